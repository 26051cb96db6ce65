"""The tally names what was appended, at any moment and whatever fails; an event that goes is missed."""

from __future__ import annotations

import random
import threading
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, Table, text

from store import log, migrate, partitions, schema
from store.copy import copy
from store.database import open_database, read, write
from store.errors import EventConflict
from store.exclusive import exclusively
from store.tally import Compared, compared
from tests.store.test_copy import a_rollout

TABLES = [*schema.metadata.tables.values()]


def all_compared(database: Engine) -> dict[str, Compared]:
    """Every table beside its tally, in one snapshot."""
    with read(database) as connection:
        return {table.name: compared(connection, table) for table in TABLES}


def faults(database: Engine) -> list[str]:
    """Tables that are not what their tally says."""
    return [name for name, found in all_compared(database).items() if found.missing or found.unnamed or found.twice]


def filled(database: Engine, maker: Any, rollout_id: str = "r1") -> None:
    with write(database) as connection:
        log.append(connection, a_rollout(maker, rollout_id))


def unguarded(connection: Connection, table: Table) -> None:
    """Take away what refuses that an event goes, and what tallies the next one."""
    if connection.dialect.name == "sqlite":
        connection.execute(text(f"drop trigger {table.name}_no_delete"))
    else:
        connection.execute(text(f"alter table {table.name} disable trigger {table.name}_no_change"))


def write_and_fail(
    database: Engine, maker: Any, number: int, failed: list[BaseException], until: threading.Event | None = None
) -> None:
    """Appends that are committed, rolled back, refused, repeated, or taken back to a savepoint."""
    dice = random.Random(number)
    try:
        for turn in count():
            if turn >= 15 and (until is None or until.is_set()):
                return
            events = a_rollout(maker, f"r{number}.{turn}")
            what = dice.choice(("whole", "one by one", "rolled back", "refused", "savepoint"))
            if what == "one by one":
                for event in events:
                    with write(database) as connection:
                        log.append(connection, [event])
            try:
                with write(database) as connection:
                    if what == "savepoint":
                        inner = connection.begin_nested()
                        log.append(connection, events[:3])
                        inner.rollback()
                    log.append(connection, events)
                    log.append(connection, events)  # which changes nothing
                    if what == "refused":
                        log.append(connection, [events[0].model_copy(update={"task": "another"})])
                    if what == "rolled back":
                        raise KeyError(what)
            except (KeyError, EventConflict):
                assert what in ("rolled back", "refused")
    except BaseException as error:
        failed.append(error)
        raise


