"""Fixtures of the command line and demo tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from turnlog.demo.model import build_model


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, built once for the whole test session."""
    return build_model(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `turnlog` in a fresh process and an empty folder, as a user does."""

    def run(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "turnlog", *arguments]
        variables = {"PATH": "/nowhere", "COLUMNS": "200", "NO_COLOR": "1", "HOME": str(tmp_path), **environment}
        return subprocess.run(
            command, cwd=tmp_path, env=variables, input=stdin, capture_output=True, text=True, timeout=120
        )

    return run
