"""docs/feeding.md does as it says, on a log of two groups."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from store.database import open_database
from store.migrate import upgrade

PAGE = (Path(__file__).parents[2] / "docs" / "feeding.md").read_text()


@pytest.fixture
def folder(
    tmp_path: Path, remember: Any, groups_of_rollouts: Any, chain_maker: Any, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TURNLOG_URL", raising=False)
    database = open_database("sqlite:///turnlog.db")
    upgrade(database)
    remember(database, groups_of_rollouts(chain_maker, ["g0", "g1"]))
    database.dispose()
    return tmp_path


def test_its_python_runs_as_it_stands(folder: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "feeding.md", None, 0)
    assert len(examples.examples) > 20
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_its_commands_run_as_they_stand(folder: Path) -> None:
    commands = [shlex.split(command) for command in re.findall(r"`(turnlog rows --out [^`]+)`", PAGE)]
    assert [words[3] for words in commands] == ["rows.parquet", "rows"]
    for _, *arguments in commands:
        subprocess.run([sys.executable, "-m", "turnlog", *arguments], check=True, capture_output=True)
    assert (folder / "rows.parquet").is_file()
    assert (folder / "rows" / "logprobs.idx").is_file()
