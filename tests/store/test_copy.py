"""A copy: the same log in another database, whatever happens meanwhile."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, select

from replay.rowset import build
from replay.source import Position as AsOf
from store import copy as copying
from store import log, migrate, schema, tail
from store.columns import PLACES
from store.copy import Copied, copy
from store.database import open_database, read, write
from store.errors import DamagedEvent, NotABeginning
from store.events import (
    CallAdmitted,
    CallCompleted,
    CallEnded,
    Event,
    MediaShown,
    MediaStored,
    RolloutOpened,
    RolloutScored,
    RowTrained,
)

DIRECTIONS = [
    ("sqlite", "sqlite"),
    pytest.param(("sqlite", "postgresql"), marks=pytest.mark.postgres),
    pytest.param(("postgresql", "sqlite"), marks=pytest.mark.postgres),
    pytest.param(("postgresql", "postgresql"), marks=pytest.mark.postgres),
]


def a_rollout(maker: Any, rollout_id: str) -> list[Event]:
    """Two chains, one call that failed, an outcome and a row that trained."""
    calls = [*maker([(3000, 200), (8, 5)], rollout_id=rollout_id), *maker(rollout_id=rollout_id)]
    last = calls[-1]
    intents = [
        CallAdmitted(
            call_id=call.call_id,
            rollout_id=rollout_id,
            decision=call.decision,
            reason=call.reason,
            parent_id=call.parent_id,
            worker="w",
            at=call.started_at,
        )
        for call in calls
    ]
    lost = intents[0].model_copy(update={"call_id": UUID(int=calls[0].call_id.int ^ 1)})
    return [
        RolloutOpened(rollout_id=rollout_id, opened_at=1, group_id="g", task="täsk", secret_hash=bytes(32)),
        *(event for pair in zip(intents, calls, strict=True) for event in pair),
        lost,
        CallEnded(
            call_id=lost.call_id,
            rollout_id=rollout_id,
            state="abandoned",
            reason="gone",
            at=last.completed_at,
            token_ids=calls[0].token_ids[-40:],
            logprobs=calls[0].logprobs[-40:],
        ),
        *media_of(calls[0], number=0),
        *media_of(last, number=1 + sum(rollout_id.encode()) % 255),
        RolloutScored(
            outcome_id=UUID(int=calls[0].call_id.int ^ 2),
            rollout_id=rollout_id,
            reward=0.1,
            accepted=(str(last.call_id),),
            output={"ü": [1.5, None]},
            at=last.completed_at + 1,
        ),
        RowTrained(
            run="run",
            step=1,
            row_id=f"row of {rollout_id}",
            rollout_id=rollout_id,
            tip_call_id=last.call_id,
            selection="completed",
            selection_version=1,
            advantage=-0.5,
            trainer_policy_version=3,
            at=last.completed_at + 2,
        ),
    ]


def media_of(call: CallCompleted, *, number: int) -> list[Event]:
    """An object that others may have shown before, and its occurrence in the call."""
    sha256 = bytes([number]) * 32
    shown = {"call_id": call.call_id, "rollout_id": call.rollout_id, "sha256": sha256, "at": call.completed_at}
    return [
        MediaStored.example().model_copy(update={"sha256": sha256}),
        MediaShown.example().model_copy(update=shown),
    ]


def remember(database: Engine, events: Sequence[Event]) -> None:
    with write(database) as connection:
        log.append(connection, events)


def contents(database: Engine) -> dict[str, list[dict[str, Any]]]:
    """Every column of every event."""
    with read(database) as connection:
        return {
            place.table.name: [
                dict(row) for row in connection.execute(select(place.table).order_by(place.table.c.sequence)).mappings()
            ]
            for place in PLACES
        }


def url_of(database: Engine) -> str:
    return database.url.render_as_string(hide_password=False)


@pytest.fixture
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two empty logs, in one direction."""
    made: list[Engine] = []
    for number, kind in enumerate(request.param):
        if kind == "postgresql" and "postgresql" not in request.param[:number]:
            made.append(open_database(request.getfixturevalue("postgres_url")))
        elif kind == "postgresql":
            made.append(open_database(request.getfixturevalue("empty_postgres_url")))
        else:
            made.append(open_database(f"sqlite:///{tmp_path}/copy{number}.db"))
        migrate.upgrade(made[-1])
    yield made[0], made[1]
    for database in made:
        database.dispose()


