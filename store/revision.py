"""What revisions of the schema are made of: their SQL files, an index that is built while calls go on, a table rebuilt.

Knows Alembic's operations and how the two databases take DDL; does not know which tables there are. Law: the same
revision runs on a connection and writes itself down as SQL, both give the same schema, and no trigger is lost.

A revision says with `in_one_transaction` whether it stays inside one. One that does not is committed in parts, so it
must be able to run again from its start: `if not exists`, `create or replace`. On PostgreSQL no statement may hold a
lock that calls wait for while it works through a large table:

- a column comes without a default, or with a constant one;
- a check comes as `not valid`, and is validated after the transaction (`0002_secret_and_views.py`);
- an index comes from `create_index`.

When SQL is written down, the database is only read (`reading` of Alembic's attributes), at the revision it is at.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from alembic import op
from alembic.operations import BatchOperations
from sqlalchemy import Connection, MetaData, Table, text

_LEAVES = text(
    "select relid::regclass::text as name from pg_partition_tree(cast(cast(:name as text) as regclass))"
    " where isleaf and level > 0 order by 1"
)
_INVALID = text("select 1 from pg_index where indexrelid = to_regclass(:name) and not indisvalid")
_KEPT = text("select type, name, sql from sqlite_master where type in ('trigger', 'view') order by rowid")


def run_file(revision: str) -> None:
    """Run the SQL beside a revision: `0001_events.py` has `0001_events.sqlite.sql` and `0001_events.postgresql.sql`."""
    dialect = op.get_context().dialect.name
    file = Path(revision)
    words = file.with_name(f"{file.stem}.{dialect}.sql").read_text(encoding="utf-8")
    if op.get_context().as_sql:
        op.execute(text(words.rstrip().removesuffix(";").replace(":", "\\:")))
    elif dialect == "postgresql":
        op.get_bind().exec_driver_sql(words, execution_options={"no_parameters": True})
    else:
        for statement in _statements(words):  # not executescript: it commits what is open, and half a schema could stay
            op.get_bind().exec_driver_sql(statement)


def create_index(name: str, table: str, columns: list[str]) -> None:
    """Build an index while calls go on; the revision is `in_one_transaction = False`.

    PostgreSQL builds it concurrently, in a partitioned table one partition after another. What an attempt that was cut
    off left half built is built anew.
    """
    if op.get_context().dialect.name == "sqlite":
        op.create_index(name, table, columns, if_not_exists=True)
        return
    leaves = list(_reading().scalars(_LEAVES, {"name": table}))
    named = {leaf: f"{leaf}_{name.removeprefix(f'{table}_')}" for leaf in leaves} or {table: name}
    quoted = op.get_context().dialect.identifier_preparer.quote
    with op.get_context().autocommit_block():  # all of it: what waits for one lock must hold no other
        for leaf, built in named.items():
            if _reading().scalar(_INVALID, {"name": built}):
                op.drop_index(built, postgresql_concurrently=True, if_exists=True)
            op.create_index(built, leaf, columns, postgresql_concurrently=True, if_not_exists=True)
        if leaves:
            listed = ", ".join(map(quoted, columns))
            op.execute(f"create index if not exists {quoted(name)} on only {quoted(table)} ({listed})")
            for built in named.values():
                op.execute(f"alter index {quoted(name)} attach partition {quoted(built)}")


@contextmanager
def rebuilt(table: str) -> Generator[BatchOperations]:
    """Change a table of SQLite in a way that copies it whole, which Alembic does without a word about its triggers.

    Every trigger and view of the database is put aside meanwhile, since those of other tables may name this one, and
    put back as it was; a revision that changes one replaces it afterwards.
    """
    kept = _reading().execute(_KEPT).all()
    for kind, name, _ in kept:
        op.execute(f"drop {kind} {name}")
    known = Table(table, MetaData(), autoload_with=_reading()) if op.get_context().as_sql else None
    with op.batch_alter_table(table, copy_from=known, recreate="always") as batch:
        yield batch
    for _, _, words in kept:
        op.execute(text(words.replace(":", "\\:")))


def _reading() -> Connection:
    """The database, at the revision it is at."""
    context = op.get_context()
    if context.as_sql:
        assert context.config is not None, "store.migrate gives one"
        return cast("Connection", context.config.attributes["reading"])
    return op.get_bind()


def _statements(words: str) -> Iterator[str]:
    """SQLite statements, one by one; the semicolons inside a trigger end none."""
    statement = ""
    for line in words.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
