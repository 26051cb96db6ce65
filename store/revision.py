"""What revisions of the schema are made of: their SQL files, run as they stand.

Knows Alembic's operations and how the two databases take DDL; does not know which tables there are. Law: the same
revision runs on a connection and writes itself down as SQL, and both give the same schema.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from alembic import op
from sqlalchemy import text


def run_file(revision: str, *, suffix: str = "") -> None:
    """Run the SQL beside a revision: `0001_events.py` has `0001_events.sqlite.sql` and `0001_events.postgresql.sql`.

    Args:
        revision: the revision's own file.
        suffix: more of the SQL file's name, behind the revision's.
    """
    dialect = op.get_context().dialect.name
    file = Path(revision)
    words = file.with_name(f"{file.stem}{suffix}.{dialect}.sql").read_text(encoding="utf-8")
    if op.get_context().as_sql:
        op.execute(text(words.replace(":", "\\:")))
    elif dialect == "postgresql":
        op.get_bind().exec_driver_sql(words, execution_options={"no_parameters": True})
    else:
        for statement in _statements(words):  # not executescript: it commits what is open, and half a schema could stay
            op.get_bind().exec_driver_sql(statement)


def _statements(words: str) -> Iterator[str]:
    """SQLite statements, one by one; the semicolons inside a trigger end none."""
    statement = ""
    for line in words.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
