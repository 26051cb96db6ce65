"""From a URL to a ready SQLAlchemy Engine: the one place that knows which database the log is in.

Knows drivers, pragmas and transactions; does not know tables or events. Law: every write goes through `write`, which is
one transaction, and every read through `read`, which is one snapshot and cannot change anything.

>>> database_url("postgres://trainer@db/turnlog")
'postgresql+psycopg://trainer@db/turnlog'
>>> database_url("mysql://db/turnlog")  # doctest: +ELLIPSIS
Traceback (most recent call last):
store.errors.BadUrl: database URL 'mysql://db/turnlog' names a mysql database: use sqlite:///FILE or ...
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.pool import ConnectionPoolEntry

from store.claim import claim
from store.errors import BadUrl, LogUnavailable
from store.turn import turn

if TYPE_CHECKING:
    import psycopg

logger = logging.getLogger("turnlog")

_WRITE = "turnlog_write"
_WRITES = "turnlog_writes"
_USED = "turnlog_used"
_REST_SECONDS = 1.0
"""How long a connection to PostgreSQL may rest before it is asked whether it still is one."""
BUSY_SECONDS = 30
"""How long SQLite waits for another process's write transaction; they last milliseconds."""
_TURN_SECONDS = 5
"""How long a write to SQLite waits for those that came before it; then it asks SQLite like anybody else."""
Durability = Literal["full", "relaxed"]
_COMMITS = {
    "full": "select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off'",
    "relaxed": "set synchronous_commit = off",
}
"""A server that waits for its standbys too, by `remote_apply`, goes on doing so."""
_PLANS = "set plan_cache_mode = force_generic_plan"
"""Each statement is planned once a connection: to plan for all partitions takes longer than to look into one."""
_SAFE_SQLITE = (3, 51, 3)
"""Older ones can, rarely, damage a WAL file that two processes write (notes of SQLite 3.51.3)."""
_SCHEMES = {"postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg", "sqlite": "sqlite"}


def database_url(url: str | None = None) -> str:
    """The log's URL as SQLAlchemy wants it: `url`, else $TURNLOG_URL, else the file turnlog.db of this folder.

    Raises BadUrl for anything but a PostgreSQL database or a SQLite file.
    """
    given = url or os.environ.get("TURNLOG_URL") or "sqlite:///turnlog.db"
    try:
        parsed = make_url(given)
    except (exc.ArgumentError, ValueError) as error:
        raise BadUrl(shown_url(given), "is not a URL") from error
    scheme = _SCHEMES.get(parsed.drivername, parsed.drivername)
    if scheme not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise BadUrl(shown_url(given), f"names a {parsed.drivername} database")
    if scheme.startswith("sqlite") and parsed.database in (None, "", ":memory:"):
        raise BadUrl(shown_url(given), "names no file, and a log in memory is not durable")
    return parsed.set(drivername=scheme).render_as_string(hide_password=False)


def shown_url(url: str | URL) -> str:
    """The URL without its secrets, for messages.

    >>> shown_url("postgresql://trainer:secret@db/turnlog?password=secret")
    'postgresql://trainer:***@db/turnlog?password=***'
    """
    hidden = re.sub(r"(//[^/@:]*):.*@", r"\1:***@", str(url))
    return re.sub(r"(?i)((?:password|secret|token|key)\w*)=[^&]*", r"\1=***", hidden)


def open_database(url: str | None = None, *, durability: Durability = "full") -> Engine:
    """A ready engine for the log at `url` (see `database_url`); the caller disposes of it.

    A commit survives a power cut, whatever the server's default is; with `relaxed` the last ones may not: up to 0.6
    seconds of them on PostgreSQL (three times `wal_writer_delay`), on SQLite those since the last checkpoint.

    Raises BadUrl, and LogUnavailable when a SQLite file's folder is missing. Nothing is connected yet.
    """
    parsed = make_url(database_url(url))
    if parsed.get_backend_name() == "sqlite":
        return _open_sqlite(parsed, durability)
    connect: dict[str, Any] = {"application_name": "turnlog"}
    if "connect_timeout" not in parsed.query:
        connect["connect_timeout"] = 5
    database = create_engine(parsed, connect_args=connect)
    commits = _COMMITS[durability]

    def choose_durability(connection: Any, _: Any) -> None:
        connection.execute(commits)
        connection.execute(_PLANS)
        connection.commit()

    event.listen(database, "connect", choose_durability)
    event.listen(database, "connect", _note_use)
    event.listen(database, "checkin", _note_use)
    event.listen(database, "checkout", _expect_alive)
    return database


