"""Named queries in, Arrow out, from whichever database holds the log.

Knows the drivers and how their values become Arrow columns of a given schema; does not know tables or what is asked.
Law: everything read through one reader is one snapshot of the log, and nothing can be written through it.

PostgreSQL is read through ADBC, which hands over Arrow without a Python value per field; SQLite through its own driver,
in the connection that is open anyway: a second SQLite library in one process would break the first one's file locks.
Where a process has no such connection, `open_reader_apart` reads SQLite through ADBC too.

    with open_reader(database) as reader:
        calls = reader.table("openings", schema, rollouts=1000)
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, cast
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_manager.dbapi
import adbc_driver_postgresql
import adbc_driver_sqlite.dbapi
import numpy as np
import pyarrow as pa
from sqlalchemy import URL, Engine, make_url

from replay.archive import archive_url, open_archive
from replay.queries import numbered, query, spelled
from replay.sealed import Sealed
from store.database import BUSY_SECONDS, read, shown_url
from store.errors import LogUnavailable
from store.settled import Ask, settled_by

_LINES = 5_000
"""Lines that SQLite hands over at once."""
_ALL = 2**30
"""Lines that ADBC makes a batch of: it gives a column of SQLite the type of its values in the first one."""
_LARGE = 256
"""The same for arrays, of which a batch has at most 2 GB: calls of a million tokens each are 1."""

_MAPPED = 2**40
"""Bytes of a SQLite file that are read in place rather than copied; SQLite takes as many as it was built for."""

_REACHED = ("calls", "outcomes", "rollouts", "trained")
"""The parts of what is settled that rows or their choice depend on."""

Value = int | str
Bytes = bytes | memoryview


class Payloads(NamedTuple):
    """The heavy columns of some completed calls as stored."""

    sequence: Sequence[int]
    codec: Sequence[int]
    token_ids: Sequence[Bytes]
    logprobs: Sequence[Bytes]


class Reader(Protocol):
    """A snapshot of a log that answers named queries."""

    @property
    def sealed(self) -> Sealed | None:
        """The archive that is read with the log as one; None for a log alone."""
        ...

    def table(self, name: str, schema: pa.Schema, **parameters: Value) -> pa.Table:
        """The whole answer of the log, its columns as the schema names and types them."""
        ...

    def payloads(self, name: str, **parameters: Value) -> Iterator[Payloads]:
        """The answer in batches, its lines in their order."""
        ...


class FirstReader(Reader, Protocol):
    """A snapshot that was just taken, which others may read apart."""

    @property
    def reached(self) -> Mapping[str, int]:
        """Up to which sequence of `calls`, `outcomes`, `rollouts`, `trained` the snapshot has all there will be."""
        ...

    @property
    def snapshot(self) -> str | None:
        """A name by which other processes read the same snapshot while this reader is open; None where a position is
        all it takes, since no event ever leaves the database.
        """
        ...


@contextmanager
def open_reader(database: Engine, archive: str | None = None) -> Generator[FirstReader]:
    """A reader of the log, and of the archive at `archive`, else at $TURNLOG_ARCHIVE, with it.

    An empty `archive` is a log alone. Raises LogUnavailable, ArchiveUnavailable and ArchiveDamaged.
    """
    sealed = _sealed(archive)
    if database.dialect.name == "sqlite":
        with read(database) as connection:
            try:
                yield _SqliteReader(cast("sqlite3.Connection", connection.connection.driver_connection), sealed)
            except sqlite3.Error as error:
                raise LogUnavailable("read the log", str(error)) from error
        return
    with _told(), _connected(database.url) as connection, connection.cursor() as cursor:
        # What is settled is asked for before the snapshot is taken, so that the snapshot has all of it.
        reached = _reached(partial(_one, cursor), "postgresql")
        _begin(connection, cursor)
        yield _PostgresReader(cursor, sealed, reached)


@contextmanager
def open_reader_apart(url: str, archive: str | None, snapshot: str | None) -> Generator[Reader]:
    """The same snapshot and archive as another process has open; for a process that opens the log in no other way.

    SQLite is read through ADBC then, in a quarter of the time. Raises what `open_reader` raises.
    """
    parsed, sealed = make_url(url), _sealed(archive)
    if parsed.get_backend_name() == "postgresql":
        with _told(), _kept(parsed) as connection, connection.cursor() as cursor:
            _begin(connection, cursor)
            if snapshot is not None:
                cursor.execute(f"set transaction snapshot '{snapshot}'")  # takes no parameter
            yield _ArrowReader(cursor, "postgresql", sealed)
        return
    file = f"file:{quote(parsed.database or '')}?mode=ro"
    with _told(), adbc_driver_sqlite.dbapi.connect(file) as connection, connection.cursor() as cursor:
        _one(cursor, f"pragma busy_timeout = {BUSY_SECONDS * 1000}")
        _one(cursor, f"pragma mmap_size = {_MAPPED}")
        yield _ArrowReader(cursor, "sqlite", sealed)


def _sealed(archive: str | None) -> Sealed | None:
    """The archive at this place, else at $TURNLOG_ARCHIVE; None for a log alone."""
    url = archive_url(archive)
    return None if url is None else Sealed(open_archive(url))


def _begin(connection: adbc_driver_manager.dbapi.Connection, cursor: adbc_driver_manager.dbapi.Cursor) -> None:
    connection.adbc_connection.set_autocommit(False)
    cursor.execute("set transaction isolation level repeatable read read only")


def _connected(url: URL) -> adbc_driver_manager.dbapi.Connection:
    server = _server(url)
    connection = adbc_driver_manager.AdbcConnection(server.database)
    return adbc_driver_manager.dbapi.Connection(cast("Any", server), connection, autocommit=True)


@contextmanager
def _kept(url: URL) -> Generator[adbc_driver_manager.dbapi.Connection]:
    """A connection with which this process goes on when it is asked again: to find its way anew takes 25 ms."""
    server = _server(url)
    connection, server.waiting = server.waiting, None
    if connection is None or not _answers(connection):
        connection = _connected(url)
    try:
        yield connection
        connection.rollback()
        connection.adbc_connection.set_autocommit(True)
    except BaseException:
        connection.close()
        raise
    server.waiting = connection


def _answers(connection: adbc_driver_manager.dbapi.Connection) -> bool:
    """Whether the server is still there; a connection that it has ended is closed."""
    try:
        with connection.cursor() as cursor:
            _one(cursor, "select 1")
    except adbc_driver_manager.Error:
        connection.close()
        return False
    return True


@cache
def _server(url: URL) -> _Server:
    named = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return _Server(adbc_driver_postgresql.connect(named))


class _Server:
    """What ADBC knows of a PostgreSQL database, its types: to ask for them takes 80 ms, to connect then 4."""

    def __init__(self, database: adbc_driver_manager.AdbcDatabase) -> None:
        self.database = database
        self.waiting: adbc_driver_manager.dbapi.Connection | None = None
        """For the next reader apart."""

    def close(self) -> None:
        """Outlive the connection that is closed; nothing is open but it."""


@contextmanager
def _told() -> Generator[None]:
    """Errors of ADBC as LogUnavailable."""
    try:
        yield
    except adbc_driver_manager.Error as error:
        lines = shown_url(str(error)).strip().splitlines()
        raise LogUnavailable("read the log", lines[0] if lines else type(error).__name__) from error


def _reached(ask: Ask, database: str) -> Mapping[str, int]:
    settled = settled_by(ask, database)
    return {part: getattr(settled, part) for part in _REACHED}


def _both(log: Mapping[str, int], sealed: Sealed | None) -> Mapping[str, int]:
    """What log and archive reach together: of a log that lost its newest partition, only the archive knows."""
    return log if sealed is None else {part: max(high, sealed.reached[part]) for part, high in log.items()}


def _one(cursor: Any, statement: str) -> Sequence[int | None]:
    cursor.execute(statement)
    found: Sequence[int | None] = cursor.fetchone()
    return found


class _ArrowReader:
    """Through a driver that hands over Arrow."""

    def __init__(
        self,
        cursor: adbc_driver_manager.dbapi.Cursor,
        dialect: Literal["postgresql", "sqlite"],
        sealed: Sealed | None,
    ) -> None:
        self._cursor = cursor
        self._dialect: Literal["postgresql", "sqlite"] = dialect
        self.sealed = sealed

    def table(self, name: str, schema: pa.Schema, **parameters: Value) -> pa.Table:
        batches: list[pa.RecordBatch] = []
        for batch in self._ask(name, parameters, _ALL):
            columns = [_typed(batch.column(at), field.type) for at, field in enumerate(schema)]
            batches.append(pa.record_batch(columns, schema=schema))
        return pa.Table.from_batches(batches, schema)

    def payloads(self, name: str, **parameters: Value) -> Iterator[Payloads]:
        for batch in self._ask(name, parameters, _LARGE):
            sequence, codec, token_ids, logprobs = batch.columns
            # Not by `to_pylist`, which takes forty times as long.
            numbers, codecs = sequence.to_numpy().tolist(), codec.to_numpy().tolist()
            yield Payloads(numbers, codecs, _views(token_ids), _views(logprobs))

    def _ask(self, name: str, parameters: Mapping[str, Value], lines: int) -> Iterator[pa.RecordBatch]:
        text = query(name, self._dialect)
        if self._dialect == "sqlite":
            asked = numbered(text)
            self._cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(lines)})
            self._cursor.execute(asked.text, tuple(parameters[each] for each in asked.names) or None)
        else:
            self._cursor.execute(spelled(text, parameters))
        return iter(self._cursor.fetch_record_batch())


class _PostgresReader(_ArrowReader):
    def __init__(
        self, cursor: adbc_driver_manager.dbapi.Cursor, sealed: Sealed | None, reached: Mapping[str, int]
    ) -> None:
        super().__init__(cursor, "postgresql", sealed)
        self.reached = _both(reached, sealed)

    @property
    def snapshot(self) -> str | None:
        (name,) = _one(self._cursor, "select pg_export_snapshot()")
        return str(name)


def _typed(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """A column in the type of the schema; SQLite's has one of its own when it is empty."""
    if column.null_count == len(column):
        return pa.nulls(len(column), wanted)
    return (column.storage if isinstance(column, pa.ExtensionArray) else column).cast(wanted)


