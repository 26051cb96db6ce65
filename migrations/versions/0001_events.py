"""The six tables of events, and the triggers that refuse to change one.

Two texts, one a database: they differ in types, in how a trigger is written and in what a careless statement may try.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    text = Path(__file__).with_name(f"0001_events.{connection.dialect.name}.sql").read_text(encoding="utf-8")
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(text, execution_options={"no_parameters": True})
        return
    for statement in _statements(text):  # not executescript: it commits what is open, and half a schema could stay
        connection.exec_driver_sql(statement)


def _statements(text: str) -> Iterator[str]:
    """SQLite statements, one by one; the semicolons inside a trigger end none."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
