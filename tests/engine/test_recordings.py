"""The acceptance test of the decision: recorded request streams of stock harnesses, with the truth about each call.

Each recording is one rollout. A call is decided when it arrives, among the calls of its recording that had completed by
then. The truth is `expected.json`; it must be met call for call, kind and parent. Missing recordings are a failure.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.decide import Continuation, Root, candidate_keys, decide
from engine.dialects import chat
from engine.items import answer_key, reasoning_digest, traces
from store import hashing
from store.events import ReasoningPolicy
from store.lineage import KnownCall, TracedCall

RECORDINGS = Path(__file__).parents[2] / "../shared/recordings"
CHAT = (
    "aider", "cline", "cline-odd-replies", "continue-cli", "deepagents-chat", "ldp-hide-env-states",
    "ldp-hide-env-states-images", "ldp-plain", "ldp-react", "mini-swe-agent-chat", "mini-swe-agent-odd-replies",
    "mistral-vibe", "mistral-vibe-odd-replies", "openai-agents-chat", "opencode-chat", "opencode-odd-replies",
    "opencode-plan-reminders", "opencode-rules-file", "opencode-subagents", "openhands-sdk-chat",
    "openhands-sdk-odd-replies", "pi", "pi-odd-replies", "pi-resume-rules-file", "qwen-code-odd-replies",
    "qwen-code-resume", "smolagents",
)  # fmt: skip
"""The recordings of this dialect, by name, so that one that is missing or new is noticed."""

REASONS = {
    "first agent call": {"first_call", "fresh_context"},
    "separate title request": {"first_call"},
    "subagent": {"fresh_context"},
    "the request ends in an assistant message": {"ends_with_model_item"},
    "three user messages": {"fresh_context"},
    "first call after": {"context_replaced"},
    "summariser": {"fresh_context"},
    "environment state shown before is replaced": {"item_edited"},
    "file block and reminder moved": {"item_edited", "item_removed"},
    "reminder": {"item_edited"},
    "system prompt": {"item_edited"},
    "came back": {"answer_edited"},
    "tool calls written as text": {"answer_edited"},
}
"""Words of a root's reason in expected.json, and what the rule calls it; the first words that fit count."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One harness run: its calls in order of arrival, and the truth about each."""

    calls: list[dict[str, Any]]
    expected: list[dict[str, Any]]


@dataclass(kw_only=True)
class Replayed:
    """The decision about each call, by seq, and the calls that a log would know afterwards."""

    decisions: dict[int, Root | Continuation] = field(default_factory=dict)
    finished: list[tuple[float, KnownCall, TracedCall]] = field(default_factory=list)
    """(time of completion, call, its traces)"""

    def verdict(self, seq: int) -> tuple[str, int | None]:
        """Kind and parent, as expected.json has them."""
        decision = self.decisions[seq]
        return ("continuation", decision.parent.sequence) if isinstance(decision, Continuation) else ("root", None)


def read(name: str) -> Recording:
    folder = RECORDINGS / name
    assert folder.is_dir(), f"{folder} is missing: the recordings are the acceptance test of the decision"
    calls = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    expected = json.loads((folder / "expected.json").read_text())["calls"]
    assert [call["seq"] for call in calls] == [truth["seq"] for truth in expected]
    return Recording(calls=calls, expected=expected)


def without_cache_control(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_cache_control(inner) for name, inner in value.items() if name != "cache_control"}
    return [without_cache_control(inner) for inner in value] if isinstance(value, list) else value


def completed(call: dict[str, Any]) -> bool:
    return not any(mark in call["response"] for mark in ("error", "stream_cut", "client_gone"))


def replay(recording: Recording, policy: ReasoningPolicy) -> Replayed:
    replayed = Replayed()
    for call in recording.calls:
        body = call["request"]
        items = chat.request_items(body)
        tools = hashing.tagged_digest("tools", hashing.canonical_json(without_cache_control(body.get("tools"))))
        render = hashing.render_hash({"model": body["model"], "tools": tools.hex()})
        before = [entry for entry in replayed.finished if entry[0] <= call["t_start_ms"]]
        decision = decide(
            items,
            render,
            tools,
            policy,
            look_up=lambda keys, before=before: [known for _, known, _ in before if known.summary_hash in keys],
            recent=lambda before=before: [traced for _, _, traced in before][-32:],
        )
        replayed.decisions[call["seq"]] = decision
        if completed(call):
            (answer,) = chat.answers(call["response"])
            parent = decision.parent if isinstance(decision, Continuation) else None
            call_id = UUID(int=call["seq"])
            known = KnownCall(
                call_id=call_id,
                rollout_id="r",
                parent_id=None if parent is None else parent.call_id,
                root_id=call_id if parent is None else parent.root_id,
                depth=0 if parent is None else parent.depth + 1,
                sequence=call["seq"],
                chain_len=0,
                hash_version=hashing.HASH_VERSION,
                summary_hash=hashing.summary_hash(candidate_keys(items, render).request_hash, answer_key(answer.items)),
                chain_hash=b"",
                reasoning_digest=reasoning_digest(answer.items),
                response_id=None,
            )
            traced = TracedCall(
                call_id=call_id,
                sequence=call["seq"],
                render_hash=render,
                tools_digest=tools,
                request=traces(items),
                answer=traces(answer.items),
            )
            replayed.finished.append((call["t_end_ms"], known, traced))
    return replayed


