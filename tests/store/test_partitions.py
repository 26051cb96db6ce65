"""Partitions of PostgreSQL: made ahead, guarded like their table, adopted and dropped; every event has a place."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Connection, Engine, make_url, select, text
from sqlalchemy.exc import IntegrityError

from replay.rowset import build
from store import log, partitions, schema
from store.database import read, write
from store.errors import SchemaBusy, UnknownPartition
from store.events import CallAdmitted, CallEnded, Event, MediaShown, MediaStored, RolloutOpened, uuid7
from store.exclusive import exclusively
from store.partitions import Period
from store.tally import compared

pytestmark = pytest.mark.postgres
INTO = "insert into call_end_default (call_id, rollout_id, state, reason, at, digest, codec, token_ids, logprobs)"
NOVEMBER = datetime(2023, 11, 1, tzinfo=UTC)
"""The month of a `ChainMaker`'s calls."""
THE_DAY = datetime(2023, 11, 14, tzinfo=UTC)
"""Their day."""


def day(year: int, month: int, day: int = 1) -> datetime:
    return datetime(year, month, day, tzinfo=UTC)


def names(connection: Connection, table: str = "model_call") -> list[str]:
    return [each.name.removeprefix(f"{table}_") for each in partitions.listed(connection) if each.table == table]


def holding(connection: Connection) -> dict[str, int]:
    """The partitions of calls that hold any, and how many."""
    counted = text("select tableoid::regclass::text as name, count(*) as calls from model_call group by 1")
    return {row.name: row.calls for row in connection.execute(counted)}


def only(periods: list[Period], table: str = "model_call") -> list[tuple[datetime, datetime]]:
    return [(each.low, each.high) for each in periods if each.table == table]


def test_an_upgrade_makes_the_present_month_and_the_next_ones(postgres_database):
    now = datetime.now(UTC)
    with read(postgres_database) as connection:
        assert partitions.missing(connection, now) == []
        assert names(connection) == [*(f"{low:%Y%m%d}" for low, _ in only(partitions.wanted(now))), "default"]
        until = partitions.made_until(connection)
        assert partitions.unguarded(connection) == set()
    assert until is not None
    assert timedelta(days=150) < until - now < timedelta(days=220)


@pytest.mark.parametrize(
    ("every", "edges"),
    [
        ("day", [day(2024, 2, 28), day(2024, 2, 29), day(2024, 3, 1)]),
        ("week", [day(2024, 2, 26), day(2024, 3, 4), day(2024, 3, 11)]),
        ("month", [day(2024, 2), day(2024, 3), day(2024, 4)]),
    ],
)
def test_periods_are_days_weeks_from_monday_and_months(every, edges):
    now = datetime(2024, 2, 28, 23, 59, tzinfo=UTC)
    assert only(partitions.wanted(now, every, 1)) == [(edges[0], edges[1]), (edges[1], edges[2])]


def test_a_period_amid_others_is_cut_short(postgres_database):
    with exclusively(postgres_database) as connection:
        assert partitions.make(connection, partitions.missing(connection, day(2024, 3, 5), "month", 0)) == []
        missing = partitions.missing(connection, day(2024, 2, 28), "week", 6)
        assert only(missing) == [
            (day(2024, 2, 26), day(2024, 3, 1)),
            (day(2024, 4), day(2024, 4, 8)),
            (day(2024, 4, 8), day(2024, 4, 15)),
        ]
        assert partitions.make(connection, missing) == []
        assert partitions.missing(connection, day(2024, 2, 28), "week", 6) == []


def test_later_periods_are_as_long_as_the_latest_ones(postgres_database):
    with exclusively(postgres_database) as connection:
        assert partitions.make(connection, partitions.missing(connection, day(2031, 1, 1), "week", 1)) == []
        assert only(partitions.missing(connection, day(2031, 1, 15), None, 0)) == [(day(2031, 1, 13), day(2031, 1, 20))]


def test_an_event_goes_to_the_partition_of_its_id_and_any_other_to_the_default_one(postgres_database, chain_maker):
    with exclusively(postgres_database) as connection:
        partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 0))
    chain = chain_maker()
    skewed = chain_maker([(5, 5)], rollout_id="r2")[0].model_copy(update={"call_id": uuid7(1, bytes(10))})
    skewed = skewed.model_copy(update={"root_id": skewed.call_id})
    with write(postgres_database) as connection:
        log.append(connection, [*chain, skewed])
    with read(postgres_database) as connection:
        assert holding(connection) == {"model_call_20231101": 3, "model_call_default": 1}
        assert log.calls(connection, "r1") == chain
        assert log.calls(connection, "r2") == [skewed]


