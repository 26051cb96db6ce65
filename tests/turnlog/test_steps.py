"""`turnlog replay`: steps over a real log, their files, and the same steps again after the log went on."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from uuid import UUID

import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from replay import provenance
from replay.chain import Refusals
from replay.errors import BadPolicy, PlanMismatch, StepRecorded
from replay.history import Policy
from replay.plan import StepPlan
from replay.rowset import outlined
from replay.run import Run, Steps
from replay.source import Position
from store.database import write
from store.events import Event, RolloutOpened, RolloutScored
from store.log import append
from turnlog.steps import Folder, Numbers, policy_of

HOUR = 3_600_000_000


def rollout(maker: Any, number: int, *, first: int = 0) -> list[Event]:
    """Rollout `number`: of a group of two, with two rows, opened in its own hour and scored."""
    name = f"r{number}"
    calls = [*maker([(20, 6), (5, 4)], rollout_id=name), *maker([(15, 5)], rollout_id=name)]
    return [
        RolloutOpened(
            rollout_id=name, group_id=f"g{number // 2}", harness=f"codex-{number % 3}", opened_at=number * HOUR
        ),
        *calls,
        RolloutScored(outcome_id=UUID(int=first + number), rollout_id=name, reward=float(number % 4), at=0),
    ]


@pytest.fixture
def log(database: Engine, chain_maker: Any) -> Engine:
    """Eight rollouts in four groups."""
    with write(database) as connection:
        append(connection, [event for number in range(8) for event in rollout(chain_maker, number)])
    return database


def drawn(log: Engine, policy: Policy | None = None, *, position: Position | None = None, **facts: Any) -> Steps:
    given = {"name": "x", "seed": 3, "steps": 5, "rollouts_per_step": 4, "world": 2, "token_budget": 64, **facts}
    outline = outlined(log, position=position)
    run = Run(policy=policy or Policy(), position=outline.position, **{"trainer_version": 5, **given})
    return Steps(run, outline, provenance.trained(log, outline.position.trained))


def test_a_step_is_said_in_numbers(log: Engine) -> None:
    outline = outlined(log)
    facts = Numbers(outline, drawn(log)).of(0)
    assert (facts["rollouts"], facts["rows"], facts["tokens"], facts["trained_tokens"]) == (4, 8, 4 * 55, 4 * 15)
    assert facts["policy_versions"] == [1, 2]
    assert facts["staleness"] == [4, 4]
    assert facts["fill"] == drawn(log).plan(0).fill
    assert "staleness" not in Numbers(outline, drawn(log, trainer_version=None)).of(0)
    narrow = Numbers(outline, drawn(log, token_budget=20)).of(0)
    assert (narrow["too_long"], narrow["rows"], narrow["tokens"], narrow["trained_tokens"]) == (4, 4, 4 * 20, 4 * 5)
    nothing = Numbers(outline, drawn(log, token_budget=10)).of(0)
    assert (nothing["too_long"], nothing["rows"], nothing["rewards"], nothing["staleness"]) == (8, 0, [], [])


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(max_trained=0, min_group=2),
        Policy(sampling="priority", weight="recency", half_life_hours=2),
        Policy(sampling="priority", weight="advantage", floor=0.2, harnesses=("codex-[01]",)),
    ],
)
def test_what_the_log_gets_later_changes_no_stored_step(log: Engine, chain_maker: Any, policy: Policy) -> None:
    steps = drawn(log, policy)
    before = [(steps.drawn(number), steps.plan(number), steps.rows(log, number).digest()) for number in range(5)]
    with write(log) as connection:
        append(connection, [event for number in range(8, 12) for event in rollout(chain_maker, number)])
        append(connection, chain_maker([(9, 4)], rollout_id="r0"))
        append(connection, [RolloutScored(outcome_id=UUID(int=99), rollout_id="r1", reward=50.0, at=1)])
    provenance.record(log, steps.trained(0, steps.rows(log, 0), at=1))
    again = drawn(log, policy, position=Position.parse(str(steps.run.position)))
    assert again.run == steps.run
    assert again.advantages == steps.advantages
    assert [(again.drawn(n), again.plan(n), again.rows(log, n).digest()) for n in range(5)] == before
    now = drawn(log, policy)
    assert [now.drawn(number) for number in range(5)] != [rollouts for rollouts, _, _ in before]


def test_what_was_trained_leaves_the_next_run(log: Engine) -> None:
    steps = drawn(log)
    provenance.record(log, steps.trained(0, steps.rows(log, 0), at=1))
    rest = drawn(log, Policy(max_trained=0))
    assert sorted(steps.drawn(0) + rest.drawn(0)) == [f"r{number}" for number in range(8)]
    others = drawn(log, Policy(max_trained=0, trained_in="another run"))
    assert len({*others.drawn(0), *others.drawn(1)}) == 8
    (event, *_) = provenance.steps_of(log, steps.drawn(0)[0])
    assert (event.run, event.step, event.trainer_policy_version) == ("x", 0, 5)
    assert event.advantage == steps.advantages[event.rollout_id] != 0
    another = drawn(log, seed=4)
    assert another.drawn(0) != steps.drawn(0)
    with pytest.raises(StepRecorded, match="step 0 of run 'x' is in the log already"):
        provenance.record(log, another.trained(0, another.rows(log, 0), at=1))


def test_a_folder_holds_the_rows_and_the_plan_by_value(log: Engine, tmp_path: Path) -> None:
    steps = drawn(log, Policy(min_group=2))
    to = tmp_path / "out" / "steps"
    folder = Folder(to, steps)
    for number in range(2):
        folder.write(number, steps.rows(log, number))
        assert not (to / "plan.json").exists()
    folder.close()
    written = json.loads((to / "plan.json").read_text())
    assert Run.from_json(written["run"]) == steps.run
    for number, step in enumerate(written["steps"]):
        assert StepPlan.from_json(step["plan"]) == steps.plan(number)
        placed = [row_id for rank in step["plan"]["ranks"] for micro_batch in rank for row_id in micro_batch]
        assert sorted(pq.read_table(to / step["file"]).column("row_id").to_pylist()) == sorted(placed)
        assert step["advantages"] == {name: steps.advantages[name] for name in steps.drawn(number)}
    assert sorted(each.name for each in to.iterdir()) == ["plan.json", "step-00000.parquet", "step-00001.parquet"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_rollout_whose_tokens_are_damaged_is_refused_by_name_and_the_others_of_its_step_train(
    log: Engine, tmp_path: Path
) -> None:
    steps = drawn(log)
    name, *others = steps.drawn(0)
    file = sqlite3.connect(log.url.database or "")
    with file:
        file.execute("drop trigger model_call_no_update")
        file.execute(
            "update model_call set token_ids = zeroblob(length(token_ids)), codec = 0 where rollout_id = ?", [name]
        )
    file.close()
    found = steps.rows(log, 0)
    folder = Folder(tmp_path, steps)
    folder.write(0, found)
    folder.close()
    (written,) = json.loads((tmp_path / "plan.json").read_text())["steps"]
    assert {*written["refused"]} == {name}
    assert {*pq.read_table(tmp_path / written["file"]).column("rollout_id").to_pylist()} == {*others}
    recorded = steps.trained(0, found, at=1)
    assert {event.rollout_id for event in recorded} == {*others}
    with pytest.raises(PlanMismatch, match="is planned and not among the rows"):
        steps.trained(0, replace(found, refusals=Refusals(())), at=1)


def test_a_policy_is_read_from_json_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text('{"min_reward": 0.5}')
    assert policy_of(str(tmp_path / "policy.json")) == policy_of(' {"min_reward": 0.5}') == Policy(min_reward=0.5)
    assert policy_of(None) == Policy()
    with pytest.raises(BadPolicy, match="is no JSON and no file of it"):
        policy_of("no/such/file")
    with pytest.raises(BadPolicy, match="is no JSON and no file of it"):
        policy_of("{min_reward: 1}")
    with pytest.raises(BadPolicy, match="a policy has version, opened_since") as named:
        policy_of('{"min_rewrd": 1}')
    assert "__" not in str(named.value)


Run_ = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_command_draws_writes_and_records(run: Run_, log: Engine, sqlite_url: str, tmp_path: Path) -> None:
    asked = ("--steps", "2", "--rollouts-per-step", "4", "--token-budget", "64", "--db", sqlite_url)
    policy = ("--policy", '{"min_group": 2}')
    shown = run("replay", *asked, *policy)
    assert shown.returncode == 0, shown.stderr
    assert "0..3" in shown.stdout
    assert "drawn from 8 rollouts as of 24.8.8.0" in shown.stdout
    recorded = ("--record", "--run", "a", "--trainer-version", "4", "--steps", "1", "--out", "steps", "--json")
    found = json.loads(run("replay", *asked, *policy, *recorded).stdout)
    assert (found["run"]["name"], [step["rollouts"] for step in found["steps"]]) == ("a", [4])
    assert found["recorded_rows"] == found["steps"][0]["rows"] > 0
    assert found["rows_recorded_before"] == 0
    again = run("replay", *asked, *policy, *recorded[:-3], "--as-of", found["run"]["position"])
    assert f"recorded 0 rows as trained by run a; {found['recorded_rows']} were there before" in again.stdout
    assert (tmp_path / "steps" / "plan.json").is_file()
    assert found["run"]["correction"] == {"kind": "none", "cap": 2.0}
    weighed = run("replay", *asked, "--correction", "token", "--cap", "1.5", "--json")
    assert json.loads(weighed.stdout)["run"]["correction"] == {"kind": "token", "cap": 1.5}
    unknown = run("replay", *asked, "--correction", "tokens")
    assert unknown.returncode == 2
    assert "is not a kind of correction" in unknown.stderr
    asked_again = ("--trainer-version", "4", "--steps", "1", "--as-of", found["run"]["position"], "--json")
    assert json.loads(run("replay", *asked, *policy, *asked_again).stdout)["steps"] == found["steps"]
    nothing = run("replay", *asked, "--policy", '{"max_trained": 0, "min_group": 3}')
    assert nothing.returncode == 1
    assert "turnlog: the policy leaves no rollout to draw (" in nothing.stderr
    assert "4 trained_before" in nothing.stderr
    assert "4 group_too_small" in nothing.stderr


def test_a_folder_holds_the_steps_of_its_plan_alone(log: Engine, tmp_path: Path) -> None:
    steps = drawn(log)
    for last in (2, 1):
        folder = Folder(tmp_path / "run", steps)
        for step in range(last):
            folder.write(step, steps.rows(log, step))
        folder.close()
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["plan.json", "step-00000.parquet"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_recorded_rows_need_the_version_that_they_trained(run: Run_, log: Engine, sqlite_url: str) -> None:
    refused = run("replay", "--record", "--db", sqlite_url)
    assert refused.returncode == 2
    assert "give --trainer-version" in refused.stderr
    for options in (("--trainer-version", "-3"), ("--trainer-version", "3", "--run", " ")):
        assert run("replay", "--record", *options, "--db", sqlite_url).returncode == 2
    assert "rows" in run("replay", "--record", "--trainer-version", "3", "--steps", "1", "--db", sqlite_url).stdout


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_page_on_replay_runs_as_it_stands(
    run: Run_, log: Engine, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    blocks = {
        kind: re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        for kind in ("json", "sh", "python")
    }
    (policy,) = blocks["json"]
    (tmp_path / "policy.json").write_text(policy.replace("codex*", "c*"))
    assert {*json.loads(policy)} <= {*Policy().as_json()}
    for line in "".join(blocks["sh"]).splitlines():
        words = shlex.split(line, comments=True)
        done = run(*words[1:], "--db", sqlite_url)
        assert (words[0], done.returncode) == ("turnlog", 0), done.stderr
    assert (tmp_path / "steps" / "plan.json").is_file()
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_doctest("".join(blocks["python"]) + "\n", {}, "replay.md", None, 0)
    assert doctest.DocTestRunner().run(examples).failed == 0
    named = set(re.findall(r"`(\w+)`", page[page.index("| part |") : page.index("```sh")]))
    assert {*Policy().as_json()} - {"version", "sampling"} <= named
