from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from store.database import write
from store.events import CallAdmitted, CallEnded, Event, RolloutOpened, RolloutScored
from store.log import append

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def log_url(sqlite_database: Engine, sqlite_url: str, chain_maker: Any) -> str:
    """A log of one scored rollout: calls 1 and 2, a root 3, a branch 4 of call 1, one failed and one pending."""
    first, second = chain_maker([(20, 10), (8, 5)], rollout_id="r1")
    evidence = {"nearest_call": str(second.call_id), "first_difference": 3, "role_here": "user", "role_there": "user"}
    third = chain_maker([(30, 4)], rollout_id="r1")[0].model_copy(
        update={"reason": "item_edited", "evidence": evidence}
    )
    (fourth,) = chain_maker([(7, 3)], rollout_id="r1", parent=first)
    failed, pending = (
        CallAdmitted(
            call_id=uuid4(),
            rollout_id="r1",
            decision="continuation",
            reason="answer_echoed",
            parent_id=second.call_id,
            worker="w1",
            at=second.completed_at + extra,
        )
        for extra in (1, 2)
    )
    events: list[Event] = [
        RolloutOpened(rollout_id="r1", group_id="g", slot=0, task="count [files]", opened_at=0),
        first,
        second,
        third,
        fourth,
        failed,
        CallEnded(call_id=failed.call_id, rollout_id="r1", state="failed", reason="out of luck", at=failed.at + 1),
        pending,
        RolloutScored(outcome_id=uuid4(), rollout_id="r1", reward=0.5, accepted=(str(second.call_id),), at=9),
    ]
    with write(sqlite_database) as connection:
        append(connection, events)
    return sqlite_url


def test_every_command_explains_itself_with_an_example(run: Run) -> None:
    for command in (
        ["demo"],
        ["serve"],
        ["show"],
        ["rows"],
        ["sql"],
        ["ui"],
        ["replay"],
        ["tail"],
        ["db", "copy"],
        ["db", "upgrade"],
        ["db", "current"],
        ["db", "check"],
        ["db", "downgrade"],
        ["db", "history"],
        ["db", "partition"],
        ["db", "partitions"],
        ["db", "grant"],
        ["db", "drain"],
    ):
        found = run(*command, "--help")
        assert found.returncode == 0
        assert "Example" in found.stdout, command


def test_a_rollout_is_drawn_as_a_tree(run: Run, log_url: str) -> None:
    found = run("show", "r1", "--db", log_url)
    assert found.returncode == 0, found.stderr
    headline, *lines = found.stdout.splitlines()
    assert headline == "r1 · group g slot 0 · task 'count [files]' · reward 0.500"
    shape = [line[: line.index("·")].strip() for line in lines if "·" in line]
    assert shape == [
        "├── ▶ row begins 1 root",
        "│   ├── 2 continues 1",
        "│   └── ▶ row begins 4 continues 1",
        "└── ▶ row begins 3 root",
    ]
    assert "item_edited at item 3 (user) against call 2" in lines[-1]
    assert "stores 13 of 43 tokens, 5 sampled" in found.stdout
    assert "│   │   ├── ✗ failed answer_echoed: out of luck" in found.stdout
    assert "│   │   └── ✗ pending answer_echoed" in found.stdout


def test_a_rollout_as_json_says_the_same(run: Run, log_url: str) -> None:
    found = json.loads(run("show", "r1", "--db", log_url, "--json").stdout)
    assert found["outcome"]["reward"] == 0.5
    calls = [(call["number"], call["state"], call["decision"], call["parent"]) for call in found["calls"]]
    assert calls == [
        (1, "completed", "root", None),
        (2, "completed", "continuation", 1),
        (None, "failed", "continuation", 2),
        (None, "pending", "continuation", 2),
        (3, "completed", "root", None),
        (4, "completed", "continuation", 1),
    ]