def test_a_period_whose_events_are_in_the_default_partition_is_refused_with_the_remedy(postgres_database, chain_maker):
    with write(postgres_database) as connection:
        log.append(connection, chain_maker())
    with exclusively(postgres_database) as connection:
        held = partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 1))
        assert [(each.period.name, each.events) for each in held] == [("model_call_20231101", 3)]
        assert "--adopt" in held[0].why
        # The others are made.
        assert "20231201" in names(connection)
        assert "20231101" in names(connection, "call_end")


def test_the_default_partition_becomes_that_of_its_events_and_none_moves(postgres_database, chain_maker):
    chain = chain_maker()
    with write(postgres_database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=1), *chain])
    before = build(postgres_database).digest()
    with read(postgres_database) as connection:
        file = connection.scalar(text("select pg_relation_filenode('model_call_default')"))
        sequences = list(connection.scalars(select(schema.model_call.c.sequence)))
    with exclusively(postgres_database) as connection:
        assert partitions.adopt(connection, THE_DAY) == []
        assert partitions.unguarded(connection) == set()
        assert partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 0)) == []
        assert [name for name in names(connection) if name < "2024"] == ["20231101", "20231114", "20231115"]
    with read(postgres_database) as connection:
        assert connection.scalar(text("select pg_relation_filenode('model_call_20231114')")) == file
        assert holding(connection) == {"model_call_20231114": 3}
        assert list(connection.scalars(select(schema.model_call.c.sequence))) == sequences
    assert build(postgres_database).digest() == before
    with write(postgres_database) as connection:  # both go on: the one adopted, and the new default one
        log.append(connection, chain_maker([(4, 4)], parent=chain[-1]))
        stray = chain_maker([(5, 5)], rollout_id="r2")[0].model_copy(update={"call_id": uuid7(1, bytes(10))})
        log.append(connection, [stray.model_copy(update={"root_id": stray.call_id})])
    with read(postgres_database) as connection:
        assert holding(connection) == {"model_call_20231114": 4, "model_call_default": 1}
    with exclusively(postgres_database) as connection:  # and once more, up to what is there
        assert partitions.adopt(connection, THE_DAY) == []
        assert holding(connection) == {"model_call_20231114": 4, "model_call_19700101": 1}


@pytest.mark.parametrize("months", [(9, 10), (10,)])
def test_the_days_of_the_default_partition_end_where_others_begin(postgres_database, chain_maker, months):
    """Of two months with none else, and of a month between the partitions of others."""
    others = [month for month in (9, 11) if month not in months]
    with exclusively(postgres_database) as connection:
        for month in others:
            assert partitions.make(connection, partitions.missing(connection, day(2024, month), "month", 0)) == []
    with write(postgres_database) as connection:
        log.append(connection, [event for month in months for event in one_call(chain_maker, day(2024, month, 30))])
    with exclusively(postgres_database) as connection:
        assert partitions.adopt(connection, datetime.now(UTC)) == []
        assert holding(connection) == {f"model_call_2024{months[0]:02}30": len(months)}
        (own,) = [each for each in partitions.listed(connection) if each.name in holding(connection)]
        assert own.high == day(2024, 10, 31)
        assert partitions.make(connection, partitions.missing(connection, day(2024, 10), "month", 1)) == []


def test_events_of_a_time_to_come_stay(postgres_database, chain_maker):
    """A partition up to then would keep those of all the years between."""
    with write(postgres_database) as connection:
        log.append(connection, [*one_call(chain_maker, THE_DAY), *one_call(chain_maker, day(9999, 12, 31))])
    with exclusively(postgres_database) as connection:
        (stays,) = partitions.adopt(connection, THE_DAY)
        assert "of 2023-11-14 to 9999-12-31, and that is a time to come" in stays.why
        assert holding(connection) == {"model_call_default": 2}


