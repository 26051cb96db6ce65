"""Find a call by its summary hash, and walk from it to its root.

Knows parent links and how deltas make a chain; does not decide which call a request continues. Law: the cost of a
look-up does not depend on the rollout's history, and a chain comes back whole and verified or not at all.

PostgreSQL keeps calls in partitions by their ids, which begin with a time, and a look-up should touch the rollout's
own. So it is told between which ids these lie: not before the rollout was opened, not after the asking clock, with a
day (`SLACK`) on both sides for servers whose clocks differ. A call outside is not found, and what continues it becomes
a root; that takes clocks more than a day apart. The statements are in `sql/lineage*.sql`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Dialect, TextualSelect, bindparam, column, text
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.dialects.sqlite import pysqlite

from store import codec, hashing, schema
from store.columns import event_of, traces
from store.errors import BrokenLink
from store.events import ItemTrace, MediaShown, token_array, uuid7
from store.statements import statements

_SELECTED = re.compile(r"^select\n(.+?)\nfrom", re.MULTILINE | re.DOTALL)
"""The columns of a statement: those of its one select that begins a line and has them on the next."""
SLACK = 24 * 3600 * 1_000_000
"""Microseconds by which the clocks of servers may differ."""
_OPENINGS_KEPT = 100_000
"""Rollouts whose opening time a worker keeps: 15 MB."""
_LAST = UUID(int=2**128 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCall:
    """A completed call as a decision sees it."""

    call_id: UUID
    rollout_id: str
    parent_id: UUID | None
    root_id: UUID
    depth: int
    sequence: int
    chain_len: int
    """Tokens from its root's first to its own last."""
    hash_version: int
    summary_hash: bytes
    chain_hash: bytes
    reasoning_digest: bytes | None
    response_id: str | None
    answer_item_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A completed call with the traces of its whole request and of its answer."""

    call_id: UUID
    sequence: int
    render_hash: bytes
    tools_digest: bytes
    request: tuple[ItemTrace, ...]
    answer: tuple[ItemTrace, ...]


def find_by_summary(
    connection: Connection,
    rollout_id: str,
    keys: Sequence[bytes],
    *,
    now: int | None = None,
    openings: dict[str, int] | None = None,
) -> list[KnownCall]:
    """The rollout's completed calls that have one of these summary hashes, in order of sequence: indexed queries.

    Args:
        connection: of the log.
        rollout_id: whose calls.
        keys: the summary hashes.
        now: the time in microseconds; without it PostgreSQL looks into partitions of the future, too.
        openings: when rollouts were opened, in microseconds; what the log says is added, and not asked for again.
    """
    question = _question(connection.dialect.name)
    known: list[KnownCall] = []
    # By the driver itself: each call asks this, and SQLAlchemy would take most of the time.
    with closing(connection.connection.cursor()) as cursor:
        between = _between(connection, rollout_id, now, {} if openings is None else openings)
        for key in dict.fromkeys(keys):
            values = {"rollout_id": rollout_id, "key": key, **between}
            cursor.execute(question.text, [values[name] for name in question.parameters])
            known += [question.answer(row) for row in cursor.fetchall()]
    return sorted(known, key=lambda call: call.sequence)


def chain_tokens(connection: Connection, call_id: UUID) -> npt.NDArray[np.int32]:
    """[chain_len] every token from the call's root to its own last, lengths and chain hashes verified.

    Raises BrokenLink when the log does not hold the whole chain as it was appended.
    """
    chain_hash: bytes | None = None
    last: UUID | None = None
    parts: list[npt.NDArray[np.int32]] = []
    length = 0
    for row in connection.execute(_CHAIN[connection.dialect.name], {"call_id": call_id}):
        delta = codec.unpack(row.codec, row.token_ids)
        chain_hash = hashing.chain_hash(chain_hash, delta)
        stored = (row.parent_id, row.depth, row.prev_len, row.prompt_len + row.sampled_len, row.chain_hash)
        if stored != (last, len(parts), length, length + len(delta) // 4, chain_hash):
            parent_id = None if row.parent_id is None else str(row.parent_id)
            why = (
                f"does not fit what the log holds above it: {len(parts)} calls of {length} tokens, the last one {last}"
            )
            raise BrokenLink(call_id=str(row.call_id), parent_id=parent_id, why=why)
        parts.append(token_array(delta))
        length += len(parts[-1])
        last = row.call_id
    if last != call_id:
        raise BrokenLink(call_id=str(call_id), parent_id=None, why="is not in the log")
    return np.concatenate(parts)


def chain_media(connection: Connection, call_id: UUID) -> list[MediaShown]:
    """The media in the call's prompt in their order, each from the call that it was new in."""
    found = connection.execute(_CHAIN_MEDIA[connection.dialect.name], {"call_id": call_id})
    return [event_of(MediaShown, row) for row in found.mappings()]


