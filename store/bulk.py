"""Many rows into a table of PostgreSQL at once, by COPY in its binary form.

Knows the table's types and psycopg's COPY; does not know what rows mean. Law: all rows of a COPY are in the table or
none. Triggers and checks hold for each of them; an id that is there is an error, for COPY knows no `on conflict`.

Of what an insert of 2,000 tokens costs PostgreSQL and its client, COPY takes half (benchmarks/README.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import Table
from sqlalchemy.dialects import postgresql


def copy_in(cursor: psycopg.Cursor[Any], table: Table, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Add the rows, whose values are in the order of `names`; they may be made while earlier ones are stored."""
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    statement = sql.SQL("copy {} ({}) from stdin (format binary)").format(sql.Identifier(table.name), columns)
    with cursor.copy(statement) as lines:
        lines.set_types([_type(table, name) for name in names])
        for row in rows:
            lines.write_row(row)


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
def _type(table: Table, name: str) -> str:
    """PostgreSQL's type of a column."""
    return table.c[name].type.compile(dialect=postgresql.dialect()).lower()  # type: ignore[no-untyped-call]
