"""One change of the schema at a time, whatever process makes it.

Knows how each database keeps others out; does not know what is changed. Law: who waits for its turn holds nothing that
the other one waits for.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, exc, text

from store.database import session, write
from store.errors import LogUnavailable, NotOwner, SchemaBusy

LOCK_SECONDS = 5
"""How long a change waits for a table on PostgreSQL; calls that come meanwhile wait behind it."""
_LOCK_TIMEOUT = text(f"set lock_timeout = '{LOCK_SECONDS}s'")
_TRY = text("select pg_try_advisory_lock(hashtext('turnlog'), hashtext('upgrade'))")
_PAUSE_SECONDS = 0.1
_BRIEFLY = text("set local lock_timeout = '200ms'")
"""For all tables less than the second after which PostgreSQL looks for a deadlock, and may end somebody else."""
_PATIENTLY = text(f"set local lock_timeout = '{LOCK_SECONDS}s'")
"""More than that second: then a vacuum gives way."""
_LOCK_NOT_AVAILABLE = "55P03"
_INSUFFICIENT_PRIVILEGE = "42501"


@contextmanager
def exclusively(database: Engine) -> Generator[Connection]:
    """A connection that may change the schema, while no other one does.

    On SQLite it is one transaction that holds the write lock. On PostgreSQL the caller commits, for some changes need
    several transactions; the lock is the session's, so the server itself must be reached, not a pool of transactions.
    Who waits asks now and then, and has no snapshot: an index that is built concurrently waits for every one there is.

    Raises SchemaBusy when a table cannot be had in time, and NotOwner when the schema is somebody else's.
    """
    if database.dialect.name == "sqlite":
        with write(database) as connection:
            yield connection
        return
    try:
        with session(database) as connection:
            while not connection.scalar(_TRY):
                connection.rollback()
                time.sleep(_PAUSE_SECONDS)
            connection.execute(_LOCK_TIMEOUT)
            connection.commit()
            yield connection
    except LogUnavailable as error:
        if _state(error.__cause__) == _LOCK_NOT_AVAILABLE:
            raise SchemaBusy(LOCK_SECONDS) from error
        raise
    except exc.ProgrammingError as error:
        if _state(error) == _INSUFFICIENT_PRIVILEGE:
            raise NotOwner(database.url.username, str(error.orig).splitlines()[0]) from error
        raise


def have_alone(connection: Connection, tables: Sequence[str], parts: Sequence[str]) -> None:
    """Have tables of PostgreSQL, and then some partitions of them, to oneself until the transaction ends.

    Asks for the tables for short moments and lets go of those it has in between: who holds one and wants another goes
    on. With the tables nobody but a vacuum has a partition. What `exclusively` raises is raised there.
    """
    give_up = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with connection.begin_nested():
                connection.execute(_BRIEFLY)
                _lock(connection, tables)
            break
        except exc.OperationalError as error:
            if _state(error) != _LOCK_NOT_AVAILABLE or time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_SECONDS)
    connection.execute(_PATIENTLY)
    _lock(connection, parts)


def _lock(connection: Connection, names: Sequence[str]) -> None:
    for name in map(connection.dialect.identifier_preparer.quote, names):
        connection.execute(text(f"lock table only {name} in access exclusive mode"))


def _state(error: BaseException | None) -> str | None:
    """PostgreSQL's code of an error."""
    state: str | None = getattr(getattr(error, "orig", None), "sqlstate", None)
    return state
