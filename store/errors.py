"""Errors of the log, one class per choice a caller can make.

    LogError
    ├── BadUrl              the database URL names no database turnlog can keep a log in
    ├── SchemaMismatch      the database's schema is older, newer or missing: migrate, or use the right release
    ├── SchemaBusy          a table is in use, so the schema cannot change now: retry when the log is quiet
    ├── UnknownRevision     no revision of the schema that can be gone back to
    ├── LosesEvents         a downgrade would drop what events say: agree to that, or stay
    ├── UnknownPartition    no partition of this name, or one that must stay
    ├── UnknownRole         no name that a role can have
    ├── SharedRole          one name for two roles, of which each would take the other's rights away
    ├── NotOwner            the schema belongs to another user of the database
    ├── NeedsPostgres       SQLite has nothing of the kind
    ├── LogUnavailable      the database cannot be reached or written: retry later
    ├── SpoolTaken          another process holds the worker's spool: stop it, or take another worker's name
    ├── EventConflict       the same id was appended before with other content
    ├── BrokenLink          an event names a parent that is missing or does not fit it
    ├── UnknownCodec        stored bytes need a newer reader
    ├── BadPosition         a text names no place in the log
    ├── NotABeginning       the log to copy to is no earlier copy of the one to copy from
    ├── DamagedEvent        a stored event is not the one that was appended: restore it from a copy
    ├── DamagedArray        stored bytes are not what was written: restore them from a copy
    ├── MediaUnavailable    the place for media bytes cannot be written
    ├── MediaUnreadable     it cannot be read
    ├── MediaMissing        an object of it is not there: restore it from a copy
    ├── MediaDamaged        an object of it holds other bytes than were stored: restore it from a copy
    └── DamagedTensors      bytes that are no file of tensors: restore them from a copy

Every message gives the value, the rule it breaks and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class LogError(Exception):
    """Base of every error that the log raises."""


class BadUrl(LogError):
    """The database URL is not one of a database that turnlog supports."""

    def __init__(self, url: str, why: str) -> None:
        self.url = url
        super().__init__(f"database URL {url!r} {why}: use sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME")


class SchemaMismatch(LogError):
    """The database is not at the schema revision that this release knows."""

    def __init__(self, database: str, *, found: str | None, expected: str, remedy: str) -> None:
        """`database` is its URL without the password."""
        self.found = found
        self.expected = expected
        self.remedy = remedy
        shown = "no turnlog schema" if found is None else f"schema revision {found!r}"
        super().__init__(f"{database} has {shown}, this release needs {expected!r}: {remedy}")


class SchemaBusy(LogError):
    """A change of the schema could not have a table in time."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        super().__init__(
            f"the schema was not changed: a transaction uses one of its tables, and calls would wait behind the change "
            f"after {seconds} s; end that transaction (pg_stat_activity shows it), or try again when the log is quiet"
        )


class UnknownRevision(LogError):
    """A downgrade names a revision that is not below the database's."""

    def __init__(self, revision: str, below: Sequence[str]) -> None:
        self.revision = revision
        known = f"choose from {', '.join(below)}" if below else "there is none below: drop the database instead"
        super().__init__(f"revision {revision!r} is not one that this log can go back to: {known}")


class LosesEvents(LogError):
    """A downgrade would drop what events say."""

    def __init__(self, revision: str, losses: Sequence[str]) -> None:
        self.losses = tuple(losses)
        super().__init__(
            f"going back to revision {revision!r} loses {'; '.join(losses)}: events are never changed, so copy the log "
            "first, then say --yes, or stay at this revision"
        )


class UnknownPartition(LogError):
    """A partition that does not exist, or is not one that can be dropped."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        super().__init__(
            f"{name!r} is not a partition that can be dropped: choose from {', '.join(known) or 'none: there are none'}"
        )


class UnknownRole(LogError):
    """A name that no role can have."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"{name!r} cannot be a role: take a name of letters, digits and _ that is not the owner's and not pg_..."
        )


class SharedRole(LogError):
    """One name was given to two roles."""

    def __init__(self, name: str, kinds: Sequence[str]) -> None:
        self.name = name
        super().__init__(
            f"role {name!r} is named for {' and '.join(kinds)}, and what one may do is taken from the other: give each "
            "a name, and make a login a member of both"
        )


