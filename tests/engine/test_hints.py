"""What stock harnesses say about a call for free, and that nothing they send can do harm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.hints import hints
from engine.items import Item

TURN = {"request_kind": "turn", "thread_source": "user", "session_id": "s", "thread_id": "t", "window_id": "t:0"}


def of(headers: dict[str, str] | None = None, body: dict[str, Any] | None = None, *items: Item) -> dict[str, Any]:
    return hints(headers or {}, body or {}, items)


def test_a_harness_that_says_nothing_gives_no_hints() -> None:
    assert of({"user-agent": "OpenAI/Python 3.57.0", "x-session-affinity": ""}, {"metadata": {"user_id": "u"}}) == {}
    assert of({}, {}, Item.message("system", ["Be brief."]), Item.message("user", ["Summarise this."])) == {}


def test_codex_tells_session_thread_and_window() -> None:
    headers = {"session-id": "s", "Thread-Id": "t", "X-Codex-Window-Id": "t:3"}
    assert of(headers) == {"harness": "codex", "session": "s", "thread": "t", "window": 3}


@pytest.mark.parametrize("as_header", [True, False])
def test_codex_tells_the_kind_of_a_call_in_its_metadata(as_header: bool) -> None:
    turn = json.dumps({**TURN, "request_kind": "compaction", "installation_id": "x" * 300})
    sent = {"x-codex-window-id": "t:1", "x-codex-turn-metadata": turn}
    found = of(sent) if as_header else of({}, {"client_metadata": sent})
    expected = {"session": "s", "thread": "t", "window": 1, "kind": "compaction", "role": "summary"}
    assert found == {"harness": "codex", **expected}


@pytest.mark.parametrize(
    ("headers", "turn", "role", "kind"),
    [
        ({}, {}, None, "turn"),
        ({"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "p"}, {}, "subagent", "collab_spawn"),
        ({"x-openai-subagent": "review"}, {}, "subagent", "review"),
        ({"x-openai-subagent": "compact"}, {}, "summary", "compact"),
        ({}, {"thread_source": "subagent"}, "subagent", "turn"),
        ({}, {"parent_thread_id": "p"}, "subagent", "turn"),
        ({"x-codex-parent-thread-id": "p"}, {"request_kind": "compaction"}, "summary", "compaction"),
    ],
)
def test_codex_tells_subagents_and_summaries(
    headers: dict[str, str], turn: dict[str, str], role: str | None, kind: str
) -> None:
    found = of({**headers, "x-codex-turn-metadata": json.dumps({**TURN, **turn})})
    assert (found.get("role"), found["kind"], found["thread"]) == (role, kind, "t")
    assert found.get("parent") == (headers.get("x-codex-parent-thread-id") or turn.get("parent_thread_id"))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"session-id": "s"}, {"session": "s"}),
        ({"session-id": "s", "agent-id": "a"}, {"session": "s", "agent": "a", "role": "subagent"}),
        ({"session-id": "s", "parent-agent-id": "p"}, {"session": "s", "parent": "p", "role": "subagent"}),
        ({"request-class": "main"}, {"kind": "main"}),
        ({"request-class": "workflow"}, {"kind": "workflow", "role": "subagent"}),
        ({"request-class": "compaction"}, {"kind": "compaction", "role": "summary"}),
        ({"agent-id": "a", "compaction": "auto"}, {"agent": "a", "role": "summary"}),
        ({"request-class": "main", "context-compacted": "auto"}, {"kind": "main"}),
    ],
)
def test_claude_code_tells_session_agent_and_class(headers: dict[str, str], expected: dict[str, str]) -> None:
    sent = {f"X-Claude-Code-{name}": value for name, value in headers.items()}
    assert of(sent) == {"harness": "claude-code", **expected}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-session-id": "s", "x-session-affinity": "s"}, {"harness": "opencode", "session": "s"}),
        (
            {"x-session-id": "s", "x-session-affinity": "s", "x-parent-session-id": "p"},
            {"harness": "opencode", "session": "s", "parent": "p", "role": "subagent"},
        ),
        ({"x-litellm-session-id": "s"}, {"harness": "openhands", "session": "s"}),
        ({"x-affinity": "s"}, {"harness": "vibe", "session": "s"}),
    ],
)
def test_other_harnesses_tell_the_session(headers: dict[str, str], expected: dict[str, str]) -> None:
    assert of(headers) == expected


@pytest.mark.parametrize(
    ("items", "role"),
    [
        ([Item.message("system", ["You are a title generator. You output ONLY a thread title."])], "title"),
        ([Item.message("developer", ["You are a title generator."]), Item.message("user", ["Hi"])], "title"),
        ([Item.message("system", ["You are Claude Code.", "Generate a concise, sentence-case title (3-7"])], "title"),
        ([Item.message("system", ["You are an anchored context summarization assistant for"])], "summary"),
        (
            [
                Item.message("system", ["You are Claude Code."]),
                Item.message("user", ["Hi"]),
                Item.tool_result("c", ["x"]),
                Item.message("user", ["CRITICAL: text only.\n\nYour task is to create a detailed summary of the "
                                      "conversation so far, paying close attention"]),
            ],
            "summary",
        ),
        ([Item.message("user", ["You are maintaining a context-aware state summary for an"])], "summary"),
        # As OpenCode 1.18, pi 1.6, Qwen Code 0.24, Mistral Vibe 3.0, Continue 1.5 and deepagents 0.7 send them.
        ([Item.message("system", ["You are a context summarization agent. You are given a"])], "summary"),
        ([Item.message("system", ["You are a context summarization assistant. Your task is to read"])], "summary"),
        (
            [
                Item.message("system", ["You are Qwen Code."]),
                Item.message("user", ["Hi"]),
                Item.message("user", ["\nYou are the component that summarizes a conversation when its context"]),
            ],
            "summary",
        ),
        (
            [
                Item.message("system", ["You are Mistral Vibe."]),
                Item.message("user", ["CRITICAL: Respond with text only. Do NOT call any tools. Any tool call will be "
                                      "rejected.\n\nYou are performing a CONTEXT CHECKPOINT COMPACTION. Create a"]),
            ],
            "summary",
        ),
        ([Item.message("system", ["\nYou write short, descriptive titles for coding-agent sessions. Given"])], "title"),
        (
            [
                Item.message("system", ["You are an agent."]),
                Item.message("user", ["Please provide a concise summary of our conversation so far, capturing the"]),
            ],
            "summary",
        ),
        ([Item.message("user", ["<role>\nContext Extraction Assistant\n</role>\n\n<primary_objective>"])], "summary"),
        # An agent that works on such a harness reads these words; they stand in no prompt of its own.
        (
            [
                Item.message("user", ["Hi"]),
                Item.tool_result("c", ["You are a context summarization agent."]),
                Item.message("user", ["Which class is the Context Extraction Assistant?"]),
            ],
            None,
        ),
        ([Item.message("system", ["x" * 5000 + "You are a title generator"])], None),
        ([Item.message("user", ["Hi"]), Item.tool_result("c", ["You are a title generator"])], None),
        ([Item.message("user", ["You are a title generator"]), Item.message("user", ["Hi"])], None),
    ],
)  # fmt: skip
def test_the_prompts_of_side_calls_are_known_by_their_words(items: list[Item], role: str | None) -> None:
    assert of({}, {}, *items).get("role") == role
    spawned = of({"x-session-affinity": "s", "x-parent-session-id": "p"}, {}, *items)
    assert spawned["role"] == (role or "subagent")


@pytest.mark.parametrize(
    "body",
    [
        {"client_metadata": 7},
        {"client_metadata": {"x-codex-turn-metadata": "{"}},
        {"client_metadata": {"x-codex-turn-metadata": "[" * 100_000}},
        {"client_metadata": {"x-codex-turn-metadata": "[1]"}},
        {"client_metadata": {"x-codex-turn-metadata": 7}},
    ],
)
def test_metadata_that_cannot_be_read_says_nothing(body: dict[str, Any]) -> None:
    assert of({}, body) == {}


def test_values_are_short_and_windows_are_small_numbers() -> None:
    found = of({"x-codex-window-id": "t" * 900 + ":" + "9" * 5000, "session-id": "s" * 900})
    assert (len(found["thread"]), len(found["session"])) == (200, 200)
    assert "window" not in found
    odd = of({}, {"client_metadata": {"x-codex-window-id": 7, "session-id": {"a": 1}}})
    assert json.loads(json.dumps(odd)) == odd
