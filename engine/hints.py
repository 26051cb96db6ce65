"""What a harness says about a call for free: who calls, in which conversation, and what the call is for.

Knows the headers and the prompts of some stock harnesses; does not know decisions or the log. Law: a hint is kept with
the call and shown to people, it is never part of a verdict; a harness that says nothing gives no hints.

Keys, those that are known: `harness`; `session`, `thread` and `agent`, its names for a conversation and who speaks in
it; `parent`, the name of the one that started it; `window`, a count that goes up when Codex compacts; `kind`, the
harness's own word for the call; and `role`, ours: `title`, `summary` or `subagent`. A call without `role` is an
agent's ordinary one, or nobody said.

>>> hints({"x-parent-session-id": "ses_1", "x-session-id": "ses_2", "x-session-affinity": "ses_2"}, {}, [])
{'harness': 'opencode', 'session': 'ses_2', 'parent': 'ses_1', 'role': 'subagent'}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from engine.items import Item

ROLES = ("title", "summary", "subagent")
"""What a call may be for, where it is no agent's ordinary one."""
_LONGEST = 200
"""Characters of a value that are kept: names are shorter, and a header may hold anything."""
_HEAD = 1000
"""Characters of a system prompt that are looked at: what a side call is for stands at its beginning."""
_CLAUDE = "x-claude-code-"

_TITLES = (
    "You are a title generator",  # OpenCode
    "Generate a concise, sentence-case title",  # Claude Code
    "You write short, descriptive titles for coding-agent sessions",  # Mistral Vibe
)
_SUMMARIES = (
    "You are a context summarization agent",  # OpenCode
    "You are an anchored context summarization assistant",  # OpenCode before
    "You are a helpful AI assistant tasked with summarizing conversations",  # OpenCode before that
    "You are a context summarization assistant",  # pi
    "Your task is to create a detailed summary of the conversation so far",  # Claude Code
    "You are maintaining a context-aware state summary",  # OpenHands
    "You are performing a CONTEXT CHECKPOINT COMPACTION",  # Mistral Vibe, Codex
    "Create a comprehensive summary of our entire conversation",  # Mistral Vibe before
    "You are the component that summarizes a conversation",  # Qwen Code
    "Please provide a concise summary of our conversation so far",  # Continue
    "<role>\nContext Extraction Assistant\n</role>",  # LangChain, and so deepagents
)
"""Words by which harnesses ask for one, early in a system prompt or anywhere in a last message of the user's."""


def hints(headers: Mapping[str, str], body: Mapping[str, JsonValue], items: Sequence[Item]) -> dict[str, JsonValue]:
    """The hints of one request; `items` are the request's own."""
    sent = {name.lower(): value for name, value in headers.items() if value}
    found = _codex(sent, body) or _claude_code(sent) or _by_session(sent)
    role = _asked_for(items) or found.get("role")
    told = {**found, "role": role}
    return {name: _short(value) for name, value in told.items() if value is not None and value != ""}


def _codex(sent: Mapping[str, str], body: Mapping[str, JsonValue]) -> dict[str, JsonValue] | None:
    """Codex sends the same facts as headers and as `client_metadata`, and more of them as JSON inside either."""
    metadata = body.get("client_metadata")
    told: dict[str, JsonValue] = {**(metadata if isinstance(metadata, dict) else {}), **sent}
    turn = _object(told.get("x-codex-turn-metadata"))
    if "x-codex-window-id" not in told and not turn:
        return None
    thread, _, window = str(told.get("x-codex-window-id") or turn.get("window_id") or "").rpartition(":")
    parent = told.get("x-codex-parent-thread-id") or turn.get("parent_thread_id")
    subagent, kind = told.get("x-openai-subagent"), turn.get("request_kind")
    spawned = subagent or parent or turn.get("thread_source") == "subagent"
    return {
        "harness": "codex",
        "session": told.get("session-id") or turn.get("session_id"),
        "thread": told.get("thread-id") or turn.get("thread_id") or thread,
        "parent": parent,
        "window": int(window) if re.fullmatch("[0-9]{1,9}", window) else None,
        "kind": subagent or kind,
        "role": "summary" if subagent == "compact" or kind == "compaction" else "subagent" if spawned else None,
    }


def _claude_code(sent: Mapping[str, str]) -> dict[str, JsonValue] | None:
    """Claude Code; it tells the class of a request when `CLAUDE_CODE_GATEWAY_HINT_HEADERS=1` is set."""
    ours = {name.removeprefix(_CLAUDE): value for name, value in sent.items() if name.startswith(_CLAUDE)}
    if not ours:
        return None
    kind = ours.get("request-class")
    summary = kind == "compaction" or "compaction" in ours
    spawned = kind in ("subagent", "workflow") or "agent-id" in ours or "parent-agent-id" in ours
    return {
        "harness": "claude-code",
        "session": ours.get("session-id"),
        "agent": ours.get("agent-id"),
        "parent": ours.get("parent-agent-id"),
        "kind": kind,
        "role": "summary" if summary else "subagent" if spawned else None,
    }


def _by_session(sent: Mapping[str, str]) -> dict[str, JsonValue]:
    """Harnesses of which one header says the conversation."""
    if "x-session-affinity" in sent or "x-parent-session-id" in sent:
        parent = sent.get("x-parent-session-id")
        session = sent.get("x-session-id") or sent.get("x-session-affinity")
        role = None if parent is None else "subagent"
        return {"harness": "opencode", "session": session, "parent": parent, "role": role}
    if "x-litellm-session-id" in sent:  # litellm's, which others may use too
        return {"harness": "openhands", "session": sent["x-litellm-session-id"]}
    if "x-affinity" in sent:
        return {"harness": "vibe", "session": sent["x-affinity"]}
    return {}


def _asked_for(items: Sequence[Item]) -> str | None:
    """What the system prompt or the last message asks for, in the words of a harness that we know."""
    heads = [item.text[:_HEAD] for item in items[:2] if item.role in ("system", "developer")]
    texts = [*heads, *(item.text for item in items[-1:] if item.role == "user")]
    for role, phrases in (("title", _TITLES), ("summary", _SUMMARIES)):
        if any(phrase in text for text in texts for phrase in phrases):
            return role
    return None


def _object(value: JsonValue) -> dict[str, JsonValue]:
    """A JSON object given as text; what is none says nothing."""
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, JsonValue]", found) if isinstance(found, dict) else {}


def _short(value: JsonValue) -> JsonValue:
    return value if isinstance(value, int) else str(value)[:_LONGEST]
