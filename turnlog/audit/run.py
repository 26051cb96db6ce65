"""A whole audit: the log read once, rollout by rollout, and every rule asked of it.

Knows the order of the rules; each of them lives in its own module. Law: nothing is changed, the log may be written to
meanwhile, and two audits at one position say the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import duckdb
from sqlalchemy import Engine, text

from replay.archive import archive_url, open_archive
from replay.errors import ArchiveDamaged, ReplayError
from replay.row import Row
from replay.rowset import stream
from replay.sealed import Sealed
from replay.sealing import verify
from replay.selection import Selection
from replay.source import Position as RowPosition
from store import migrate, partitions, schema
from store.database import read
from store.errors import SchemaMismatch
from store.media import MediaStore
from store.settled import Position
from turnlog.audit import chains, decisions, declared, events, source, suspects, tally
from turnlog.audit import media as media_check
from turnlog.audit.findings import Findings
from turnlog.audit.source import RolloutEvents
from turnlog.audit.writers import Writers

Progress = Callable[[int, int], None]
"""Called with the tokens that are audited and those of the whole log."""
_TRIGGERS = {
    "sqlite": text("select name from sqlite_master where type = 'trigger'"),
    "postgresql": text(
        "select tgname from pg_trigger join pg_class on pg_class.oid = tgrelid"
        " where not tgisinternal and tgenabled = 'A' and relnamespace = current_schema()::regnamespace"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What an audit found."""

    position: Position
    findings: Findings
    rollouts: int
    events: Mapping[str, int]
    """How many were read, by kind."""
    tokens: int
    """Of completed calls, each counted where it is stored."""
    seconds: float

    @property
    def clean(self) -> bool:
        """Whether all of the log follows from the rest of it."""
        return not self.findings.differences


def audit(
    database: Engine,
    *,
    position: Position | None = None,
    archive: str | None = None,
    media: MediaStore | None = None,
    finished: bool = False,
    progress: Progress | None = None,
) -> Audited:
    """Derive everything in the log again.

    Args:
        database: the log, of this release's schema; its guards may be gone, which is a difference.
        position: as of when; None for all that is settled now.
        archive: read with the log as one; None for $TURNLOG_ARCHIVE, empty for the log alone.
        media: where media bytes lie; None leaves them out, and counts what was left out.
        finished: nothing is running any more, so that a call without an end is a difference.
        progress: called after each batch of rollouts.

    Raises SchemaMismatch for a log of another schema, PositionAhead, and what reading raises.
    """
    began = time.monotonic()
    findings = Findings()
    _guards(database, findings)
    url = archive_url(archive)
    sealed = None if url is None else Sealed(open_archive(url))
    if sealed is not None:
        _archive(sealed, findings)
    at = source.position_of(database, position, sealed)
    tally.check(database, at, sealed, findings)
    listed = source.rollouts(database, at, sealed)
    total = sum(each.tokens for each in listed)
    counts: Counter[str] = Counter()
    writers = Writers()
    seen_media: set[bytes] = set()
    done = tokens = 0
    with duckdb.connect(":memory:") as engine:
        for batch in source.batches(listed):
            found = source.events(database, at, sealed, batch)
            for rollout in found:
                counts.update(each.place.kind for each in rollout.stored)
                tokens += sum(call.delta_len for _, call in rollout.calls)
                events.check(rollout, findings, finished=finished)
                decisions.check(rollout.rollout_id, rollout.calls, findings)
                suspects.check(rollout.rollout_id, [call for _, call in rollout.calls], findings)
                declared.check(rollout, findings)
                writers.add(rollout)
            chains.check(found, findings, engine)
            _trained(database, at, archive, found, findings)
            shown = media_check.shown(found, seen_media)
            media_check.check(shown, source.objects(database, at, sealed, shown.keys()), media, findings)
            done += sum(each.tokens for each in batch)
            if progress is not None:
                progress(done, total)
    writers.check(findings)
    return Audited(
        position=at,
        findings=findings,
        rollouts=len(listed),
        events=dict(counts),
        tokens=tokens,
        seconds=time.monotonic() - began,
    )


def _guards(database: Engine, findings: Findings) -> None:
    """The schema is this release's, or nothing can be read; a trigger that is gone is a difference."""
    try:
        migrate.require_current(database)
    except SchemaMismatch:
        if migrate.current(database) != migrate.head():
            raise
        kind = database.dialect.name
        with read(database) as connection:
            missing = schema.guards(kind) - set(connection.scalars(_TRIGGERS[kind]))
            if kind == "postgresql":
                missing |= {*partitions.unguarded(connection)}
        for guard in sorted(missing):
            findings.differs("guard", None, f"trigger {guard}", stored="missing", derived="one that refuses a change")
    findings.checked["guard"] += len(schema.guards(database.dialect.name))


def _archive(sealed: Sealed, findings: Findings) -> None:
    """Each file of the archive is the one that was sealed, and its events give their digests."""
    for file in (file for files in sealed.archive.files.values() for file in files):
        findings.checked["archive"] += file.lines
        try:
            verify(sealed.archive, file)
        except ArchiveDamaged as error:
            findings.differs("archive", None, f"file {file.path}", stored=file.sha256, derived=error)


def _trained(
    database: Engine, position: Position, archive: str | None, batch: Sequence[RolloutEvents], findings: Findings
) -> None:
    """Rows that trained, beside those that replay gives at the same position."""
    with_rows = [rollout for rollout in batch if rollout.trained]
    if not with_rows:
        return
    today: dict[str, Row] = {}
    rules = {(row.selection, row.selection_version) for rollout in with_rows for row in rollout.trained}
    wanted = {row.row_id for rollout in with_rows for row in rollout.trained}
    at = RowPosition(
        calls=position.calls, outcomes=position.outcomes, rollouts=position.rollouts, trained=position.trained
    )
    for rule, version in sorted(rules):
        ids = [rollout.rollout_id for rollout in with_rows if rollout.calls]
        try:
            selection = Selection(rule=rule, version=version)
            parts = [*stream(database, selection, rollouts=ids, position=at, archive=archive)] if ids else []
        except ReplayError as error:
            findings.differs("trained_row", None, f"rows of rule {rule} {version}", stored="trained", derived=error)
            continue
        today.update((row.row_id, row) for part in parts for row in part.rows if row.row_id in wanted)
    for rollout in with_rows:
        chains.trained(rollout, today, findings)
