"""`turnlog explain` as a user runs it: on recordings of stock harnesses, and on files with mistakes in them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.explain import Recording
from turnlog.explain import ExplainedFile, decided, tables

RECORDINGS = (Path(__file__).parents[2] / "../shared/recordings").resolve()
FILES = sorted(str(file) for file in RECORDINGS.glob("*/requests.jsonl"))
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def explain(tmp_path: Path) -> Run:
    """Run `turnlog explain` in a fresh process and an empty folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "turnlog", "explain", *arguments]
        variables = {"PATH": "/nowhere", "COLUMNS": "160", "NO_COLOR": "1", "HOME": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)

    return run


def chat_line(*messages: tuple[str, str], answer: str = "ok", **more: Any) -> str:
    request = {"messages": [{"role": role, "content": text} for role, text in messages]}
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": answer}}]}
    return json.dumps({"endpoint": "/v1/chat/completions", "request": request, "response": response, **more}) + "\n"


@pytest.mark.parametrize("policy", ["strict", "restore"])
def test_every_recorded_call_has_the_verdict_that_a_person_gave(explain: Run, policy: str) -> None:
    found = explain(*FILES, "--json", "--reasoning", policy)
    assert (found.returncode, found.stderr) == (0, "")
    verdicts = {}
    for line in found.stdout.splitlines():
        call = json.loads(line)
        assert [*call] == ["file", "seq", "kind", "parent", "reason", "candidates", "evidence"]
        verdicts[call["file"], call["seq"]] = (call["kind"], call["parent"])
    truth = {}
    for file in FILES:
        for call in json.loads(Path(file).with_name("expected.json").read_text())["calls"]:
            lost = policy == "strict" and "reasoning_dropped" in call["flags"]
            truth[file, call["seq"]] = ("root", None) if lost else (call["kind"], call["parent"])
    assert len(truth) == 516
    assert verdicts == truth


def test_one_file_needs_no_name_in_its_lines(explain: Run) -> None:
    found = explain(FILES[0], "--json")
    assert "file" not in json.loads(found.stdout.splitlines()[0])


def test_people_get_the_calls_the_rows_and_the_counts(explain: Run) -> None:
    found = explain(str(RECORDINGS / "claude-code-subagents/requests.jsonl"), str(RECORDINGS / "codex/requests.jsonl"))
    assert found.returncode == 0
    for said in ("continues 10", "item_edited at item 0 (system) against call 10", "subagent", "stream_cut"):
        assert said in found.stdout
    for said in ("1 → 2 → 8 → 10", "13 … 16", "all of them", "2 recordings", "tools_changed"):
        assert said in found.stdout
    assert "bad lines" not in found.stdout
    assert "--reasoning restore" not in found.stdout


def test_calls_that_strict_costs_are_counted_with_the_way_out(explain: Run) -> None:
    file = str(RECORDINGS / "openhands-sdk-chat/requests.jsonl")
    strict, restore = explain(file), explain(file, "--reasoning", "restore")
    assert "9 roots are calls whose harness did not send reasoning back" in strict.stdout
    assert "`--reasoning restore`" in strict.stdout
    assert "did not send" not in restore.stdout
    assert "its reasoning did not come back and is kept" in restore.stdout


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_bad_lines_are_named_and_the_rest_is_decided(explain: Run, tmp_path: Path, as_json: tuple[str, ...]) -> None:
    (tmp_path / "trace.jsonl").write_text(
        chat_line(("user", "1"), answer="a")
        + "\n{\n"
        + chat_line(("user", "1"), ("assistant", "a"), ("user", "[bold]2"))
        + '{"endpoint": "/v1/embeddings"}\n'
        + chat_line(("wizard", "x"))
    )
    found = explain("trace.jsonl", *as_json)
    assert found.returncode == 1
    assert found.stderr.startswith("turnlog: trace.jsonl:3: this is no JSON")
    assert len(found.stderr.strip().splitlines()) == 1
    assert "Traceback" not in found.stderr
    if as_json:
        calls = [json.loads(line) for line in found.stdout.splitlines()]
        assert [(call["seq"], call["kind"], call["parent"]) for call in calls] == [
            (1, "root", None),
            (2, "continuation", 1),
            (3, "passed", None),
            (4, "refused", None),
        ]
    else:
        assert "unknown_endpoint" in found.stdout
        assert "'wizard', which turnlog cannot compare" in found.stdout
        assert "bad lines" in found.stdout


def test_an_empty_file_is_a_recording_without_calls(explain: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    found = explain("empty.jsonl")
    assert (found.returncode, found.stderr.strip()) == (0, "")
    assert "empty.jsonl" in found.stdout
    assert explain("empty.jsonl", "--json").stdout == ""


def test_a_file_that_does_not_exist_is_named(explain: Run) -> None:
    found = explain("nowhere.jsonl")
    assert found.returncode == 2
    assert "'nowhere.jsonl' does not exist" in found.stderr


def test_calls_are_printed_as_they_are_read(tmp_path: Path) -> None:
    """A line is answered before the next one is written, so that a running harness can be followed."""
    import os

    fifo = tmp_path / "trace.jsonl"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "turnlog", "explain", "--json", str(fifo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with fifo.open("w") as harness:
            for number in (1, 2):
                harness.write(chat_line(("user", f"task {number}")))
                harness.flush()
                assert json.loads(process.stdout.readline())["seq"] == number
        assert process.wait(timeout=60) == 0


def test_every_line_is_in_a_table_or_a_count(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(chat_line(("user", "1")) + "{\n" + chat_line(("user", "2")))
    explained = ExplainedFile(name="trace")
    for call in decided(Recording("strict", name="trace"), file):
        if isinstance(call, Exception):
            explained.bad_lines += 1
        else:
            explained.calls.append(call)
    assert (len(explained.calls), explained.bad_lines) == (2, 1)
    assert len([*tables([explained])]) == 3
