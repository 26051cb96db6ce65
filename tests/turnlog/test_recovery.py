"""Calls that never ended are listed and marked; spools of servers that died are handed over."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store import log, recovery
from store.database import read, write
from store.events import CallAdmitted, CallEnded, RolloutOpened, uuid7
from store.spool import Spool


def admitted(number: int, *, worker: str, minutes_ago: int) -> CallAdmitted:
    return CallAdmitted(
        call_id=uuid7(number, bytes(10)), rollout_id="r1", decision="root", reason="first_call", parent_id=None,
        worker=worker, at=time.time_ns() // 1000 - minutes_ago * 60_000_000,
    )  # fmt: skip


@pytest.fixture
def log_url(sqlite_database: Engine, sqlite_url: str) -> str:
    with write(sqlite_database) as connection:
        log.append(
            connection,
            [
                RolloutOpened(rollout_id="r1", opened_at=1),
                admitted(1, worker="dead", minutes_ago=300),
                admitted(2, worker="dead", minutes_ago=90),
                admitted(3, worker="dead", minutes_ago=5),
                admitted(4, worker="other", minutes_ago=90),
            ],
        )
    return sqlite_url


def numbers(listed: str) -> list[int]:
    return [int(call["call_id"].replace("-", "")[:12], 16) for call in json.loads(listed)]


def test_calls_of_a_server_that_will_not_come_back_are_marked_lost(
    run: Any, log_url: str, sqlite_database: Engine
) -> None:
    asked = ("db", "check", "--db", log_url, "--json")
    assert numbers(run(*asked).stdout) == [1, 2, 3, 4]
    assert numbers(run(*asked, "--older-than", "2h").stdout) == [1]
    assert numbers(run(*asked, "--mark-lost", "--worker", "dead").stdout) == [1, 2]  # an hour old, if not said
    assert numbers(run(*asked, "--mark-lost", "--worker", "dead").stdout) == []
    found = run("db", "check", "--mark-lost", "--older-than", "1s", "--db", log_url)
    assert "2 calls marked lost" in found.stderr
    assert "no pending calls" in run("db", "check", "--db", log_url).stdout
    with read(sqlite_database) as connection:
        ends = log.ends(connection, "r1")
    assert {(end.state, end.reason) for end in ends} == {
        ("lost", "marked by `turnlog db check --mark-lost`: its server did not come back")
    }
    assert len(ends) == 4


def test_a_time_that_is_none_is_told(run: Any, log_url: str) -> None:
    found = run("db", "check", "--older-than", "soon", "--db", log_url)
    assert found.returncode == 2
    assert "s, m, h or d" in found.stderr


def test_a_call_that_ends_while_it_is_marked_stays_as_it_ended(database: Engine) -> None:
    intents = [admitted(number, worker="w", minutes_ago=90) for number in range(1, 4)]
    ended = CallEnded(call_id=intents[1].call_id, rollout_id="r1", state="failed", reason="out of luck", at=1)
    with write(database) as connection:
        log.append(connection, [*intents, ended])
    marked = recovery.mark_lost(database, intents, why="gone", at=2)
    assert [end.call_id for end in marked] == [intents[0].call_id, intents[2].call_id]
    with read(database) as connection:
        assert sorted(end.state for end in log.ends(connection, "r1")) == ["failed", "lost", "lost"]
        assert log.pending(connection) == []


def test_spools_of_dead_servers_are_handed_over_and_those_of_live_ones_left(
    run: Any, sqlite_database: Engine, sqlite_url: str, chain_maker: Any, tmp_path: Path
) -> None:
    chain, folder = chain_maker(), tmp_path / "spools"
    with closing(Spool(folder, "dead")) as dead, closing(Spool(folder, "live")) as live:
        dead.append([[call] for call in chain])
        dead.append([[chain[0].model_copy(update={"finish_reason": "another"})]])
        live.append([[RolloutOpened(rollout_id="r2", opened_at=1)]])
        dead.close()
        found = run("db", "drain", str(folder), "--db", sqlite_url, "--json")
        assert json.loads(found.stdout) == [
            {"worker": "dead", "state": "empty", "drained": 4, "refused": 1},
            {"worker": "live", "state": "held by a live server", "drained": 0, "refused": 0},
        ]
    assert found.returncode == 1  # something was refused: somebody must look
    assert "1 submissions were refused" in found.stderr
    again = run("db", "drain", str(folder), "--db", sqlite_url)
    assert again.returncode == 0, again.stderr
    with read(sqlite_database) as connection:
        assert log.calls(connection, "r1") == chain
        assert log.rollout(connection, "r2") is not None