@pytest.fixture
def some_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/some.db"


@pytest.mark.parametrize("two", DIRECTIONS, indirect=True)
def test_a_copy_is_the_same_log_in_every_direction(two: tuple[Engine, Engine], make_chain_maker: Any) -> None:
    source, target = two
    for number in range(3):
        remember(source, a_rollout(make_chain_maker(number), f"r{number}"))
    then = build(source)
    found = copy(source, target)
    assert contents(target) == contents(source)
    assert {*found.present.values()} == {0}
    assert found.events == {
        "rollout_opened": 3,
        "call_completed": 15,
        "call_ended": 3,
        "call_admitted": 18,
        "rollout_scored": 3,
        "row_trained": 3,
        "media_stored": 4,
        "media_shown": 6,
    }
    assert found.position == tail.now(source) == tail.now(target)
    assert rows(build(target)) == rows(then)
    remember(source, a_rollout(make_chain_maker(7), "r7"))
    again = copy(source, target)
    assert again.present == found.events
    assert again.events["call_completed"] == 5
    assert contents(target) == contents(source)
    for database in two:
        assert rows(build(database, position=AsOf.parse(str(then.position)))) == rows(then)
    assert rows(build(target)) == rows(build(source)) != rows(then)
    assert {*copy(source, target).events.values()} == {0}


def rows(found: Any) -> tuple[Any, ...]:
    """What makes rows the same."""
    arrays = [
        (row.row_id, row.token_ids.tobytes(), row.loss_mask.tobytes(), row.logprobs.tobytes()) for row in found.rows
    ]
    assert arrays
    return (found.digest(), str(found.position), arrays)


@pytest.mark.parametrize("two", DIRECTIONS, indirect=True)
def test_events_that_are_appended_to_a_copy_come_behind_it(two: tuple[Engine, Engine], make_chain_maker: Any) -> None:
    source, target = two
    remember(source, a_rollout(make_chain_maker(0), "r0"))
    copy(source, target)
    before = tail.now(target)
    remember(target, a_rollout(make_chain_maker(1), "r1"))
    page = tail.read(target, after=before)
    assert {told.fields["rollout_id"] for told in page.events if told.kind != "media_stored"} == {"r1"}
    assert len(page.events) == len(a_rollout(make_chain_maker(1), "r1")) - 1  # both were shown one image
    with pytest.raises(
        NotABeginning, match=r"is no earlier copy of .*at sequence 2 of rollout it has rollout_opened r1"
    ):
        copy(source, target)


def test_a_log_of_other_events_is_not_copied_over(
    sqlite_database: Engine, some_url: str, make_chain_maker: Any
) -> None:
    target = open_database(some_url)
    migrate.upgrade(target)
    remember(sqlite_database, a_rollout(make_chain_maker(0), "r0"))
    remember(target, a_rollout(make_chain_maker(1), "r0"))
    before = contents(target)
    with pytest.raises(NotABeginning) as refused:
        copy(sqlite_database, target)
    assert url_of(sqlite_database) in str(refused.value)
    assert url_of(target) in str(refused.value)
    assert "copy into an empty database" in str(refused.value)
    assert contents(target) == before
    target.dispose()


COPY = """
import sys
from store import copy
from store.database import open_database
copy._BATCH = 7
source, target = map(open_database, sys.argv[1:])
copy.copy(source, target, progress=lambda doing, done, total: print(doing, done, flush=True))
"""


