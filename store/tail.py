"""The events of a log as they settle, each once, from any position on.

Knows in which order events of eight tables are told; does not know who listens. Law: what is told is settled, so that
no event that commits late is ever skipped. Events of one kind come in the order of their sequences, and none comes
before one that it names: a call after its rollout's opening, its intent and its parent, media after their call, a
trained row after its tip, and an outcome after the calls of its rollout that were completed by then. Apart from that,
earlier times come first.

    page = tail.read(database, after=Position())
    for told in page.events:
        ...                                         # and keep told.position: what follows it comes next
    page = tail.read(database, after=page.position)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from pydantic import JsonValue
from pydantic_core import to_jsonable_python
from sqlalchemy import ColumnElement, Connection, Engine, Select, func, select

from store import schema
from store.columns import event_of, place_of
from store.database import read_one
from store.narrow import WIDE
from store.settled import Position, settled

Kind = Literal[
    "rollout_opened", "call_admitted", "call_completed", "call_ended", "media_stored", "media_shown", "rollout_scored",
    "row_trained",
]  # fmt: skip

_CLOCKS = 60_000_000
"""Microseconds by which the clocks of two machines may differ: so much earlier an outcome may say that it came."""
_SAID = "said_at"
_SECRET = "secret_hash"
"""The one field of an event that is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One event as JSON, and the position after it."""

    kind: Kind
    sequence: int
    time: int
    """When it happened by its writer's clock, in microseconds."""
    fields: Mapping[str, JsonValue]
    """The event's own JSON, without its wide columns unless they were asked for."""
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some events, and where the next page begins."""

    events: tuple[Told, ...]
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One kind of event: its part of a position, and what it names of others, as statements that give a sequence."""

    part: str
    time: str
    needs: Mapping[str, Any]
    said_by: Any = None
    """A statement that gives its time, for an event that has none of its own."""


def _sources() -> Mapping[Kind, _Source]:
    """In the order in which events of one time are told."""
    opening, call = schema.rollout.alias(), schema.model_call.alias()
    intent = schema.call_intent.alias()
    admitted, completed, ended = schema.call_intent, schema.model_call, schema.call_end
    scored, trained = schema.rollout_outcome, schema.trained_row
    stored, shown, occurrence = schema.media_object, schema.call_media, schema.call_media.alias()

    def opened(rollout_id: Any) -> Any:
        return select(opening.c.sequence).where(opening.c.rollout_id == rollout_id).scalar_subquery()

    def intended(call_id: Any) -> Any:
        return select(intent.c.sequence).where(intent.c.call_id == call_id).scalar_subquery()

    def called(call_id: Any) -> Any:
        return select(call.c.sequence).where(call.c.call_id == call_id).scalar_subquery()

    first_shown = select(func.min(occurrence.c.at)).where(occurrence.c.sha256 == stored.c.sha256).scalar_subquery()
    last_call = (
        select(func.max(call.c.sequence))
        .where(call.c.rollout_id == scored.c.rollout_id, call.c.completed_at <= scored.c.at + _CLOCKS)
        .scalar_subquery()
    )
    return {
        "rollout_opened": _Source(part="rollouts", time="opened_at", needs={}),
        "call_admitted": _Source(
            part="intents",
            time="at",
            needs={"rollouts": opened(admitted.c.rollout_id), "calls": called(admitted.c.parent_id)},
        ),
        "call_completed": _Source(
            part="calls",
            time="completed_at",
            needs={"rollouts": opened(completed.c.rollout_id), "intents": intended(completed.c.call_id)},
        ),
        "call_ended": _Source(
            part="ends",
            time="at",
            needs={"rollouts": opened(ended.c.rollout_id), "intents": intended(ended.c.call_id)},
        ),
        "media_stored": _Source(part="objects", time="at", needs={}, said_by=first_shown),
        "media_shown": _Source(
            part="media",
            time="at",
            needs={
                "calls": called(shown.c.call_id),
                "objects": select(stored.c.sequence).where(stored.c.sha256 == shown.c.sha256).scalar_subquery(),
            },
        ),
        "rollout_scored": _Source(
            part="outcomes", time="at", needs={"rollouts": opened(scored.c.rollout_id), "calls": last_call}
        ),
        "row_trained": _Source(part="trained", time="at", needs={"calls": called(trained.c.tip_call_id)}),
    }


_SOURCES = _sources()
KINDS: tuple[Kind, ...] = tuple(_SOURCES)
_PARTS: Mapping[str, Kind] = {source.part: kind for kind, source in _SOURCES.items()}


def now(database: Engine) -> Position:
    """The position after all that is settled."""
    with read_one(database) as connection:
        return settled(connection)