def test_events_on_both_sides_of_a_partition_stay_where_they_are(postgres_database, chain_maker):
    with exclusively(postgres_database) as connection:
        partitions.make(connection, partitions.missing(connection, day(2023, 10), "month", 0))
    stray = chain_maker([(5, 5)], rollout_id="r2")[0].model_copy(update={"call_id": uuid7(1, bytes(10))})
    with write(postgres_database) as connection:
        log.append(connection, [*chain_maker(), stray.model_copy(update={"root_id": stray.call_id})])
    with exclusively(postgres_database) as connection:
        (held,) = partitions.adopt(connection, THE_DAY)
    assert "model_call_20231001 lies among them" in held.why
    assert "`turnlog db drop-partition model_call_default` lets them go" in held.why
    with read(postgres_database) as connection:
        assert holding(connection) == {"model_call_default": 4}


def test_a_partition_is_dropped_by_name_with_all_in_it_and_no_other(postgres_database, chain_maker):
    with exclusively(postgres_database) as connection:
        partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 0))
    with write(postgres_database) as connection:
        log.append(connection, chain_maker())
    for name in ("rollout", "model_call_20990101"):
        with (
            pytest.raises(UnknownPartition, match=r"choose from .*model_call_20231101"),
            exclusively(postgres_database) as connection,
        ):
            partitions.drop(connection, ["model_call_20231101", name])
    with exclusively(postgres_database) as connection:
        assert holding(connection) == {"model_call_20231101": 3}
        partitions.drop(connection, ["model_call_20231101", "call_intent_20231101"])
        connection.commit()
        assert holding(connection) == {}
        assert "20231101" not in names(connection) + names(connection, "call_intent")
        assert "20231101" in names(connection, "call_end")


def test_the_default_partition_is_followed_by_an_empty_one(postgres_database, chain_maker):
    chain = chain_maker()
    with write(postgres_database) as connection:
        log.append(connection, chain)
    with exclusively(postgres_database) as connection:
        partitions.drop(connection, ["model_call_default"])
        connection.commit()
        assert holding(connection) == {}
        assert partitions.unguarded(connection) == set()
    with read(postgres_database) as connection:
        found = compared(connection, schema.model_call)
    assert found.missing == found.dropped == [(1, 3)]
    with write(postgres_database) as connection:
        log.append(connection, chain_maker([(5, 5)], rollout_id="r2"))
    with read(postgres_database) as connection:
        assert holding(connection) == {"model_call_default": 1}
        assert connection.scalar(select(schema.model_call.c.sequence)) == 4


def test_partitions_with_events_of_one_call_go_together_whatever_their_bounds_are(postgres_database, chain_maker):
    """Such as intents in the default partition of a time for which calls have one."""
    (intent, end, *_), (admitted, call) = events(chain_maker), one_call(chain_maker, THE_DAY, admitted=True)
    with write(postgres_database) as connection:
        log.append(connection, [intent, end, admitted])
    with exclusively(postgres_database) as connection:
        partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 0))
    with write(postgres_database) as connection:
        log.append(connection, [call])
    with exclusively(postgres_database) as connection:
        assert holding(connection) == {"model_call_20231101": 1}
        found = {each.name for each in partitions.together(connection, "model_call_20231101")}
        assert found == {
            *("model_call_20231101", "call_end_20231101", "call_media_20231101"),
            *("call_intent_default", "call_end_default", "call_media_default", "model_call_default"),
        }
        with pytest.raises(UnknownPartition, match="call_intent_default"):
            partitions.together(connection, "call_intent_default")


def test_partitions_are_made_while_calls_are_written(postgres_database, chain_maker):
    """No lock that an insert of another partition's waits for, and none that waits for one."""
    with exclusively(postgres_database) as connection:
        partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 0))
    chain = chain_maker()
    with write(postgres_database) as writing:
        log.append(writing, chain[:1])
        with exclusively(postgres_database) as connection:
            assert partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 3)) == []
        log.append(writing, chain[1:])
    with read(postgres_database) as connection:
        assert holding(connection) == {"model_call_20231101": 3}


def test_a_reader_that_holds_the_default_partition_makes_it_give_up_in_time(postgres_database, chain_maker):
    with read(postgres_database) as reading:
        reading.execute(text("select count(*) from model_call"))
        with pytest.raises(SchemaBusy, match="end that transaction"), exclusively(postgres_database) as connection:
            partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 0))
    with exclusively(postgres_database) as connection:
        assert partitions.make(connection, partitions.missing(connection, NOVEMBER, "month", 0)) == []


