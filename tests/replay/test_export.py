import gc
import json
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from replay import export
from replay.errors import FileUnwritable
from replay.export import stream_parquet, write_parquet
from replay.rowset import Part, RowSet, build, stream
from replay.selection import Selection
from replay.tally import Tally, tally
from store.events import Event

Remember = Callable[[Engine, Iterable[Event]], None]


@pytest.fixture
def found(sqlite_database: Engine, remember: Remember, grow: Any, chain_maker: Any) -> RowSet:
    remember(sqlite_database, grow(chain_maker, [None, 0, 0, None]))
    return build(sqlite_database)


def test_duckdb_and_pyarrow_read_the_rows_back(found: RowSet, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_parquet(found, file)
    lines: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    for row, line in zip(found.rows, lines, strict=True):
        assert line["row_id"] == row.row_id
        assert line["call_ids"] == [str(call_id) for call_id in row.call_ids]
        assert line["call_numbers"] == [*row.call_numbers]
        for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
            assert line[name] == getattr(row, name).tolist(), name
    with duckdb.connect(":memory:") as engine:
        statement = "select row_id, len(token_ids), list_sum(loss_mask::int[]) from read_parquet($file)"
        counted = engine.sql(statement, params={"file": str(file)}).fetchall()
    assert counted == [(row.row_id, row.length, row.trained) for row in found.rows]


def test_the_file_says_what_made_it(found: RowSet, tmp_path: Path) -> None:
    write_parquet(found, tmp_path / "rows.parquet")
    facts = pq.read_schema(tmp_path / "rows.parquet").metadata
    assert facts[b"turnlog.position"].decode() == str(found.position)
    assert json.loads(facts[b"turnlog.selection"]) == found.selection.as_json()
    assert facts[b"turnlog.rows_sha256"].decode() == found.digest()


def test_a_file_is_whole_or_as_it_was(found: RowSet, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_parquet(found, file)
    write_parquet(found, file)
    assert [each.name for each in tmp_path.iterdir() if "parquet" in each.name] == ["rows.parquet"]
    with pytest.raises(FileUnwritable, match=r"missing/rows\.parquet' cannot be written"):
        write_parquet(found, tmp_path / "missing" / "rows.parquet")
    with pytest.raises(FileUnwritable):
        write_parquet(found, tmp_path)
    assert [each.name for each in tmp_path.iterdir() if "part" in each.name] == []
    assert pq.read_table(file).num_rows == len(found.rows)


def many(database: Engine, remember: Remember, groups_of_rollouts: Any, maker: Any) -> RowSet:
    remember(database, groups_of_rollouts(maker, ["g0", "g1", "g2"]))
    calls = maker(rollout_id="damaged")
    remember(database, [*calls[:2], calls[2].model_copy(update={"media_count": 2})])
    return build(database)


def count(found: RowSet) -> Tally:
    """A row set as its tally should be."""
    return Tally(
        rollouts=found.rollouts,
        rows=len(found.rows),
        tokens=sum(row.length for row in found.rows),
        trained=sum(row.trained for row in found.rows),
        refusals=found.refusals,
        left_out=found.left_out,
        position=found.position,
        selection=found.selection,
        sha256=found.digest(),
    )


def test_a_stream_is_written_as_the_whole_would_be_however_it_is_cut(
    sqlite_database: Engine, remember: Remember, groups_of_rollouts: Any, chain_maker: Any, tmp_path: Path
) -> None:
    found = many(sqlite_database, remember, groups_of_rollouts, chain_maker)
    whole, streamed = tmp_path / "whole.parquet", tmp_path / "streamed.parquet"
    write_parquet(found, whole)
    parts = [*stream(sqlite_database, tokens=100)]
    assert len(parts) > 4
    assert stream_parquet(parts, streamed, Selection()) == tally(parts, Selection()) == count(found)
    assert pq.read_table(streamed).equals(pq.read_table(whole))
    assert pq.read_schema(streamed).metadata == pq.read_schema(whole).metadata
    assert (pq.read_metadata(whole).num_row_groups, found.refusals.by_reason()) == (1, {"media_not_captured": 1})


def test_rows_longer_than_a_row_group_begin_new_ones(found: RowSet, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(export, "_TOKENS_AT_ONCE", found.rows[0].length)
    write_parquet(found, tmp_path / "rows.parquet")
    facts = pq.read_metadata(tmp_path / "rows.parquet")
    assert 1 < facts.num_row_groups <= facts.num_rows == len(found.rows)
    assert pq.read_table(tmp_path / "rows.parquet").column("row_id").to_pylist() == [row.row_id for row in found.rows]


def test_no_rows_are_an_empty_file(sqlite_database: Engine, tmp_path: Path) -> None:
    written = stream_parquet(stream(sqlite_database), tmp_path / "rows.parquet", Selection())
    assert (written.rows, written.sha256) == (0, build(sqlite_database).digest())
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 0


def test_no_more_than_one_part_is_held(
    sqlite_database: Engine, remember: Remember, groups_of_rollouts: Any, chain_maker: Any, tmp_path: Path
) -> None:
    many(sqlite_database, remember, groups_of_rollouts, chain_maker)
    passed: list[weakref.ref[np.ndarray[Any, Any]]] = []

    def watched() -> Iterator[Part]:
        for part in stream(sqlite_database, tokens=100):
            passed.extend(weakref.ref(row.token_ids) for row in part.rows[:1])
            here = len(part.rows[:1])
            yield part
            gc.collect()
            assert sum(each() is not None for each in passed) <= here + 1

    stream_parquet(watched(), tmp_path / "rows.parquet", Selection())
    assert len(passed) > 4


def test_a_stream_that_breaks_leaves_the_file_as_it_was(found: RowSet, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_parquet(found, file)
    before = file.read_bytes()

    def broken() -> Iterator[Part]:
        yield Part(rows=found.rows, counts=None, position=found.position)
        raise ValueError("the log went away")

    with pytest.raises(ValueError, match="the log went away"):
        stream_parquet(broken(), file, found.selection)
    assert file.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if "part" in each.name] == []


def test_hugging_faces_datasets_read_the_rows_back(
    found: RowSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import load_dataset, logging

        logging.disable_progress_bar()
    file = tmp_path / "rows.parquet"
    write_parquet(found, file)
    dataset = load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    for row, line in zip(found.rows, dataset, strict=True):
        assert (line["row_id"], line["reward"], line["call_numbers"]) == (row.row_id, row.reward, [*row.call_numbers])
        for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
            assert line[name] == getattr(row, name).tolist(), name
    lazily = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
    assert [line["row_id"] for line in lazily] == [row.row_id for row in found.rows]