def recent_requests(
    connection: Connection, rollout_id: str, limit: int = 32, *, now: int | None = None
) -> list[TracedCall]:
    """The rollout's latest completed calls with the item traces of their whole requests, newest last."""
    values = {"rollout_id": rollout_id, "calls": limit, **_between(connection, rollout_id, now, {})}
    found = connection.execute(_RECENT_REQUESTS, values).all()
    rows = {row.call_id: row for row in found}
    whole: dict[UUID | None, tuple[ItemTrace, ...]] = {None: ()}
    recent: list[TracedCall] = []
    for row in found:
        if not row.recent:
            continue
        path: list[UUID] = []
        above: UUID | None = row.call_id
        while above is not None and above not in whole:
            path.append(above)
            above = rows[above].parent_id
        added = (traces(rows[call_id].request_roles, rows[call_id].request_digests) for call_id in reversed(path))
        whole[row.call_id] = tuple(chain.from_iterable((whole[above], *added)))
        recent.append(
            TracedCall(
                call_id=row.call_id,
                sequence=row.sequence,
                render_hash=row.render_hash,
                tools_digest=row.tools_digest,
                request=whole[row.call_id],
                answer=traces(row.answer_roles, row.answer_digests),
            )
        )
    return recent


def _between(
    connection: Connection, rollout_id: str, now: int | None, openings: dict[str, int]
) -> dict[str, UUID | bytes]:
    """Between which ids the rollout's calls lie: `low` to below `high`, as the driver takes them."""
    if connection.dialect.name == "sqlite":  # has no partitions to leave out
        return {"low": bytes(16), "high": _LAST.bytes}
    if rollout_id not in openings:
        with closing(connection.connection.cursor()) as cursor:
            cursor.execute(_question(connection.dialect.name).opened_at, [rollout_id])
            found = cursor.fetchone()
        if found is not None:
            if len(openings) >= _OPENINGS_KEPT:
                openings.clear()
            openings[rollout_id] = found[0]
    opened = openings.get(rollout_id)
    low = UUID(int=0) if opened is None else uuid7(max(0, opened - SLACK) // 1000, bytes(10))
    return {"low": low, "high": _LAST if now is None else uuid7((now + SLACK) // 1000, bytes(10))}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """The statement `find_by_summary` as one driver takes it."""

    opened_at: str
    text: str
    parameters: tuple[str, ...]
    columns: tuple[tuple[str, Callable[[Any], Any] | None], ...]
    """In their order: a column, and how its value is read where the driver's is not it."""

    def answer(self, row: Sequence[Any]) -> KnownCall:
        """One row of the driver's."""
        fields = {
            name: value if read is None else read(value) for (name, read), value in zip(self.columns, row, strict=True)
        }
        fields["chain_len"] = fields.pop("prompt_len") + fields.pop("sampled_len")
        fields["answer_item_ids"] = tuple(fields["answer_item_ids"])
        return KnownCall(**fields)


@cache
def _question(database: str) -> _Question:
    made = {"sqlite": (pysqlite.dialect, "qmark"), "postgresql": (psycopg.dialect, "format")}
    kind, style = made[database]
    dialect: Dialect = kind(paramstyle=style)
    compiled = _FIND_BY_SUMMARY.compile(dialect=dialect)
    assert compiled.positiontup is not None, "both parameter styles are positional"
    return _Question(
        opened_at=str(text(statements("lineage")["opened_at"]).compile(dialect=dialect)),
        text=str(compiled),
        parameters=tuple(compiled.positiontup),
        columns=tuple(
            (found.name, found.type.dialect_impl(dialect).result_processor(dialect, None))
            for found in _FIND_BY_SUMMARY.selected_columns
        ),
    )


def _statement(name: str, file: str = "lineage") -> TextualSelect:
    """One statement by its name; its columns have the types of `model_call`.

    They are told in their order: only then does SQLAlchemy not work them out anew for each result.
    """
    words = statements(file)[name]
    (selected,) = _SELECTED.findall(words)
    names = [column.split()[-1].rpartition(".")[-1] for column in selected.split(",")]
    call = schema.model_call.c
    return text(words).columns(*(call[name] if name in call else column(name) for name in names))


_FIND_BY_SUMMARY = _statement("find_by_summary")
_CHAIN = {
    each: _statement("chain", f"lineage.{each}").bindparams(bindparam("call_id", type_=schema.Id))
    for each in ("sqlite", "postgresql")
}
_CHAIN_MEDIA = {
    each: text(statements(f"lineage.{each}")["chain_media"])
    .bindparams(bindparam("call_id", type_=schema.Id))
    .columns(*(schema.call_media.c[name] for name in MediaShown.model_fields if name != "kind"))
    for each in ("sqlite", "postgresql")
}
_RECENT_REQUESTS = _statement("recent_requests")
