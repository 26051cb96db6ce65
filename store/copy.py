"""A log copied into another database, event by event, as it is: sequences and digests stay.

Knows two databases and the columns between them; does not know what the events mean or who watches. Law: the log copied
to is at every moment a beginning of the one copied from, so that a copy which was killed goes on where it was, a copy
repeated adds what is new, and a position or a stored run means the same in both. What is there already is compared by
digest; each event that is copied gives its digest again or stops the copy. What the source's tally misses, the
copy's misses too.

What is settled (`store.settled`) when the copy begins is copied; the log may be written to meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, Literal

import psycopg
from psycopg import sql
from pydantic import ValidationError
from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    Engine,
    Insert,
    Select,
    Text,
    bindparam,
    func,
    insert,
    select,
    type_coerce,
)

from store.bulk import copy_in
from store.columns import Place, event_of, place_of, shown_key
from store.database import read, read_one, shown_url, write
from store.errors import DamagedArray, DamagedEvent, NotABeginning, UnknownCodec
from store.schema import CanonicalJson
from store.settled import Position, settled
from store.tally import carry

_BATCH = 1000
"""Most events of a transaction."""
_BYTES = 16_000_000
"""Bytes of arrays at which a transaction ends: one event more than that is the most that is held in memory."""
_FETCH = 100
"""Events that PostgreSQL hands over at once."""

# An intent comes after what became of it: no call of a log that is copied in part looks as if it were still running,
# nor as if its media were missing.
_ORDER = (
    ("rollout_opened", "rollouts"),
    ("media_stored", "objects"),
    ("media_shown", "media"),
    ("call_completed", "calls"),
    ("call_ended", "ends"),
    ("call_admitted", "intents"),
    ("rollout_scored", "outcomes"),
    ("row_trained", "trained"),
)
Row = Mapping[str, Any]
Progress = Callable[[Literal["comparing", "copying"], int, int], None]
"""Told what is done, and how many sequences of how many are behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy did."""

    events: Mapping[str, int]
    """Events that it added, by kind."""
    present: Mapping[str, int]
    """Events that were there before, by kind."""
    position: Position
    """Of the log copied from: what is up to there is in both."""


def copy(source: Engine, target: Engine, *, progress: Progress | None = None) -> Copied:
    """Add to the target what is settled in the source; both have the schema of this release.

    Raises NotABeginning when the target holds anything else, before or while it is copied to, and DamagedEvent for an
    event of the source that does not give its digest. Both leave what was copied before.
    """
    with read_one(source) as connection:
        until = settled(connection)
    high = asdict(until)
    behind = 0
    added: dict[str, int] = {}
    present: dict[str, int] = {}

    def tell(doing: Literal["comparing", "copying"], at: int) -> None:
        if progress is not None:
            progress(doing, behind + at, sum(high.values()))

    for kind, part in _ORDER:
        place = place_of(kind)
        at = 0
        present[kind] = added[kind] = 0
        for at in _compared(source, target, place):
            present[kind] += 1
            if present[kind] % _BATCH == 0:
                tell("comparing", at)
        for batch in _batches(source, place, after=at, until=high[part]):
            for row in batch:
                _verify(source, place, row)
            _add(source, target, place, batch, after=at)
            added[kind] += len(batch)
            at = batch[-1]["sequence"]
            tell("copying", at)
        behind += high[part]
        tell("copying", 0)
    carry(source, target)
    return Copied(events=added, present=present, position=until)


def _compared(source: Engine, target: Engine, place: Place) -> Iterator[int]:
    """The sequences that the target has, each compared. Raises NotABeginning."""
    table = place.table
    statement = select(table.c.sequence, table.c.digest, *(table.c[name] for name in place.key)).order_by(
        table.c.sequence
    )
    with read(target) as there:
        last = there.scalar(select(func.max(table.c.sequence)))
        if last is None:
            return
        ours = statement.where(table.c.sequence <= last)
        with read(source) as here, _stream(here, ours) as one_by_one, _stream(there, statement) as others:
            for one, other in zip_longest(one_by_one, others):
                if one is None or other is None or tuple(one[:2]) != tuple(other[:2]):
                    raise _differs(source, target, place, one, other)
                yield one[0]


def _differs(source: Engine, target: Engine, place: Place, one: Any, other: Any) -> NotABeginning:
    """Where two logs part."""

    def shown(row: Any) -> str:
        return "nothing" if row is None else f"{place.kind} {shown_key(row[2:])} with digest {bytes(row[1]).hex()[:16]}"

    sequence = min(row[0] for row in (one, other) if row is not None)
    one, other = (row if row is not None and row[0] == sequence else None for row in (one, other))
    why = f"at sequence {sequence} of {place.table.name} it has {shown(other)}, the other {shown(one)}"
    return _refusal(source, target, why)


def _refusal(source: Engine, target: Engine, why: str) -> NotABeginning:
    return NotABeginning(source=shown_url(source.url), target=shown_url(target.url), why=why)


def _stream(connection: Connection, statement: Select[Any]) -> closing[CursorResult[Any]]:
    """The rows as they come, never all of them in memory."""
    return closing(connection.execution_options(yield_per=_FETCH).execute(statement))


def _batches(source: Engine, place: Place, *, after: int, until: int) -> Iterator[list[Row]]:
    """The stored events between two sequences, JSON as its text, in pieces that one transaction may hold.

    Each piece is read in a snapshot of its own: what is settled does not change, and no snapshot grows old.
    """
    sequence = place.table.c.sequence
    while after < until:
        statement = select(*_raw(place)).where(sequence > after, sequence <= until).order_by(sequence).limit(_BATCH)
        batch: list[Row] = []
        size = 0
        with read(source) as connection, _stream(connection, statement) as rows:
            for mapping in rows.mappings():
                row: Row = {str(name): value for name, value in mapping.items()}
                batch.append(row)
                size += sum(len(row[name]) for name in ("token_ids", "logprobs") if name in row)
                if size >= _BYTES:
                    break
        if not batch:
            return
        after = batch[-1]["sequence"]
        yield batch


def _verify(source: Engine, place: Place, row: Row) -> None:
    """Derive the event's digest again. Raises DamagedEvent."""
    why = "does not give its digest"
    try:
        fields = {
            name: json.loads(value)
            if value is not None and isinstance(place.table.c[name].type, CanonicalJson)
            else value
            for name, value in row.items()
        }
        if event_of(place.event, fields).digest() == row["digest"]:
            return
    except (ValidationError, DamagedArray, UnknownCodec, ValueError) as error:
        why = f"cannot be read ({str(error).splitlines()[0]})"
    raise DamagedEvent(
        log=shown_url(source.url),
        kind=place.kind,
        event_id=shown_key([row[name] for name in place.key]),
        sequence=row["sequence"],
        why=why,
    )