def _views(column: pa.Array) -> list[memoryview]:
    """The values of a binary column, without copying them."""
    _, offsets, data = column.buffers()
    edges = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].tolist()
    whole = memoryview(data if data is not None else b"").cast("B")
    return [whole[low:high] for low, high in pairwise(edges)]


class _SqliteReader:
    def __init__(self, connection: sqlite3.Connection, sealed: Sealed | None) -> None:
        self._connection = connection
        self.sealed = sealed
        self.reached = _both(_reached(partial(_one, connection.cursor()), "sqlite"), sealed)
        self.snapshot: str | None = None

    def table(self, name: str, schema: pa.Schema, **parameters: Value) -> pa.Table:
        batches: list[pa.RecordBatch] = []
        for lines in self._ask(name, parameters):
            values = zip(*lines, strict=True)
            columns = [pa.array(each, field.type) for each, field in zip(values, schema, strict=True)]
            batches.append(pa.record_batch(columns, schema=schema))
        return pa.Table.from_batches(batches, schema)

    def payloads(self, name: str, **parameters: Value) -> Iterator[Payloads]:
        for lines in self._ask(name, parameters):
            yield Payloads(*zip(*lines, strict=True))

    def _ask(self, name: str, parameters: Mapping[str, Value]) -> Iterator[list[Any]]:
        cursor = self._connection.execute(query(name, "sqlite"), parameters)
        while lines := cursor.fetchmany(_LINES):
            yield lines
