"""Append and read in order: the only module that writes events.

Knows tables and what must hold before an event may be in one; does not know which columns it has there, databases'
URLs, threads or the model server. Law: an event is appended once, whole and checked: the same event again changes
nothing, other content under its id is refused, and a call extends its parent token for token.

Nothing here commits. The caller's transaction (`store.database.write`) makes a batch durable or, when an append raises,
leaves nothing of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar, cast
from uuid import UUID

from sqlalchemy import Connection, Select, Table, and_, exists, func, select, tuple_

from store import hashing, schema
from store.bulk import copied_in
from store.columns import PLACES, Key, Place, event_of, place_of, shown_key
from store.errors import BrokenLink, EventConflict, LogUnavailable
from store.events import (
    CallAdmitted,
    CallCompleted,
    CallEnded,
    Event,
    MediaShown,
    MediaStored,
    RolloutOpened,
    RolloutScored,
)
from store.insert import insert_into

_E = TypeVar("_E", RolloutOpened, CallAdmitted, CallCompleted, CallEnded, MediaShown, RolloutScored)
_BATCH = 500
"""Events checked by one query: a longer iterable is appended in pieces, and never held whole."""
_COPIED, COPIED_FROM = (RolloutOpened, CallAdmitted, CallCompleted, CallEnded), 4
"""Events that are new but for a lost acknowledgement, and from how many on COPY saves more than it asks."""
_OPEN = {
    "postgresql": "select rollout_id from rollout where rollout_id = any(%s)",
    "sqlite": "select rollout_id from rollout where rollout_id in (select value from json_each(?))",
}
"""Which of these rollouts are open; by the driver, for SQLAlchemy takes 1.3 ms to write a list of 16 into a query."""
_CALL_NAMED = re.compile(r"\bcall ([0-9a-f-]{36})\b")
"""How a trigger of PostgreSQL names the call that it refuses."""
_NOTHING: Mapping[UUID, Tip] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """What a child must fit of its parent."""

    rollout_id: str
    root_id: UUID
    depth: int
    chain_len: int
    chain_hash: bytes

    @classmethod
    def of(cls, call: CallCompleted) -> Tip:
        """What a child of this call must fit."""
        return cls(
            rollout_id=call.rollout_id,
            root_id=call.root_id,
            depth=call.depth,
            chain_len=call.chain_len,
            chain_hash=call.chain_hash,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was done for events before their transaction; they are told apart by their identity."""

    rows: Mapping[int, tuple[Any, ...]]
    """Of each event, as its statement takes it."""
    checked: frozenset[int]
    """Calls whose hashes and parent links were found to be right."""


UNPREPARED = Prepared(rows=MappingProxyType({}), checked=frozenset())


def prepare(events: Iterable[Event], database: str, *, known: Mapping[UUID, Tip] = _NOTHING) -> Prepared:
    """Make the rows of events that are about to be appended, and check them as far as that needs no log.

    This is most of what an append takes, and SQLite lets one process write at a time. Raises BrokenLink.
    """
    rows: dict[int, tuple[Any, ...]] = {}
    checked: set[int] = set()
    tips: dict[UUID, Tip | CallCompleted] = {}
    for event in events:
        rows[id(event)] = insert_into(place_of(event.kind).table, database).parameters(event)
        if isinstance(event, CallCompleted):
            parent = None if event.parent_id is None else tips.get(event.parent_id) or known.get(event.parent_id)
            if parent is not None or event.parent_id is None:
                _check(event, parent)
                tips[event.call_id] = event
                checked.add(id(event))
    return Prepared(rows=rows, checked=frozenset(checked))


