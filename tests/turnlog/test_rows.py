"""`turnlog rows`: what it writes, and what it needs of memory while it does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from sqlalchemy import Engine

from replay.rowset import build
from store.database import write
from store.events import CallAdmitted, CallEnded, uuid7
from store.log import append

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def log(sqlite_database: Engine, chain_maker: Any) -> Engine:
    with write(sqlite_database) as connection:
        append(connection, chain_maker(rollout_id="r1") + chain_maker([(9, 3)], rollout_id="r2"))
    return sqlite_database


def test_both_forms_hold_the_rows_that_are_counted(run: Run, log: Engine, sqlite_url: str, tmp_path: Path) -> None:
    found = build(log)
    counted = json.loads(run("rows", "--json", "--db", sqlite_url).stdout)
    assert (counted["rows"], counted["sha256"], counted["rollouts"]) == (2, found.digest(), 2)
    for form, out in (("parquet", "rows.parquet"), ("megatron", "rows")):
        processes = ("--processes", "2") if form == "parquet" else ()
        written = run("rows", "--json", "--db", sqlite_url, "--out", out, "--format", form, *processes)
        assert written.returncode == 0, written.stderr
        assert json.loads(written.stdout) == {**counted, "out": out}
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 2
    tokens = IndexedDataset(str(tmp_path / "rows" / "token_ids"))
    assert [item.tolist() for item in tokens] == [row.token_ids.tolist() for row in found.rows]


def test_calls_that_did_not_complete_are_counted_by_their_state(run: Run, log: Engine, sqlite_url: str) -> None:
    one, two = uuid7(7, bytes(10)), uuid7(8, bytes(10))
    asked = {
        "rollout_id": "r2",
        "decision": "root",
        "reason": "fresh_context",
        "parent_id": None,
        "worker": "w",
        "at": 7,
    }
    with write(log) as connection:
        append(connection, [CallAdmitted.model_validate({"call_id": call_id, **asked}) for call_id in (one, two)])
        append(connection, [CallEnded(call_id=one, rollout_id="r2", state="lost", reason="killed", at=9)])
    assert json.loads(run("rows", "--json", "--db", sqlite_url).stdout)["unfinished_calls"] == {"lost": 1, "pending": 1}
    only = json.loads(run("rows", "--json", "--db", sqlite_url, "--rollout", "r1").stdout)
    assert only["unfinished_calls"] == {}
    assert "calls that did not complete" in run("rows", "--db", sqlite_url).stdout


def test_a_folder_in_the_place_of_the_file_is_named(run: Run, log: Engine, sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    found = run("rows", "--db", sqlite_url, "--out", "taken")
    assert found.returncode == 1
    assert found.stderr.strip().startswith("turnlog: 'taken' cannot be written (it is a folder): name a file")


def test_without_megatron_the_other_form_is_named(log: Engine, sqlite_url: str, tmp_path: Path) -> None:
    arguments = ["turnlog", "rows", "--db", sqlite_url, "--out", "rows", "--format", "megatron"]
    hidden = f"import sys; sys.modules['megatron'] = None; sys.argv = {arguments}; import turnlog.cli as c; c.main()"
    found = subprocess.run([sys.executable, "-c", hidden], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 1
    assert "install turnlog's extra `megatron`, or write --format parquet" in found.stderr
