"""The acceptance test of the decision: recorded request streams of stock harnesses, with the truth about each call.

Each recording is one rollout, decided call by call by `engine.explain`. The truth is `expected.json`; it must be met
call for call, kind and parent. Missing recordings are a failure, and new ones are noticed.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine.dialects import chat
from engine.dialects.routes import dialect_at
from engine.explain import Explained, Recording
from engine.items import traces
from replay.piece import CALLS, Piece, Rollout
from replay.selection import Selection, select
from store.events import ReasoningPolicy

RECORDINGS = Path(__file__).parents[2] / "../shared/recordings"
NAMES = sorted(folder.name for folder in RECORDINGS.iterdir() if folder.is_dir()) if RECORDINGS.is_dir() else []

REASONS = {
    "first agent call": {"first_call", "fresh_context"},
    "separate title request": {"first_call"},
    "subagent": {"fresh_context"},
    "the request ends in an assistant message": {"ends_with_model_item"},
    "three user messages": {"fresh_context"},
    "instructions and first messages again": {"fresh_context"},
    "the last three rounds kept": {"item_edited"},
    "first call after": {"context_replaced"},
    "context reset": {"item_removed"},
    "the tools list is empty": {"tools_changed"},
    "summariser": {"fresh_context"},
    "environment state shown before is replaced": {"item_edited"},
    "an older tool result is replaced": {"item_edited"},
    "old reasoning": {"item_edited", "item_removed"},
    "file block and reminder moved": {"item_edited", "item_removed"},
    "reminder": {"item_edited"},
    "system prompt": {"item_edited"},
    "reasoning item comes back": {"answer_edited"},
    "came back": {"answer_edited"},
    "tool calls written as text": {"answer_edited"},
}
"""Words of a root's reason in expected.json, and what the rule calls it; the first words that fit count."""


def lines_of(name: str) -> list[str]:
    return (RECORDINGS / name / "requests.jsonl").read_text().splitlines()


