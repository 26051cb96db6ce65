"""The rows as a Parquet file: one row a line, its arrays as lists.

Knows columns and files; does not know where rows come from. Law: a file is whole or absent, and says what made it.

The file's metadata hold `turnlog.position`, `turnlog.selection` (JSON) and `turnlog.rows_sha256`. DuckDB reads it:
`select row_id, len(token_ids) from 'rows.parquet'`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replay.errors import FileUnwritable
from replay.row import Row
from replay.rowset import RowSet
from store import hashing

_SCHEMA = pa.schema(
    {
        "row_id": pa.string(),
        "rollout_id": pa.string(),
        "group_id": pa.string(),
        "reward": pa.float64(),
        "call_ids": pa.list_(pa.string()),
        "call_numbers": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "policy_versions": pa.list_(pa.int64()),
    }
)
_ROWS_AT_ONCE = 1000


def write_parquet(found: RowSet, file: Path) -> None:
    """Write the rows to `file`, aside first and then renamed over it. Raises FileUnwritable."""
    facts = {
        "turnlog.position": str(found.position),
        "turnlog.selection": hashing.canonical_json(found.selection.as_json()).decode(),
        "turnlog.rows_sha256": found.digest(),
    }
    schema = _SCHEMA.with_metadata(facts)
    aside = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with pq.ParquetWriter(aside, schema, compression="zstd") as writer:
            for start in range(0, len(found.rows), _ROWS_AT_ONCE):
                columns = _columns(found.rows[start : start + _ROWS_AT_ONCE])
                arrays = [pa.array(columns[field.name], field.type) for field in schema]
                writer.write_table(pa.table(arrays, schema=schema))
        aside.replace(file)
    except OSError as error:
        raise FileUnwritable(str(file), error.strerror or str(error)) from error
    finally:
        aside.unlink(missing_ok=True)


def _columns(rows: Sequence[Row]) -> dict[str, list[object]]:
    return {
        "row_id": [row.row_id for row in rows],
        "rollout_id": [row.rollout_id for row in rows],
        "group_id": [row.group_id for row in rows],
        "reward": [row.reward for row in rows],
        "call_ids": [[str(call_id) for call_id in row.call_ids] for row in rows],
        "call_numbers": [row.call_numbers for row in rows],
        "token_ids": [row.token_ids for row in rows],
        "loss_mask": [row.loss_mask for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "policy_versions": [row.policy_versions for row in rows],
    }
