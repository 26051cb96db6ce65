"""Archived partitions out of a log.

Knows what must be sealed before a partition goes; does not know how events are sealed, or which partitions go together.
Law: a partition goes when every event in it was found in the archive by sequence and digest, in files that were
verified just now. Calls go on meanwhile: what they add to it keeps it, and nobody can once that was looked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from sqlalchemy import BigInteger, Connection, LargeBinary, column, func, select
from sqlalchemy import table as named_table

from replay.archive import Archive
from replay.errors import NotArchived
from replay.sealing import verify
from store import partitions
from store.columns import PLACES
from store.exclusive import have_alone
from store.partitions import Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What went."""

    partitions: tuple[str, ...]
    events: int


def drop_archived(connection: Connection, archive: Archive, name: str) -> Dropped:
    """Check and drop a partition of model_call, also the default one, and those that go with it; the caller commits.

    Raises UnknownPartition, NotArchived and ArchiveDamaged.
    """
    going = partitions.together(connection, name)
    checked = {each.name: _check(connection, archive, each, name) for each in going}
    order = [place.table.name for place in PLACES]  # in which writers have them
    tables = sorted({each.table for each in going}, key=order.index)
    have_alone(connection, tables, [*checked])
    for part, events in checked.items():
        now = connection.scalar(select(func.count()).select_from(named_table(part))) or 0
        if now != events:  # events are never changed or deleted, so the others are those that were checked
            raise NotArchived(name, archive.url, f"{now - events} events, which came to {part} just now, are not")
    partitions.drop(connection, [*checked])
    return Dropped(partitions=(*checked,), events=sum(checked.values()))


def _check(connection: Connection, archive: Archive, part: Partition, name: str) -> int:
    """How many events a partition has, each in the archive. Raises NotArchived."""
    events = named_table(part.name, column("sequence", BigInteger), column("digest", LargeBinary))
    held = connection.execute(select(events.c.sequence, events.c.digest)).all()
    if not held:
        return 0
    low, high = min(row.sequence for row in held), max(row.sequence for row in held)
    files = [file for file in archive.files[part.table] if file.low <= high and file.high >= low]
    found = pa.concat_tables([verify(archive, file) for file in files]) if files else None
    sealed = {} if found is None else dict(zip(found["sequence"].to_pylist(), found["digest"].to_pylist(), strict=True))
    missing = [row.sequence for row in held if sealed.get(row.sequence) != row.digest]
    if missing:
        whose = f"its {len(held)} events" if part.name == name else f"the {len(held)} events of {part.name} with it"
        raise NotArchived(name, archive.url, f"{len(missing)} of {whose}, such as {missing[0]}, are not")
    return len(held)