def truth_of(name: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = json.loads((RECORDINGS / name / "expected.json").read_text())["calls"]
    return calls


def decided(name: str, policy: ReasoningPolicy) -> tuple[Recording, dict[int, Explained]]:
    recording = Recording(policy, name=name)
    found = [recording.read(line, number) for number, line in enumerate(lines_of(name), start=1)]
    return recording, {call.seq: call for call in found}


def test_the_recordings_are_here_in_all_three_dialects() -> None:
    dialects = Counter(
        dialect.NAME
        for name in NAMES
        for line in lines_of(name)
        if (dialect := dialect_at(json.loads(line)["endpoint"])) is not None
    )
    assert dialects == {"chat": 302, "responses": 118, "messages": 96}
    assert len(NAMES) == 47


@pytest.mark.parametrize("name", NAMES)
def test_with_restore_every_call_has_the_right_kind_and_parent(name: str) -> None:
    _, found = decided(name, "restore")
    truth = truth_of(name)
    assert [*found] == [call["seq"] for call in truth]
    wrong = {
        call["seq"]: {"truth": call, "found": found[call["seq"]]}
        for call in truth
        if (found[call["seq"]].kind, found[call["seq"]].parent) != (call["kind"], call["parent"])
    }
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_with_strict_exactly_the_calls_without_their_reasoning_become_roots(name: str) -> None:
    _, found = decided(name, "strict")
    for truth in truth_of(name):
        call = found[truth["seq"]]
        if "reasoning_dropped" in truth["flags"]:
            assert (call.kind, call.parent, call.reason) == ("root", None, "reasoning_dropped")
            assert call.evidence["nearest_call"] == truth["parent"]
        else:
            assert (call.kind, call.parent) == (truth["kind"], truth["parent"])


@pytest.mark.parametrize("name", NAMES)
def test_restored_reasoning_is_flagged_where_it_was_dropped(name: str) -> None:
    _, found = decided(name, "restore")
    for truth in truth_of(name):
        call = found[truth["seq"]]
        if call.kind == "continuation":
            assert (call.evidence["flags"] == ["reasoning_dropped"]) == ("reasoning_dropped" in truth["flags"])


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_failed_says_so_and_no_other_does(name: str) -> None:
    _, found = decided(name, "restore")
    for truth in truth_of(name):
        assert ("no_answer" in found[truth["seq"]].evidence) == bool(truth.get("failed"))


def test_the_reasons_of_roots_say_what_a_person_said() -> None:
    reasons: Counter[str] = Counter()
    for name in NAMES:
        _, found = decided(name, "restore")
        for truth in truth_of(name):
            call = found[truth["seq"]]
            if call.kind == "root":
                reasons[call.reason] += 1
                words = next(words for words in REASONS if words in truth["reason"])
                assert call.reason in REASONS[words], (name, truth, call)
    assert reasons == {
        "first_call": 47,
        "item_edited": 31,
        "answer_edited": 29,
        "fresh_context": 26,
        "context_replaced": 12,
        "item_removed": 8,
        "tools_changed": 1,
        "ends_with_model_item": 1,
    }


def test_harnesses_that_say_what_a_call_is_for_say_the_truth() -> None:
    """The prompts of the recordings are replaced, so only headers and Codex's own metadata can tell here."""
    told: Counter[tuple[str, str]] = Counter()
    for name in NAMES:
        _, found = decided(name, "restore")
        for truth in truth_of(name):
            if (role := found[truth["seq"]].role) is not None:
                assert role == truth["call_role"]
                told[name, role] += 1
    assert told == {
        ("claude-code-subagents", "subagent"): 4,
        ("codex", "summary"): 1,
        ("codex-subagents", "subagent"): 4,
        ("opencode-subagents", "subagent"): 4,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_continuation_begins_with_its_parents_whole_request(name: str) -> None:
    items = {}
    for line in lines_of(name):
        call = json.loads(line)
        dialect = dialect_at(call["endpoint"])
        assert dialect is not None
        items[call["seq"]] = traces(dialect.request_items(call["request"]))
    _, found = decided(name, "restore")
    for seq, call in found.items():
        if call.parent is not None:
            before = items[call.parent]
            assert items[seq][: len(before)] == before
            assert len(items[seq]) > len(before)


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_are_those_that_the_selection_rule_gives(name: str) -> None:
    recording, _ = decided(name, "restore")
    rows = recording.rows()
    nothing = dict.fromkeys(("group_id", "task", "harness", "reward", "accepted", "output"))
    lines = [
        {
            "sequence": number,
            "rollout_id": name,
            "call_id": call.known.call_id.bytes,
            "parent_id": call.known.parent_id and call.known.parent_id.bytes,
            "request_hash": call.request_hash,
            "choice": call.choice,
        }
        for number, call in enumerate(recording._calls.values(), start=1)
    ]
    piece = Piece.of([Rollout(rollout_id=name, opened_at=0, **nothing)], pa.Table.from_pylist(lines, CALLS))
    counts = select(Selection(), piece).counts.tolist()
    trained = [seq for row in rows for seq in row.trained]
    assert sorted(trained) == sorted(
        call.known.sequence for call, counted in zip(recording._calls.values(), counts, strict=True) if counted
    )
    assert len(set(trained)) == len(trained)
    for row in rows:
        assert row.calls[-1] == row.trained[-1]
        assert set(row.trained) <= set(row.calls)


CHAT = [name for name in NAMES if json.loads(lines_of(name)[0])["endpoint"] == chat.PATH]


@pytest.mark.parametrize("name", CHAT)
def test_a_recorded_answer_cut_into_chunks_is_the_same_answer(name: str) -> None:
    dice = random.Random(name)
    for line in lines_of(name):
        response = json.loads(line)["response"]
        if "choices" in response:
            stream = chat.StreamedResponse()
            for chunk in chunks_of(dice, response):
                stream.take(json.dumps(chunk).encode())
            assert stream.completed
            stream.take(b"[DONE]")
            assert stream.ended
            assert chat.answers(stream.response()) == chat.answers(response)


def chunks_of(dice: random.Random, response: dict[str, Any]) -> list[dict[str, Any]]:
    (choice,) = response["choices"]
    message, deltas = choice["message"], [{"role": "assistant"}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in cut(dice, message.get(name) or "")]
    for position, call in enumerate(message.get("tool_calls") or []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{"index": position, "id": call["id"], "function": {"name": name}}]})
        for piece in cut(dice, arguments):
            deltas.append({"tool_calls": [{"index": position, "function": {"arguments": piece}}]})
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    return [*chunks, end, {"choices": [], "usage": response["usage"]}]


def cut(dice: random.Random, text: str) -> list[str]:
    places = sorted(dice.randrange(len(text) + 1) for _ in range(3))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