def test_a_long_chain_is_drawn_flat(run: Run, sqlite_database: Engine, sqlite_url: str, chain_maker: Any) -> None:
    with write(sqlite_database) as connection:
        append(connection, [RolloutOpened(rollout_id="r1", opened_at=0), *chain_maker([(9, 2)] * 1500)])
    lines = run("show", "r1", "--db", sqlite_url).stdout.splitlines()
    assert len(lines) == 1501
    assert lines[-1].startswith("    └── 1500 continues 1499 · ")


def test_rollouts_are_listed(run: Run, log_url: str) -> None:
    found = json.loads(run("show", "--db", log_url, "--json").stdout)
    assert found == [
        {
            "rollout_id": "r1",
            "group_id": "g",
            "task": "count [files]",
            "calls": 4,
            "roots": 2,
            "other_calls": 2,
            "sampled_tokens": 22,
            "reward": 0.5,
        }
    ]
    assert "count [files]" in run("show", "--db", log_url).stdout


def test_pending_calls_are_listed(run: Run, log_url: str) -> None:
    found = json.loads(run("db", "check", "--db", log_url, "--json").stdout)
    assert [(call["rollout_id"], call["worker"]) for call in found] == [("r1", "w1")]
    assert "w1" in run("db", "check", "--db", log_url).stdout


def test_rows_are_counted_and_written(run: Run, log_url: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    found = run("rows", "--out", "rows.parquet", "--db", log_url)
    assert found.returncode == 0, found.stderr
    assert "wrote 3 rows to rows.parquet" in found.stdout
    written = pq.read_table(tmp_path / "rows.parquet")
    assert written.column("call_numbers").to_pylist() == [[1, 2], [1, 4], [3]]
    counted = json.loads(run("rows", "--json", "--db", log_url).stdout)
    assert (counted["rows"], counted["trained_tokens"], counted["out"]) == (3, 22, None)
    assert counted["refused_rollouts"] == []
    again = json.loads(run("rows", "--json", "--db", log_url, "--as-of", counted["position"]).stdout)
    assert again["sha256"] == counted["sha256"]


def test_old_rows_come_again_by_the_command_that_was_printed(
    run: Run, log_url: str, sqlite_database: Engine, chain_maker: Any, tmp_path: Path
) -> None:
    (tmp_path / "a log's folder").symlink_to(tmp_path)
    url = f"sqlite:///{tmp_path}/a log's folder/turnlog.db"
    asked = ("--exclude-role", "title", "--rollout", "r1", "--db", url)
    (line,) = [line for line in run("rows", *asked).stdout.splitlines() if "the same rows" in line]
    words = shlex.split(line.partition(": ")[2])
    before = json.loads(run(*words[1:], "--json").stdout)
    with write(sqlite_database) as connection:
        root = chain_maker([(9, 4), (3, 3)], rollout_id="r1")
        append(connection, [*root, RolloutScored(outcome_id=uuid4(), rollout_id="r1", reward=9, at=99)])
    assert json.loads(run("rows", *asked, "--json").stdout)["rows"] == before["rows"] + 1
    assert json.loads(run(*words[1:], "--json").stdout) == before
    assert before["selection"]["excluded_roles"] == ["title"]


def test_refused_rollouts_are_counted_by_their_reason(run: Run, log_url: str) -> None:
    found = run("rows", "--rule", "declared", "--db", log_url)
    assert found.returncode == 0
    assert "parent_not_selected" in found.stdout
    counted = json.loads(run("rows", "--rule", "declared", "--json", "--db", log_url).stdout)
    assert [(refused["rollout_id"], refused["reason"]) for refused in counted["refused_rollouts"]] == [
        ("r1", "parent_not_selected")
    ]


def test_the_schema_is_created_and_named(run: Run, tmp_path: Path) -> None:
    assert "no schema" in run("db", "current").stdout
    assert not (tmp_path / "turnlog.db").exists()
    upgraded = run("db", "upgrade")
    assert "sqlite:///turnlog.db is at schema revision" in upgraded.stdout
    found = json.loads(run("db", "current", "--json").stdout)
    assert found["current"] == found["needed"]


def test_the_environment_names_the_log(run: Run, log_url: str) -> None:
    assert "r1" in run("show", TURNLOG_URL=log_url).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show"], "sqlite:///turnlog.db has no turnlog schema, this release needs"),
        (["show", "--db", "sqlite:///other.db"], "sqlite:///other.db has no turnlog schema, this release needs"),
        (["rows"], "run `turnlog db upgrade`"),
        (["show", "--db", "mysql://somewhere/else"], "names a mysql database: use sqlite:///FILE"),
        (["show", "--db", "sqlite:///no/such/folder.db"], "does not exist: create it"),
        (["show", "--db", "postgresql://me:secret@127.0.0.1:1/log"], "the log database is not available"),
        (["serve", "--port", "8000"], "'--port' stands where the model belongs: write it first"),
        (["serve", "model", "--db", "sqlite:///new.db"], "run `turnlog db upgrade`"),
    ],
)
def test_what_a_user_can_mend_is_one_line_without_a_traceback(run: Run, arguments: list[str], said: str) -> None:
    found = run(*arguments)
    assert found.returncode == 1
    assert found.stderr.startswith("turnlog: ")
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert "secret" not in found.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rows", "--exclude-role", "summery"], "'summery' is no role of a call: one of title, summary, subagent"),
        (["sql", "--csv"], "are for the answer to a query: give one"),
        (["sql", "--archive", "gone"], "are for the answer to a query: give one"),
        (["show", "r1", "--tokenizer", "gone"], "shows the texts of a boundary"),
        (["demo", "--folder", "a.file"], "is a file"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    run: Run, log_url: str, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "a.file").touch()
    found = run(*arguments, "--db", log_url)
    assert found.returncode == 2
    assert said in " ".join(found.stderr.replace("│", " ").split())


