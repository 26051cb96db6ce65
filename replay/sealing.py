"""From a log to its archive: finished rollouts, sealed.

Knows which rollouts are finished and how their events become files; does not know how an archive is read for rows.
Law: sealing adds and never rewrites, and a seal is written when every file was read back, has the hash that the seal
says, and gives every event's digest again. What it says of chain hashes was derived from the file read back too.

A rollout is *finished* before a time when its opening and each of its intents, calls, ends and outcomes is older, and
every call that was admitted is completed or ended. An outcome is not asked for: what nobody scored by then is kept too.
Of a finished rollout everything is sealed that is settled (decision 0016) and not in the archive yet, the rows that it
trained with it; so a later run adds what came late.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import ColumnElement, Connection, Engine, Table, Text, select, text, type_coerce
from sqlalchemy.dialects.sqlite import pysqlite

from replay.archive import Archive, Seal, SealedFile, columns_of, parquet, typed
from replay.errors import ArchiveDamaged, OtherLog
from replay.queries import query
from store import codec, hashing, migrate, schema
from store.columns import PLACES, Place, event_of
from store.database import read, read_one
from store.schema import CanonicalJson, Id
from store.settled import settled

Progress = Callable[[int, int], None]
"""Called with the number of rollouts done and of all."""

_TOKENS = 8_000_000
"""Of a file of calls, about: what is held in memory while it is written or read."""
_TOKENS_A_CALL = 100
"""What a call weighs beside its tokens."""
_ROLLOUTS = 5_000
"""Most rollouts of a file."""
_SETTLED = {
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
_ID = pa.schema({"sequence": pa.int64(), "digest": pa.binary()})
_STORED = pysqlite.dialect()
"""Its column types store what Parquet does: ids as 16 bytes, JSON as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What a run sealed, or would seal."""

    number: int | None
    """Of its seal; None when there was nothing to seal, or nothing was written."""
    rollouts: int
    """Rollouts that had something new."""
    finished: int
    """Rollouts that are finished, whenever they were sealed."""
    events: Mapping[str, int]
    """How many, by table."""
    bytes: int
    """Of its files."""


def seal(
    database: Engine, archive: Archive, *, before: int, name: str, write: bool = True, progress: Progress | None = None
) -> Sealed:
    """Seal what finished before a time and is not in the archive yet.

    Args:
        database: the log, of this release's schema.
        archive: opened with `new=True`, just now.
        before: Unix microseconds.
        name: a word that no other run uses, for its files.
        write: or only count what would be sealed.
        progress: called after each file.

    Raises OtherLog, ArchiveDamaged, ArchiveUnavailable, SealTaken.
    """
    number = len(archive.seals) + 1
    known = {place.table.name: _Known(archive, place.table) for place in PLACES}
    files: list[SealedFile] = []
    events: Counter[str] = Counter()
    rollouts = done = 0
    with read_one(database) as connection:
        until = settled(connection)  # before the snapshot, so that the snapshot has all of it
    with read(database) as connection:
        finished = _finished(connection, before)
        for at, part in enumerate(_parts(finished)):
            new: set[str] = set()
            for place in PLACES:
                lines = _lines(connection, place.table, part, getattr(until, _SETTLED[place.table.name]))
                lines = known[place.table.name].others(lines)
                if not lines.num_rows:
                    continue
                if "rollout_id" in lines.schema.names:
                    new |= {*lines["rollout_id"].to_pylist()}
                events[place.table.name] += lines.num_rows
                if write:
                    path = f"{place.table.name}/month={part.month}/{number:05}-{name}-{at:04}.parquet"
                    files.append(_write(archive, place, _ordered(lines, part.rollouts), path))
            rollouts += len(new)
            done += len(part.rollouts)
            if progress is not None:
                progress(done, len(finished))
    if files:
        archive.add(
            Seal(
                number=number,
                revision=migrate.head(),
                position=str(until),
                before=before,
                rollouts=rollouts,
                events=dict(events),
                files=tuple(files),
            )
        )
    return Sealed(
        number=number if files else None,
        rollouts=rollouts,
        finished=len(finished),
        events=dict(events),
        bytes=sum(file.size for file in files),
    )


def verify(archive: Archive, file: SealedFile) -> pa.Table:
    """Read a file, prove its hash and derive the digest of every event in it; returns its sequences and digests.

    Where its seal says that the chain hashes of its calls were derived, they are derived again too. Raises
    ArchiveDamaged.
    """
    found = _read_back(archive, file)
    if file.chained and not chained(found):
        raise ArchiveDamaged(archive.url, file.path, "holds a call whose tokens do not give its chain hash")
    return typed(found, _ID)


def _read_back(archive: Archive, file: SealedFile) -> pa.Table:
    """All lines of a file that has the hash of its seal and in which every event gives its digest again."""
    place = next(place for place in PLACES if place.table.name == file.table)
    found = archive.lines(file, columns_of(place.table), archive.whole(file))
    for row in rows_of(place.table, found):
        if event_of(place.event, row).digest() != row["digest"]:
            raise ArchiveDamaged(
                archive.url, file.path, f"holds {file.table} {row['sequence']}, which does not give its digest again"
            )
    return found


def chained(calls: pa.Table) -> bool:
    """Whether each call's tokens give its chain hash on top of its parent's, which is among these calls too."""
    call_id, parent_id = (_plain(calls[name].combine_chunks()) for name in ("call_id", "parent_id"))
    parent = pc.index_in(parent_id, call_id, skip_nulls=True)
    if parent.null_count != parent_id.null_count:
        return False
    own = calls["chain_hash"].combine_chunks()
    return all(
        hashing.chain_hash(above, raw) == derived
        for above, raw, derived in zip(
            own.take(parent).to_pylist(), calls["token_ids"].to_pylist(), own.to_pylist(), strict=True
        )
    )


def rows_of(table: Table, lines: pa.Table) -> Iterator[dict[str, object]]:
    """Lines of a file as a table's rows, their values as the log's columns have them."""
    names = [column.name for column in table.c]
    reads = [column.type.dialect_impl(_STORED).result_processor(_STORED, None) for column in table.c]
    for batch in lines.to_batches(1000):
        columns = [
            [*map(convert, column)] if convert else column
            for convert, column in zip(reads, (_plain(batch[name]).to_pylist() for name in names), strict=True)
        ]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


class _Known:
    """What the archive has of a table."""

    def __init__(self, archive: Archive, table: Table) -> None:
        self._url, self._table = archive.url, table.name
        parts = [archive.lines(file, _ID) for file in archive.files[table.name]]
        found = pa.concat_tables(parts or [_ID.empty_table()])
        found = found.sort_by("sequence")
        self._sequence: npt.NDArray[np.int64] = found["sequence"].to_numpy()
        self._digest = found["digest"]

    def others(self, lines: pa.Table) -> pa.Table:
        """The lines that it does not have. Raises OtherLog when it has another event in the place of one."""
        sequence = lines["sequence"].to_numpy()
        at = np.searchsorted(self._sequence, sequence)
        there = np.flatnonzero(np.isin(sequence, self._sequence))
        ours, theirs = lines["digest"].take(there), self._digest.take(at[there])
        if ours.to_pylist() != theirs.to_pylist():
            other = next(
                int(sequence[place]) for place, one, two in zip(there, ours, theirs, strict=True) if one != two
            )
            raise OtherLog(self._url, self._table, other)
        return lines.take(np.delete(np.arange(len(sequence)), there))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Rollouts whose events share files."""

    rollouts: Sequence[str]
    month: str


