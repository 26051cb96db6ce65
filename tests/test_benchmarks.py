"""Benchmarks that run in a minute do run, and measure what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.postgres
def test_the_benchmark_of_the_log_runs(tmp_path: Path) -> None:
    out = tmp_path / "log.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "log.py"), "--quick", "--out", str(out)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    figures = json.loads(out.read_text())
    for database in ("sqlite", "postgresql"):
        measured = figures[database]
        for kind in ("small", "large", "mix"):
            for line in measured["writers"][kind].values():
                assert min(line[f"{way}_per_s"] for way in ("turnlog", "raw", "encoding")) > 0
                assert 0 < line["p50_ms"] <= line["p99_ms"]
                assert line["group"] >= 1
        assert measured["writers"]["large"]["2"]["disk_of_arrays"] > 1
        assert measured["idle"]["p50_ms"] > 0
        assert measured["lookups"]["found, of this month"]["p50_ms"] > 0


def test_the_benchmark_of_our_own_part_of_a_call_runs(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "serving.py"), "own", "--quick", "--out", str(out)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    first, second = json.loads(out.read_text())["own"]
    assert (first["turn"], second["turn"]) == (1, 2)
    assert 0 < first["request_kb"] < second["request_kb"]
    assert min(row[part] for row in (first, second) for part in ("reading_ms", "rest_ms")) > 0


def test_a_slip_at_the_benchmark_of_serving_is_told_before_anything_is_measured() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "serving.py"), "wal", "agent"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert "nothing is called wal: name some of own, wall, short, agent, 5, 50, 200, sqlite, postgresql" in found.stderr
