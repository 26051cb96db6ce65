"""The events of a log, and of its archive, in batches of whole rollouts, up to a settled position.

Knows tables and archives; does not know what must hold between events. Law: what is read is settled, so that the same
position gives the same events however the log goes on; a batch is read in one short snapshot, and holds a bounded
number of tokens unless one rollout has more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import pyarrow as pa
from pydantic import ValidationError
from sqlalchemy import ColumnElement, Engine, Table, Text, func, literal, select, type_coerce, union_all

from replay.archive import columns_of
from replay.sealed import Sealed
from replay.sealing import rows_of
from store import schema
from store.columns import PLACES, Place, event_of, place_of, shown_key
from store.database import read, read_one
from store.errors import DamagedArray, UnknownCodec
from store.events import CallAdmitted, CallCompleted, CallEnded, Event, RolloutOpened, RolloutScored, RowTrained
from store.settled import Position, settled

_TOKENS = 4_000_000
_TOKENS_A_CALL = 500
"""About, of a call that only the archive has: what is known before it is read."""
_ROLLOUTS = 400
"""Of a batch, at most."""
PARTS = {
    "rollout": "rollouts",
    "call_intent": "intents",
    "model_call": "calls",
    "call_end": "ends",
    "rollout_outcome": "outcomes",
    "trained_row": "trained",
    "media_object": "objects",
    "call_media": "media",
}
"""The part of a position that counts a table's events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One event as it is stored."""

    place: Place
    sequence: int
    digest: bytes
    key: tuple[object, ...]
    event: Event | None
    """None when it cannot be read back."""
    fault: str | None = None
    sealed: bytes | None = None
    """The digest of the same event in the archive, where it is sealed too."""

    @property
    def name(self) -> str:
        """Kind and id."""
        return f"{self.place.kind} {shown_key(self.key)}"