@pytest.mark.parametrize("two", [DIRECTIONS[0], DIRECTIONS[1]], indirect=True)
def test_a_copy_that_is_killed_goes_on_where_it_was(
    two: tuple[Engine, Engine], make_chain_maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = two
    for number in range(30):
        remember(source, a_rollout(make_chain_maker(number), f"r{number}"))
    whole = contents(source)
    for kill in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", COPY, url_of(source), url_of(target)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        copied = 0
        for line in process.stdout:
            copied += line.startswith("copying")
            if copied == 3 + 5 * kill:
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        partly = contents(target)
        assert any(partly.values())
        for table, lines in partly.items():
            assert lines == whole[table][: len(lines)], "at every moment a beginning of the log"
        assert partly != whole
        with read(target) as connection:
            assert {each.call_id for each in log.pending(connection)} == set()
    found = copy(source, target)
    assert sum(found.present.values()) > 100
    assert contents(target) == whole
    assert rows(build(target)) == rows(build(source))


def damage(database: Engine, statement: str) -> None:
    """Change what nobody may: past the triggers, as a disk would."""
    with database.connect() as connection:
        driver = connection.connection.driver_connection
        if database.dialect.name == "sqlite":
            driver.execute("pragma query_only = off")
            driver.execute("drop trigger model_call_no_update")
            driver.execute(statement)
        else:
            driver.execute("alter table model_call disable trigger model_call_no_change")
            driver.execute(statement)
            driver.commit()


@pytest.mark.parametrize("two", [DIRECTIONS[1], DIRECTIONS[2]], indirect=True)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("set reason = 'another'", "does not give its digest"),
        ("set codec = 9", "cannot be read .*codec 9"),
        ("set token_ids = logprobs, codec = 1", "cannot be read"),
        ("set sampling = '{'", "cannot be read"),
    ],
)
def test_an_event_that_is_damaged_stops_the_copy(
    two: tuple[Engine, Engine], make_chain_maker: Any, change: str, why: str
) -> None:
    source, target = two
    remember(source, a_rollout(make_chain_maker(0), "r0"))
    damage(source, f"update model_call {change} where sequence = 4")
    with read(source) as connection:
        call_id = connection.scalar(select(schema.model_call.c.call_id).where(schema.model_call.c.sequence == 4))
    with pytest.raises(DamagedEvent, match=f"call_completed {call_id} at sequence 4 of .* {why}"):
        copy(source, target)


@pytest.mark.parametrize("two", DIRECTIONS[1:3], indirect=True)
def test_a_log_is_copied_while_it_is_written_to(two: tuple[Engine, Engine], make_chain_maker: Any) -> None:
    source, target = two
    failed: list[BaseException] = []

    def write_on(number: int) -> None:
        dice = random.Random(number)
        database = open_database(url_of(source))
        try:
            for turn in range(12):
                for event in a_rollout(make_chain_maker(100 * number + turn), f"r{number}.{turn}"):
                    with write(database) as connection:
                        log.append(connection, [event])
                        time.sleep(0.02 * (dice.random() < 0.2))
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            database.dispose()

    threads = [threading.Thread(target=write_on, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    copies: list[Copied] = []
    while any(thread.is_alive() for thread in threads):
        copies.append(copy(source, target))
    for thread in threads:
        thread.join()
    assert failed == []
    copies.append(copy(source, target))
    assert sum(any(each.events.values()) for each in copies) > 1, "some of it came while the log was written to"
    assert contents(target) == contents(source)
    for earlier, later in pairwise(copies):
        assert later.present == {kind: earlier.present[kind] + earlier.events[kind] for kind in later.present}


@pytest.mark.parametrize("two", [DIRECTIONS[0], DIRECTIONS[1]], indirect=True)
def test_whoever_writes_to_the_target_of_a_copy_ends_it(
    two: tuple[Engine, Engine], make_chain_maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = two
    for number in range(3):
        remember(source, a_rollout(make_chain_maker(number), f"r{number}"))
    monkeypatch.setattr(copying, "_BATCH", 4)

    def intrude(doing: str, done: int, total: int) -> None:
        if done == 17:  # three openings, all media and a part of the calls are there
            remember(target, make_chain_maker(99)([(4, 2)], rollout_id="r0"))

    with pytest.raises(NotABeginning, match="model_call has sequence 5 by now, which this copy did not write"):
        copy(source, target, progress=intrude)


def test_a_large_event_ends_its_transaction(
    sqlite_database: Engine, some_url: str, make_chain_maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(sqlite_database, make_chain_maker(0)([(30_000, 10)] * 4))
    monkeypatch.setattr(copying, "_BYTES", 100_000)
    target = open_database(some_url)
    migrate.upgrade(target)
    steps: list[int] = []
    copy(sqlite_database, target, progress=lambda doing, done, total: steps.append(done))
    assert [step for step in dict.fromkeys(steps) if step] == [2, 4]
    assert contents(target) == contents(sqlite_database)
    target.dispose()