def append(
    connection: Connection,
    events: Iterable[Event],
    *,
    known: Mapping[UUID, Tip] = _NOTHING,
    prepared: Prepared = UNPREPARED,
) -> None:
    """Append events in their order, parents before children; what is in the log already with the same content stays.

    A `RolloutOpened` that says nothing but the id (`implicit`) is satisfied by any opening of that rollout. `known` are
    tips of committed calls, which the log then need not be asked for: an event that is committed stays as it is.
    `prepared` is of these very events.

    Raises EventConflict for an id with other content, or a call that has ended otherwise, and BrokenLink for a call
    that does not extend its parent. The transaction must then be rolled back.
    """
    rest = iter(events)
    while batch := list(islice(rest, _BATCH)):
        kinds: dict[type[Event], list[Event]] = {}
        for event in batch:
            kinds.setdefault(type(event), []).append(event)
        _check_calls(connection, cast("list[CallCompleted]", kinds.get(CallCompleted, [])), known, prepared)
        for place in PLACES:
            if not (mine := kinds.get(place.event)):
                continue
            if place.event is MediaStored:
                mine.sort(key=place.key_of)  # others may be storing some of them in another order
            _insert(connection, place, mine, prepared)


def rollout(connection: Connection, rollout_id: str) -> RolloutOpened | None:
    """How the rollout was opened; None when the log does not know it."""
    found = _read(connection, RolloutOpened, select(schema.rollout).where(schema.rollout.c.rollout_id == rollout_id))
    return found[0] if found else None


def rollouts(connection: Connection) -> list[RolloutOpened]:
    """Every rollout, in order of sequence."""
    return _read(connection, RolloutOpened, select(schema.rollout).order_by(schema.rollout.c.sequence))


def calls(connection: Connection, rollout_id: str) -> list[CallCompleted]:
    """The rollout's completed calls, in order of sequence."""
    return _read(connection, CallCompleted, _of_rollout(schema.model_call, rollout_id))


def intents(connection: Connection, rollout_id: str) -> list[CallAdmitted]:
    """The rollout's admitted calls, in order of sequence."""
    return _read(connection, CallAdmitted, _of_rollout(schema.call_intent, rollout_id))


def ends(connection: Connection, rollout_id: str) -> list[CallEnded]:
    """The rollout's calls that ended without an answer, in order of sequence."""
    return _read(connection, CallEnded, _of_rollout(schema.call_end, rollout_id))


def media(connection: Connection, rollout_id: str) -> list[MediaShown]:
    """The media that the rollout's calls were shown, in order of sequence."""
    return _read(connection, MediaShown, _of_rollout(schema.call_media, rollout_id))


def outcomes(connection: Connection, rollout_id: str) -> list[RolloutScored]:
    """The rollout's outcomes, in order of sequence: the last one counts."""
    return _read(connection, RolloutScored, _of_rollout(schema.rollout_outcome, rollout_id))


def newest_call_id(connection: Connection) -> UUID | None:
    """The call id with the latest time, of calls admitted, completed or ended; None for a log without calls."""
    found = (
        connection.scalar(select(table.c.call_id).order_by(table.c.call_id.desc()).limit(1))
        for table in (schema.call_intent, schema.model_call, schema.call_end)
    )
    return max((call_id for call_id in found if call_id is not None), default=None)


def pending(connection: Connection, *, worker: str | None = None) -> list[CallAdmitted]:
    """Intents with neither a completed call nor an end, of one worker or of all, in order of sequence."""
    intent = schema.call_intent
    statement = select(intent).where(_IS_PENDING).order_by(intent.c.sequence)
    return _read(connection, CallAdmitted, statement if worker is None else statement.where(intent.c.worker == worker))


def unfinished(connection: Connection, rollouts: Sequence[str] | None = None) -> dict[str, int]:
    """How many calls of these rollouts, or of all, did not complete: by how they ended, and those that are pending."""
    intent, end = schema.call_intent, schema.call_end
    ended = select(end.c.state, func.count()).group_by(end.c.state).order_by(end.c.state)
    pending = select(func.count()).select_from(intent).where(_IS_PENDING)
    if rollouts is not None:
        ended, pending = ended.where(end.c.rollout_id.in_(rollouts)), pending.where(intent.c.rollout_id.in_(rollouts))
    counts = {str(state): int(count) for state, count in connection.execute(ended)}
    return counts | {"pending": left} if (left := connection.scalar(pending)) else counts


_IS_PENDING = and_(
    *(
        ~exists().where(table.c.call_id == schema.call_intent.c.call_id)
        for table in (schema.model_call, schema.call_end)
    )
)


