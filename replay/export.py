"""The rows as a Parquet file: one row a line, its arrays as lists.

Knows columns and files; does not know where rows come from. Law: a file is whole or absent, and says what made it.

The file's metadata hold `turnlog.position`, `turnlog.selection` (JSON) and `turnlog.rows_sha256`. DuckDB reads it
(`select row_id, len(token_ids) from 'rows.parquet'`), and so does Hugging Face's `datasets`
(`load_dataset("parquet", data_files="rows.parquet")`).

Rows are written as they come, and no more than one part of a stream is held.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from replay.errors import FileUnwritable
from replay.row import Row
from replay.rowset import Part, RowSet
from replay.selection import Selection
from replay.tally import Tally, tally
from store import hashing

FACTS = pa.schema(
    {
        "row_id": pa.string(),
        "rollout_id": pa.string(),
        "group_id": pa.string(),
        "reward": pa.float64(),
        "call_ids": pa.list_(pa.string()),
        "call_numbers": pa.list_(pa.int32()),
    }
)
"""Columns that are not a value per token."""
ARRAYS = pa.schema(
    {
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "policy_versions": pa.list_(pa.int64()),
    }
)
"""Columns of a value per token."""
_HANDLE: dict[str, pa.DataType] = {
    "modality": pa.string(),
    "sha256": pa.string(),  # hex: the object's name in the media store
    "start": pa.int64(),
    "length": pa.int64(),
    "tokens": pa.int64(),
    "geometry": pa.string(),  # JSON
}
MEDIA = pa.schema({"media": pa.list_(pa.struct(_HANDLE))})
"""What stands among the tokens: handles, their bytes lie in the media store (`replay.media.MediaHandle`)."""
_TOKENS_AT_ONCE = 1 << 20
"""Of a row group: about 20 MB before it is compressed."""


def write_parquet(found: RowSet, file: Path) -> None:
    """Write the rows that are held to `file`, aside first and then renamed over it. Raises FileUnwritable."""
    stream_parquet([Part(rows=found.rows, counts=None, position=found.position)], file, found.selection)


def stream_parquet(parts: Iterable[Part], file: Path, selection: Selection) -> Tally:
    """Write rows to `file` as they come, aside first and then renamed over it, and count them.

    Args:
        parts: of `replay.rowset.stream` under this selection.
        file: to write; what it held before stays until all rows are there.
        selection: for the metadata.

    Raises FileUnwritable, and what the stream raises.
    """
    if file.is_dir():
        raise FileUnwritable(str(file), "it is a folder")
    aside = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with open_parquet(aside, pa.schema([*FACTS, *ARRAYS, *MEDIA])) as writer:
            found = tally(_written(parts, writer), selection)
            writer.add_key_value_metadata(metadata(found))
        aside.replace(file)
    except OSError as error:
        raise FileUnwritable(str(file), error.strerror or str(error)) from error
    finally:
        aside.unlink(missing_ok=True)
    return found


def open_parquet(file: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer whose metadata, known at the end, are those of the schema that readers see: no second copy of it.

    Arrays have no dictionary: without one they are smaller by a quarter, and read faster.
    """
    options: dict[str, Any] = {"use_dictionary": [field.name for field in schema if pa.types.is_string(field.type)]}
    return pq.ParquetWriter(file, schema, compression="zstd", store_schema=False, **options)


def metadata(found: Tally) -> Mapping[str, str]:
    """What a file says of how it was made."""
    return {
        "turnlog.position": str(found.position),
        "turnlog.selection": hashing.canonical_json(found.selection.as_json()).decode(),
        "turnlog.rows_sha256": found.sha256,
    }


def facts(rows: Sequence[Row]) -> list[pa.Array]:
    """The columns of `FACTS`."""
    columns: list[list[object]] = [
        [row.row_id for row in rows],
        [row.rollout_id for row in rows],
        [row.group_id for row in rows],
        [row.reward for row in rows],
        [[str(call_id) for call_id in row.call_ids] for row in rows],
        [row.call_numbers for row in rows],
    ]
    return [pa.array(column, field.type) for column, field in zip(columns, FACTS, strict=True)]


def _written(parts: Iterable[Part], writer: pq.ParquetWriter) -> Iterator[Part]:
    """The parts again, each once it is written."""
    for part in parts:
        for rows in _cut(part.rows):
            writer.write_table(pa.table([*facts(rows), *_arrays(rows), media(rows)], schema=writer.schema))
        yield part


def media(rows: Sequence[Row]) -> pa.Array:
    """The column of `MEDIA`."""
    return pa.array([[handle.as_json() for handle in row.media] for row in rows], MEDIA.field(0).type)


def _cut(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    begun = 0
    tokens = 0
    for place, row in enumerate(rows):
        tokens += row.length
        if tokens >= _TOKENS_AT_ONCE or place + 1 == len(rows):
            yield rows[begun : place + 1]
            begun, tokens = place + 1, 0


def _arrays(rows: Sequence[Row]) -> list[pa.Array]:
    edges = pa.array(np.append(0, np.cumsum([row.length for row in rows])), pa.int32())

    def column(name: str, kind: pa.DataType) -> pa.Array:
        arrays: list[npt.NDArray[np.generic]] = [getattr(row, name) for row in rows]
        return pa.ListArray.from_arrays(edges, pa.array(np.concatenate(arrays), kind.value_type))

    return [column(field.name, field.type) for field in ARRAYS]
