import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from replay.errors import FileUnwritable
from replay.export import write_parquet
from replay.rowset import RowSet, build
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
