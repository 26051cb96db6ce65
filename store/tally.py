"""What was appended, by the tally that the database keeps itself, beside what is there: a deleted event is missed.

Knows runs of sequences; does not know events, or why one is gone. Law: the tally is durable with the events that it
names or not at all (triggers write it, see revision 0005), so in one snapshot both name the same sequences, at any
time and however many transactions are open; whatever differs was done by hand.

>>> without([(1, 9)], [(3, 4), (9, 12)])
[(1, 2), (5, 8)]
>>> within([(1, 9), (20, 22)], [(3, 4), (9, 20)])
[(3, 4), (9, 9), (20, 20)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, Table, func, insert, select, text

from store import schema
from store.database import read, write
from store.statements import statements

Run = tuple[int, int]
"""Sequences without a gap: the first and the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A table and its tally, each as runs in order."""

    named: Sequence[Run]
    """Given to events."""
    missing: Sequence[Run]
    """Given to events that the table does not have."""
    dropped: Sequence[Run]
    """Of these, what left with partitions."""
    unnamed: Sequence[Run]
    """Of events that the table has, and the tally does not know."""
    twice: Sequence[Run]
    """Given to more than one event, one after the other."""


def compared(connection: Connection, table: Table) -> Compared:
    """The table beside its tally. In a snapshot, such as that of `store.database.read`."""
    there = present(connection, table)
    named = _named(connection, table, dropped=False)
    missing = without(named, there)
    return Compared(
        named=named,
        missing=missing,
        dropped=within(missing, _named(connection, table, dropped=True)),
        unnamed=without(there, named),
        twice=_runs(connection, "twice", table_name=table.name),
    )


def present(connection: Connection, table: Table) -> list[Run]:
    """The sequences that the table has."""
    sequence = table.c.sequence
    run = (sequence - func.row_number().over(order_by=sequence)).label("run")
    line = select(sequence, run).subquery()
    low, high = func.min(line.c.sequence), func.max(line.c.sequence)
    return [(row[0], row[1]) for row in connection.execute(select(low, high).group_by(line.c.run).order_by(low))]


def carry(source: Engine, target: Engine) -> None:
    """Let the tally of a copy name what its source lost too: copying a log must not hide that an event was deleted."""
    for table in schema.metadata.sorted_tables:
        with read(source) as connection:
            ours = compared(connection, table)
        if not ours.missing:
            continue
        with write(target) as connection:
            lines: list[dict[str, object]] = []
            for dropped, runs in ((False, ours.missing), (True, ours.dropped)):
                for low, high in without(runs, _named(connection, table, dropped=dropped)):
                    lines.append({"table_name": table.name, "low": low, "high": high, "dropped": dropped})
            if lines:
                connection.execute(insert(schema.tally), lines)


def without(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """What of the runs none of the others has; each in order."""
    found: list[Run] = []
    at = 0
    for low, high in runs:
        while at < len(others) and others[at][1] < low:
            at += 1
        here = at
        while here < len(others) and others[here][0] <= high:
            if low < others[here][0]:
                found.append((low, others[here][0] - 1))
            low = max(low, others[here][1] + 1)
            here += 1
        if low <= high:
            found.append((low, high))
    return found


def within(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """What of the runs one of the others has too; each in order."""
    return without(runs, without(runs, others))


def size(runs: Sequence[Run]) -> int:
    """How many sequences there are.

    >>> size([(1, 1), (4, 6)])
    4
    """
    return sum(high - low + 1 for low, high in runs)


def _named(connection: Connection, table: Table, *, dropped: bool) -> list[Run]:
    return _runs(connection, "named", table_name=table.name, dropped=dropped)


def _runs(connection: Connection, statement: str, **values: object) -> list[Run]:
    found = connection.execute(text(statements("tally")[statement]), values)
    return [(row.low, row.high) for row in found]