def test_every_recording_of_this_dialect_is_here() -> None:
    assert RECORDINGS.is_dir(), f"{RECORDINGS} is missing: the recordings are the acceptance test of the decision"
    found = {
        folder.name
        for folder in RECORDINGS.iterdir()
        if folder.is_dir() and read(folder.name).calls[0]["endpoint"] == "/v1/chat/completions"
    }
    assert found == set(CHAT)


@pytest.mark.parametrize("name", CHAT)
def test_with_restore_every_call_has_the_right_kind_and_parent(name: str) -> None:
    recording = read(name)
    replayed = replay(recording, "restore")
    wrong = {
        truth["seq"]: {
            "found": found,
            "truth": wanted,
            "why": truth["reason"],
            "decision": replayed.decisions[truth["seq"]],
        }
        for truth in recording.expected
        if (found := replayed.verdict(truth["seq"])) != (wanted := (truth["kind"], truth["parent"]))
    }
    assert not wrong


@pytest.mark.parametrize("name", CHAT)
def test_with_strict_exactly_the_calls_without_their_reasoning_become_roots(name: str) -> None:
    recording = read(name)
    replayed = replay(recording, "strict")
    for truth in recording.expected:
        decision = replayed.decisions[truth["seq"]]
        if "reasoning_dropped" in truth["flags"]:
            assert isinstance(decision, Root)
            assert decision.reason == "reasoning_dropped"
            assert decision.evidence["nearest_call"] == str(UUID(int=truth["parent"]))
        else:
            assert replayed.verdict(truth["seq"]) == (truth["kind"], truth["parent"])


@pytest.mark.parametrize("name", CHAT)
def test_restored_reasoning_is_flagged_where_it_was_dropped(name: str) -> None:
    recording = read(name)
    replayed = replay(recording, "restore")
    for truth in recording.expected:
        decision = replayed.decisions[truth["seq"]]
        if isinstance(decision, Continuation):
            assert ("reasoning_dropped" in decision.flags) == ("reasoning_dropped" in truth["flags"])


def test_the_reasons_of_roots_say_what_a_person_said() -> None:
    found: Counter[str] = Counter()
    for name in CHAT:
        recording = read(name)
        replayed = replay(recording, "restore")
        for truth in recording.expected:
            decision = replayed.decisions[truth["seq"]]
            if isinstance(decision, Root):
                found[decision.reason] += 1
                words = next(words for words in REASONS if words in truth["reason"])
                assert decision.reason in REASONS[words], (name, truth, decision)
    assert found == {
        "first_call": 27,
        "item_edited": 19,
        "answer_edited": 18,
        "fresh_context": 15,
        "context_replaced": 6,
        "item_removed": 2,
        "ends_with_model_item": 1,
    }


def test_parents_are_continued_whole_requests_and_answers() -> None:
    """Where a continuation's answer starts, its parent's request ends, item for item."""
    for name in CHAT:
        recording = read(name)
        replayed = replay(recording, "restore")
        requests = {traced.sequence: traced.request for _, _, traced in replayed.finished}
        for call in recording.calls:
            decision = replayed.decisions[call["seq"]]
            if isinstance(decision, Continuation):
                items = traces(chat.request_items(call["request"]))
                assert items[: decision.start] == requests[decision.parent.sequence]
                assert decision.start < decision.suffix < len(items)


@pytest.mark.parametrize("name", CHAT)
def test_a_recorded_answer_cut_into_chunks_is_the_same_answer(name: str) -> None:
    dice = random.Random(name)
    for call in read(name).calls:
        if completed(call):
            stream = chat.StreamedResponse()
            for chunk in chunks_of(dice, call["response"]):
                stream.feed(chunk)
            assert stream.completed
            assert chat.answers(stream.response()) == chat.answers(call["response"])


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