def one_call(chain_maker, at: datetime, *, admitted: bool = False) -> list[Event]:
    """A call of a time, of a rollout of its own; with its intent when that is asked for."""
    name = f"of-{at:%Y-%m-%d}"
    (made,) = chain_maker([(5, 5)], rollout_id=name)
    call_id = uuid7(int(at.timestamp() * 1000), bytes(10))
    call = made.model_copy(update={"call_id": call_id, "root_id": call_id})
    intent = CallAdmitted(
        call_id=call_id, rollout_id=name, decision="root", reason="first_call", parent_id=None, worker="w", at=1
    )
    return [intent, call] if admitted else [call]


def events(chain_maker) -> list[object]:
    intent = CallAdmitted(
        call_id=uuid7(1, bytes(10)),
        rollout_id="r1",
        decision="root",
        reason="first_call",
        parent_id=None,
        worker="w",
        at=1,
    )
    end = CallEnded(call_id=uuid7(2, bytes(10)), rollout_id="r1", state="failed", reason="x", at=1)
    media = MediaShown.example().model_copy(update={"call_id": uuid7(1, bytes(10))})
    return [intent, end, *chain_maker(), MediaStored.example(), media]


@pytest.mark.parametrize("role", ["origin", "replica"])
@pytest.mark.parametrize("table", schema.PARTITIONED)
def test_a_partition_that_is_named_itself_refuses_every_change(
    postgres_database, postgres_url, chain_maker, table, role
):
    with write(postgres_database) as connection:
        log.append(connection, events(chain_maker))
    url = make_url(postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"set session_replication_role = {role}")
        for named in (f"{table}_default", f"{table}_{datetime.now(UTC):%Y%m01}"):
            for change in (f"update {named} set digest = digest", f"delete from {named}"):
                if named.endswith("default"):
                    with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match=f"{table} is append-only"):
                        connection.execute(change)
            with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match=f"{table} is append-only"):
                connection.execute(f"truncate {named}")
        with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match=f"{table} is append-only"):
            connection.execute(f"update {table} set call_id = gen_random_uuid()")


def test_a_call_cannot_end_twice_through_a_partition_either(postgres_database, chain_maker):
    chain = chain_maker()
    with write(postgres_database) as connection:
        log.append(connection, chain)
    with pytest.raises(IntegrityError, match="is already completed"), write(postgres_database) as connection:
        connection.execute(
            text(f"{INTO} select call_id, rollout_id, 'failed', '', 1, digest, 0, '', '' from model_call limit 1")
        )


def test_an_insert_into_a_partition_is_announced_too(postgres_database, chain_maker):
    """So nobody can slip an event behind the back of a reader that takes positions (decision 0016)."""
    with write(postgres_database) as connection:
        log.append(connection, chain_maker())
    announced = text("select count(*) from pg_locks where locktype = 'advisory' and classid::bigint >> 16 = 29813 + 5")
    with write(postgres_database) as connection:
        assert connection.scalar(announced) == 0
        connection.execute(
            text(
                f"{INTO} select '00000000-0000-7000-8000-000000000001', 'r1', 'failed', '', 1, digest, 0, '', ''"
                " from model_call limit 1"
            )
        )
        assert connection.scalar(announced) == 1
    with read(postgres_database) as connection:
        assert connection.scalar(text("select sequence from call_end")) == 1  # of the one sequence of the table


def test_a_server_is_told_when_partitions_end_soon(postgres_database: Engine, sqlite_database: Engine):
    with read(postgres_database) as connection:
        until = partitions.made_until(connection)
    assert until is not None
    assert partitions.reminder(postgres_database, until - timedelta(days=32)) is None
    soon = partitions.reminder(postgres_database, until - timedelta(days=30))
    assert soon is not None
    assert f"partitions end on {until:%Y-%m-%d}" in soon
    assert "run `turnlog db partition`" in soon
    assert partitions.reminder(sqlite_database, until) is None


def test_ids_and_times_go_into_one_another():
    at = datetime(2026, 11, 30, 12, tzinfo=UTC)
    assert partitions.time_of(partitions.floor(at)) == at
    assert (
        partitions.floor(at)
        <= uuid7(int(at.timestamp() * 1000), bytes(10))
        < partitions.floor(at + timedelta(seconds=1))
    )
    assert partitions.time_of(UUID(int=2**128 - 1)).year == 9999
