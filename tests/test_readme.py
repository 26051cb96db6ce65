"""Every command that README.md shows is run, or, where it needs a model or a harness, checked word by word."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from store.database import open_database, write
from store.events import Event, RolloutOpened
from store.log import append
from store.migrate import upgrade

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


RECORDED = {
    "seq": 1,
    "endpoint": "/v1/chat/completions",
    "request": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    "response": {"choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}]},
}


def _lines(language: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def _commands(*, first: str) -> list[list[str]]:
    """The shell lines whose first word, behind any variables, is this one, split into words without their comments."""
    split = [shlex.split(line, comments=True) for line in _lines("sh")]
    commands = [list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)) for words in split]
    return [words for words in commands if words[0] == first]


@pytest.fixture
def folder(tmp_path: Path, chain_maker: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a recorded call and the log of a demo's first rollout, and no other log named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TURNLOG_URL", raising=False)
    database = open_database()
    upgrade(database)
    lengths = [[(20, 10), (8, 5)], [(30, 10), (8, 5)], [(40, 10)]]
    events: list[Event] = [RolloutOpened(rollout_id="demo1-1", group_id="demo1", slot=1, opened_at=0)]
    for contexts in lengths:
        events.extend(chain_maker(contexts, rollout_id="demo1-1"))
    with write(database) as connection:
        append(connection, events)
    database.dispose()
    (tmp_path / "requests.jsonl").write_text(json.dumps(RECORDED) + "\n")
    return tmp_path


def test_every_shell_line_is_of_a_kind_that_is_tested_here() -> None:
    kinds = ("make", "turnlog", "pip", "curl", "vllm")
    assert sum(len(_commands(first=kind)) for kind in kinds) == len(_lines("sh"))


def test_the_make_targets_exist_and_set_themselves_up() -> None:
    targets = [target for _, target in _commands(first="make")]
    assert sorted(targets) == ["bench", "chaos", "check", "demo", "test"]
    for target in targets:
        fresh = ["make", "--no-print-directory", "--dry-run", "VENV=no/such/environment", target]
        planned = subprocess.run(fresh, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "pip install" in planned
        assert "no/such/environment/bin/" in planned.splitlines()[-1]


def test_the_commands_that_read_a_log_run_as_they_stand(folder: Path) -> None:
    ran = 0
    for _, command, *arguments in _commands(first="turnlog"):
        if command not in ("serve", "ui") and "postgresql" not in " ".join(arguments):
            done = subprocess.run([sys.executable, "-m", "turnlog", command, *arguments], cwd=folder, check=False)
            assert done.returncode == (command == "audit"), "the log here is made up, which audit must find"
            ran += 1
    assert ran == 7
    assert (folder / "rows.parquet").is_file()


def test_the_page_is_there_until_it_is_interrupted(folder: Path) -> None:
    (shown,) = [words for words in _commands(first="turnlog") if words[1] == "ui"]
    command = [sys.executable, "-m", *shown, "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        said = page.stdout.readline()
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+", said)
        with urlopen(address) as answer:
            assert b"demo1-1" in answer.read()
        page.send_signal(signal.SIGINT)
    assert page.returncode in (0, 130)


@pytest.mark.postgres
def test_the_commands_that_name_a_server_run_with_one(empty_postgres_url: str) -> None:
    (upgrading,) = [words for words in _commands(first="turnlog") if words[1] == "db" and "--db" in words]
    upgrading[upgrading.index("--db") + 1] = empty_postgres_url
    subprocess.run([sys.executable, "-m", *upgrading], check=True)


def test_the_sql_answers_as_it_stands(folder: Path) -> None:
    (asked,) = [words for words in _commands(first="turnlog") if words[1] == "sql"]
    command = [sys.executable, "-m", *asked, "--json"]
    answer = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    assert json.loads(answer) == [{"reason": "first_call", "rows": 3}]


def test_the_python_runs_as_it_stands(folder: Path) -> None:
    examples = doctest.DocTestParser().get_doctest("\n".join(_lines("python")) + "\n", {}, "README.md", None, 0)
    assert len(examples.examples) > 3
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_the_flags_of_the_server_exist() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    theirs = {flag for action in parser._actions for flag in action.option_strings}
    ours = set(re.findall(r"--[a-z-]+", _help("serve")))
    stock = _commands(first="vllm")
    shown = [*(words for words in _commands(first="turnlog") if words[1] == "serve"), *stock]
    assert len(shown) == 2
    for words in shown:
        flags = {word for word in words if word.startswith("--")}
        assert flags <= theirs | (set() if words in stock else ours)


def test_the_variables_of_the_server_exist() -> None:
    from engine.settings import Settings

    named = {name for line in _lines("sh") for name in re.findall(r"\b([A-Z_]+)=", line)}
    assert named <= {"VLLM_PLUGINS", *(f"TURNLOG_{name.upper()}" for name in Settings.model_fields)}


def test_the_rollout_api_takes_what_the_readme_posts() -> None:
    from engine.outcome import Outcome
    from engine.rollouts import OpenRollout

    bodies: list[tuple[str, Callable[[Any], object]]] = [
        ("localhost:8000/rollouts", OpenRollout.model_validate),
        ("localhost:8000/rollouts/r1/outcome", Outcome.model_validate),
    ]
    posted = [(words[2], json.loads(words[words.index("-d") + 1])) for words in _commands(first="curl")]
    assert [url for url, _ in posted] == [url for url, _ in bodies]
    for (_, body), (_, validate) in zip(posted, bodies, strict=True):
        validate(body)


def test_the_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in _commands(first="pip"):
        assert set(re.findall(r"\w+", words[-1])) <= extras.keys()


def test_the_folders_are_the_ones_that_there_are() -> None:
    named = set(re.findall(r"^\| `(\w+)/`", README, re.MULTILINE))
    assert named == {"store", "migrations", "engine", "replay", "turnlog", "docs", "examples", "benchmarks", "tests"}
    assert all((ROOT / name).is_dir() for name in named)


def test_the_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert links
    assert [link for page, link in links if not (page.parent / link).exists()] == []


def _help(*command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "turnlog", *command, "--help"], capture_output=True, text=True, check=True
    ).stdout
