"""A clock that is set back: order and look-ups do not notice."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from sqlalchemy import Engine

from engine.clock import Clock
from engine.journal import Journal
from store import lineage, log
from store.database import read, write
from store.events import CallCompleted, uuid7

HOUR = 3_600_000_000


class SetClock:
    """A wall clock that can be set, as a machine's can."""

    def __init__(self, now: int) -> None:
        self.now = now

    def __call__(self) -> int:
        self.now += 10
        return self.now


def milliseconds(call_id: UUID) -> int:
    return call_id.int >> 80


def test_times_and_ids_only_rise_when_the_clock_is_set_back() -> None:
    wall = SetClock(1_700_000_000_000_000)
    clock = Clock(wall)
    ids, times = [], []
    for step in range(3000):
        if step in (1000, 2000):
            wall.now -= HOUR
        ids.append(clock.new_id())
        times.append(clock.now())
    assert ids == sorted(set(ids))
    assert times == sorted(set(times))
    assert milliseconds(ids[-1]) - milliseconds(ids[0]) < 100  # it waits for the wall clock, and does not run ahead


def test_an_id_still_tells_its_time() -> None:
    clock = Clock(lambda: 1_700_000_000_123_456)
    found = clock.new_id()
    assert (milliseconds(found), found.version, found.variant) == (1_700_000_000_123, 7, "specified in RFC 4122")


def test_a_worker_that_starts_with_its_clock_set_back_goes_on_behind_the_log(
    database: Engine, chain_maker, caplog: pytest.LogCaptureFixture
) -> None:
    root, child = chain_maker([(9, 3), (5, 2)])
    with write(database) as connection:
        log.append(connection, [root])
    wall = SetClock(1000 * milliseconds(root.call_id) - HOUR)
    journal = Journal(database, worker="w", clock=Clock(wall))
    try:
        assert journal.start() == []
        assert "3599 seconds ahead of this machine's clock" in caplog.text
        call_id = journal.new_id()
        later = child.model_copy(update={"call_id": call_id, "completed_at": journal.now()})
        assert call_id > root.call_id

        async def extend() -> None:
            await journal.append([later])
            for call in (root, later):  # both are found, though the machine's clock says that neither exists yet
                (found,) = (await journal.look_up("r1", [call.summary_hash])).calls
                assert found.call_id == call.call_id

        asyncio.run(extend())
        wall.now -= 24 * HOUR
        assert journal.new_id() > call_id
        assert journal.now() > later.completed_at
    finally:
        journal.close()
    with read(database) as connection:
        assert log.calls(connection, "r1") == [root, later]
        assert len(lineage.chain_tokens(connection, call_id)) == later.chain_len


def test_a_log_without_calls_asks_nothing_of_the_clock(sqlite_database: Engine) -> None:
    journal = Journal(sqlite_database, worker="w", clock=Clock(lambda: 7_000_000))
    assert journal.start() == []
    assert milliseconds(journal.new_id()) == milliseconds(uuid7(7_000, bytes(10)))
    assert CallCompleted.example().call_id < journal.new_id()
    journal.close()