def _check_calls(
    connection: Connection, batch: Sequence[CallCompleted], known: Mapping[UUID, Tip], prepared: Prepared
) -> None:
    """Every call's hashes and parent link; a parent may stand earlier in the batch. Reads one narrow row a parent."""
    batch = [call for call in batch if id(call) not in prepared.checked]
    parents = {call.parent_id for call in batch if call.parent_id is not None}
    tips: dict[UUID, Tip | CallCompleted] = {parent: known[parent] for parent in parents if parent in known}
    if unknown := parents.difference(tips):
        tips |= _tips(connection, unknown)
    for call in batch:
        _check(call, None if call.parent_id is None else tips.get(call.parent_id))
        tips[call.call_id] = call


def _check(call: CallCompleted, parent: Tip | CallCompleted | None) -> None:
    """Raises BrokenLink for a call that does not fit on top of this parent, or None for a root."""
    if (why := _misfit(call, parent)) is not None:
        parent_id = None if call.parent_id is None else str(call.parent_id)
        raise BrokenLink(call_id=str(call.call_id), parent_id=parent_id, why=why)


def _misfit(call: CallCompleted, parent: Tip | CallCompleted | None) -> str | None:
    """What is wrong with the call on top of this parent; None when all is right."""
    if call.hash_version not in hashing.DERIVED:
        return f"has hashes of version {call.hash_version}, this release checks up to version {hashing.HASH_VERSION}"
    if call.summary_hash != hashing.summary_hash(call.request_hash, call.answer_key):
        return "has a summary hash that is not that of its request hash and answer key"
    if call.parent_id is not None:
        if parent is None:
            return "is not in the log"
        if parent.rollout_id != call.rollout_id:
            return f"is in rollout {parent.rollout_id!r}, the call in {call.rollout_id!r}"
        if parent.root_id != call.root_id:
            return f"has root {parent.root_id}, the call {call.root_id}"
        if parent.depth + 1 != call.depth:
            return f"has depth {parent.depth}, the call {call.depth}"
        if parent.chain_len != call.prev_len:
            return f"has a chain of {parent.chain_len} tokens, the call extends {call.prev_len}"
    if call.chain_hash != hashing.chain_hash(None if parent is None else parent.chain_hash, call.token_ids):
        return "does not give its chain hash with the call's tokens" if parent else "has a chain hash not of its tokens"
    return None


def _tips(connection: Connection, call_ids: Iterable[UUID]) -> dict[UUID, Tip]:
    call = schema.model_call.c
    statement = select(
        call.call_id, call.rollout_id, call.root_id, call.depth, call.prompt_len, call.sampled_len, call.chain_hash
    ).where(call.call_id.in_(call_ids))
    return {
        row.call_id: Tip(
            rollout_id=row.rollout_id,
            root_id=row.root_id,
            depth=row.depth,
            chain_len=row.prompt_len + row.sampled_len,
            chain_hash=row.chain_hash,
        )
        for row in connection.execute(statement)
    }


def _insert(connection: Connection, place: Place, batch: Sequence[Event], prepared: Prepared) -> None:
    """Insert first, and look only when the log took fewer than it was given, or refused.

    On PostgreSQL another transaction may insert the same id meanwhile: the insert waits for it.
    """
    if place.event is RolloutOpened:
        batch = _unopened(connection, cast("Sequence[RolloutOpened]", batch))
    if not batch:
        return
    statement = insert_into(place.table, connection.dialect.name)
    driver = connection.dialect.loaded_dbapi
    try:
        # By the driver itself: SQLAlchemy would take more time than the rest of an append.
        with closing(connection.connection.cursor()) as cursor:
            # Where it is not prepared, a row is made while the one before is on its way.
            rows: Any = (prepared.rows.get(id(event)) or statement.parameters(event) for event in batch)
            if connection.dialect.name == "postgresql" and place.event in _COPIED and len(batch) >= COPIED_FROM:
                if copied_in(cast("Any", cursor), place.table, statement.names, rows):
                    return
                rows = map(statement.parameters, batch)
            cursor.executemany(statement.text, rows)
            inserted = cursor.rowcount
    except (driver.IntegrityError, driver.DataError) as error:
        raise _refused(connection, place, batch, str(error).splitlines()[0]) from error
    except driver.ProgrammingError as error:  # a right that was taken away, a table that is gone
        raise LogUnavailable(f"insert into {place.table.name}", str(error).splitlines()[0]) from error
    if inserted != len(batch):
        digests = _digests(connection, place, batch)
        for event in batch:
            if not _is_known(place, event, digests):
                raise EventConflict(
                    kind=event.kind,
                    event_id=shown_key(place.key_of(event)),
                    why="uses a writer_seq that its writer used before",
                )