def _note_use(_: Any, record: ConnectionPoolEntry) -> None:
    record.info[_USED] = time.monotonic()


def _expect_alive(connection: Any, record: ConnectionPoolEntry, _: Any) -> None:
    """Connect anew where the server is known to have closed the connection, or does not answer after a rest.

    Asking before each use, as SQLAlchemy can, would be every second thing that a busy model server asks. One use fails
    when the database goes in the midst of work, as it then also can between the question and the use.
    """
    if not _alive(connection, record.info[_USED]):
        raise exc.InvalidatePoolError


def _alive(connection: Any, used: float) -> bool:
    """Whether a connection of PostgreSQL's driver that was used last at this time can be used."""
    alive = not connection.closed
    if alive and time.monotonic() - used > _REST_SECONDS:
        try:
            connection.execute("select 1")
            connection.rollback()
        except connection.OperationalError:
            alive = False
    return bool(alive)


def _open_sqlite(url: URL, durability: Durability) -> Engine:
    folder = Path(url.database or "").absolute().parent
    if not folder.is_dir():
        raise LogUnavailable("open the log", f"folder {str(folder)!r} of the SQLite file does not exist: create it")
    database = create_engine(url, connect_args={"timeout": BUSY_SECONDS, "isolation_level": None})
    synchronous = f"pragma synchronous = {'full' if durability == 'full' else 'normal'}"
    event.listen(database, "connect", _prepare_sqlite)
    event.listen(database, "connect", lambda connection, _: connection.execute(synchronous))
    event.listen(database, "begin", _begin_sqlite)
    return database


