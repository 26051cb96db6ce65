"""Recorded request streams that nobody has seen: overlap, failures, other calls, and lines that cannot be read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.explain import BadLine, Explained, ExplainedRow, Recording
from store.events import ReasoningPolicy

SYSTEM = {"role": "system", "content": "Be brief."}


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def line(
    *messages: dict[str, Any], answer: Any = None, body: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A chat call of these messages; the answer is a text, or the response itself."""
    response = answer if isinstance(answer, dict) else plain(say(answer or "ok"))
    request = {"model": "m", "messages": [SYSTEM, *messages], **(body or {})}
    return {"endpoint": "/v1/chat/completions", "request": request, "response": response, **more}


def plain(*messages: dict[str, Any]) -> dict[str, Any]:
    return {
        "choices": [
            {"index": index, "message": message, "finish_reason": "stop"} for index, message in enumerate(messages)
        ]
    }


def read(*lines: dict[str, Any], policy: ReasoningPolicy = "strict") -> list[Explained]:
    recording = Recording(policy, name="trace.jsonl")
    return [recording.read(json.dumps(each), number) for number, each in enumerate(lines, start=1)]


def verdicts(*lines: dict[str, Any], policy: ReasoningPolicy = "strict") -> list[tuple[int, str, int | None]]:
    return [(call.seq, call.kind, call.parent) for call in read(*lines, policy=policy)]


def rows(*lines: dict[str, Any]) -> list[ExplainedRow]:
    recording = Recording("restore", name="trace.jsonl")
    for number, each in enumerate(lines, start=1):
        recording.read(json.dumps(each), number)
    return recording.rows()


def test_calls_without_numbers_or_times_come_one_after_the_other() -> None:
    assert verdicts(
        line(ask("1"), answer="a"),
        line(ask("1"), say("a"), ask("2"), answer="b"),
        line(ask("1"), say("a"), ask("2"), say("b"), ask("3")),
    ) == [(1, "root", None), (2, "continuation", 1), (3, "continuation", 2)]


def test_numbers_of_the_recording_are_kept() -> None:
    found = verdicts(
        line(ask("1"), answer="a", seq=7),
        line(ask("1"), say("a"), ask("2"), seq=3),
        line(ask("x")),
    )
    assert found == [(7, "root", None), (3, "continuation", 7), (4, "root", None)]


@pytest.mark.parametrize(("end", "kind"), [(10, "continuation"), (11, "root"), (None, "continuation")])
def test_a_call_in_flight_is_no_parent(end: int | None, kind: str) -> None:
    first = line(ask("1"), answer="a", t_start_ms=0, t_end_ms=end)
    (_, found) = read(first, line(ask("1"), say("a"), ask("2"), t_start_ms=10, t_end_ms=20))
    assert found.kind == kind
    assert found.reason == ("answer_echoed" if kind == "continuation" else "first_call")


def test_lines_in_order_of_completion_are_decided_alike() -> None:
    slow = line(ask("slow"), answer="s", seq=1, t_start_ms=0, t_end_ms=100)
    quick = line(ask("quick"), answer="q", seq=2, t_start_ms=10, t_end_ms=20)
    after = line(ask("quick"), say("q"), ask("more"), answer="r", seq=3, t_start_ms=30, t_end_ms=40)
    late = line(ask("slow"), say("s"), ask("more"), seq=4, t_start_ms=110.5, t_end_ms=120)
    expected = {1: None, 2: None, 3: 2, 4: 1}
    for order in ((slow, quick, after, late), (quick, after, slow, late)):
        assert {call.seq: call.parent for call in read(*order)} == expected


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ({"status": 500, "error": {"error": {"message": "try again"}}}, "error 500"),
        ({"error": "gone"}, "error"),
        ({"status": 200, "stream_cut": True}, "stream_cut"),
        ({**plain(say("a")), "client_gone": True}, "client_gone"),
        ({"choices": [{"message": 7}]}, "the server's answer cannot be captured: choices[0].message is 7"),
        ({}, "the server's answer cannot be captured: choices is null"),
        (None, "no response"),
        ([], "no response"),
    ],
)
def test_a_call_without_an_answer_is_decided_and_is_no_parent(response: Any, why: str) -> None:
    failed = {**line(ask("1")), "response": response}
    first, retry, after = read(failed, line(ask("1"), answer="a"), line(ask("1"), say("a"), ask("2")))
    assert first.kind == "root"
    assert str(first.evidence["no_answer"]).startswith(why)
    assert (retry.kind, after.parent) == ("root", 2)
    assert "no_answer" not in after.evidence


