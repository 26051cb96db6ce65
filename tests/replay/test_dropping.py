"""What is archived leaves the log, also out of the default partition, while calls go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select, text

from replay import dropping
from replay.archive import open_archive
from replay.dropping import Dropped, drop_archived
from replay.errors import NotArchived
from replay.rowset import build
from replay.sealing import seal
from store import log, partitions, schema
from store.database import read
from store.events import CallAdmitted, CallEnded, Event, RolloutOpened, uuid7
from store.exclusive import exclusively
from store.tally import compared

pytestmark = pytest.mark.postgres
Remember = Callable[[Engine, Iterable[Event]], None]
NEVER = 2**62
"""A time after everything."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


@pytest.fixture
def database(postgres_database: Engine, chain_maker: Any, remember: Remember) -> Engine:
    """A log whose default partition holds calls of two months, and another partition between them."""
    failed = uuid7(1, b"0123456789")
    with exclusively(postgres_database) as connection:
        partitions.make(connection, partitions.wanted(datetime(2000, 1, 1, tzinfo=UTC), "month", 0))
    opened = RolloutOpened(rollout_id="r1", opened_at=1)
    admitted = CallAdmitted(
        call_id=failed, rollout_id="r1", decision="root", reason="first_call", parent_id=None, worker="w", at=5
    )
    ended = CallEnded(call_id=failed, rollout_id="r1", state="failed", reason="full", at=6)
    (old,) = chain_maker([(6, 2)], rollout_id="r1")
    old = old.model_copy(update={"call_id": (call_id := uuid7(2, bytes(10))), "root_id": call_id})
    remember(postgres_database, [opened, admitted, ended, old, *chain_maker()])
    return postgres_database


def sealed(database: Engine, url: str, name: str = "test") -> None:
    seal(database, open_archive(url, new=True), before=NEVER, name=name)


def drop(database: Engine, url: str, name: str = "model_call_default") -> Dropped:
    with exclusively(database) as connection:
        found = drop_archived(connection, open_archive(url), name)
        connection.commit()
    return found


def held(connection: Connection) -> dict[str, int]:
    """The partitions that hold events, and how many."""
    names = [each.name for each in partitions.listed(connection)]
    counted = ((name, connection.scalar(text(f"select count(*) from {name}"))) for name in names)
    return {name: count for name, count in counted if count}


def test_the_default_partition_goes_when_all_in_it_is_sealed(
    database: Engine, chain_maker: Any, remember: Remember, url: str
) -> None:
    sealed(database, url)
    late = chain_maker(rollout_id="late")
    remember(database, late)
    with pytest.raises(NotArchived, match="model_call_default stays: 3 of its 7 events, such as 5, are not in archive"):
        drop(database, url)
    sealed(database, url, "second")
    before = build(database)
    with read(database) as connection:
        there = held(connection)
    assert there == {"model_call_default": 7, "call_intent_default": 1, "call_end_default": 1}
    dropped = drop(database, url)
    assert (dropped.partitions[0], dropped.events) == ("model_call_default", 9)
    assert not build(database).rows
    assert build(database, archive=url).digest() == before.digest()
    with read(database) as connection:
        assert held(connection) == {}
        assert log.pending(connection) == []
        assert partitions.unguarded(connection) == set()
        assert compared(connection, schema.model_call).dropped == [(1, 7)]
    with exclusively(database) as connection:
        assert partitions.make(connection, partitions.missing(connection, datetime(2023, 11, 5, tzinfo=UTC))) == []
    remember(database, chain_maker(rollout_id="then"))
    with read(database) as connection:
        assert held(connection) == {"model_call_20231101": 3}
        assert connection.scalar(select(schema.model_call.c.sequence).order_by("sequence").limit(1)) == 8


def test_what_was_adopted_goes_like_any_other_partition(database: Engine, url: str) -> None:
    """Calls lie on both sides of a partition and stay; intents and ends do not, and are given days of their own."""
    with exclusively(database) as connection:
        (stays,) = partitions.adopt(connection, datetime.now(UTC))
    assert (stays.period.table, stays.events) == ("model_call", 4)
    with read(database) as connection:
        assert held(connection) == {"model_call_default": 4, "call_intent_19700101": 1, "call_end_19700101": 1}
    sealed(database, url)
    before = build(database)
    assert drop(database, url).events == 4
    assert build(database, archive=url).digest() == before.digest()


