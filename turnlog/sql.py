"""`turnlog sql`: one query to the log, read only, its answer as a table, CSV, JSON or Parquet.

Knows how to run text that nobody has checked, and how its values are shown; does not know tables or what they mean.
Law: no text can change the log. It runs in a read-only snapshot, as one statement, and is not let out of that snapshot:

- SQLite asks `_may` about everything the statement would do, and that allows reading. `pragma query_only = off`,
  `attach` and transactions are refused, and the connection is `query_only` beside that.
- PostgreSQL runs it as the query of a cursor, which can be a query only: no `set`, `commit` or second statement. What
  the query calls still runs in a transaction that is read only and whose first snapshot is taken, so that no setting
  makes it writable again. `explain` is no query, so it runs as a prepared statement, which is one statement as well.
  At the end all is rolled back: `explain analyze create table ... as` gets past the read-only transaction.
- With an archive DuckDB runs it, on a copy of both in memory that reaches no file (`replay.attached`).

Rights stay those of the URL's user: on PostgreSQL a superuser's query can call functions that reach beyond the log.

`uuid('0198...')` makes an id of a text, on each of them.
"""

from __future__ import annotations

import csv
import json
import re
import sqlite3
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, count, islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from uuid import UUID

from pydantic import JsonValue
from rich.markup import escape
from rich.table import Table
from sqlalchemy import Engine, inspect
from sqlalchemy.exc import SAWarning

from replay.errors import FileUnwritable
from store.database import read
from turnlog.errors import BadSql, NotTabular

if TYPE_CHECKING:
    import duckdb
    import psycopg

Value = int | float | str | bytes | Decimal | None
"""What a column can hold, once ids are text."""

_FETCH = 1000
"""Lines that the database hands over at once."""
_SHOWN = 16
"""Bytes of a blob that the terminal shows."""
_SCHEMA = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo"})
"""Pragmas that tell of tables, and set nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a query gives; its lines are read as they are asked for."""

    columns: tuple[str, ...]
    """Each name once: a second `call_id` is `call_id_2`."""
    lines: Iterator[tuple[Value, ...]]


@contextmanager
def ask(database: Engine, sql: str) -> Generator[Answer]:
    """Run one query. Raises BadSql for whatever the database refuses, also while the lines are read."""
    with read(database) as connection:
        driver = connection.connection.driver_connection
        if isinstance(driver, sqlite3.Connection):
            with _sqlite(driver, sql) as answer:
                yield answer
        else:
            with _postgresql(driver, sql) as answer:  # type: ignore[arg-type]
                yield answer


@contextmanager
def ask_both(database: Engine, archive: str | None, sql: str) -> Generator[Answer]:
    """Run one query of DuckDB's on log and archive together, a copy of both. Raises BadSql, and what reading raises."""
    from replay.attached import attached

    with attached(database, archive) as engine, ask_copy(engine, sql) as answer:
        yield answer


@contextmanager
def ask_copy(engine: duckdb.DuckDBPyConnection, sql: str) -> Generator[Answer]:
    """Run one query on what `replay.attached` gives. Raises BadSql."""
    import duckdb

    with _refused(duckdb.Error):
        statements = engine.extract_statements(sql)
        reads = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if len(statements) != 1 or statements[0].type not in reads:
            raise BadSql("it is not one statement that only reads")
        engine.execute("begin transaction read only")  # a query can hold a DELETE
        try:
            yield _answer(engine.execute(statements[0]))
        finally:
            engine.execute("rollback")


def tables(database: Engine) -> list[dict[str, JsonValue]]:
    """The tables and views that a query can name, with their columns."""
    found = inspect(database)
    named = [(name, "table") for name in found.get_table_names()] + [(name, "view") for name in found.get_view_names()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SAWarning)  # of a type that it does not know, and only the name is wanted
        return [
            {"name": name, "kind": kind, "columns": ", ".join(column["name"] for column in found.get_columns(name))}
            for name, kind in sorted(named)
            if name != "alembic_version"
        ]


@contextmanager
def _sqlite(driver: sqlite3.Connection, sql: str) -> Generator[Answer]:
    driver.create_function("uuid", 1, lambda text: UUID(text).bytes, deterministic=True)
    driver.set_authorizer(_may)
    cursor = driver.cursor()
    try:
        with _refused(sqlite3.Error, sqlite3.Warning):
            cursor.execute(sql)
            yield _answer(cursor)
    finally:
        cursor.close()
        driver.set_authorizer(None)


def _may(action: int, first: str | None, second: str | None, _database: str | None, _source: str | None) -> int:
    """Whether a statement may do this, as SQLite asks while it prepares it."""
    match action:
        case sqlite3.SQLITE_SELECT | sqlite3.SQLITE_READ | sqlite3.SQLITE_RECURSIVE:
            allowed = True
        case sqlite3.SQLITE_FUNCTION:
            allowed = second != "load_extension"
        case sqlite3.SQLITE_PRAGMA:
            allowed = first in _SCHEMA
        case sqlite3.SQLITE_UPDATE:  # asked for table-valued functions such as json_each; no statement can really do it
            allowed = first == "sqlite_master"
        case _:
            allowed = False
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


