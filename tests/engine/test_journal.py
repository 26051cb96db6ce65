"""What one turn of the event loop asks of the log and tells it goes together; a caller that leaves loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import Engine, event

from engine.errors import LogDown
from engine.journal import Journal
from store import log
from store.database import read, write
from store.events import CallCompleted, RolloutOpened


def opening(number: int) -> RolloutOpened:
    return RolloutOpened(rollout_id=f"r{number}", opened_at=number)


def in_a_journal(database: Engine, work: Callable[[Journal], Awaitable[None]], *, patience: float = 10) -> None:
    async def run() -> None:
        journal = Journal(database, worker="test", patience=patience)
        try:
            await asyncio.wait_for(work(journal), 20)
        finally:
            journal.close()

    asyncio.run(run())


def test_look_ups_of_one_turn_use_one_connection_and_each_gets_its_own_answer(database: Engine) -> None:
    call = CallCompleted.example()
    with write(database) as connection:
        log.append(connection, [call])
    uses: list[object] = []
    event.listen(database, "checkout", lambda *used: uses.append(used))

    async def work(journal: Journal) -> None:
        keys = [[call.summary_hash], [bytes(32)], [call.summary_hash]]
        asked = [asyncio.create_task(journal.look_up("example", each)) for each in keys]
        await asyncio.sleep(0)
        asked[0].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert [len(each.calls) for each in answers[1:]] == [0, 1]  # type: ignore[union-attr]
        assert len(uses) == 1
        assert [found.call_id for found in (await journal.look_up("example", keys[0])).calls] == [call.call_id]

    in_a_journal(database, work)


def test_a_log_that_is_down_fails_every_look_up_of_the_turn(sqlite_database: Engine) -> None:
    with write(sqlite_database) as connection:
        connection.exec_driver_sql("alter table model_call rename to gone")

    async def work(journal: Journal) -> None:
        asked = [journal.look_up(rollout, [bytes(32)]) for rollout in ("r1", "r2")]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [LogDown, LogDown]
        assert "no such table" in str(answers[0])

    in_a_journal(sqlite_database, work, patience=0.1)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_events_of_a_caller_that_is_cancelled_become_durable(sqlite_database: Engine, turns: int) -> None:
    async def work(journal: Journal) -> None:
        told = [asyncio.create_task(journal.append([opening(number)])) for number in range(3)]
        await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        told[1].cancel()
        await asyncio.gather(*told, return_exceptions=True)
        await journal.append([opening(3)])  # the writer keeps the order: what was told before is durable now

    in_a_journal(sqlite_database, work)
    with read(sqlite_database) as connection:
        assert [each.rollout_id for each in log.rollouts(connection)] == ["r0", "r1", "r2", "r3"]
