"""The database goes away: before a call, during its generation, at its commit. Plain and streamed, refused and spooled.

Away means that it closes every connection and lets nobody in. What the client saw stands beside what the log holds.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import Engine

from store import lineage, log
from store.database import read
from store.events import CallCompleted

pytestmark = pytest.mark.postgres
QUESTION = [{"role": "user", "content": "Hi"}]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


def went_on(messages: list[dict[str, str]], answer: str | None) -> list[dict[str, str]]:
    assert answer is not None
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on"}]


def calls_of(database: Engine) -> list[CallCompleted]:
    with read(database) as connection:
        found = log.calls(connection, "r")
        assert log.pending(connection) == []
        for call in found:  # whole: every chain is there, and every hash fits
            assert len(lineage.chain_tokens(connection, call.call_id)) == call.chain_len
    return found


@STREAMED
def test_away_before_a_call_refuse(serve: Any, postgres_database: Engine, outage: Any, said_by: Any, stream: bool):
    server = serve(postgres_database)
    outage.begin()
    refused = server.ask(QUESTION, stream=stream)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "the log is down" in refused.json()["error"]["message"]
    assert server.engine.generations == 0  # it cost no token
    outage.end()
    with read(postgres_database) as connection:
        assert (log.rollouts(connection), log.pending(connection)) == ([], [])
    assert_served_again(server, said_by)


def assert_served_again(server: Any, said_by: Any) -> None:
    """Once a second somebody finds out whether the log is back."""
    time.sleep(1)
    assert said_by(server.ask(QUESTION)) is not None


@STREAMED
def test_away_before_a_call_spool(
    serve: Any, postgres_database: Engine, outage: Any, said_by: Any, until: Any, stream: bool
):
    server = serve(postgres_database, "spool")
    first = went_on(QUESTION, said_by(server.ask(QUESTION, stream=stream)))
    outage.begin()
    second = went_on(first, said_by(server.ask(first, stream=stream)))  # its parent is in the log, and remembered
    third = said_by(server.ask(second, stream=stream))  # its parent is in the spool
    unknown = went_on(QUESTION, "what this worker never said")
    stranger = said_by(server.ask(unknown, stream=stream))
    outage.end()
    until(lambda: not server.journal.writer.spooling)
    root, second_call, third_call, other = calls_of(postgres_database)
    assert (third, stranger) == ("answer 3", "answer 4")
    assert [call.reason for call in (root, second_call, third_call, other)] == [
        "first_call", "answer_echoed", "answer_echoed", "log_unavailable",
    ]  # fmt: skip
    assert (second_call.parent_id, third_call.parent_id) == (root.call_id, second_call.call_id)
    assert other.parent_id is None
    assert server.journal.writer.counters.drained == server.journal.writer.counters.spooled == 6
    # And when it is back, the log is asked again.
    assert said_by(server.ask(went_on(second, third), stream=stream)) == "answer 5"
    assert calls_of(postgres_database)[-1].parent_id == third_call.call_id


@STREAMED
@pytest.mark.parametrize("on_log_failure", ["refuse", "spool"])
def test_away_during_generation_and_back_before_patience_ends(
    serve: Any, postgres_database: Engine, outage: Any, said_by: Any, on_log_failure: str, stream: bool
):
    server = serve(postgres_database, on_log_failure, patience=20)
    server.engine.halfway = outage.cut
    assert said_by(server.ask(QUESTION, stream=stream)) == "answer 1"
    assert [call.sampled_len for call in calls_of(postgres_database)] == [len("answer 1") + 1]
    assert server.journal.writer.counters.spooled == 0


@STREAMED
def test_away_at_the_commit_refuse(
    serve: Any, postgres_database: Engine, outage: Any, said_by: Any, caplog: Any, stream: bool
):
    server = serve(postgres_database)
    server.before_commit = outage.begin
    failed = server.ask(QUESTION, stream=stream)
    assert said_by(failed) is None
    assert "ServiceUnavailableError" in failed.text
    assert failed.status_code == (200 if stream else 503)  # a stream has begun by then: its error is its last event
    assert ("retry-after" in failed.headers) != stream
    server.before_commit = lambda: None
    server.close()
    assert "an event could not be appended" in caplog.text  # that it failed could not be written either
    outage.end()
    with read(postgres_database) as connection:
        assert log.calls(connection, "r") == []
        assert len(log.pending(connection)) == 1
    again = serve(postgres_database)
    assert [(end.state, end.reason) for end in again.lost] == [("lost", "worker w stopped before the call ended")]
    assert said_by(again.ask(QUESTION, stream=stream)) == "answer 1"
    assert [call.reason for call in calls_of(postgres_database)] == ["first_call"]


@STREAMED
def test_away_at_the_commit_spool(
    serve: Any, postgres_database: Engine, outage: Any, said_by: Any, until: Any, stream: bool
):
    server = serve(postgres_database, "spool")
    server.before_commit = outage.begin
    first = went_on(QUESTION, said_by(server.ask(QUESTION, stream=stream)))
    server.before_commit = lambda: None
    assert said_by(server.ask(first, stream=stream)) == "answer 2"
    outage.end()
    until(lambda: not server.journal.writer.spooling)
    root, child = calls_of(postgres_database)
    assert (child.parent_id, child.reason) == (root.call_id, "answer_echoed")


def test_a_full_spool_refuses_until_the_database_is_back(
    serve: Any, postgres_database: Engine, outage: Any, said_by: Any, until: Any
):
    server = serve(postgres_database, "spool", limit=30_000)
    asked = went_on(QUESTION, said_by(server.ask(QUESTION)))
    outage.begin()
    answered = 1
    while (answer := said_by(response := server.ask(asked))) is not None:
        asked = went_on(asked, answer)
        answered += 1
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert server.engine.generations == answered > 2  # what was refused cost no token
    outage.end()
    until(lambda: not server.journal.writer.spooling)
    assert said_by(server.ask(asked)) == f"answer {answered + 1}"
    assert len(calls_of(postgres_database)) == answered + 1


def test_a_worker_that_is_killed_with_a_full_spool_hands_it_over_when_it_starts_again(
    serve: Any, postgres_database: Engine, outage: Any, said_by: Any
):
    server = serve(postgres_database, "spool")
    server.before_commit = outage.begin
    first = went_on(QUESTION, said_by(server.ask(QUESTION)))
    server.close()  # the database does not come back in its life
    assert server.journal.writer.spooling
    outage.end()
    again = serve(postgres_database, "spool")
    assert again.lost == []  # the intent's end was in the spool
    assert said_by(again.ask(first)) == "answer 1"
    root, child = calls_of(postgres_database)
    assert child.parent_id == root.call_id
