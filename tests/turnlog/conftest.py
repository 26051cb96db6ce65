"""Fixtures of the command line and demo tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnlog.demo.model import build_model


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, built once for the whole test session."""
    return build_model(tmp_path_factory.mktemp("demo") / "model")