def _finished(connection: Connection, before: int) -> list[tuple[str, str, int]]:
    """Id, month and weight of each finished rollout, by month and in the order of rows."""
    found = connection.execute(text(query("finished", "sqlalchemy")), {"before": before})
    weighed = [
        (
            each.rollout_id,
            f"{datetime.fromtimestamp((each.opened_at or each.begun_at) // 1_000_000, UTC):%Y-%m}",
            each.tokens + _TOKENS_A_CALL * each.calls,
        )
        for each in found
    ]
    return sorted(weighed, key=lambda each: each[1])


def _parts(finished: Sequence[tuple[str, str, int]]) -> Iterator[_Part]:
    """Cut the rollouts where a month ends or a file is full; a rollout is never cut."""
    rollouts: list[str] = []
    month, weight = "", 0
    for rollout_id, its_month, its_weight in finished:
        full = weight + its_weight > _TOKENS or len(rollouts) == _ROLLOUTS
        if rollouts and (its_month != month or full):
            yield _Part(rollouts=rollouts, month=month)
            rollouts, weight = [], 0
        rollouts.append(rollout_id)
        month, weight = its_month, weight + its_weight
    if rollouts:
        yield _Part(rollouts=rollouts, month=month)


def _of_rollouts(table: Table, rollouts: Sequence[str]) -> ColumnElement[bool]:
    """Whether an event is of these rollouts; an object is of all that show it."""
    if "rollout_id" in table.c:
        return table.c.rollout_id.in_(rollouts)
    shown = select(schema.call_media.c.sha256).where(schema.call_media.c.rollout_id.in_(rollouts))
    return table.c.sha256.in_(shown)


