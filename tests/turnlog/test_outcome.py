"""`turnlog outcome`: a rollout scored straight in its log, and every example of docs/outcomes.md."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from engine.errors import EngineError
from engine.outcome import Outcome, scored
from store import log
from store.database import read, write
from store.errors import EventConflict
from store.events import RolloutOpened, RolloutScored
from store.output import HarnessOutput
from turnlog.errors import CommandError
from turnlog.outcome import outcome_of, record

PAGE = (Path(__file__).parents[2] / "docs/outcomes.md").read_text()
SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
TWO = str(UUID(int=2))


@pytest.fixture
def url(sqlite_database: Engine, sqlite_url: str) -> str:
    with write(sqlite_database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=0)])
    return sqlite_url


def outcomes(database: Engine) -> list[RolloutScored]:
    with read(database) as connection:
        return log.outcomes(connection, "r1")


def test_an_outcome_is_what_the_server_would_have_appended(
    run: Any, url: str, sqlite_database: Engine, tmp_path: Path
) -> None:
    (tmp_path / "output.json").write_text(json.dumps(SAID))
    options = ["--reward", "0.5", "--status", "truncated", "--declared-rewrite", '{"at": 3}', "--outcome-id", TWO]
    told = run("outcome", "r1", *options, "--output", "output.json", "--json", "--db", url)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == {
        "outcome_id": TWO,
        "rollout_id": "r1",
        "accepted": None,
        "output": {"form": "chat", "passages": 1},
    }
    (found,) = outcomes(sqlite_database)
    body = Outcome.model_validate(
        {"reward": 0.5, "status": "truncated", "output": SAID, "declared_rewrites": [{"at": 3}], "outcome_id": TWO}
    )
    assert found == scored("r1", body, new_id=UUID(int=1), at=found.at)


def test_an_output_is_read_from_standard_input_and_ids_from_options(
    run: Any, url: str, sqlite_database: Engine
) -> None:
    told = run("outcome", "r1", "--reward", "1", "--output", "-", "--db", url, stdin=json.dumps(SAID))
    assert told.returncode == 0, told.stderr
    assert re.fullmatch(r"rollout r1 has outcome [0-9a-f-]{36}: 1.0, completed\n", told.stdout)
    assert run("outcome", "r1", "--reward", "1", "--accept", "a", "--accept", "b", "--db", url).returncode == 0
    first, second = outcomes(sqlite_database)
    assert HarnessOutput.model_validate(first.output).form == "chat"
    assert (second.accepted, second.output) == (("a", "b"), None)


def test_the_same_command_again_changes_nothing(run: Any, url: str, sqlite_database: Engine) -> None:
    command = ["outcome", "r1", "--reward", "1", "--outcome-id", TWO, "--db", url]
    assert run(*command).returncode == 0
    again = run(*command)
    assert (again.returncode, again.stderr) == (0, "")
    other = run("outcome", "r1", "--reward", "2", "--outcome-id", TWO, "--db", url)
    assert other.returncode == 1
    assert f"outcome {TWO} is in the log with other content" in other.stderr
    assert [found.reward for found in outcomes(sqlite_database)] == [1.0]


def test_one_outcome_written_by_many_at_once_is_one(database: Engine) -> None:
    with write(database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=0)])
    outcome = Outcome.model_validate({"reward": 1.0, "outcome_id": TWO})
    with ThreadPoolExecutor(8) as threads:
        told = [*threads.map(lambda at: record(database, "r1", outcome, new_id=UUID(int=9), at=at), range(8))]
    assert [receipt["outcome_id"] for receipt in told] == [TWO] * 8
    assert len(outcomes(database)) == 1
    with write(database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r2", opened_at=0)])
    with pytest.raises(EventConflict):
        record(database, "r2", outcome, new_id=UUID(int=9), at=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody", "--reward", "1"], "rollout 'nobody' is not in the log"),
        (["r1", "--reward", "nan"], "reward is nan, no advantage can be taken of it: send a finite number"),
        (["r1", "--reward", "1", "--output", "bad.json"], "bad.json cannot be read as JSON"),
    ],
)
def test_what_cannot_be_an_outcome_is_one_line_and_nothing_is_written(
    run: Any, url: str, sqlite_database: Engine, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "bad.json").write_bytes(b"\xff")
    found = run("outcome", *arguments, "--db", url)
    assert (found.returncode, found.stdout) == (1, "")
    assert words in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert outcomes(sqlite_database) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output": "gone.json"}, "gone.json cannot be read as JSON"),
        ({"rewrites": ["{"]}, "--declared-rewrite '{' cannot be read as JSON"),
        ({"outcome_id": "one"}, "outcome_id is 'one', which the log cannot hold"),
        ({"accepted": [""]}, "accepted.0 is '', which the log cannot hold"),
    ],
)
def test_options_that_say_no_outcome_are_refused(options: dict[str, Any], words: str) -> None:
    said: dict[str, Any] = {"accepted": None, "output": None, "rewrites": (), "outcome_id": None, **options}
    with pytest.raises((CommandError, EngineError)) as refused:
        outcome_of(reward=1.0, status="completed", **said)
    assert words in str(refused.value)


def test_the_command_explains_itself_with_an_example(run: Any) -> None:
    assert "Example" in run("outcome", "--help").stdout


def test_every_example_of_the_page_is_an_outcome_of_the_form_it_says() -> None:
    examples = re.findall(r"^### [^\n]*\(`(\w+)`\)$.*?^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [form for form, _ in examples] == [
        "chat", "messages", "items", "snapshots", "responses", "text", "references", "accepted",
    ]  # fmt: skip
    for form, block in examples:
        event = scored("r1", Outcome.model_validate_json(block), new_id=UUID(int=1), at=0)
        if form in ("references", "accepted"):
            assert (event.accepted, event.output) == (("chatcmpl-1", "chatcmpl-2"), None)
        else:
            found = HarnessOutput.model_validate(event.output)
            assert (found.form, len(found.passages) > 0) == (form, True)