def test_media_that_cannot_be_kept_are_refused_before_a_model_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    found = run("serve", "model", TURNLOG_MEDIA=str(tmp_path / "taken"))
    assert found.returncode == 1
    assert "set TURNLOG_MEDIA to a writable place" in found.stderr


def test_the_demo_says_what_it_needs_before_it_starts(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['megatron'] = None; sys.argv = ['turnlog', 'demo']; import turnlog.cli as c; c.main()"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.startswith("turnlog: the demo needs megatron, not installed in this environment")
    assert not list(tmp_path.iterdir())


def test_an_unknown_rollout_is_named(run: Run, log_url: str) -> None:
    found = run("show", "r2", "--db", log_url)
    assert (found.returncode, found.stdout) == (1, "")
    assert "rollout 'r2' is not in the log" in found.stderr
    assert "rollout 'r2' is not in the log" in run("rows", "--rollout", "r2", "--db", log_url).stderr


def test_a_file_in_a_missing_folder_is_refused_before_any_work(run: Run, log_url: str) -> None:
    found = run("rows", "--out", "no/such/rows.parquet", "--db", log_url)
    assert found.returncode == 2
    assert "does not exist: create it" in found.stderr


def test_a_log_of_a_newer_release_is_refused(run: Run, log_url: str) -> None:
    file = sqlite3.connect(log_url.removeprefix("sqlite:///"))
    with file:
        file.execute("update alembic_version set version_num = '9999'")
    file.close()
    found = run("show", "--db", log_url)
    assert found.returncode == 1
    assert "use the release of turnlog that knows '9999'" in found.stderr


def test_a_call_is_shown_even_when_its_rollout_has_nothing_else(chain_maker: Any) -> None:
    from turnlog.show import arrange

    (call,) = chain_maker([(3, 2)])
    refused = CallEnded(call_id=uuid4(), rollout_id="r1", state="refused", reason="too long", at=0)
    assert [(shown.state, shown.number) for shown in arrange([call], [], [refused])] == [
        ("refused", None),
        ("completed", 1),
    ]
