"""Named queries in, Arrow out, from whichever database holds the log.

Knows the drivers and how their values become Arrow columns of a given schema; does not know tables or what is asked.
Law: everything read through one reader is one snapshot of the log, and nothing can be written through it.

PostgreSQL is read through ADBC, which hands over Arrow without a Python value per field; SQLite through its own driver,
in the connection that is open anyway: a second SQLite library in one process would break the first one's file locks.

    with open_reader(database) as reader:
        for batch in reader.read("calls_between", schema, low=1, high=1000): ...
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import adbc_driver_manager
import adbc_driver_postgresql.dbapi
import pyarrow as pa
from sqlalchemy import Engine

from replay.queries import numbered, query
from store.database import read, shown_url
from store.errors import LogUnavailable

_LINES = 20_000
"""Lines of a record batch."""

Value = int | str


class Reader(Protocol):
    """A snapshot of a log that answers named queries."""

    def read(self, name: str, schema: pa.Schema, **parameters: Value) -> Iterator[pa.RecordBatch]:
        """The answer's lines in pieces, its columns as the schema names and types them."""
        ...

    def table(self, name: str, schema: pa.Schema, **parameters: Value) -> pa.Table:
        """The whole answer."""
        ...


@contextmanager
def open_reader(database: Engine) -> Generator[Reader]:
    """A reader of the log; raises LogUnavailable when it cannot be reached."""
    if database.dialect.name == "sqlite":
        with read(database) as connection:
            try:
                yield _SqliteReader(cast("sqlite3.Connection", connection.connection.driver_connection))
            except sqlite3.Error as error:
                raise LogUnavailable("read the log", str(error)) from error
        return
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        with adbc_driver_postgresql.dbapi.connect(url) as connection, connection.cursor() as cursor:
            cursor.execute("set transaction isolation level repeatable read read only")
            yield _PostgresReader(cursor)
    except adbc_driver_manager.Error as error:
        lines = shown_url(str(error)).strip().splitlines()
        raise LogUnavailable("read the log", lines[0] if lines else type(error).__name__) from error


class _PostgresReader:
    def __init__(self, cursor: adbc_driver_postgresql.dbapi.Cursor) -> None:
        self._cursor = cursor

    def read(self, name: str, schema: pa.Schema, **parameters: Value) -> Iterator[pa.RecordBatch]:
        asked = numbered(query(name, "postgresql"))
        self._cursor.execute(asked.text, tuple(parameters[each] for each in asked.names) or None)
        for batch in self._cursor.fetch_record_batch():
            columns = [_stored(batch.column(at)).cast(field.type) for at, field in enumerate(schema)]
            yield pa.record_batch(columns, schema=schema)

    def table(self, name: str, schema: pa.Schema, **parameters: Value) -> pa.Table:
        return pa.Table.from_batches(self.read(name, schema, **parameters), schema)


def _stored(column: pa.Array) -> pa.Array:
    """An id's 16 bytes; any other column as it is."""
    return column.storage if isinstance(column, pa.ExtensionArray) else column


class _SqliteReader:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def read(self, name: str, schema: pa.Schema, **parameters: Value) -> Iterator[pa.RecordBatch]:
        cursor = self._connection.execute(query(name, "sqlite"), parameters)
        while lines := cursor.fetchmany(_LINES):
            columns = [
                pa.array(values, field.type) for values, field in zip(zip(*lines, strict=True), schema, strict=True)
            ]
            yield pa.record_batch(columns, schema=schema)

    def table(self, name: str, schema: pa.Schema, **parameters: Value) -> pa.Table:
        return pa.Table.from_batches(self.read(name, schema, **parameters), schema)
