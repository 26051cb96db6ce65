"""Megatron's own reader over what was exported for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from sqlalchemy import Engine

from replay.errors import FileUnwritable
from replay.indexed import KINDS, stream_indexed
from replay.rowset import Part, RowSet, build, stream
from replay.selection import Selection
from replay.tally import tally


@pytest.fixture
def found(sqlite_database: Engine, remember: Any, groups_of_rollouts: Any, chain_maker: Any) -> RowSet:
    remember(sqlite_database, groups_of_rollouts(chain_maker, ["g0", "g1"]))
    return build(sqlite_database)


@pytest.mark.parametrize("mapped", [True, False])
def test_megatron_reads_every_array_back(
    found: RowSet, sqlite_database: Engine, tmp_path: Path, *, mapped: bool
) -> None:
    folder = tmp_path / "rows"
    written = stream_indexed(stream(sqlite_database, tokens=100), folder, Selection())
    assert written == tally(stream(sqlite_database), Selection())
    for name, kind in KINDS.items():
        dataset = IndexedDataset(str(folder / name), mmap=mapped)
        assert len(dataset) == len(found.rows)
        assert dataset.document_indices.tolist() == [*range(len(found.rows) + 1)]
        for row, item in zip(found.rows, dataset, strict=True):
            assert item.dtype == kind
            assert item.tolist() == getattr(row, name).tolist(), name
    scores = IndexedDataset(str(folder / "logprobs"), mmap=mapped)
    assert scores.get(1, offset=3, length=4).tolist() == found.rows[1].logprobs[3:7].tolist()


def test_what_is_not_a_value_a_token_stands_beside_in_the_same_order(found: RowSet, tmp_path: Path) -> None:
    parts = [Part(rows=found.rows, counts=None, position=found.position)]
    stream_indexed(parts, tmp_path / "rows", found.selection)
    lines = pq.read_table(tmp_path / "rows" / "rows.parquet").to_pylist()
    assert [line["row_id"] for line in lines] == [row.row_id for row in found.rows]
    assert [line["reward"] for line in lines] == [row.reward for row in found.rows]
    facts = pq.read_schema(tmp_path / "rows" / "rows.parquet").metadata
    assert facts[b"turnlog.rows_sha256"].decode() == found.digest()
    assert json.loads(facts[b"turnlog.selection"]) == found.selection.as_json()


def test_a_folder_is_whole_or_absent(found: RowSet, tmp_path: Path) -> None:
    def broken() -> Iterator[Part]:
        yield Part(rows=found.rows, counts=None, position=found.position)
        raise ValueError("the log went away")

    with pytest.raises(ValueError, match="the log went away"):
        stream_indexed(broken(), tmp_path / "rows", found.selection)
    assert not [each for each in tmp_path.iterdir() if "rows" in each.name]
    (tmp_path / "rows").mkdir()
    with pytest.raises(FileUnwritable, match="it exists already"):
        stream_indexed(broken(), tmp_path / "rows", found.selection)
    with pytest.raises(FileUnwritable, match="No such file or directory"):
        stream_indexed(broken(), tmp_path / "missing" / "rows", found.selection)
