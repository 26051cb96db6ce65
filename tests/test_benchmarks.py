"""Benchmarks that run in a minute do run, and measure what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    path.name: text.removeprefix('"""').partition("\n")[0]
    for path, text in ((path, path.read_text()) for path in (ROOT / "benchmarks").glob("*.py"))
    if "__main__" in text
}
"""Each script's name, and the question that its docstring begins with."""


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


@pytest.mark.postgres
def test_the_benchmark_of_rows_runs(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = ["--scale", "0.005", "--repeats", "1", "--only", "full size", "--out", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "rows.py"), *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    measured = json.loads(out.read_text())["rows"]["10k x 20, full size"]
    assert measured["rollouts"] == 50
    for source in ("sqlite", "postgresql", "sealed"):
        for variant in ("turnlog", "side by side", "joined"):
            figures = measured[f"{source} {variant}"]
            assert figures["k_rows_per_s"] * figures["seconds"] == pytest.approx(0.1)  # two rows a rollout
            assert figures["m_tokens_per_s"] > figures["m_trained_per_s"] > 0


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_benchmark_says_what_it_measures_before_it_does(script: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--help"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith(f"usage: {script}")
    assert SCRIPTS[script] in found.stdout


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