def test_at_any_moment_the_tally_names_what_is_there(database: Engine, make_chain_maker: Any) -> None:
    failed: list[BaseException] = []
    threads = [
        threading.Thread(target=write_and_fail, args=(database, make_chain_maker(number), number, failed))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    looks = 0
    while any(thread.is_alive() for thread in threads):
        assert faults(database) == []
        looks += 1
    for thread in threads:
        thread.join()
    assert failed == []
    assert looks > 3
    assert faults(database) == []
    gaps = {name: found.named[0][0] > 1 or len(found.named) > 1 for name, found in all_compared(database).items()}
    assert any(gaps.values()) == (database.dialect.name == "postgresql"), "only PostgreSQL leaves some"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_an_event_that_goes_is_missed_and_so_is_one_that_took_its_place(
    database: Engine, make_chain_maker: Any, table: Table
) -> None:
    maker = make_chain_maker(1)
    filled(database, maker)
    with write(database) as connection:
        unguarded(connection, table)
        last = connection.scalar(text(f"select max(sequence) from {table.name}"))
        connection.execute(text(f"delete from {table.name} where sequence = {last}"))
    assert faults(database) == [table.name]
    assert all_compared(database)[table.name].missing == [(last, last)]
    filled(database, maker, "r2")
    found = all_compared(database)[table.name]
    if database.dialect.name == "sqlite":
        assert (found.missing, found.twice) == ([], [(last, last)])  # which gives the highest sequence again
    else:
        assert (found.missing, found.twice) == ([(last, last)], [])


@pytest.mark.parametrize(
    "kinds", ["sqlite to sqlite", "sqlite to postgres", "postgres to sqlite", "postgres to postgres"]
)
@pytest.mark.postgres
def test_a_copy_misses_what_its_source_misses_and_no_more(
    request: pytest.FixtureRequest, tmp_path: Any, make_chain_maker: Any, kinds: str
) -> None:
    one, _, other = kinds.split()
    source: Engine = request.getfixturevalue(f"{one}_database")
    url = f"sqlite:///{tmp_path / 'target.db'}" if other == "sqlite" else request.getfixturevalue("empty_postgres_url")
    target = open_database(url)
    migrate.upgrade(target)
    maker, failed = make_chain_maker(7), list[BaseException]()
    write_and_fail(source, maker, 7, failed)
    copy(source, target)
    assert faults(target) == []
    table = schema.model_call
    gone = all_compared(source)[table.name].named[-1][1]
    for database in (source, target):
        with write(database) as connection:
            unguarded(connection, table)
    with write(source) as connection:
        connection.execute(text(f"delete from model_call where sequence = {gone}"))
    assert faults(target) == []
    with write(target) as connection:
        connection.execute(text(f"delete from model_call where sequence = {gone}"))
    for _ in range(2):
        copy(source, target)
        assert all_compared(target)[table.name].missing == [(gone, gone)]
    fresh = open_database(f"sqlite:///{tmp_path / 'fresh.db'}")
    migrate.upgrade(fresh)
    for _ in range(2):
        copy(source, fresh)
        assert all_compared(fresh)[table.name].missing == [(gone, gone)]
        assert all_compared(fresh)[table.name].twice == []
    for database in (target, fresh):
        database.dispose()


def test_a_log_of_before_is_tallied_with_its_gaps(empty_url: str, make_chain_maker: Any) -> None:
    database = open_database(empty_url)
    migrate.upgrade(database, "0004")
    maker = make_chain_maker(1)
    for number in range(3):
        filled(database, maker, f"r{number}")
    with write(database) as connection:
        unguarded(connection, schema.trained_row)
        connection.execute(text("delete from trained_row where sequence = 2"))
    migrate.upgrade(database)
    filled(database, maker, "later")
    assert faults(database) == []
    found = all_compared(database)
    assert found["trained_row"].named == [(1, 1), (3, 4)]
    assert found["rollout"].named == [(1, 4)]
    migrate.downgrade(database, "0004")
    filled(database, maker, "latest")
    migrate.upgrade(database)
    assert faults(database) == []
    assert all_compared(database)["rollout"].named == [(1, 5)]
    database.dispose()


@pytest.mark.postgres
def test_an_upgrade_tallies_each_event_once_while_calls_are_written(
    empty_postgres_url: str, make_chain_maker: Any
) -> None:
    database = open_database(empty_postgres_url)
    migrate.upgrade(database, "0004")
    done, failed = threading.Event(), list[BaseException]()
    threads = [
        threading.Thread(target=write_and_fail, args=(database, make_chain_maker(number), number, failed, done))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    try:
        migrate.upgrade(database)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert faults(database) == []
    database.dispose()


@pytest.mark.postgres
def test_what_left_with_a_partition_is_told_apart(postgres_database: Engine, make_chain_maker: Any) -> None:
    maker = make_chain_maker(1)
    with exclusively(postgres_database) as connection:
        when = partitions.time_of(maker([(4, 2)])[0].call_id)
        partitions.make(connection, partitions.wanted(when, "day", 0))
    filled(postgres_database, maker)
    with exclusively(postgres_database) as connection:
        name = next(each.name for each in partitions.listed(connection) if each.low and each.low <= when < each.high)
        partitions.drop(connection, [f"model_call_{name.rpartition('_')[2]}"])
        connection.commit()
    found = all_compared(postgres_database)
    assert found["model_call"].missing == found["model_call"].dropped == [(1, 5)]
    del found["model_call"]
    assert not any(each.missing or each.unnamed or each.twice for each in found.values())


@pytest.mark.postgres
def test_what_is_inserted_into_a_partition_by_its_name_is_tallied(
    postgres_database: Engine, make_chain_maker: Any
) -> None:
    filled(postgres_database, make_chain_maker(1))
    with write(postgres_database) as connection:
        names = ", ".join(column.name for column in schema.call_end.c if column.name not in ("sequence", "call_id"))
        other = "'00000000-0000-7000-8000-000000000001'"
        words = f"insert into call_end_default (call_id, {names}) select {other}, {names} from call_end"
        connection.execute(text(words))
    assert all_compared(postgres_database)["call_end"].named == [(1, 2)]
    assert faults(postgres_database) == []