def _prepare_sqlite(connection: sqlite3.Connection, _: Any) -> None:
    """Page size and WAL are kept in the file, the rest is each connection's own."""
    connection.execute(
        "pragma page_size = 16384"
    )  # before the first table; checkpoints stall 25 times less than at 4096
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("pragma journal_mode = wal")
            break
        except sqlite3.OperationalError as error:
            # Processes that open a new file at once: SQLite does not wait for this lock by itself.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    """A write takes the write lock at once: a transaction that reads first could not wait for it later.

    It keeps in memory what SQLite needs to take back one statement: the pages that each insert changes, which would go
    to a temporary file. A read may sort more than memory holds. Both are said only where they change, for SQLite then
    compiles each statement of the connection anew.
    """
    write = connection.get_execution_options().get(_WRITE, False)
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    if connection.info.get(_WRITES) is not write:
        driver.execute("pragma temp_store = memory" if write else "pragma temp_store = file")
        driver.execute("pragma query_only = off" if write else "pragma query_only = on")
        connection.info[_WRITES] = write
    driver.execute("begin immediate" if write else "begin")


def claim_sqlite(database: Engine) -> BinaryIO | None:
    """Say for as long as the file returned is open that this process writes to the log; None on PostgreSQL.

    Warns when another process does already and this SQLite is one that may damage the file then.
    """
    if database.dialect.name != "sqlite":
        return None
    held = claim(Path(f"{database.url.database}-writer"))
    if held is None and sqlite3.sqlite_version_info < _SAFE_SQLITE:
        logger.warning(
            "another process writes to %s, and SQLite %s can rarely damage a file that two processes write: serve with "
            "--api-server-count 1 and one server a file, use SQLite %d.%d.%d or newer, or keep the log in PostgreSQL",
            database.url.database, sqlite3.sqlite_version, *_SAFE_SQLITE,
        )  # fmt: skip
    return held


@contextmanager
def write(database: Engine) -> Generator[Connection]:
    """One transaction that may append: committed at the end of the block, rolled back when it raises.

    Raises LogUnavailable for what the driver raises, also at the commit: the events may then be durable or not, and
    appending them again is safe. Writers of one SQLite file take turns.
    """
    with closing(Pen(database)) as pen, pen.write() as connection:
        yield connection


class Pen:
    """What `write` does, again and again by one thread, on a connection that it keeps meanwhile."""

    def __init__(self, database: Engine) -> None:
        self._database = database
        self._turn = Path(f"{database.url.database}-turn") if database.dialect.name == "sqlite" else None
        self._connection: Connection | None = None
        self._commits_itself = False
        self._pool = database.pool
        self._used = 0.0

    @contextmanager
    def write(self) -> Generator[Connection]:
        """One transaction; after one that fails the next takes another connection."""
        queue = nullcontext() if self._turn is None else turn(self._turn, min(_TURN_SECONDS, BUSY_SECONDS))
        with queue, _unavailable("write to the log", self._database), self._ready() as connection, connection.begin():
            yield connection

    @contextmanager
    def write_at_once(self) -> Generator[psycopg.Connection[Any]]:
        """PostgreSQL's driver, where what is sent before one wait is one transaction; what is refused may go on."""
        with _unavailable("write to the log", self._database), self._ready(commits_itself=True) as connection:
            yield cast("psycopg.Connection[Any]", connection.connection.driver_connection)

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            if self._pool is not self._database.pool:  # it was disposed of, and closes nothing any more
                self._connection.invalidate()
            self._connection.close()
            self._connection = None

    @contextmanager
    def _ready(self, *, commits_itself: bool = False) -> Generator[Connection]:
        if (kept := self._connection) is not None:
            driver = kept.connection.driver_connection
            if self._database.dialect.name == "postgresql" and not _alive(driver, self._used):
                kept.invalidate()
            if kept.invalidated or commits_itself is not self._commits_itself or self._pool is not self._database.pool:
                self.close()
        if self._connection is None:
            self._pool, self._commits_itself = self._database.pool, commits_itself
            options = {"isolation_level": "AUTOCOMMIT"} if commits_itself else {}
            self._connection = self._database.connect().execution_options(**{_WRITE: True}, **options)
        try:
            yield self._connection
        except BaseException:
            self._connection.invalidate()
            self.close()
            raise
        self._used = time.monotonic()


@contextmanager
def read(database: Engine) -> Generator[Connection]:
    """One consistent snapshot of the log, read only. Raises LogUnavailable for what the driver raises."""
    with _unavailable("read the log", database), database.connect() as connection:
        if database.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        with connection.begin():
            yield connection


@contextmanager
def read_one(database: Engine) -> Generator[Connection]:
    """For one statement that reads, which is a snapshot by itself: no transaction to begin and to end around it."""
    if database.dialect.name == "sqlite":
        with read(database) as connection:  # costs no round trip there, and cannot change anything
            yield connection
    else:
        with _unavailable("read the log", database), database.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def session(database: Engine) -> Generator[Connection]:
    """A connection of its own whose transactions the caller begins and ends, for changes of the schema."""
    with _unavailable("change the schema", database), database.connect() as connection:
        try:
            yield connection.execution_options(**{_WRITE: True})
        finally:
            connection.invalidate()  # what was set on it, and its locks, end with it


@contextmanager
def _unavailable(operation: str, database: Engine) -> Generator[None]:
    """Driver errors that tell of the database, not of the statement, as LogUnavailable; a broken rule stays itself."""
    driver = database.dialect.loaded_dbapi
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError, driver.Error) as error:
        cause = error.orig if isinstance(error, exc.DBAPIError) else error
        executed = not isinstance(error, exc.DBAPIError) or error.statement is not None
        if executed and isinstance(cause, driver.IntegrityError | driver.DataError | driver.ProgrammingError):
            raise
        lines = str(cause).strip().splitlines()
        raise LogUnavailable(operation, lines[0] if lines else type(cause).__name__) from error