def test_an_event_that_goes_with_it_must_be_archived_too(
    database: Engine, chain_maker: Any, remember: Remember, url: str
) -> None:
    """The intent of a sealed call's twin in another partition; one that stayed behind would look unfinished."""
    sealed(database, url)
    call = build(database).rows[0]
    with read(database) as connection:
        last = log.calls(connection, call.rollout_id)[-1]
    intent = CallAdmitted(
        call_id=last.call_id, rollout_id="r1", decision="root", reason="first_call", parent_id=None, worker="w", at=5
    )
    remember(database, [intent])
    with exclusively(database) as connection:
        partitions.drop(connection, ["call_intent_20000101"])
        connection.commit()
    with pytest.raises(NotArchived, match="1 of the 2 events of call_intent_default with it, such as 2, are not in"):
        drop(database, url)


def test_what_comes_while_the_archive_is_read_keeps_the_partition(
    database: Engine, chain_maker: Any, remember: Remember, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed(database, url)
    alone = dropping.have_alone

    def late(connection: Connection, *names: Any) -> None:
        remember(database, chain_maker(rollout_id="late"))
        alone(connection, *names)

    monkeypatch.setattr(dropping, "have_alone", late)
    with pytest.raises(NotArchived, match="3 events, which came to model_call_default just now, are not in archive"):
        drop(database, url)
    with read(database) as connection:
        assert held(connection)["model_call_default"] == 7


@contextmanager
def beside(work: Callable[[], None]) -> Generator[threading.Thread]:
    """Something that another thread does meanwhile; its error is ours."""
    errors: list[Exception] = []

    def tried() -> None:
        try:
            work()
        except Exception as error:  # told below
            errors.append(error)

    thread = threading.Thread(target=tried)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(30)
    assert not thread.is_alive()
    assert not errors, errors


def test_calls_that_wait_meanwhile_find_their_place(
    database: Engine, chain_maker: Any, remember: Remember, url: str
) -> None:
    sealed(database, url)
    late = chain_maker(rollout_id="late")
    with exclusively(database) as connection:
        drop_archived(connection, open_archive(url), "model_call_default")
        with beside(lambda: remember(database, late)) as writer:
            writer.join(0.3)
            assert writer.is_alive()
            connection.commit()
    with read(database) as connection:
        assert held(connection) == {"model_call_default": 3}
        assert log.calls(connection, "late") == late


def test_who_has_one_table_and_wants_another_is_let_through(database: Engine, url: str) -> None:
    sealed(database, url)
    begun = threading.Event()

    def reads() -> None:
        with read(database) as connection:
            connection.execute(text("select count(*) from model_call"))
            begun.set()
            time.sleep(0.5)
            connection.execute(text("set local deadlock_timeout = '20s'"))
            connection.execute(text("select count(*) from call_intent"))

    with beside(reads):
        assert begun.wait(10)
        assert drop(database, url).events == 6


def test_calls_go_on_while_partitions_are_adopted_and_dropped(
    database: Engine, make_chain_maker: Any, remember: Remember, url: str
) -> None:
    sealed(database, url)
    done = threading.Event()
    written: dict[str, int] = {}

    def writes(name: str) -> None:
        maker = make_chain_maker(hash(name) % 1000)
        parent = None
        while not done.is_set():
            parent = maker([(3, 3)], rollout_id=name, parent=parent)[0]
            intent = CallAdmitted(
                call_id=parent.call_id,
                rollout_id=name,
                decision=parent.decision,
                reason=parent.reason,
                parent_id=parent.parent_id,
                worker="w",
                at=1,
            )
            remember(database, [intent])
            remember(database, [parent])
            written[name] = written.get(name, 0) + 1

    with beside(lambda: writes("w1")), beside(lambda: writes("w2")):
        try:
            while len(written) < 2:
                time.sleep(0.01)
            with exclusively(database) as connection:
                partitions.drop(connection, ["model_call_20000101", "call_intent_20000101", "call_end_20000101"])
                connection.commit()
                assert partitions.adopt(connection, datetime.now(UTC)) == []
            between = sum(written.values())
            while sum(written.values()) < between + 10:
                time.sleep(0.01)
        finally:
            done.set()
    with read(database) as connection:
        assert {name: len(log.calls(connection, name)) for name in written} == written
        assert {name: len(log.intents(connection, name)) for name in written} == written
        (name,) = (name for name in held(connection) if name.startswith("model_call"))
    sealed(database, url, "all")
    before = build(database)
    assert drop(database, url, name).events == 6 + 2 * sum(written.values())
    assert build(database, archive=url).digest() == before.digest()