def test_an_error_of_null_is_no_error() -> None:
    response = {
        "status": "completed",
        "error": None,
        "output": [{"type": "message", "role": "assistant", "content": "a"}],
    }
    call = {"endpoint": "/v1/responses", "request": {"input": "1"}, "response": response}
    following = {**call, "request": {"input": [ask("1"), say("a"), ask("2")]}}
    assert [found.parent for found in read(call, following)] == [None, 1]


def test_dialects_models_and_tools_are_contexts_of_their_own() -> None:
    tools = [{"type": "function", "function": {"name": "ls"}}]
    first = line(ask("1"), answer="a", body={"tools": tools})
    request = (ask("1"), say("a"), ask("2"))
    marked = [{**tools[0], "cache_control": {"type": "ephemeral"}}]
    for body, parent in (
        ({"tools": tools}, 1),
        ({"tools": marked}, 1),
        ({"tools": tools, "tool_choice": "none", "temperature": 1, "reasoning_effort": "high"}, 1),
        ({"tools": tools, "model": "other"}, None),
        ({"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"tools": []}, None),
        ({}, None),
    ):
        assert read(first, line(*request, body=body))[1].parent == parent
    assert read(first, line(*request))[1].reason == "tools_changed"
    in_messages = {
        "endpoint": "/v1/messages",
        "request": {"model": "m", "tools": tools, "system": SYSTEM["content"], "messages": [*request]},
        "response": {},
    }
    assert read(first, in_messages)[1].parent is None


@pytest.mark.parametrize("empty", [[], None])
def test_no_tools_are_no_tools_however_they_are_written(empty: Any) -> None:
    assert verdicts(line(ask("1"), answer="a"), line(ask("1"), say("a"), ask("2"), body={"tools": empty}))[1][2] == 1


@pytest.mark.parametrize(
    "endpoint",
    [
        "/v1/chat/completions",
        "http://127.0.0.1:8000/rollouts/r1/v1/chat/completions?beta=true",
        "POST /v1/chat/completions",
        "/v1/chat/completions/",
    ],
)
def test_the_path_alone_says_the_dialect(endpoint: str) -> None:
    assert read({**line(ask("1")), "endpoint": endpoint})[0].kind == "root"


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("/v1/messages/count_tokens", "not_a_model_call"),
        ("/rollouts/r1/v1/models", "not_a_model_call"),
        ("/v1/completions", "unknown_endpoint"),
        ("", "unknown_endpoint"),
        ("http://[", "unknown_endpoint"),
    ],
)
def test_what_is_no_model_call_is_passed_by_name_and_changes_nothing(endpoint: str, reason: str) -> None:
    first, other, after = read(
        line(ask("1"), answer="a"),
        {"endpoint": endpoint, "request": None},
        line(ask("1"), say("a"), ask("2")),
    )
    assert (other.seq, other.kind, other.parent, other.reason) == (2, "passed", None, reason)
    assert (first.kind, after.seq, after.parent) == ("root", 3, 1)


def test_a_request_that_a_server_would_refuse_says_why() -> None:
    found, after = read(line({"role": "user", "content": [{"type": "hologram"}]}), line(ask("1")))
    assert (found.kind, found.parent, found.candidates) == ("refused", None, 0)
    assert "'hologram', which turnlog cannot compare" in found.reason
    assert found.evidence == {"param": "messages[1].content[0].type"}
    assert after.reason == "first_call"


