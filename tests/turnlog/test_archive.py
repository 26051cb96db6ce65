"""`turnlog archive` and what reads it, from the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from store import log, migrate
from store.database import open_database, write
from store.events import RolloutOpened, RolloutScored, uuid7

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def filled(tmp_path: Path, chain_maker: Any) -> Path:
    """A log of one finished rollout, in the folder that commands run in."""
    database = open_database(f"sqlite:///{tmp_path / 'turnlog.db'}")
    migrate.upgrade(database)
    scored = RolloutScored(outcome_id=uuid7(1, bytes(10)), rollout_id="r1", reward=1.0, at=1)
    with write(database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=1), *chain_maker(), scored])
    database.dispose()
    return tmp_path


def test_the_command_seals_once_and_rows_and_steps_come_from_the_archive(filled: Path, run: Run) -> None:
    archive = ("archive", "--before", "2030-01-01", "--to", "sealed", "--json")
    assert json.loads(run(*archive, "--dry-run").stdout)["rollouts"] == 1
    assert not (filled / "sealed").exists()
    first = json.loads(run(*archive).stdout)
    assert (first["seal"], first["events"]) == (1, {"rollout": 1, "model_call": 3, "rollout_outcome": 1})
    assert json.loads(run(*archive).stdout)["events"] == {}
    wanted = json.loads(run("rows", "--json").stdout)
    migrate.upgrade(open_database(f"sqlite:///{filled / 'empty.db'}"))
    alone = ("--db", "sqlite:///empty.db")
    assert json.loads(run("rows", "--json", *alone, "--archive", "sealed").stdout) == wanted
    assert json.loads(run("rows", "--json", *alone, TURNLOG_ARCHIVE="sealed").stdout) == wanted
    steps = run("replay", "--steps", "1", "--out", "steps", "--json", *alone, "--archive", "sealed")
    assert json.loads(steps.stdout)["steps"][0]["rows"] == 1


def test_what_cannot_be_done_ends_in_one_line(filled: Path, run: Run) -> None:
    missing = run("rows", "--archive", "nowhere")
    assert missing.returncode == 1
    assert "archive 'nowhere' cannot be used (nothing is sealed there)" in missing.stderr
    dropped = run("db", "drop-partition", "model_call_20261101", "--archive", "nowhere")
    assert dropped.returncode == 1
    assert "docs/archive.md" in dropped.stderr


@pytest.mark.postgres
def test_a_log_whose_owner_made_no_partitions_sheds_what_is_sealed(
    postgres_url: str, chain_maker: Any, run: Run
) -> None:
    database = open_database(postgres_url)
    with write(database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=1), *chain_maker()])
    at = ("--db", postgres_url)
    assert run("archive", "--before", "2030-01-01", "--to", "sealed", *at).returncode == 0
    dropped = run("db", "drop-partition", "model_call_default", "--archive", "sealed", *at)
    assert dropped.stdout.startswith("dropped model_call_default, "), dropped.stderr
    assert dropped.stdout.endswith(": 3 events, all in sealed\n")
    with write(database) as connection:
        log.append(connection, chain_maker(rollout_id="late"))
    database.dispose()
    stays = run("db", "drop-partition", "model_call_default", "--archive", "sealed", *at)
    assert stays.returncode == 1
    assert "model_call_default stays: 3 of its 3 events, such as 4, are not in archive 'sealed'" in stays.stderr
    adopted = run("db", "partition", "--adopt", *at)
    assert (adopted.returncode, adopted.stdout.split("partitions")[0]) == (0, "made 1 "), adopted.stderr
    checked = run("db", "check", *at)
    assert checked.returncode == 0, checked.stderr