class NotOwner(LogError):
    """The database user may not change the schema."""

    def __init__(self, user: str | None, cause: str) -> None:
        self.user = user
        super().__init__(
            f"user {user!r} may not change the schema ({cause}): run it as the user who made it, or hand what --sql "
            "prints to them"
        )


class NeedsPostgres(LogError):
    """A SQLite log was asked for what only PostgreSQL has."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"a SQLite log has no {what}: {instead}, or keep the log in PostgreSQL")


class LogUnavailable(LogError):
    """The database did not answer or refused the write for a reason outside the event."""

    def __init__(self, operation: str, cause: str) -> None:
        self.operation = operation
        self.cause = cause
        super().__init__(f"{operation}: the log database is not available ({cause}): check TURNLOG_URL and retry")


class SpoolTaken(LogError):
    """Two live processes want one spool."""

    def __init__(self, path: str, worker: str) -> None:
        self.path = path
        super().__init__(
            f"spool {path!r} is held by another live process of worker {worker!r}, and one process writes a spool: "
            "stop that process, or give this one another name with TURNLOG_WORKER"
        )


class EventConflict(LogError):
    """An id that is already in the log came again with different content."""

    def __init__(self, *, kind: str, event_id: str, why: str = "is already in the log with other content") -> None:
        self.kind = kind
        self.event_id = event_id
        super().__init__(f"{kind} {event_id} {why}: events are immutable, append a new event under a new id")


class BrokenLink(LogError):
    """A call does not extend its parent: parent missing, other rollout, wrong length or wrong hash."""

    def __init__(self, *, call_id: str, parent_id: str | None, why: str) -> None:
        self.call_id = call_id
        self.parent_id = parent_id
        subject = f"root call {call_id}" if parent_id is None else f"call {call_id} names parent {parent_id}, which"
        super().__init__(f"{subject} {why}: append a parent before its children, and every call as it was computed")


class UnknownCodec(LogError):
    """A stored array uses a codec that this release cannot read."""

    def __init__(self, codec: int) -> None:
        self.codec = codec
        super().__init__(f"stored tokens use codec {codec}, this release reads 0 and 1: upgrade turnlog")


class DamagedArray(LogError):
    """Stored bytes cannot be read back: the file or the disk under it is damaged."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"a stored token array cannot be decompressed ({cause}): restore the database from a copy")


class DamagedEvent(LogError):
    """A stored event does not give the digest that it was stored with."""

    def __init__(self, *, log: str, kind: str, event_id: str, sequence: int, why: str) -> None:
        self.kind = kind
        self.event_id = event_id
        self.sequence = sequence
        super().__init__(
            f"{kind} {event_id} at sequence {sequence} of {log} {why}: all before it is copied; "
            "restore the event from a copy of the log, then copy again"
        )


class BadPosition(LogError):
    """A text does not name a place in the log."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"{text!r} is no position of the log: give the one that a tail printed, such as 60.5.5.0.62.1")


class NotABeginning(LogError):
    """The log to copy to holds something that the log to copy from has not, or has otherwise."""

    def __init__(self, *, source: str, target: str, why: str) -> None:
        self.source = source
        self.target = target
        super().__init__(
            f"{target} is no earlier copy of {source} ({why}): copy into an empty database, or into a copy of this log "
            "that nothing else has written to"
        )


class MediaUnavailable(LogError):
    """The media location cannot be written."""

    def __init__(self, url: str, cause: str) -> None:
        self.url = url
        super().__init__(f"media location {url!r} cannot be written ({cause}): set TURNLOG_MEDIA to a writable place")


class MediaUnreadable(LogError):
    """The media location cannot be read."""

    def __init__(self, url: str, cause: str) -> None:
        self.url = url
        super().__init__(f"media location {url!r} cannot be read ({cause}): set TURNLOG_MEDIA to where this log's are")


class MediaMissing(LogError):
    """The media location has no such object."""

    def __init__(self, url: str, address: bytes) -> None:
        self.address = address
        super().__init__(f"media {address.hex()} is not in {url!r}: restore it from a copy, or set TURNLOG_MEDIA")


class MediaDamaged(LogError):
    """An object of the media location is not the one that was stored."""

    def __init__(self, url: str, address: bytes, why: str = "holds other bytes than were stored") -> None:
        self.address = address
        super().__init__(f"media {address.hex()} in {url!r} {why}: restore it from a copy")


class DamagedTensors(LogError):
    """Bytes that are no file of tensors."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"media cannot be read as tensors ({cause}): restore them from a copy")
