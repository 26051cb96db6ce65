"""A log and its archive as one database in DuckDB: the tables without their arrays, and the views of auditors.

Knows Arrow tables and the views in `sql/views.sql`; does not know who asks. Law: it is a copy in memory of one
snapshot. Nothing done to it reaches the log, the archive or any file.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import duckdb
import pyarrow as pa
from sqlalchemy import Engine, Text, select, type_coerce

from replay.archive import archive_url, columns_of, open_archive
from replay.queries import query
from store import schema
from store.database import read
from store.schema import CanonicalJson, Id

VIEWS = ("rollout_state", "row_boundary", "chain", "row_token_count", "declared_vs_found", "drift")
"""In an order in which each needs only those before it."""
WIDE = ("codec", "token_ids", "logprobs", "secret_hash")
"""Columns that are left out: arrays, and the one secret."""
_LINES = 10_000


@contextmanager
def attached(database: Engine, archive: str | None = None) -> Generator[duckdb.DuckDBPyConnection]:
    """Tables and views of the log, and of the archive at `archive`, else at $TURNLOG_ARCHIVE, as one.

    An event that is in both is there once. Raises LogUnavailable, ArchiveUnavailable and ArchiveDamaged.
    """
    url = archive_url(archive)
    sealed = None if url is None else open_archive(url)
    with duckdb.connect(":memory:") as engine:
        with read(database) as connection:
            for table in schema.metadata.sorted_tables:
                columns = [column for column in table.c if column.name not in WIDE]
                typed = pa.schema([field for field in columns_of(table) if field.name not in WIDE])
                asked = [
                    type_coerce(column, Text).label(column.name) if isinstance(column.type, CanonicalJson) else column
                    for column in columns
                ]
                parts = [] if sealed is None else [sealed.lines(file, typed) for file in sealed.files[table.name]]
                lines = connection.execution_options(yield_per=_LINES).execute(select(*asked))
                for some in lines.partitions():
                    values = zip(*some, strict=True)
                    parts.append(
                        pa.table([_array(column, each) for column, each in zip(columns, values, strict=True)], typed)
                    )
                engine.register(f"all_of_{table.name}", pa.concat_tables(parts) if parts else typed.empty_table())
                engine.execute(
                    f"create table {table.name} as"
                    f" select distinct on (sequence) * from all_of_{table.name} order by sequence"
                )
                engine.unregister(f"all_of_{table.name}")
        for view in VIEWS:
            engine.execute(query(f"view_{view}"))
        engine.execute("create macro uuid(words) as cast(words as uuid)")
        engine.execute("set integer_division = true")  # as the log's own databases divide
        engine.execute("set enable_external_access = false")
        engine.execute("set lock_configuration = true")
        yield engine


def _array(column: object, values: tuple[object, ...]) -> pa.Array:
    kind = getattr(column, "type", None)
    if isinstance(kind, Id):
        ids = [None if value is None else getattr(value, "bytes", value) for value in values]
        return pa.ExtensionArray.from_storage(pa.uuid(), pa.array(ids, pa.binary(16)))
    return pa.array(values)
