"""The partitions of PostgreSQL: which there are, which should be made ahead, which go together, and how they go.

Knows periods of time and the ranges of ids that they are, since a UUIDv7 begins with its time; does not know what a
call is. Law: an event always has a place, for what no partition is for goes into the default one, and no event moves:
the default partition becomes one of its own, or goes as a whole, and an empty one takes its place.

Periods are days, weeks or months of UTC. One that begins amid what is there already is cut short:

>>> monday = datetime(2026, 11, 30, tzinfo=UTC)
>>> [str(start.date()) for start in _edges(monday, "month", 2)]
['2026-11-01', '2026-12-01', '2027-01-01', '2027-02-01']
>>> floor(monday)
UUID('01a229c0-5400-0000-0000-000000000000')
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Literal
from uuid import UUID

from sqlalchemy import Connection, Engine, column, exists, select, text
from sqlalchemy import table as named_table

from store import schema
from store.database import read
from store.errors import UnknownPartition
from store.statements import statements

Every = Literal["day", "week", "month"]
_AHEAD: dict[Every, int] = {"day": 60, "week": 13, "month": 6}
"""How many periods are made beyond the present one, when nobody says."""
_ALL = (UUID(int=0), UUID(int=2**128 - 1))
_BOUNDS = re.compile(r"FROM \('?([^')]+)'?\) TO \('?([^')]+)'?\)")
_LAST_MS = 253_402_300_799_999
"""The end of the year 9999: ids that say more were made without a clock."""
_ENOUGH = timedelta(days=31)
"""When the partitions made ahead end sooner, servers say so."""
_SKEW = timedelta(days=1)
"""How far a server's clock may be ahead; what is later was made without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A stretch of time of one table, `low` to below `high`, that has a partition or should have one."""

    table: str
    low: datetime
    high: datetime

    @property
    def name(self) -> str:
        """What its partition is called: after the day it begins on."""
        return f"{self.table}_{self.low:{'%Y%m%d' if self.low == _begin(self.low, 'day') else '%Y%m%d_%H%M%S'}}"

    @property
    def ids(self) -> tuple[UUID, UUID]:
        """The lowest id of it, and the lowest one after it."""
        return floor(self.low), floor(self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition that is there."""

    table: str
    name: str
    low: datetime | None
    """None for the default partition, which holds what no other one is for."""
    high: datetime | None
    events: int
    """About how many, by PostgreSQL's own estimate."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A period without a partition, since the default one holds events of it."""

    period: Period
    events: int
    why: str
    """What can be done about it."""


def floor(at: datetime) -> UUID:
    """The lowest UUIDv7 of a time."""
    return UUID(int=max(0, int(at.timestamp() * 1000)) << 80)


def time_of(call_id: UUID) -> datetime:
    """When a UUIDv7 was made; the end of the calendar for an id that is none."""
    return datetime.fromtimestamp(min(call_id.int >> 80, _LAST_MS) / 1000, UTC)


def listed(connection: Connection) -> list[Partition]:
    """Every partition, table by table in the order of time, the default ones last."""
    found: list[Partition] = []
    for row in connection.execute(text(statements("partitions")["listed"])):
        bounds = _BOUNDS.search(row.bounds)
        low, high = map(_time, bounds.groups()) if bounds else (None, None)
        found.append(
            Partition(table=row.table_name, name=row.name, low=low, high=high, events=row.events, bytes=row.bytes)
        )
    return sorted(found, key=lambda each: (each.table, each.low is None, each.low))


def wanted(now: datetime, every: Every = "month", ahead: int | None = None) -> list[Period]:
    """The present period of each table and those `ahead`; unless told, enough for the next months."""
    edges = _edges(now, every, _AHEAD[every] if ahead is None else ahead)
    return [Period(table=table, low=low, high=high) for table in schema.PARTITIONED for low, high in pairwise(edges)]


def missing(
    connection: Connection,
    now: datetime,
    every: Every | None = None,
    ahead: int | None = None,
    *,
    to_come: bool = False,
) -> list[Period]:
    """What of the wanted periods has no partition yet. Unless told, they are as long as the latest ones there are.

    A table that the database does not have yet is left out; or, `to_come`, is taken to get those that calls have.
    """
    known = listed(connection)
    absent = {*schema.PARTITIONED}.difference(each.table for each in known)
    there = [each for each in known if each.low is not None and each.high is not None]
    there += [replace(each, table=table) for table in absent for each in there if each.table == "model_call"]
    found: list[Period] = []
    for period in wanted(now, every or _habit(there), ahead):
        if period.table in absent and not to_come:
            continue
        low = period.low
        for each in there:
            if each.table == period.table and each.low and each.high and each.low < period.high and each.high > low:
                if each.low > low:
                    found.append(Period(table=period.table, low=low, high=each.low))
                low = each.high
        if low < period.high:
            found.append(Period(table=period.table, low=low, high=period.high))
    return found


def make(connection: Connection, periods: Sequence[Period]) -> list[Held]:
    """Make a partition of each period, and commit each; says for which ones it could not.

    A period of which the default partition holds events cannot have another one.
    """
    held: list[Held] = []
    for period in periods:
        events, *_ = _held(connection, period.table, period.ids)
        if events:
            why = "turnlog db partition --adopt gives these a partition, or says why it cannot"
            held.append(Held(period=period, events=events, why=why))
        else:
            _run(connection, "make", period)
        connection.commit()
    return held


def adopt(connection: Connection, now: datetime) -> list[Held]:
    """Give what the default partition of each table holds a partition of whole days, and commit each; says what stays.

    The default partition becomes that one and an empty one takes its place: calls wait while it is read once.
    """
    stays: list[Held] = []
    for table in sorted({each.table for each in listed(connection)}):
        own = _own(connection, table, now)
        if isinstance(own, Period):
            _run(connection, "adopt", own)
        elif own is not None:
            stays.append(own)
        connection.commit()
    return stays


def together(connection: Connection, name: str) -> list[Partition]:
    """A partition of calls, and those that go with it: of the same time, or with another event of one of its calls.

    A call whose intent stayed behind would look as if it had not ended. Raises UnknownPartition.
    """
    known = listed(connection)
    calls = {each.name: each for each in known if each.table == "model_call"}
    if name not in calls:
        raise UnknownPartition(name, sorted(calls))
    found = [calls[name]]
    for one in found:  # also those that are found on the way
        found += [each for each in known if each not in found and _belong(connection, one, each)]
    return found


def drop(connection: Connection, names: Sequence[str]) -> None:
    """Remove partitions and all events in them, together or not at all; the caller commits. For what is kept elsewhere.

    A default partition is followed by an empty one. Raises UnknownPartition.
    """
    there = {each.name: each for each in listed(connection)}
    for name in names:
        if name not in there:
            raise UnknownPartition(name, sorted(there))
    for name in names:
        values = {"parent": there[name].table, "named": name}
        connection.execute(text(statements("partitions")["drop"]), values)
        if there[name].low is None:
            connection.execute(text(statements("partitions")["renew"]), values)


def as_sql(periods: Sequence[Period]) -> str:
    """The same as SQL, for whoever runs it by hand; it fails where the default partition holds events of a period."""
    lines = (
        f"select make_partition('{each.table}', '{each.name}', '{floor(each.low)}', '{floor(each.high)}');\n"
        for each in periods
    )
    return "".join(lines)


def made_until(connection: Connection) -> datetime | None:
    """Up to when every table has partitions made ahead; None when one has none."""
    ends = [
        max((each.high for each in listed(connection) if each.table == table and each.high), default=None)
        for table in schema.PARTITIONED
    ]
    known = [end for end in ends if end is not None]
    return min(known) if len(known) == len(ends) else None


def reminder(database: Engine, now: datetime) -> str | None:
    """What to say when the partitions made ahead end within a month; None while they do not, and on SQLite."""
    if database.dialect.name == "sqlite":
        return None
    with read(database) as connection:
        until = made_until(connection)
    if until is not None and until >= now + _ENOUGH:
        return None
    end = "there are no partitions of the calls to come" if until is None else f"partitions end on {until:%Y-%m-%d}"
    return f"{end}, and later calls go to the default one, which can only go as a whole: run `turnlog db partition`"


def unguarded(connection: Connection) -> set[str]:
    """Triggers that a partition lacks: events in it could be changed, or appear behind a reader's back."""
    return set(connection.scalars(text(statements("partitions")["unguarded"])))


def _edges(now: datetime, every: Every, ahead: int) -> list[datetime]:
    """Where the present period begins, and where it and each of those ahead ends."""
    edges = [_begin(now, every)]
    while len(edges) < ahead + 2:
        edges.append(_next(edges[-1], every))
    return edges


def _begin(at: datetime, every: Every) -> datetime:
    """Where the period of a time begins."""
    day = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if every == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if every == "month" else day


def _next(begin: datetime, every: Every) -> datetime:
    """Where the period after the one that begins here begins."""
    if every == "month":
        return (begin + timedelta(days=31)).replace(day=1)
    return begin + timedelta(days=7 if every == "week" else 1)


def _habit(there: Sequence[Partition]) -> Every:
    """How long the latest partition is."""
    latest = max(there, key=lambda each: each.high or datetime.min.replace(tzinfo=UTC), default=None)
    if latest is None or latest.low is None or latest.high is None:
        return "month"
    days = (latest.high - latest.low) / timedelta(days=1)
    return "day" if days <= 1 else "week" if days <= 7 else "month"


def _held(connection: Connection, table: str, ids: tuple[UUID, UUID]) -> tuple[int, UUID | None, UUID | None]:
    values = {"parent": table, "low": ids[0], "high": ids[1]}
    events, lowest, highest = connection.execute(text(statements("partitions")["held"]), values).one()
    return events, lowest, highest


def _own(connection: Connection, table: str, now: datetime) -> Period | Held | None:
    """The days of what the default partition holds; why it stays, when they cannot be a partition; None for nothing."""
    events, lowest, highest = _held(connection, table, _ALL)
    if lowest is None or highest is None:
        return None
    low, high = time_of(lowest), time_of(highest)
    there = [(each.low, each.high, each.name) for each in listed(connection) if each.table == table]
    bounded = [(begin, end, name) for begin, end, name in there if begin is not None and end is not None]
    among = next((name for begin, _, name in bounded if low < begin <= high), None)
    to_come = high > now + _SKEW
    if among is None and not to_come:
        return Period(
            table=table,
            low=max([_begin(low, "day"), *(end for _, end, _ in bounded if end <= low)]),
            high=min([_next(_begin(high, "day"), "day"), *(begin for begin, _, _ in bounded if begin > high)]),
        )
    cause = "that is a time to come" if to_come else f"{among} lies among them"
    why = (
        f"they are of {low:%Y-%m-%d} to {high:%Y-%m-%d}, and {cause}: once all are archived, "
        "`turnlog db drop-partition model_call_default` lets them go"
    )
    return Held(period=Period(table=table, low=low, high=high), events=events, why=why)


def _belong(connection: Connection, one: Partition, other: Partition) -> bool:
    """Whether two partitions of different tables are of the same time, or hold events of the same call."""
    if one.table == other.table:
        return False
    if (one.low, one.high) == (other.low, other.high):
        return True
    if one.low and one.high and other.low and other.high and (one.high <= other.low or other.high <= one.low):
        return False
    ours, theirs = (named_table(each.name, column("call_id")) for each in (one, other))
    return bool(connection.scalar(select(exists().where(ours.c.call_id == theirs.c.call_id))))


def _run(connection: Connection, statement: str, period: Period) -> None:
    low, high = period.ids
    values = {"parent": period.table, "named": period.name, "low": low, "high": high}
    connection.execute(text(statements("partitions")[statement]), values)


def _time(bound: str) -> datetime:
    """A bound as PostgreSQL writes it."""
    ends = {"MINVALUE": _ALL[0], "MAXVALUE": _ALL[1]}
    return time_of(ends.get(bound) or UUID(bound))
