"""With how many processes a log is read when nobody says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from replay.archive import open_archive
from replay.sealing import seal
from store.database import write
from store.log import append
from turnlog import console


@pytest.mark.parametrize(
    ("cores", "large", "of_a_log", "of_a_sealed_one"), [(1, 2, 1, 1), (2, 2, 2, 1), (6, 2, 6, 3), (6, 99, 1, 1)]
)
def test_a_large_log_takes_a_process_a_core_and_a_sealed_one_half_as_many(
    cores: int,
    large: int,
    of_a_log: int,
    of_a_sealed_one: int,
    sqlite_database: Engine,
    chain_maker: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_LARGE", large)
    monkeypatch.setattr(console, "_cores", lambda: cores)
    with write(sqlite_database) as connection:
        append(connection, chain_maker())
    archive = str(tmp_path / "archive")
    seal(sqlite_database, open_archive(archive, new=True), before=2**62, name="test")
    for place, processes in (("", of_a_log), (archive, of_a_sealed_one)):
        with console.pool_of(None, sqlite_database, place) as pool:
            assert (pool.processes if pool is not None else 1) == processes
    with console.pool_of(2, sqlite_database, archive) as pool:
        assert pool is not None
        assert pool.processes == 2
