"""`turnlog tail` and `turnlog db copy` as a user types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from store.database import write
from store.events import Event, RolloutOpened, RolloutScored
from store.log import append

Run = Callable[..., subprocess.CompletedProcess[str]]


def history(chain_maker: Any, rollout_id: str) -> list[Event]:
    calls = chain_maker([(20, 10), (8, 5)], rollout_id=rollout_id)
    scored = RolloutScored(
        outcome_id=UUID(int=calls[0].call_id.int ^ 2), rollout_id=rollout_id, reward=0.5, at=2 * 10**15
    )
    return [RolloutOpened(rollout_id=rollout_id, opened_at=0, task="count [files]"), *calls, scored]


def remember(database: Engine, events: Sequence[Event]) -> None:
    with write(database) as connection:
        append(connection, events)


def lines(found: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_a_program_reads_a_json_line_an_event_and_goes_on_from_its_position(
    run: Run, sqlite_database: Engine, sqlite_url: str, chain_maker: Any
) -> None:
    remember(sqlite_database, history(chain_maker, "r1"))
    found = run("tail", "--db", sqlite_url)
    told = lines(found)
    assert [line["event"]["kind"] for line in told] == [
        "rollout_opened",
        "call_completed",
        "call_completed",
        "rollout_scored",
    ]
    assert [line["sequence"] for line in told] == [1, 1, 2, 1]
    assert "token_ids" not in told[1]["event"]
    assert found.stderr == f"what follows: --after {told[-1]['position']}\n"
    assert lines(run("tail", "--db", sqlite_url, "--after", told[1]["position"])) == told[2:]
    assert lines(run("tail", "--db", sqlite_url, "--after", "now")) == []
    remember(sqlite_database, history(chain_maker, "r2"))
    new = lines(run("tail", "--db", sqlite_url, "--after", told[-1]["position"], "--kind", "rollout_scored"))
    assert [line["event"]["rollout_id"] for line in new] == ["r2"]
    whole = lines(run("tail", "--db", sqlite_url, "--rollout", "r1", "--tokens", "--kind", "call_completed"))
    assert [len(line["event"]["token_ids"]) for line in whole] == [8 * 30, 8 * 13]


def test_a_position_of_another_log_is_told_of(
    run: Run, sqlite_database: Engine, sqlite_url: str, chain_maker: Any
) -> None:
    remember(sqlite_database, history(chain_maker, "r1"))
    found = run("tail", "--db", sqlite_url, "--after", "2.9.1.0.0.0")
    assert (found.returncode, found.stdout) == (0, "")
    assert "--after 2.9.1.0.0.0 is ahead of the log, which has reached 2.1.1.0.0.0" in found.stderr
    assert "ahead" not in run("tail", "--db", sqlite_url, "--after", "2.1.1.0.0.0").stderr


def test_a_person_reads_a_line_an_event(run: Run, sqlite_database: Engine, sqlite_url: str, chain_maker: Any) -> None:
    remember(sqlite_database, history(chain_maker, "r1"))
    found = run("tail", "--db", sqlite_url, "--text")
    assert found.returncode == 0, found.stderr
    first, call, _, last = found.stdout.splitlines()
    assert first == "1970-01-01 00:00:00.000 rollout opened r1 task count [files]"
    assert "call completed r1 " in call
    assert call.endswith("root: first_call, 20 prompt and 10 sampled tokens, stop")
    assert last.endswith("rollout scored r1 reward 0.5, completed")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--after", "yesterday"], "turnlog: 'yesterday' is no position of the log"),
        (["--kind", "step"], "'step' is no kind of event: one of rollout_opened, call_admitted"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    run: Run, sqlite_database: Engine, sqlite_url: str, arguments: list[str], why: str
) -> None:
    found = run("tail", "--db", sqlite_url, *arguments)
    assert found.returncode != 0
    assert why in found.stderr


def test_a_log_is_followed_until_one_stops(sqlite_database: Engine, sqlite_url: str, chain_maker: Any) -> None:
    remember(sqlite_database, history(chain_maker, "r1"))
    command = [sys.executable, "-m", "turnlog", "tail", "-f", "--db", sqlite_url]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs pytest in the background has it, and what it starts, ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        told = [json.loads(process.stdout.readline()) for _ in range(4)]
        remember(sqlite_database, history(chain_maker, "r2"))
        told += [json.loads(process.stdout.readline()) for _ in range(4)]
        assert [line["event"]["rollout_id"] for line in told] == ["r1"] * 4 + ["r2"] * 4
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=20)
        assert rest == ""
        assert said == f"what follows: --after {told[-1]['position']}\n"
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()


def test_whoever_reads_enough_of_a_tail_may_stop(sqlite_database: Engine, sqlite_url: str, chain_maker: Any) -> None:
    for number in range(300):
        remember(sqlite_database, history(chain_maker, f"r{number}"))
    command = f"{sys.executable} -m turnlog tail --db {sqlite_url} | head -1"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(found.stdout)["event"]["rollout_id"] == "r0"
    assert "Traceback" not in found.stderr
    assert "BrokenPipe" not in found.stderr


def test_a_log_is_copied_into_a_database_that_is_made_for_it(
    run: Run, sqlite_database: Engine, sqlite_url: str, tmp_path: Path, chain_maker: Any
) -> None:
    remember(sqlite_database, history(chain_maker, "r1"))
    target = f"sqlite:///{tmp_path}/copy.db"
    found = run("db", "copy", sqlite_url, target)
    assert found.returncode == 0, found.stderr
    assert "call completed" in found.stdout
    assert found.stdout.endswith(f"{target} has all of {sqlite_url} up to position 2.1.1.0.0.0\n")
    again = json.loads(run("db", "copy", sqlite_url, target, "--json").stdout)
    assert {*again["added"].values()} == {0}
    assert again["present"]["call_completed"] == 2
    assert again["position"] == "2.1.1.0.0.0"
    assert lines(run("tail", "--db", target)) == lines(run("tail", "--db", sqlite_url))
    as_of = ["--as-of", "2.1.1.0", "--json"]
    ours, theirs = (json.loads(run("rows", "--db", url, *as_of).stdout) for url in (sqlite_url, target))
    assert ours == theirs
    assert ours["rows"] == 1


def test_a_log_is_not_copied_over_another_one(
    run: Run, sqlite_database: Engine, sqlite_url: str, tmp_path: Path, make_chain_maker: Any
) -> None:
    remember(sqlite_database, history(make_chain_maker(0), "r1"))
    target = f"sqlite:///{tmp_path}/copy.db"
    assert run("db", "copy", sqlite_url, target).returncode == 0
    remember(sqlite_database, history(make_chain_maker(1), "r2"))
    other = f"sqlite:///{tmp_path}/other.db"
    assert run("db", "copy", sqlite_url, other).returncode == 0
    found = run("db", "copy", target, other)
    assert found.returncode == 1
    assert found.stderr.lstrip().startswith(f"turnlog: {other} is no earlier copy of {target} (")
