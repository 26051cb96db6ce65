"""The rows as Megatron's `IndexedDataset`s: a `.bin` and `.idx` pair for each of a row's arrays.

Knows which array is kept in which type; does not know rows' sources or trainers, nor the file format, which Megatron's
own builder writes. Law: a folder is whole or absent, and item i of every dataset in it is of the same row.

    rows/
      token_ids.bin .idx        int32      `GPTDataset` reads these: each row is a document of its own
      loss_mask.bin .idx        uint8      1 where a token trains
      logprobs.bin .idx         float32    position t scores token t, 0 where not sampled
      policy_versions.bin .idx  int64      -1 where not sampled
      rows.parquet              a line a row, in the same order: ids, group, reward, calls; and what made the folder

    tokens = IndexedDataset("rows/token_ids")
    logprobs = IndexedDataset("rows/logprobs")
    tokens[0], logprobs.get(0, offset=100, length=50)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from replay.errors import FileUnwritable
from replay.export import FACTS, MEDIA, facts, media, metadata, open_parquet
from replay.rowset import Part
from replay.selection import Selection
from replay.tally import Tally, tally

KINDS = {"token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "policy_versions": np.int64}
"""The datasets of a folder and their types."""


def stream_indexed(parts: Iterable[Part], folder: Path, selection: Selection) -> Tally:
    """Write rows into a new folder as they come, aside first and then renamed, and count them.

    Args:
        parts: of `replay.rowset.stream` under this selection.
        folder: to make; one that is there already is not touched.
        selection: for the metadata.

    Raises FileUnwritable, and what the stream raises.
    """
    if folder.exists():
        raise FileUnwritable(str(folder), "it exists already")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    builders: dict[str, IndexedDatasetBuilder] = {}
    try:
        aside.mkdir()
        for name, kind in KINDS.items():
            builders[name] = IndexedDatasetBuilder(get_bin_path(str(aside / name)), kind)
        with open_parquet(aside / "rows.parquet", pa.schema([*FACTS, *MEDIA])) as writer:
            found = tally(_written(parts, builders, writer), selection)
            writer.add_key_value_metadata(metadata(found))
        for name, builder in builders.items():
            builder.finalize(get_idx_path(str(aside / name)))
        aside.rename(folder)
    except OSError as error:
        raise FileUnwritable(str(folder), error.strerror or str(error)) from error
    finally:
        for builder in builders.values():
            builder.data_file.close()
        shutil.rmtree(aside, ignore_errors=True)
    return found


def _written(
    parts: Iterable[Part], builders: dict[str, IndexedDatasetBuilder], writer: pq.ParquetWriter
) -> Iterator[Part]:
    """The parts again, each once it is written."""
    for part in parts:
        for row in part.rows:
            for name, builder in builders.items():
                builder.add_document(getattr(row, name), [row.length])
        if part.rows:
            writer.write_table(pa.table([*facts(part.rows), media(part.rows)], schema=writer.schema))
        yield part