@dataclass(slots=True, kw_only=True)
class RolloutEvents:
    """All events of one rollout."""

    rollout_id: str
    stored: list[Stored] = field(default_factory=list[Stored])

    @property
    def opening(self) -> RolloutOpened | None:
        """How it was opened."""
        return next((each.event for each in self.stored if isinstance(each.event, RolloutOpened)), None)

    @property
    def calls(self) -> list[tuple[int, CallCompleted]]:
        """Its completed calls that can be read, with their sequences, in their order."""
        found = [(each.sequence, each.event) for each in self.stored if isinstance(each.event, CallCompleted)]
        return sorted(found, key=lambda each: each[0])

    @property
    def intents(self) -> list[CallAdmitted]:
        """Its admitted calls."""
        return [each.event for each in self.stored if isinstance(each.event, CallAdmitted)]

    @property
    def ends(self) -> list[CallEnded]:
        """Its calls that ended without an answer."""
        return [each.event for each in self.stored if isinstance(each.event, CallEnded)]

    @property
    def outcome(self) -> RolloutScored | None:
        """Its latest outcome."""
        found = [(each.sequence, each.event) for each in self.stored if isinstance(each.event, RolloutScored)]
        return max(found, key=lambda each: each[0])[1] if found else None

    @property
    def trained(self) -> list[RowTrained]:
        """Rows of it that trained."""
        return [each.event for each in self.stored if isinstance(each.event, RowTrained)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A rollout that has events."""

    rollout_id: str
    tokens: int
    """That its completed calls add."""


def position_of(database: Engine, asked: Position | None, sealed: Sealed | None) -> Position:
    """The position to audit at: what was asked for, else all that is settled or was when it was sealed.

    Raises PositionAhead.
    """
    from replay.errors import PositionAhead

    with read_one(database) as connection:
        found = [settled(connection)]
    if sealed is not None:  # the newest events may have left the log
        found += sealed.archive.positions()
    now = Position(**{part: max(getattr(each, part) for each in found) for part in PARTS.values()})
    if asked is None:
        return now
    if any(getattr(asked, part) > getattr(now, part) for part in PARTS.values()):
        raise PositionAhead(asked=str(asked), reached=str(now))
    return asked


def rollouts(database: Engine, position: Position, sealed: Sealed | None) -> list[Listed]:
    """Every rollout with an event up to the position: those of the archive in the order of its files, then by id."""
    weight = schema.model_call.c.prompt_len - schema.model_call.c.prev_len + schema.model_call.c.sampled_len
    parts = [
        select(
            place.table.c.rollout_id, (weight if place.table is schema.model_call else literal(0)).label("tokens")
        ).where(place.table.c.sequence <= _until(place, position))
        for place in PLACES
        if "rollout_id" in place.table.c
    ]
    every = union_all(*parts).subquery()
    with read(database) as connection:
        found = connection.execute(select(every.c.rollout_id, func.sum(every.c.tokens)).group_by(every.c.rollout_id))
        tokens = {rollout_id: int(total) for rollout_id, total in found}
    order: dict[str, int] = {}
    if sealed is not None:
        for place, (rollout_id, (calls, *_)) in enumerate(sealed.extents(position.calls).items()):
            order[rollout_id] = place
            tokens[rollout_id] = tokens.get(rollout_id) or _TOKENS_A_CALL * calls
    ids = sorted(tokens, key=lambda each: (order.get(each, len(order)), each))
    return [Listed(rollout_id=rollout_id, tokens=tokens[rollout_id]) for rollout_id in ids]


def batches(listed: Sequence[Listed]) -> Iterator[list[Listed]]:
    """The rollouts in batches of a bounded number of tokens."""
    batch: list[Listed] = []
    tokens = 0
    for each in listed:
        if batch and (tokens + each.tokens > _TOKENS or len(batch) == _ROLLOUTS):
            yield batch
            batch, tokens = [], 0
        batch.append(each)
        tokens += each.tokens
    if batch:
        yield batch


def events(database: Engine, position: Position, sealed: Sealed | None, batch: Sequence[Listed]) -> list[RolloutEvents]:
    """All events of some rollouts, those of log and archive once."""
    ids = [each.rollout_id for each in batch]
    found = {rollout_id: RolloutEvents(rollout_id=rollout_id) for rollout_id in ids}
    with read(database) as connection:
        for place in PLACES:
            if "rollout_id" not in place.table.c:
                continue
            table, until = place.table, _until(place, position)
            statement = select(*_columns(table)).where(table.c.rollout_id.in_(ids), table.c.sequence <= until)
            in_archive = _sealed(sealed, place, ids, until)
            for row in connection.execute(statement.order_by(table.c.sequence)).mappings():
                twin = in_archive.pop(row["sequence"], None)
                found[row["rollout_id"]].stored.append(_stored(place, row, None if twin is None else twin["digest"]))
            for other in in_archive.values():
                found[other["rollout_id"]].stored.append(_stored(place, other, other["digest"]))
    return [*found.values()]


def objects(
    database: Engine, position: Position, sealed: Sealed | None, addresses: Collection[bytes]
) -> dict[bytes, Stored]:
    """The events of media objects by address, as far as log or archive has them."""
    place = place_of("media_stored")
    table, until = place.table, _until(place, position)
    found: dict[bytes, Stored] = {}
    if not addresses:
        return found
    if sealed is not None:
        for file in sealed.archive.files[table.name]:
            for other in _rows(table, sealed.archive.lines(file, columns_of(table))):
                if other["sha256"] in addresses and other["sequence"] <= until:
                    found[other["sha256"]] = _stored(place, other, None)
    with read(database) as connection:
        statement = select(*_columns(table)).where(table.c.sha256.in_(addresses), table.c.sequence <= until)
        for row in connection.execute(statement).mappings():
            twin = found.get(bytes(row["sha256"]))
            found[bytes(row["sha256"])] = _stored(place, row, None if twin is None else twin.digest)
    return found


def _rows(table: Table, lines: pa.Table) -> Iterator[dict[str, Any]]:
    """Sealed lines as a table's rows."""
    yield from cast("Iterator[dict[str, Any]]", rows_of(table, lines))


def _columns(table: Table) -> list[ColumnElement[Any]]:
    """A table's columns, JSON as its text: what is none must not end the reading."""
    return [type_coerce(each, Text).label(each.name) if _is_json(each) else each for each in table.c]


def _sealed(sealed: Sealed | None, place: Place, ids: Sequence[str], until: int) -> dict[int, dict[str, Any]]:
    """The events of these rollouts that the archive has of a table, by sequence."""
    if sealed is None:
        return {}
    columns = columns_of(place.table)
    if place.table is schema.model_call:
        lines = sealed.calls(ids, columns, until)
    else:
        lines = sealed.table(place.table.name, columns, until, ids)
    return {row["sequence"]: row for row in _rows(place.table, lines)}


def _until(place: Place, position: Position) -> int:
    return int(getattr(position, PARTS[place.table.name]))


@cache
def _json_names(table: Table) -> tuple[str, ...]:
    return tuple(column.name for column in table.c if _is_json(column))


def _is_json(column: ColumnElement[Any]) -> bool:
    return isinstance(column.type, schema.CanonicalJson)


def _stored(place: Place, row: Mapping[Any, Any], sealed: bytes | None) -> Stored:
    event: Event | None = None
    fault: str | None = None
    try:
        values = {**row}
        for name in _json_names(place.table):
            if isinstance(value := values[name], str):
                values[name] = json.loads(value)
        event = event_of(place.event, values)
    except (ValidationError, ValueError, TypeError, DamagedArray, UnknownCodec) as error:
        fault = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return Stored(
        place=place,
        sequence=row["sequence"],
        digest=bytes(row["digest"]),
        key=tuple(row[name] for name in place.key),
        event=event,
        fault=fault,
        sealed=sealed,
    )
