"""Many rows into a table of PostgreSQL at once, by COPY in its binary form.

Knows that form of the types that the log's columns have; does not know what rows mean. Law: all rows of a COPY are in
the table or none. Triggers and checks hold for each of them; an id that is there is an error, for COPY knows no `on
conflict`.

Of what an insert of 2,000 tokens costs PostgreSQL and its client, COPY takes half (benchmarks/README.md). Statement and
types are found out once a table and not once a COPY, as psycopg would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from struct import Struct
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import Table
from sqlalchemy.dialects import postgresql

_BEGIN, _END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_PIECE = 64 << 10
"""Bytes that are sent together: PostgreSQL stores them while the next rows are made."""


def copy_in(cursor: psycopg.Cursor[Any], table: Table, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Add the rows, whose values are in the order of `names`; they may be made while earlier ones are stored."""
    statement, count, fields = _form(table, tuple(names), cursor.connection.info.encoding)
    with cursor.copy(statement) as lines:
        piece = [_BEGIN]
        size = 0
        for row in rows:
            line = b"".join(
                [_NULL if value is None else field(value) for field, value in zip(fields, row, strict=True)]
            )
            piece += (count, line)
            size += len(line)
            if size > _PIECE:
                lines.write(b"".join(piece))
                piece, size = [], 0
        lines.write(b"".join((*piece, _END)))


def copied_in(cursor: psycopg.Cursor[Any], table: Table, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> bool:
    """Whether the rows were added: none of them is when the table has one already, and the transaction goes on."""
    cursor.execute("savepoint before_copy")
    try:
        copy_in(cursor, table, names, rows)
    except psycopg.errors.UniqueViolation:
        cursor.execute("rollback to savepoint before_copy")
        return False
    cursor.execute("release savepoint before_copy")
    return True


@cache
def _form(table: Table, names: tuple[str, ...], encoding: str) -> tuple[bytes, bytes, tuple[_Field, ...]]:
    """The statement, what each line begins with, and how it goes on."""
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    statement = sql.SQL("copy {} ({}) from stdin (format binary)").format(sql.Identifier(table.name), columns)
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    kinds = (table.c[name].type.compile(dialect=dialect).lower() for name in names)
    fields = (partial(_text, encoding) if kind == "text" else _FIELDS[kind] for kind in kinds)
    return statement.as_bytes(), Struct(">h").pack(len(names)), tuple(fields)


_Field = Callable[[Any], bytes]
"""A value as PostgreSQL receives it: its length in four bytes, and its bytes."""
_LENGTH = Struct(">i").pack


def _text(encoding: str, value: str) -> bytes:
    return _bytes(value.encode(encoding))


def _bytes(value: bytes) -> bytes:
    return _LENGTH(len(value)) + value


_FIELDS: Mapping[str, _Field] = {
    "bytea": _bytes,
    "uuid": lambda value: _bytes(value.bytes),
    "bigint": partial(Struct(">iq").pack, 8),
    "smallint": partial(Struct(">ih").pack, 2),
    "double precision": partial(Struct(">id").pack, 8),
}