def _unopened(connection: Connection, batch: Sequence[RolloutOpened]) -> list[RolloutOpened]:
    """The openings without those that say nothing but the id of a rollout that is open by then."""
    implicit = {event.rollout_id for event in batch if event.implicit}
    opened = _open(connection, sorted(implicit)) if implicit else set()
    new: list[RolloutOpened] = []
    for event in batch:
        if not (event.rollout_id in opened and event.implicit):
            new.append(event)
        opened.add(event.rollout_id)
    return new


def _open(connection: Connection, rollouts: list[str]) -> set[str]:
    """Those of the rollouts that are open."""
    database = connection.dialect.name
    asked: Any = rollouts if database == "postgresql" else json.dumps(rollouts)
    with closing(connection.connection.cursor()) as cursor:
        cursor.execute(_OPEN[database], (asked,))
        return {rollout_id for (rollout_id,) in cursor.fetchall()}


def _refused(connection: Connection, place: Place, batch: Sequence[Event], why: str) -> EventConflict:
    """What a trigger or a check refused, by the name of the event where that can be found out.

    On PostgreSQL the transaction is over, but the message names a call that ends twice; on SQLite the log can be asked.
    """
    ended: str | UUID | None = None
    if match := _CALL_NAMED.search(why):
        ended = match[1]
    elif connection.dialect.name == "sqlite":
        digests = _digests(connection, place, batch)
        for event in batch:
            try:
                _is_known(place, event, digests)
            except EventConflict as conflict:
                return conflict
        if isinstance(batch[0], CallCompleted | CallEnded):
            other = schema.call_end.c if isinstance(batch[0], CallCompleted) else schema.model_call.c
            ids = [event.call_id for event in batch if isinstance(event, CallCompleted | CallEnded)]
            ended = connection.scalar(select(other.call_id).where(other.call_id.in_(ids)).limit(1))
    if ended is None:  # the message names the rule, the first event stands for the batch
        return EventConflict(kind=batch[0].kind, event_id=shown_key(place.key_of(batch[0])), why=f"was refused ({why})")
    state = "has ended without an answer" if place.event is CallCompleted else "is completed"
    return EventConflict(kind=batch[0].kind, event_id=str(ended), why=f"names a call that {state} ({why})")


def _is_known(place: Place, event: Event, digests: Mapping[Key, bytes]) -> bool:
    """Whether the log has this very event; raises EventConflict when it has another one under its id."""
    stored = digests.get(place.key_of(event))
    if stored is None:
        return False
    if stored != event.digest() and not (isinstance(event, RolloutOpened) and event.implicit):
        raise EventConflict(kind=event.kind, event_id=shown_key(place.key_of(event)))
    return True


def _digests(connection: Connection, place: Place, batch: Iterable[Event]) -> dict[Key, bytes]:
    """Stored digests of those events of the batch whose ids are in the log."""
    key = [place.table.c[name] for name in place.key]
    ids = [place.key_of(event) for event in batch]
    wanted = key[0].in_([value for (value,) in ids]) if len(key) == 1 else tuple_(*key).in_(ids)
    return {tuple(row[:-1]): row.digest for row in connection.execute(select(*key, place.table.c.digest).where(wanted))}


def _of_rollout(table: Table, rollout_id: str) -> Select[Any]:
    return select(table).where(table.c.rollout_id == rollout_id).order_by(table.c.sequence)


def _read(connection: Connection, kind: Callable[..., _E], statement: Select[Any]) -> list[_E]:
    return [event_of(kind, row) for row in connection.execute(statement).mappings()]
