"""One call for the eye: what the log says of it, what comes before and after it, and what changed where it is a root.

Knows the tables by a call's id and the boundary that `turnlog.boundary` compares; does not know HTML. Law: what is read
is the call, its own chain and, for a root, the chain that it is compared with, never the whole rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import JsonValue
from sqlalchemy import Connection, func, select

from store import schema
from store.columns import event_of
from store.events import CallAdmitted, CallCompleted, CallEnded, logprob_array
from store.lineage import chain_media
from turnlog.boundary import Boundary, Detokenizer, boundary
from turnlog.ui.errors import NoPicture, UnknownCall

COMPARED = 400_000
"""Tokens of two contexts beyond which a page does not compare them; `turnlog show --boundary` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another call that a page leads to."""

    call_id: UUID
    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """An image, a video or a sound that is new in this call."""

    modality: str
    sha256: str
    media_type: str
    size: int
    start: int
    length: int
    geometry: JsonValue

    @property
    def pictured(self) -> bool:
        """Whether it may be shown as a picture."""
        return self.modality != "audio" and isinstance(self.geometry, dict) and "height" in self.geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """What a picture of an object needs to know of one of its occurrences."""

    sha256: bytes
    tokens: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCall:
    """All that its page shows; a call without an answer has only its intent and its end."""

    call_id: UUID
    rollout_id: str
    completed: CallCompleted | None
    intent: CallAdmitted | None
    end: CallEnded | None
    sequence: int | None
    number: int | None
    parent: Neighbour | None
    children: Sequence[Neighbour]
    before: Neighbour | None
    """The completed call of the rollout in front of it in the log."""
    after: Neighbour | None
    nearest: Neighbour | None
    """For a root: the earlier call that it is compared with."""
    media: Sequence[Media]

    @property
    def state(self) -> str:
        """What became of it."""
        if self.completed is not None:
            return "completed"
        return "pending" if self.end is None else self.end.state

    @property
    def mean_logprob(self) -> float | None:
        """Of its sampled tokens; None without any."""
        if self.completed is None or not self.completed.sampled_len:
            return None
        return float(logprob_array(self.completed.logprobs).mean())


def load(connection: Connection, call_id: UUID) -> OneCall:
    """Read one call. Raises UnknownCall."""
    completed, sequence = _one(connection, CallCompleted, schema.model_call, call_id)
    intent, _ = _one(connection, CallAdmitted, schema.call_intent, call_id)
    end, _ = _one(connection, CallEnded, schema.call_end, call_id)
    known = completed or intent or end
    if known is None:
        raise UnknownCall(str(call_id))
    parent_id = completed.parent_id if completed else intent.parent_id if intent else None
    named = (completed.evidence if completed else {}).get("nearest_call")
    numbers = _numbers(connection, known.rollout_id, sequence)
    call = schema.model_call.c
    return OneCall(
        call_id=call_id,
        rollout_id=known.rollout_id,
        completed=completed,
        intent=intent,
        end=end,
        sequence=sequence,
        number=None if sequence is None else numbers(sequence),
        parent=_by_id(connection, parent_id, numbers),
        children=_neighbours(
            connection, call.parent_id == call_id, call.rollout_id == known.rollout_id, numbers=numbers
        ),
        before=_beside(connection, known.rollout_id, sequence, numbers, later=False),
        after=_beside(connection, known.rollout_id, sequence, numbers, later=True),
        nearest=_by_id(connection, _uuid(named), numbers),
        media=_media(connection, call_id),
    )


def images_before(connection: Connection, call: OneCall) -> list[str]:
    """Addresses of the images in the context that a root is compared with; nothing where both have the same."""
    if call.nearest is None:
        return []
    shown = chain_media(connection, call.nearest.call_id)
    there = [each.sha256.hex() for each in shown if each.modality != "audio" and "height" in each.geometry]
    return [] if there == [each.sha256 for each in call.media if each.pictured] else there


def occurrence(connection: Connection, sha256: bytes) -> Occurrence:
    """One occurrence of an object. Raises NoPicture."""
    shown = schema.call_media.c
    asked = select(shown.tokens, shown.geometry).where(shown.sha256 == sha256).limit(1)
    row = connection.execute(asked).one_or_none()
    height = None if row is None else row.geometry.get("height")
    if row is None or not isinstance(height, int):
        raise NoPicture(sha256.hex(), "no call of this log shows an image with this content address")
    return Occurrence(sha256=sha256, tokens=row.tokens, height=height)


def compared(connection: Connection, call: CallCompleted, tokenizer: Detokenizer | None) -> Boundary | None:
    """What changed between the nearest earlier context and this root; None when there is nothing to compare."""
    nearest = _uuid(call.evidence.get("nearest_call"))
    if call.parent_id is not None or nearest is None:
        return None
    other, _ = _one(connection, CallCompleted, schema.model_call, nearest)
    if other is None or other.chain_len + call.chain_len > COMPARED:
        return None
    table = schema.model_call
    chain = select(table).where(table.c.root_id == other.root_id, table.c.depth <= other.depth)
    events = [event_of(CallCompleted, row) for row in connection.execute(chain).mappings()]
    return boundary({each.call_id: each for each in [*events, call]}, call, tokenizer)


def _one(connection: Connection, kind: Callable[..., Any], table: Any, call_id: UUID) -> tuple[Any, int | None]:
    row = connection.execute(select(table).where(table.c.call_id == call_id)).mappings().one_or_none()
    return (None, None) if row is None else (event_of(kind, row), row["sequence"])


def _uuid(named: JsonValue) -> UUID | None:
    try:
        return UUID(named) if isinstance(named, str) else None
    except ValueError:
        return None


def _numbers(connection: Connection, rollout_id: str, sequence: int | None) -> Callable[[int], int]:
    """From a sequence to the number of that completed call in its rollout: counted once, then from there."""
    call = schema.model_call.c
    mine = select(func.count()).where(call.rollout_id == rollout_id)
    base = 0 if sequence is None else connection.execute(mine.where(call.sequence <= sequence)).scalar_one()

    def number(other: int) -> int:
        if sequence is None:
            return int(connection.execute(mine.where(call.sequence <= other)).scalar_one())
        if other >= sequence:
            between = mine.where(call.sequence > sequence, call.sequence <= other)
            return int(base + connection.execute(between).scalar_one())
        return int(base - connection.execute(mine.where(call.sequence > other, call.sequence <= sequence)).scalar_one())

    return number


def _neighbours(connection: Connection, *conditions: Any, numbers: Callable[[int], int]) -> list[Neighbour]:
    call = schema.model_call.c
    asked = select(call.call_id, call.sequence, call.reason).where(*conditions).order_by(call.sequence).limit(100)
    return [
        Neighbour(call_id=row.call_id, number=numbers(row.sequence), reason=row.reason)
        for row in connection.execute(asked).all()
    ]


def _by_id(connection: Connection, call_id: UUID | None, numbers: Callable[[int], int]) -> Neighbour | None:
    if call_id is None:
        return None
    found = _neighbours(connection, schema.model_call.c.call_id == call_id, numbers=numbers)
    return found[0] if found else None


def _beside(
    connection: Connection, rollout_id: str, sequence: int | None, numbers: Callable[[int], int], *, later: bool
) -> Neighbour | None:
    if sequence is None:
        return None
    call = schema.model_call.c
    mine = select(call.call_id, call.sequence, call.reason).where(call.rollout_id == rollout_id)
    beyond = call.sequence > sequence if later else call.sequence < sequence
    order = call.sequence.asc() if later else call.sequence.desc()
    row = connection.execute(mine.where(beyond).order_by(order).limit(1)).one_or_none()
    return None if row is None else Neighbour(call_id=row.call_id, number=numbers(row.sequence), reason=row.reason)


def _media(connection: Connection, call_id: UUID) -> list[Media]:
    shown, kept = schema.call_media.c, schema.media_object.c
    asked = (
        select(shown.modality, shown.sha256, kept.media_type, kept.size, shown.start, shown.length, shown.geometry)
        .join(schema.media_object, kept.sha256 == shown.sha256)
        .where(shown.call_id == call_id)
        .order_by(shown.place)
    )
    return [Media(**{**row, "sha256": row["sha256"].hex()}) for row in connection.execute(asked).mappings()]
