"""The example runs as its page says, on a real server and a real Megatron, only much shorter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc

from replay.provenance import origin, trained
from replay.rowset import build
from store.database import open_database

EXAMPLE = Path(__file__).parents[1] / "examples/grpo.py"


def _run(folder: Path, *options: str) -> str:
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_trains_from_rollouts_and_then_from_their_log_alone(tmp_path: Path) -> None:
    said = _run(tmp_path, "--steps", "2", "--groups", "2", "--size", "4")
    differences = [float(found) for found in re.findall(r"largest difference (\S+)", said)]
    assert len(differences) == 2
    assert max(differences) < 1e-3  # so the server samples from the trainer's weights, and from nothing cached
    assert (tmp_path / "grpo/reward.svg").read_text().count("<path")

    database = open_database(f"sqlite:///{tmp_path / 'grpo/turnlog.db'}")
    played = build(database)
    assert not played.refusals.rollouts
    assert all(row.policy_range == (int(row.group_id[4]),) * 2 for row in played.rows if row.group_id)  # step1-0
    assert {row.policy_range[0] for row in played.rows} == {0, 1}
    assert all(sum(row.rollout_id == score.rollout_id for row in played.rows) >= 2 for score in played.scores)
    before = trained(database)
    assert sorted(before.column("row_id").to_pylist()) == sorted(row.row_id for row in played.rows)

    (tmp_path / "grpo/server.log").unlink()
    said = _run(tmp_path, "--from-log", "grpo/turnlog.db", "--folder", "again", "--steps", "2", "--groups", "2")
    assert len(re.findall(r"best quarter -\d", said)) == 3
    assert (tmp_path / "again/history.svg").is_file()
    assert not (tmp_path / "again/server.log").exists()  # nothing was served
    assert build(database).digest() == played.digest()  # nothing was recorded but what trained

    of_history = trained(database).filter(pc.field("run") == "history")
    assert set(of_history.column("step").to_pylist()) == {0, 1}
    first = of_history.to_pylist()[0]
    came_from = origin(database, "history", first["step"], first["row_id"])
    row = next(row for row in played.rows if row.row_id == first["row_id"])
    assert tuple(call.call_id for call in came_from.calls) == row.call_ids
    assert {version for call in came_from.calls for version in call.policy_versions} == {row.policy_range[0]}
    database.dispose()