def _lines(connection: Connection, table: Table, part: _Part, until: int) -> pa.Table:
    """All columns of the settled events of some rollouts, arrays without their codec."""
    columns = [
        type_coerce(column, Text).label(column.name) if isinstance(column.type, CanonicalJson) else column
        for column in table.c
    ]
    statement = select(*columns).where(_of_rollouts(table, part.rollouts), table.c.sequence <= until)
    unpack = codec.Unpacker()
    rows: list[dict[str, Any]] = []
    for row in connection.execute(statement).mappings():
        values = {**row}
        if "codec" in values:
            values |= {"codec": codec.RAW, "token_ids": unpack(values["codec"], values["token_ids"])}
        rows.append(values)
    arrays = []
    for field, column in zip(columns_of(table), table.c, strict=True):
        stored: list[Any] = [row[column.name] for row in rows]
        if isinstance(column.type, Id):
            ids = pa.array([value and value.bytes for value in stored], pa.binary(16))
            arrays.append(pa.ExtensionArray.from_storage(pa.uuid(), ids))
        else:
            arrays.append(pa.array(stored, field.type))
    return pa.table(arrays, schema=columns_of(table))


def _ordered(lines: pa.Table, rollouts: Sequence[str]) -> pa.Table:
    """By rollout in their order; calls then by root and depth, so that a chain without branches lies end to end."""
    if "rollout_id" not in lines.schema.names:
        return lines.sort_by("sequence")
    sequence = lines["sequence"].to_numpy()
    rollout = pc.index_in(lines["rollout_id"], pa.array(rollouts, pa.string())).to_numpy()
    if "root_id" not in lines.schema.names:
        return lines.take(np.lexsort((sequence, rollout)))
    root = _plain(lines["root_id"].combine_chunks()).dictionary_encode().indices.to_numpy()
    first = np.full(root.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, root, sequence)
    return lines.take(np.lexsort((sequence, lines["depth"].to_numpy(), first[root], rollout)))


def _write(archive: Archive, place: Place, lines: pa.Table, path: str) -> SealedFile:
    """Write a file, and read it back before anybody relies on it."""
    data = parquet(lines)
    sequence = lines["sequence"].to_numpy()
    file = SealedFile(
        path=path,
        table=place.table.name,
        lines=lines.num_rows,
        low=int(sequence.min()),
        high=int(sequence.max()),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    archive.write(path, data)
    found = _read_back(archive, file)
    if not typed(found, _ID).equals(typed(lines, _ID)):
        raise ArchiveDamaged(archive.url, path, "does not hold the events that were written")
    return file.model_copy(update={"chained": place.table is schema.model_call and chained(found)})


def _plain(column: pa.Array) -> pa.Array:
    """An id's 16 bytes; any other column as it is."""
    return column.storage if isinstance(column, pa.ExtensionArray) else column