def test_a_request_that_nests_too_deep_is_refused_as_a_server_does() -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"in": deep}
    tool = {"type": "function", "function": {"name": "put", "parameters": deep}}
    found, after = read(line(ask("1"), body={"tools": [tool]}), line(ask("1")))
    assert (found.kind, found.parent) == ("refused", None)
    assert found.reason == "the request nests too deep to be read: send it flatter"
    assert after.reason == "first_call"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "this is no JSON"),
        ("{", "this is no JSON"),
        ('{"endpoint": "/v1/messages", "request": {"messages": [], "temperature": NaN}}', "NaN is no number of JSON"),
        ("[" * 100_000, "this is no JSON"),
        ("[]", "this is []: write one call a line, as a JSON object"),
        ("{}", "endpoint is null: name the path"),
        ('{"endpoint": 7}', "endpoint is 7: name the path"),
        ('{"endpoint": "/v1/messages"}', "request is null: write the body as it was sent"),
        ('{"endpoint": "/v1/messages", "request": "x"}', "request is 'x': write the body"),
        ('{"endpoint": "/v1/messages", "request": {}, "seq": "a"}', "seq is 'a': number the calls"),
        ('{"endpoint": "/v1/messages", "request": {}, "seq": true}', "seq is True: number the calls"),
        ('{"endpoint": "/v1/messages", "request": {}, "seq": 1}', "seq 1 is used by an earlier line"),
        ('{"endpoint": "/v1/messages", "request": {}, "t_start_ms": "now"}', "t_start_ms is 'now': give milliseconds"),
        ('{"endpoint": "/v1/messages", "request": {}, "t_end_ms": false}', "t_end_ms is False: give milliseconds"),
        (b"\xff{}", "this is no JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_left_out(text: str | bytes, why: str) -> None:
    recording = Recording("strict", name="trace.jsonl")
    recording.read(json.dumps(line(ask("1"), answer="a")), 1)
    with pytest.raises(BadLine) as caught:
        recording.read(text, 2)
    assert str(caught.value).startswith("trace.jsonl:2: ")
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300
    assert (caught.value.name, caught.value.number) == ("trace.jsonl", 2)
    after = recording.read(json.dumps(line(ask("1"), say("a"), ask("2"))), 3)
    assert (after.seq, after.parent) == (2, 1)


def test_evidence_names_calls_by_their_numbers_and_is_json() -> None:
    found = read(
        line(ask("1"), answer="a", seq=10),
        line(ask("edited"), say("a"), ask("2"), seq=20),
        line(ask("1"), seq=30),
    )
    assert (found[1].reason, found[1].evidence["nearest_call"]) == ("item_edited", 10)
    assert found[2].evidence["repeats_call"] == 10
    for call in found:
        shown = call.as_json()
        assert json.loads(json.dumps(shown)) == shown
        assert [*shown] == ["seq", "kind", "parent", "reason", "candidates", "evidence"]


def test_reasoning_that_does_not_come_back_follows_the_policy() -> None:
    first = line(ask("1"), answer=plain(say("a", reasoning="Hm.")))
    second = line(ask("1"), say("a"), ask("2"))
    strict, restored = (read(first, second, policy=policy)[1] for policy in ("strict", "restore"))
    assert (strict.kind, strict.reason, strict.candidates, strict.evidence["nearest_call"]) == (
        "root",
        "reasoning_dropped",
        1,
        1,
    )
    assert (restored.parent, restored.evidence) == (1, {"flags": ["reasoning_dropped"]})


def test_headers_tell_the_role() -> None:
    spawned = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert [
        call.role
        for call in read(
            line(ask("1"), headers=spawned), line(ask("2"), headers={"x-a": 7}), line(ask("3"), headers="none")
        )
    ] == ["subagent", None, None]


def test_a_chain_is_one_row_and_a_fork_trains_what_is_new() -> None:
    found = rows(
        line(ask("1"), answer="a"),
        line(ask("1"), say("a"), ask("2"), answer="b"),
        line(ask("1"), say("a"), ask("other"), answer="c"),
        line(ask("new context"), answer="d"),
    )
    assert [(row.calls, row.trained, row.reason) for row in found] == [
        ((1, 2), (1, 2), "first_call"),
        ((1, 3), (3,), "first_call"),
        ((4,), (4,), "fresh_context"),
    ]


def test_an_answer_that_was_sampled_again_gives_no_row_unless_it_was_used() -> None:
    again = [line(ask("1"), answer="a"), line(ask("1"), answer="b")]
    assert [row.calls for row in rows(*again)] == [(2,)]
    used = line(ask("1"), say("a"), ask("2"))
    assert [row.calls for row in rows(*again, used)] == [(1, 3), (2,)]


def test_every_choice_of_an_answer_is_a_call_of_its_own() -> None:
    several = line(ask("1"), answer=plain(say("a"), say("b"), say("c")))
    recording = [several, line(ask("1"), say("b"), ask("2"), answer="d")]
    assert verdicts(*recording)[1] == (2, "continuation", 1)
    assert sorted(row.calls for row in rows(*recording)) == [(1,), (1,), (1, 2)]


def test_a_root_looks_at_the_latest_32_answered_calls_however_long_the_recording() -> None:
    recording = Recording("strict", name="long")
    for number in range(400):
        recording.read(json.dumps(line(ask(f"task {number}"), answer="x")), number + 1)
    assert len(recording._recent) <= 128
    near = recording.read(json.dumps(line(ask("task 390"), say("edited"), ask("more"))), 401)
    assert (near.reason, near.evidence["nearest_call"]) == ("answer_edited", 391)
    far = recording.read(json.dumps(line(ask("task 3"), say("edited"), ask("more"))), 402)
    assert far.evidence["nearest_call"] != 4
    found = recording.read(json.dumps(line(ask("task 3"), say("x"), ask("more"))), 403)
    assert found.parent == 4
