"""A run as a value: the same steps from its number alone, whatever happened to the trainer and the log meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from sqlalchemy import Engine, text

from replay.advantage import advantages
from replay.errors import BadPolicy, BadPosition, BadRun, NothingToDraw, PositionAhead, UnknownRule
from replay.history import Policy
from replay.pack import packs
from replay.plan import plan
from replay.provenance import events, record
from replay.rowset import build
from replay.run import Run, Steps
from replay.selection import Selection
from replay.source import Position
from store.events import Event, RolloutOpened, RolloutScored, uuid7

Remember = Callable[[Engine, Iterable[Event]], None]
GROUPS = ["g0", "g1", "g2", "g3", "g4"]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def filled(database: Engine, remember: Remember, groups_of_rollouts: Any, chain_maker: Any) -> Engine:
    remember(database, groups_of_rollouts(chain_maker, GROUPS))
    return database


def asked(database: Engine, **parts: Any) -> Run:
    """A run over all that the log holds now: two steps are an epoch of five groups."""
    position = build(database, rollouts=()).position
    return replace(
        Run(name="r", position=position, steps=3, groups_per_step=3, world=2, token_budget=90, seed=4), **parts
    )


def listed(steps: Steps, database: Engine, rank: int = 0) -> list[str]:
    return [each.pack.digest() for step in range(steps.run.steps) for each in steps.packs(database, step, rank=rank)]


def later(rollout_id: str, reward: float) -> RolloutScored:
    return RolloutScored(outcome_id=uuid7(999, bytes(10)), rollout_id=rollout_id, reward=reward, at=999)


def test_a_run_is_stored_by_value() -> None:
    run = Run(
        name="grpo",
        position=Position.parse("9.8.7.6"),
        selection=Selection(rule="declared", excluded_roles=frozenset({"title", "b", "a"})),
        policy=Policy(min_reward=0.5, sampling="priority"),
        steps=3,
        rollouts_per_step=4,
        token_budget=100,
        baseline="leave_one_out",
    )
    written = json.dumps(run.as_json())
    assert json.loads(written)["position"] == "9.8.7.6"
    again = Run.from_json(json.loads(written))
    assert again == run
    assert again.digest() == run.digest()
    others = [replace(run, seed=1), replace(run, policy=Policy()), replace(run, position=Position.parse("9.8.7.7"))]
    assert len({run.digest(), *(other.digest() for other in others)}) == 4
    least = {"name": "a", "position": "1.1.1.0", "steps": 1, "groups_per_step": 1, "token_budget": 9}
    assert Run.from_json(least).policy == Policy()


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ({"steps": 0}, BadRun, "the run's steps 0 is less than 1"),
        ({"groups_per_step": None}, BadRun, "give one of them"),
        ({"rollouts_per_step": 3}, BadRun, "give one of them"),
        ({"groups_per_step": 0}, BadRun, "the run's groups_per_step 0 is less than 1"),
        ({"world": "two"}, BadRun, "the run's world 'two'"),
        ({"colour": 1}, BadRun, "a run has version, name, position"),
        ({"version": 2}, BadRun, "the run's version 2"),
        ({"position": "now"}, BadPosition, "'now' is not a position"),
        ({"policy": {"floor": 2}}, BadPolicy, "the policy's floor 2"),
        ({"selection": {"rule": "all"}}, UnknownRule, "named 'all'"),
    ],
)
def test_a_part_that_cannot_be_is_named(parts: dict[str, JsonValue], error: type[Exception], said: str) -> None:
    least = {"name": "a", "position": "1.1.1.0", "steps": 1, "groups_per_step": 1, "token_budget": 9}
    with pytest.raises(error, match=said):
        Run.from_json({**least, **parts})


def test_a_step_is_drawn_planned_and_packed_as_its_parts_say(filled: Engine) -> None:
    run = asked(filled)
    steps = Steps.of(filled, run)
    whole = build(filled)
    gains = advantages(whole.scores)
    assert steps.advantages == gains
    for number in range(run.steps):
        drawn = steps.drawn(number)
        rows = [row for row in whole.rows if row.rollout_id in drawn]
        assert {row.row_id for row in steps.rows(filled, number).rows} == {row.row_id for row in rows}
        planned = plan(rows, seed=4, step=number, world=2, token_budget=90)
        assert steps.plan(number) == planned
        for rank in (0, 1):
            placed = steps.packs(filled, number, rank=rank)
            expected = [each.digest() for each in packs(planned, rows, gains, rank=rank)]
            assert [each.pack.digest() for each in placed] == expected
            assert [(each.step, each.micro_batch, each.micro_batches) for each in placed] == [
                (number, place, planned.micro_batches) for place in range(planned.micro_batches)
            ]
            (last,) = steps.packs(filled, number, rank=rank, only=[planned.micro_batches - 1])
            assert last.pack.digest() == expected[-1]
    epoch = [rollout_id for number in (0, 1) for rollout_id in steps.drawn(number)]
    assert sorted(epoch) == sorted(f"{group}.{slot}" for group in GROUPS for slot in range(3))


def test_what_is_appended_later_changes_no_step(
    filled: Engine, remember: Remember, groups_of_rollouts: Any, make_chain_maker: Any
) -> None:
    run = asked(filled, policy=Policy(max_trained=0))
    steps = Steps.of(filled, run)
    before = listed(steps, filled)
    rows = steps.rows(filled, 0).rows
    trained = events(steps.plan(0), rows, steps.advantages, run="r", selection=run.selection, trainer_version=1, at=0)
    assert record(filled, trained)
    continued = make_chain_maker(7).call(5, 4, rollout_id="g0.0", parent=None)
    remember(filled, [continued, later("g0.0", 50.0), *groups_of_rollouts(make_chain_maker(8), ["g7"])])
    assert listed(Steps.of(filled, run), filled) == before
    now = Steps.of(filled, asked(filled, policy=Policy(max_trained=0)))
    assert listed(now, filled) != before
    assert {row.rollout_id for row in rows}.isdisjoint(now.eligible.table.column("rollout_id").to_pylist())


def test_a_baseline_is_over_the_whole_group_or_over_those_that_have_rows(filled: Engine, remember: Remember) -> None:
    remember(filled, [RolloutOpened(rollout_id="g0.9", group_id="g0", opened_at=9), later("g0.9", 90.0)])
    drawn_in_part = asked(filled, groups_per_step=None, rollouts_per_step=1, policy=Policy(sampling="priority"))
    whole = build(filled)
    found = Steps.of(filled, drawn_in_part)
    assert len(found.drawn(0)) == 1
    assert found.advantages == advantages(whole.scores)
    balanced = Steps.of(filled, replace(drawn_in_part, population="with_rows")).advantages
    assert balanced == advantages(score for score in whole.scores if score.rollout_id != "g0.9")
    assert balanced["g0.0"] != found.advantages["g0.0"]
    alone = Steps.of(filled, replace(drawn_in_part, baseline="leave_one_out", divide_by_std=True)).advantages
    assert alone == advantages(whole.scores, baseline="leave_one_out", divide_by_std=True)


def test_damaged_tokens_take_all_rows_of_their_rollout_and_no_other_from_the_packs(
    sqlite_database: Engine, remember: Remember, groups_of_rollouts: Any, chain_maker: Any
) -> None:
    remember(sqlite_database, groups_of_rollouts(chain_maker, ["g0", "g1"]))
    with sqlite_database.connect() as connection:  # as someone with the file in hand can
        connection.exec_driver_sql("pragma query_only = off")
        for trigger in connection.scalars(text("select name from sqlite_master where type = 'trigger'")).all():
            connection.exec_driver_sql(f'drop trigger "{trigger}"')
        connection.execute(text("update model_call set chain_hash = zeroblob(32) where rollout_id = 'g0.0' and depth"))
        connection.commit()
    steps = Steps.of(sqlite_database, asked(sqlite_database, steps=1, groups_per_step=2, token_budget=45))
    planned = {row_id for rank in steps.plan(0).ranks for micro_batch in rank for row_id in micro_batch}
    placed = [each for rank in (0, 1) for each in steps.packs(sqlite_database, 0, rank=rank)]
    here = {row_id for each in placed for row_id in each.pack.row_ids}
    assert here == {row.row_id for row in steps.rows(sqlite_database, 0).rows if row.row_id in planned} < planned
    missing = [refusal for each in placed for refusal in each.refused]
    assert {(refusal.rollout_id, refusal.reason) for refusal in missing} == {("g0.0", "chain_hash_mismatch")}
    assert len(planned - here) > 1
    assert 0 in {len(each.pack.row_ids) for each in placed if each.refused}  # a pack that lost its only row


def test_what_a_run_cannot_have_is_refused(filled: Engine) -> None:
    run = asked(filled)
    with pytest.raises(PositionAhead):
        Steps.of(filled, replace(run, position=Position.parse("999999.1.1.0")))
    steps = Steps.of(filled, run)
    for step in (-1, 3):
        with pytest.raises(ValueError, match=f"step {step} is not of the run: it has steps 0 to 2"):
            steps.plan(step)
    with pytest.raises(NothingToDraw):
        Steps.of(filled, replace(run, policy=Policy(min_reward=99))).plan(0)


class Trainer:
    """Starts `resumed_run.py` on a run, and kills it."""

    def __init__(self, folder: Path, url: str, run: Run) -> None:
        self._place = folder / "place.json"
        self._arguments = [url, str(folder / "run.json"), str(self._place)]
        (folder / "run.json").write_text(json.dumps(run.as_json()))

    def train(self, *, workers: int, kill_after: int | None) -> list[str]:
        """What it printed; SIGKILL, to it and its workers, after so many batches."""
        command = [sys.executable, str(HERE / "resumed_run.py"), *self._arguments, str(workers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT) as process:
            assert process.stdout is not None
            printed: list[str] = []
            for line in process.stdout:
                printed.append(line.rstrip())
                if len(printed) == kill_after:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
            printed += process.stdout.read().splitlines()
        assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)
        return printed

    def batches_done(self) -> int:
        """How many batches its last checkpoint counts, by the place saved in it."""
        saved = json.loads(self._place.read_text())
        return sum(1 for place in self.places if place < (saved["step"], saved["micro_batch"]))

    places: list[tuple[int, int]]


def test_a_killed_trainer_goes_on_with_the_same_bytes(
    sqlite_database: Engine, remember: Remember, groups_of_rollouts: Any, make_chain_maker: Any, tmp_path: Path
) -> None:
    filled = sqlite_database
    remember(filled, groups_of_rollouts(make_chain_maker(0), GROUPS))
    run = asked(filled, world=1, steps=4, token_budget=160)
    steps = Steps.of(filled, run)
    placed = [each for step in range(run.steps) for each in steps.packs(filled, step)]
    uninterrupted = [f"{each.step} {each.micro_batch} {each.pack.digest()}" for each in placed]
    trainer = Trainer(tmp_path, filled.url.render_as_string(hide_password=False), run)
    trainer.places = [(each.step, each.micro_batch) for each in placed]
    table: list[tuple[str, str]] = []
    for number, (workers, kill_after) in enumerate([(0, 4), (3, 7), (1, None)]):
        done = trainer.batches_done() if number else 0
        printed = trainer.train(workers=workers, kill_after=kill_after)
        assert printed == uninterrupted[done : done + len(printed)]
        table += [(line, f"{workers} workers") for line in printed]
        remember(filled, groups_of_rollouts(make_chain_maker(50 + number), [f"later{number}"]))
        remember(filled, [RolloutScored(outcome_id=uuid7(900 + number, bytes(10)), rollout_id="g1.0", reward=7, at=9)])
    assert len(uninterrupted) > 15
    assert table[-1][0] == uninterrupted[-1]
    assert {line for line, _ in table} == {*uninterrupted}
    print("step, micro-batch and SHA-256 of its bytes, uninterrupted and as three processes got it, two of them killed")
    for line in uninterrupted:
        print(line, "|", ", ".join(by for other, by in table if other == line))