@contextmanager
def _postgresql(driver: psycopg.Connection[Any], sql: str) -> Generator[Answer]:
    import psycopg

    explained = re.match(r"\s*explain\b", sql, re.IGNORECASE)
    try:
        with _refused(psycopg.Error, psycopg.Warning):
            with driver.cursor() as first:
                first.execute("select 1")  # a snapshot: from here on nothing makes the transaction writable
            with driver.cursor() if explained else driver.cursor(name="turnlog") as cursor:
                if isinstance(cursor, psycopg.ServerCursor):
                    cursor.execute(sql.encode())
                else:
                    cursor.execute(sql.encode(), prepare=True)
                yield _answer(cursor)
    finally:
        driver.rollback()


@contextmanager
def _refused(*errors: type[Exception]) -> Generator[None]:
    try:
        yield
    except errors as error:
        lines = str(error).strip().splitlines()
        raise BadSql(lines[0] if lines else type(error).__name__) from error


def _answer(cursor: Any) -> Answer:
    if cursor.description is None:
        raise BadSql("the statement gives no lines")
    names = [column[0] for column in cursor.description]
    return Answer(columns=_once(names), lines=_lines(cursor, [name.endswith("_id") for name in names]))


def _lines(cursor: Any, ids: Sequence[bool]) -> Iterator[tuple[Value, ...]]:
    while fetched := cursor.fetchmany(_FETCH):
        for line in fetched:
            yield tuple(_value(value, is_id=is_id) for value, is_id in zip(line, ids, strict=True))


def _value(value: Any, *, is_id: bool) -> Value:
    """Ids as text on both databases: SQLite has 16 bytes for one, in a column whose name ends with `_id`."""
    if isinstance(value, bytes | memoryview):
        data = bytes(value)
        return str(UUID(bytes=data)) if is_id and len(data) == 16 else data
    if value is None or isinstance(value, int | float | str | Decimal):
        return value
    return str(value)


def _once(names: Iterable[str]) -> tuple[str, ...]:
    """Names made unique.

    >>> _once(["call_id", "call_id", "n", "call_id"])
    ('call_id', 'call_id_2', 'n', 'call_id_3')
    """
    found: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in count(2))
        found.append(next(each for each in chain([name], others) if each not in found))
    return tuple(found)


def first_lines(answer: Answer, limit: int) -> tuple[Table, bool]:
    """The first lines as a table, and whether there are more; a limit of 0 shows all."""
    lines = list(answer.lines if limit == 0 else islice(answer.lines, limit + 1))
    more = 0 < limit < len(lines)
    shown = lines[:limit] if more else lines
    table = Table()
    for place, name in enumerate(answer.columns):
        number = any(isinstance(line[place], int | float | Decimal) for line in shown)
        table.add_column(escape(name), justify="right" if number else "left", overflow="fold")
    for line in shown:
        table.add_row(*(escape(_cell(value)) for value in line))
    return table, more


def _cell(value: Value) -> str:
    if isinstance(value, bytes) and len(value) > _SHOWN:
        return f"{value[:_SHOWN].hex()}... {len(value)} bytes"
    return "" if value is None else str(_plain(value))


def _plain(value: Value) -> int | float | str | None:
    """A value as CSV and JSON have it: blobs in hex, exact numbers as the nearest that programs read, else text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal):
        whole = value.is_finite() and value == value.to_integral_value()
        value = int(value) if whole else float(value)
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def write_csv(answer: Answer, out: TextIO) -> None:
    """All lines as CSV with a heading; NULL is empty."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows(map(_plain, line) for line in answer.lines)


def write_json(answer: Answer, out: TextIO) -> None:
    """All lines as a JSON array of objects, one a line."""
    out.write("[")
    for place, line in enumerate(answer.lines):
        values = zip(answer.columns, map(_plain, line), strict=True)
        out.write(f"{',' if place else ''}\n{json.dumps(dict(values), ensure_ascii=False)}")
    out.write("\n]\n")


def write_parquet(answer: Answer, file: Path) -> int:
    """All lines as a Parquet file, blobs as bytes; says how many. The file is whole or absent.

    Raises NotTabular and FileUnwritable.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [*zip(*answer.lines, strict=True)] or [()] * len(answer.columns)
    try:
        table = pa.table({name: pa.array(values) for name, values in zip(answer.columns, columns, strict=True)})
    except pa.ArrowException as error:
        raise NotTabular(str(error)) from error
    aside = file.with_name(f".{file.name}.part")
    try:
        pq.write_table(table, aside, compression="zstd")
        aside.replace(file)
    except OSError as error:
        raise FileUnwritable(str(file), error.strerror or str(error)) from error
    finally:
        aside.unlink(missing_ok=True)
    return int(table.num_rows)
