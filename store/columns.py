"""How an event becomes the columns of its table, and back.

Knows which kind of event is kept where, and under which id; does not know how rows are inserted or found. Law: what
`row_of` takes apart `event_of` puts together again, so that a stored event gives the digest that it was stored with.

>>> from store.events import CallCompleted, RolloutOpened
>>> call = CallCompleted.example()
>>> place = place_of(call.kind)
>>> place.table.name, place.key_of(call) == (call.call_id,)
('model_call', True)
>>> opened = RolloutOpened(rollout_id="r1", opened_at=5)
>>> event_of(RolloutOpened, {"sequence": 7, **row_of(opened)}) == opened
True
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import RowMapping, Table

from store import codec, hashing, schema
from store.events import (
    CallAdmitted,
    CallCompleted,
    CallEnded,
    Event,
    ItemTrace,
    MediaShown,
    MediaStored,
    RolloutOpened,
    RolloutScored,
    RowTrained,
)

_E = TypeVar("_E", bound=Event)
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one kind of event is kept, and the columns that are its id."""

    event: type[Event]
    table: Table
    key: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The kind's name, as events carry it."""
        return str(self.event.model_fields["kind"].default)

    def key_of(self, event: Event) -> Key:
        """An event's id."""
        return tuple(getattr(event, name) for name in self.key)


# Ends before completions, and objects, which several calls may store at once, before both: on PostgreSQL all take
# locks, and one order of taking them cannot deadlock.
PLACES = (
    Place(event=RolloutOpened, table=schema.rollout, key=("rollout_id",)),
    Place(event=MediaStored, table=schema.media_object, key=("sha256",)),
    Place(event=CallAdmitted, table=schema.call_intent, key=("call_id",)),
    Place(event=CallEnded, table=schema.call_end, key=("call_id",)),
    Place(event=MediaShown, table=schema.call_media, key=("call_id", "place")),
    Place(event=CallCompleted, table=schema.model_call, key=("call_id",)),
    Place(event=RolloutScored, table=schema.rollout_outcome, key=("outcome_id",)),
    Place(event=RowTrained, table=schema.trained_row, key=("run", "step", "row_id")),
)
"""In the order in which a batch of events is inserted."""


@cache
def place_of(kind: str) -> Place:
    """Where a kind of event is kept."""
    return next(place for place in PLACES if place.kind == kind)


def shown_key(key: Sequence[Any]) -> str:
    """An event's id, for messages."""
    return "/".join(str(part) for part in key)


def row_of(event: Event) -> dict[str, Any]:
    """The event's columns: its fields under their names, arrays packed, traces split into roles and digests."""
    row = stored_row(event)
    return row | {name: json.loads(row[name]) for name in _json_columns(type(event)) if row[name] is not None}


def stored_row(event: Event) -> dict[str, Any]:
    """The same with JSON columns as their text; that of a field is what the digest covers, and is made once."""
    texts = event.json_texts()
    row = {**event.__dict__, "digest": event.digest_with(texts)}
    if isinstance(event, CallCompleted | CallEnded):
        packed = codec.pack(event.token_ids)
        row["codec"], row["token_ids"] = packed.codec, packed.data
    if isinstance(event, CallCompleted):
        for name, items in (("request", event.request_items), ("answer", event.answer_items)):
            texts |= hashing.json_texts({f"{name}_roles": [item.role for item in items]}, [f"{name}_roles"])
            row[f"{name}_digests"] = b"".join([item.digest for item in items])
    for name in _json_columns(type(event)):
        if row.get(name, "") is not None:
            row[name] = texts[name]
    return row


@cache
def _json_columns(kind: type[Event]) -> tuple[str, ...]:
    (table,) = (place.table for place in PLACES if place.event is kind)
    return tuple(column.name for column in table.c if isinstance(column.type, schema.CanonicalJson))


def event_of(kind: Callable[..., _E], row: Mapping[str, Any] | RowMapping) -> _E:
    """The event again, from the columns of its table."""
    fields: dict[str, Any] = {
        str(name): value for name, value in row.items() if name not in ("kind", "sequence", "digest")
    }
    if "codec" in fields:
        fields["token_ids"] = codec.unpack(fields.pop("codec"), fields["token_ids"])
    if "request_roles" in fields:
        for name in ("request", "answer"):
            fields[f"{name}_items"] = traces(fields.pop(f"{name}_roles"), fields.pop(f"{name}_digests"))
    return kind(**fields)


def traces(roles: Sequence[str], digests: bytes) -> tuple[ItemTrace, ...]:
    """Item traces from their two columns: the roles, and the digests end to end."""
    return tuple(ItemTrace(role=role, digest=digests[32 * at : 32 * at + 32]) for at, role in enumerate(roles))
