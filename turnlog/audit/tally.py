"""Events that are gone: what the log's own tally names beside what log and archive have.

Knows runs of sequences; does not know what the events said. Law: the whole log as it is now is compared, in one
snapshot, whichever position is audited: an event that was appended is there, and what is there was appended once.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from sqlalchemy import Engine, Table

from replay.sealed import Sealed
from store.columns import PLACES
from store.database import read
from store.settled import Position
from store.tally import Run, compared, size, within, without
from turnlog.audit.findings import Findings
from turnlog.audit.source import PARTS

_SEQUENCE = pa.schema({"sequence": pa.int64()})


def check(database: Engine, position: Position, sealed: Sealed | None, findings: Findings) -> None:
    """Each table beside its tally; up to the position what was given to no event is counted."""
    for table in (place.table for place in PLACES):
        with read(database) as connection:
            found = compared(connection, table)
        archived = [] if sealed is None else _archived(sealed, table)
        elsewhere = found.dropped if sealed is None else []
        missing = without(without(found.missing, archived), elsewhere)
        for runs, stored, derived in (
            (missing, "no event", "the one that was appended"),
            (found.unnamed, "an event", "none, since it is not in the tally"),
            (found.twice, "appended twice", "once: what had it first was deleted"),
        ):
            for run in runs:
                findings.differs("tally", None, _shown(table, run), stored=stored, derived=derived)
        for run in elsewhere:
            findings.note("archived", _shown(table, run))
        until = int(getattr(position, PARTS[table.name]))
        given = size(within(found.named, [(1, until)]))
        findings.checked["tally"] += given
        if gap := until - given:
            findings.note("gaps", f"{gap} of {table.name}")


def _archived(sealed: Sealed, table: Table) -> list[Run]:
    """The sequences that the archive has of a table."""
    files = sealed.archive.files[table.name]
    parts = [sealed.archive.lines(file, _SEQUENCE)["sequence"].to_numpy() for file in files]
    if not parts:
        return []
    sequences = np.unique(np.concatenate(parts))
    begins = np.flatnonzero(np.diff(sequences, prepend=sequences[0] - 2) > 1)
    ends = np.append(begins[1:], len(sequences)) - 1
    return list(zip(sequences[begins].tolist(), sequences[ends].tolist(), strict=True))


def _shown(table: Table, run: Run) -> str:
    low, high = run
    return f"{table.name} {low}" if low == high else f"{table.name} {low} to {high}"
