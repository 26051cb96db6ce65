"""The insert of one table's events, as a driver takes it.

Knows SQLAlchemy's compiler and what each driver wants of a value; does not know when an event may be in the log. Law: a
statement is made once a table and database, and takes an event whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Dialect, Table
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.dialects.sqlite import pysqlite

from store import schema
from store.columns import stored_row
from store.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """An insert as one driver takes it."""

    text: str
    """Which does nothing for an id that is there."""
    of_new: str
    """Which refuses an id that is there."""
    names: tuple[str, ...]
    """The columns in the order of its parameters."""
    take: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    """Their values of a row."""
    ids_as_bytes: tuple[str, ...]
    """Columns of ids that the driver takes as bytes."""

    def parameters(self, event: Event) -> tuple[Any, ...]:
        """The event as its row."""
        row = stored_row(event)
        for name in self.ids_as_bytes:
            if (value := row[name]) is not None:
                row[name] = value.bytes
        return self.take(row)


@cache
def insert_into(table: Table, database: str) -> Insert:
    """The insert into a table of one database."""
    names = [column.name for column in table.c if column.name != "sequence"]
    insert: Any
    if database == "sqlite":
        dialect: Dialect = pysqlite.dialect(paramstyle="qmark")
        insert = sqlite_insert(table)
    else:
        dialect = psycopg.dialect(paramstyle="format")  # type: ignore[no-untyped-call]
        insert = postgresql_insert(table)
    compiled = insert.on_conflict_do_nothing().inline().compile(dialect=dialect, column_keys=names)
    order = compiled.positiontup
    assert order is not None, "both parameter styles are positional"
    ids = (name for name in names if isinstance(table.c[name].type, schema.Id))
    return Insert(
        text=str(compiled),
        of_new=str(insert.inline().compile(dialect=dialect, column_keys=names)),
        names=tuple(order),
        take=itemgetter(*order),
        ids_as_bytes=tuple(ids) if database == "sqlite" else (),
    )
