from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"vllm", "torch", "megatron", "duckdb", "transformers", "pyarrow"}
SHELLS = {
    "engine.processed",
    "engine.worker",
    "engine.plugin",
    "replay.dataset",
    "replay.indexed",
    "replay.loss",
    "replay.media_tensors",
    "replay.megatron",
    "turnlog.demo.megatron_cpu",
    "turnlog.demo.qwen3",
    "turnlog.demo.render",
    "turnlog.demo.train",
}
"""Modules whose work is the model server or the trainer itself."""
ALLOWED: dict[str, set[str]] = {
    "store": set(),
    "engine": set(),
    "replay": {"duckdb", "pyarrow"},
    "turnlog": {"duckdb", "pyarrow"},
}


def _modules(package: str) -> list[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py"))
    names = (".".join(part for part in path.parts if part != "__init__") for path in paths)
    return sorted(name for name in names if name not in SHELLS and not name.endswith("__main__"))


def _loaded_by(modules: list[str]) -> set[str]:
    """Top-level names of everything that a fresh process has loaded after importing the modules."""
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_everything_but_the_shells_imports_without_the_heavy_libraries(package: str) -> None:
    modules = _modules(package)
    assert len(modules) > 3
    assert _loaded_by(modules) & HEAVY <= ALLOWED[package]


def test_the_command_line_starts_without_what_only_some_commands_need() -> None:
    assert not _loaded_by(["turnlog.cli"]) & (HEAVY | {"alembic", "openai"})
