"""Archived partitions out of a log.

Knows which partitions go together and what must be sealed before; does not know how events are sealed. Law: a partition
goes when every event in it was found in the archive by sequence and digest, in files that were verified just now, and
nothing can be written to it between the check and its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from sqlalchemy import Connection, Table, select, text
from sqlalchemy import table as named_table

from replay.archive import Archive
from replay.errors import NotArchived
from replay.sealing import verify
from store import partitions, schema
from store.errors import UnknownPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What went."""

    partitions: tuple[str, ...]
    events: int


def drop_archived(connection: Connection, archive: Archive, name: str) -> Dropped:
    """Check and drop a partition of model_call and those of call_intent and call_end of its time; the caller commits.

    Raises UnknownPartition, NotArchived and ArchiveDamaged.
    """
    there = [each for each in partitions.listed(connection) if each.low is not None]
    chosen = next((each for each in there if each.name == name and each.table == "model_call"), None)
    if chosen is None:
        raise UnknownPartition(name, sorted(each.name for each in there if each.table == "model_call"))
    going = [each for each in there if (each.low, each.high) == (chosen.low, chosen.high)]
    if len(going) != len(schema.PARTITIONED):
        raise NotArchived(name, archive.url, "the partitions of intents and ends have other bounds than it has")
    # Reads go on; a call that is written meanwhile waits, and then finds no partition of its own but the default one.
    for each in going:
        quoted = connection.dialect.identifier_preparer.quote(each.name)
        connection.execute(text(f"lock table {quoted} in share row exclusive mode"))
    events = sum(_check(connection, archive, schema.metadata.tables[each.table], each.name) for each in going)
    partitions.drop(connection, [each.name for each in going])
    return Dropped(partitions=tuple(each.name for each in going), events=events)


def _check(connection: Connection, archive: Archive, table: Table, name: str) -> int:
    """How many events the partition has, each in the archive. Raises NotArchived."""
    held = connection.execute(
        select(table.c.sequence, table.c.digest)
        .select_from(table)
        .where(table.c.call_id.in_(select(text("call_id")).select_from(named_table(name))))
    ).all()
    if not held:
        return 0
    low, high = min(row.sequence for row in held), max(row.sequence for row in held)
    files = [file for file in archive.files[table.name] if file.low <= high and file.high >= low]
    found = pa.concat_tables([verify(archive, file) for file in files]) if files else None
    sealed = {} if found is None else dict(zip(found["sequence"].to_pylist(), found["digest"].to_pylist(), strict=True))
    missing = [row.sequence for row in held if sealed.get(row.sequence) != bytes(row.digest)]
    if missing:
        raise NotArchived(name, archive.url, f"{len(missing)} of its {len(held)} events, such as {missing[0]}, are not")
    return len(held)