def read(
    database: Engine,
    *,
    after: Position,
    limit: int = 1000,
    rollouts: Collection[str] = (),
    kinds: Collection[Kind] = KINDS,
    tokens: bool = False,
) -> Page:
    """The next settled events after a position, at most `limit`; an empty page says that there are none yet.

    Args:
        database: the log.
        after: where the page before ended, or the position of the last event that was dealt with.
        limit: most events of the page.
        rollouts: only events of these; empty for all. A position then has passed the events of others.
        kinds: only these. A position stays where it is for the others.
        tokens: with the wide columns; the fields are then those of the whole event, which reads back by `AnyEvent`.
    """
    with read_one(database) as connection:
        known = {part: max(high, getattr(after, part)) for part, high in asdict(settled(connection)).items()}
        until = dict(known)
        ahead: dict[Kind, list[_Waiting]] = {}
        for kind in KINDS:
            if kind not in kinds:
                continue
            statement = _statement(kind, tokens=tokens)
            part = _SOURCES[kind].part
            statement = statement.where(_table(kind).c.sequence.between(getattr(after, part) + 1, until[part]))
            if rollouts:
                statement = statement.where(_of_rollouts(kind, sorted(rollouts)))
            ahead[kind] = _fetch(connection, statement.limit(limit), kind, tokens=tokens)
            if len(ahead[kind]) == limit:
                until[part] = ahead[kind][-1].sequence
    orderable: Mapping[Kind, Sequence[_Waiting]] = _orderable(ahead, until)
    if not any(orderable.values()) and not _unsettled(ahead, known):
        # They wait for one another: what was not logged in order, such as calls before their intents, is told as well.
        orderable = {kind: events[:1] for kind, events in ahead.items()}
    return _merged(orderable, until, after, limit)


def _unsettled(ahead: Mapping[Kind, Sequence[_Waiting]], known: Mapping[str, int]) -> bool:
    """Whether the next event of some kind needs one that is not settled yet: once it is, the order is clear."""
    heads = [events[0] for events in ahead.values() if events]
    return any(known[part] < need for head in heads for part, need in head.needs.items())


def _table(kind: Kind) -> Any:
    return place_of(kind).table


def _of_rollouts(kind: Kind, rollouts: Sequence[str]) -> ColumnElement[bool]:
    """Whether an event is of these rollouts; an object is of all that show it."""
    if kind != "media_stored":
        return cast("ColumnElement[bool]", _table(kind).c.rollout_id.in_(rollouts))
    shown = select(schema.call_media.c.sha256).where(schema.call_media.c.rollout_id.in_(rollouts))
    return schema.media_object.c.sha256.in_(shown)


def _statement(kind: Kind, *, tokens: bool) -> Select[*tuple[Any, ...]]:
    """The columns to tell, and of each event it names the sequence, as `needs_...`."""
    table, event = _table(kind), place_of(kind).event
    narrow = ["sequence", *(name for name in event.model_fields if name in table.c and name not in WIDE)]
    columns: list[ColumnElement[Any]] = [table.c[name] for name in (table.c.keys() if tokens else narrow)]
    if (said_by := _SOURCES[kind].said_by) is not None:
        columns.append(said_by.label(_SAID))
    needs = [statement.label(f"needs_{part}") for part, statement in _SOURCES[kind].needs.items()]
    return select(*columns, *needs).order_by(table.c.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """An event that is read and not yet told."""

    kind: Kind
    sequence: int
    time: int
    fields: Mapping[str, JsonValue]
    needs: Mapping[str, int]


def _fetch(connection: Connection, statement: Select[*tuple[Any, ...]], kind: Kind, *, tokens: bool) -> list[_Waiting]:
    source, event = _SOURCES[kind], place_of(kind).event
    found: list[_Waiting] = []
    for mapping in connection.execute(statement).mappings():
        row = dict(mapping)
        needs = {part: row.pop(f"needs_{part}") or 0 for part in source.needs}
        time = row[source.time] if source.said_by is None else row.pop(_SAID) or 0
        if tokens:
            fields = event_of(event, row).model_dump(mode="json", exclude={_SECRET})
        else:
            told = {name: value for name, value in row.items() if name not in ("sequence", _SECRET)}
            fields = {"kind": kind, **to_jsonable_python(told, bytes_mode="hex")}
        found.append(_Waiting(kind=kind, sequence=row["sequence"], time=time, fields=fields, needs=needs))
    return found


def _merged(ahead: Mapping[Kind, Sequence[_Waiting]], until: dict[str, int], after: Position, limit: int) -> Page:
    """One order of what was read: at each step the earliest event of those whose needs are told."""
    done = asdict(after)
    untold = {part for part, kind in _PARTS.items() if kind not in ahead}
    told: list[Told] = []
    next_of = dict.fromkeys(ahead, 0)
    while len(told) < limit:
        heads = [events[next_of[kind]] for kind, events in ahead.items() if next_of[kind] < len(events)]
        if not heads:
            break
        ready = [
            head for head in heads if all(part in untold or done[part] >= need for part, need in head.needs.items())
        ]
        first = min(ready or heads, key=lambda head: head.time)  # none is ready where events were not logged in order
        next_of[first.kind] += 1
        done[_SOURCES[first.kind].part] = first.sequence
        told.append(
            Told(
                kind=first.kind,
                sequence=first.sequence,
                time=first.time,
                fields=first.fields,
                position=Position(**done),
            )
        )
    for kind, events in ahead.items():
        part = _SOURCES[kind].part
        if next_of[kind] == len(events):  # nothing of this kind is left up to there
            done[part] = max(done[part], until[part])
    return Page(events=tuple(told), position=Position(**done))


def _orderable(ahead: Mapping[Kind, Sequence[_Waiting]], until: dict[str, int]) -> dict[Kind, Sequence[_Waiting]]:
    """What was read, each kind up to the first event that needs one which is not settled, or beyond what was read."""
    found = dict(ahead)
    shortened = True
    while shortened:
        shortened = False
        for kind, events in found.items():
            for place, each in enumerate(events):
                if any(until[part] < need for part, need in each.needs.items()):
                    found[kind] = events[:place]
                    until[_SOURCES[kind].part] = each.sequence - 1
                    shortened = True
                    break
    return found