def _add(source: Engine, target: Engine, place: Place, batch: Sequence[Row], *, after: int) -> None:
    """Insert a batch behind the last event that the target is known to have, in one transaction."""
    table = place.table
    with write(target) as connection:
        driver = connection.connection.driver_connection
        if isinstance(driver, psycopg.Connection):  # SQLite's write transaction keeps others out by itself
            words = sql.SQL("lock table {} in share row exclusive mode")
            driver.execute(words.format(sql.Identifier(table.name)))
        last = connection.scalar(select(func.coalesce(func.max(table.c.sequence), 0)))
        if last != after:
            why = f"{table.name} has sequence {last} by now, which this copy did not write"
            raise _refusal(source, target, why)
        if isinstance(driver, psycopg.Connection):
            # COPY takes sequences as given, where INSERT would override the identity.
            with driver.cursor() as cursor:
                copy_in(cursor, table, [*table.c.keys()], (tuple(row.values()) for row in batch))
            moved = func.setval(func.pg_get_serial_sequence(table.name, "sequence"), batch[-1]["sequence"])
            connection.execute(select(moved))
        else:
            connection.execute(_insert(place), [dict(row) for row in batch])


@cache
def _insert(place: Place) -> Insert:
    """Whole rows as they were read."""
    return insert(place.table).values(
        {column.name: bindparam(column.name, type_=column.type) for column in _raw(place)}
    )


@cache
def _raw(place: Place) -> tuple[ColumnElement[Any], ...]:
    """The table's columns, JSON as its text."""
    return tuple(
        type_coerce(column, Text()).label(column.name) if isinstance(column.type, CanonicalJson) else column
        for column in place.table.c
    )
