"""The partitions of PostgreSQL: which there are, which should be made ahead, and how one goes.

Knows periods of time and the ranges of ids that they are, since a UUIDv7 begins with its time; does not know what a
call is. Law: an event always has a place, for what no partition is for goes into the default one, and no event moves.

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

from sqlalchemy import Connection, Engine, text

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
    """A period that has no partition, since the default one holds events of it already."""

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


def make(connection: Connection, periods: Sequence[Period], *, adopt: bool = False) -> list[Held]:
    """Make a partition of each period, and commit each; says for which ones it could not.

    A period whose events are in the default partition already can be made only by making that partition the period's:
    with `adopt`, where the events allow it, which holds calls up while it is read once.
    """
    held: list[Held] = []
    for period in periods:
        if _is_inside(connection, period):  # of a partition that was adopted just now
            continue
        events, *_ = _held(connection, period.table, period.ids)
        if not events:
            _run(connection, "make", period)
        elif not isinstance(adopted := _adoptable(connection, period), Period):
            held.append(Held(period=period, events=events, why=adopted))
        elif adopt:
            _run(connection, "adopt", adopted)
        else:
            held.append(Held(period=period, events=events, why="turnlog db partition --adopt gives it to that period"))
        connection.commit()
    return held


def drop(connection: Connection, names: Sequence[str]) -> None:
    """Remove partitions and all events in them, together or not at all; the caller commits. For what is kept elsewhere.

    Raises UnknownPartition, also for a default partition.
    """
    there = {each.name: each.table for each in listed(connection) if each.low is not None}
    for name in names:
        if name not in there:
            raise UnknownPartition(name, sorted(there))
    for name in names:
        connection.execute(text(statements("partitions")["drop"]), {"parent": there[name], "named": name})


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
    return f"{end}, and later calls go to the default one, of which none can be archived: run `turnlog db partition`"


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


def _is_inside(connection: Connection, period: Period) -> bool:
    return any(
        each.table == period.table and each.low and each.high and each.low <= period.low and period.high <= each.high
        for each in listed(connection)
    )


def _held(connection: Connection, table: str, ids: tuple[UUID, UUID]) -> tuple[int, UUID | None, UUID | None]:
    values = {"parent": table, "low": ids[0], "high": ids[1]}
    events, lowest, highest = connection.execute(text(statements("partitions")["held"]), values).one()
    return events, lowest, highest


def _adoptable(connection: Connection, period: Period) -> Period | str:
    """The period of all that the default partition holds; why there is none when another partition lies among it."""
    _, lowest, highest = _held(connection, period.table, _ALL)
    assert lowest is not None, "it holds events of the period"
    assert highest is not None, "it holds events of the period"
    low, high = time_of(lowest), time_of(highest)
    whole = Period(
        table=period.table,
        low=min(period.low, _begin(low, "day")),
        high=max(period.high, _next(_begin(high, "day"), "day")),
    )
    among = [
        each.name
        for each in listed(connection)
        if each.table == period.table and each.low and each.high and each.low < whole.high and each.high > whole.low
    ]
    if among:
        return f"it holds events of {low:%Y-%m-%d} to {high:%Y-%m-%d}, and {among[0]} lies among them, so they stay"
    return whole


def _run(connection: Connection, statement: str, period: Period) -> None:
    low, high = period.ids
    values = {"parent": period.table, "named": period.name, "low": low, "high": high}
    connection.execute(text(statements("partitions")[statement]), values)


def _time(bound: str) -> datetime:
    """A bound as PostgreSQL writes it."""
    ends = {"MINVALUE": _ALL[0], "MAXVALUE": _ALL[1]}
    return time_of(ends.get(bound) or UUID(bound))
