"""The proof of the chaos run: the log alone, held against what the agents wrote down.

Knows the log's events and the agents' notes; does not know servers or kills. Law: every promise noted is found in the
log exactly once and whole, and everything in the log, noted or not, is right by itself: digest, hashes, parent, intent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, Table, select
from transformers import PreTrainedTokenizerFast

from store import hashing, log, schema
from store.database import read
from store.events import CallCompleted, Event, token_array

KEYS = {
    schema.rollout: "rollout_id",
    schema.call_intent: "call_id",
    schema.model_call: "call_id",
    schema.call_end: "call_id",
    schema.rollout_outcome: "outcome_id",
}


@dataclass(slots=True, kw_only=True)
class Found:
    """What the log and the notes say together."""

    answered: int = 0
    """Whole answers that agents noted."""
    calls: int = 0
    """Completed calls in the log; also those whose answer did not reach anybody."""
    continued: int = 0
    lost: int = 0
    """Answers noted and not in the log: must be none."""
    doubled: int = 0
    """Answers that are in the log more than once: must be none."""
    marked_lost: int = 0
    """Calls cut off by a kill, which the next start of their worker ended."""
    ended: int = 0
    """Calls that ended without an answer otherwise: failed, abandoned, refused."""
    holes: int = 0
    """Places in the writers' own counts that no event has: completed calls that a kill kept from the log."""
    writers: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])
    """Why calls that went on from an answer began a new row all the same."""
    wrong: list[str] = field(default_factory=list[str])
    """Everything that must not be, in words."""


def prove(database: Engine, notes: Iterable[Path], tokenizer: PreTrainedTokenizerFast, *, exact: bool) -> Found:
    """Hold the log against the notes.

    `exact` when an answer's text is all that was sampled; else a part of it, as where thoughts are told apart.
    """
    noted = [json.loads(line) for path in notes for line in path.read_text().splitlines()]
    found = Found()
    by_response: dict[str, list[CallCompleted]] = {}
    with read(database) as connection:
        rollouts = {opened.rollout_id for opened in log.rollouts(connection)}
        for rollout in sorted(rollouts):
            for call in _rollout(connection, rollout, found):
                by_response.setdefault(call.response_id or "", []).append(call)
        found.wrong += [f"intent {each.call_id} has no end" for each in log.pending(connection)]
        outcomes = Counter(str(row[0]) for row in connection.execute(select(schema.rollout_outcome.c.outcome_id)))
    _writers(by_response, found)
    for note in noted:
        if note["kind"] == "answered":
            found.answered += 1
            _answer(note, by_response, found, tokenizer, exact=exact)
        elif note["kind"] == "opened" and note["rollout"] not in rollouts:
            found.wrong.append(f"rollout {note['rollout']} was opened and is not in the log")
        elif note["kind"] == "scored" and outcomes[note["outcome_id"]] != 1:
            found.wrong.append(f"outcome {note['outcome_id']} is {outcomes[note['outcome_id']]} times in the log")
    found.wrong += [f"rollout {each}: half an append is in the log" for each in rollouts if each.startswith("half-")]
    return found


def _rollout(connection: Connection, rollout: str, found: Found) -> list[CallCompleted]:
    """One rollout's events, each checked by itself and against the others."""
    opened = log.rollout(connection, rollout)
    calls, ends = log.calls(connection, rollout), log.ends(connection, rollout)
    intents, outcomes = log.intents(connection, rollout), log.outcomes(connection, rollout)
    assert opened is not None
    groups: tuple[tuple[Table, list[Any]], ...] = (
        (schema.rollout, [opened]),
        (schema.call_intent, intents),
        (schema.model_call, calls),
        (schema.call_end, ends),
        (schema.rollout_outcome, outcomes),
    )
    for table, events in groups:
        _digests(connection, table, rollout, events, found)
    admitted = {intent.call_id: intent for intent in intents}
    known: dict[UUID, CallCompleted] = {}
    for call in calls:
        intent = admitted.get(call.call_id)
        if intent is None or (intent.decision, intent.parent_id) != (call.decision, call.parent_id):
            found.wrong.append(f"call {call.call_id} is not what was admitted: {intent}")
        if (why := _misfit(call, known)) is not None:
            found.wrong.append(f"call {call.call_id} {why}")
        known[call.call_id] = call
    for end in ends:
        if end.call_id in known:
            found.wrong.append(f"call {end.call_id} is completed and {end.state}")
        if end.state != "refused" and end.call_id not in admitted:
            found.wrong.append(f"call {end.call_id} is {end.state} and was never admitted")
    found.calls += len(calls)
    found.continued += sum(call.decision == "continuation" for call in calls)
    found.marked_lost += sum(end.state == "lost" for end in ends)
    found.ended += sum(end.state != "lost" for end in ends)
    return calls


def _digests(connection: Connection, table: Table, rollout: str, events: list[Event], found: Found) -> None:
    key = KEYS[table]
    question = select(table.c[key], table.c.digest).where(table.c.rollout_id == rollout)
    stored = {row[0]: row[1] for row in connection.execute(question)}
    for event in events:
        if stored.pop(getattr(event, key)) != event.digest():
            found.wrong.append(f"{event.kind} {getattr(event, key)} does not have the digest of its content")
    found.wrong += [f"{table.name} {left} was not read back" for left in stored]


def _misfit(call: CallCompleted, known: dict[UUID, CallCompleted]) -> str | None:
    """What is wrong with a call by itself or on top of its parent."""
    if call.summary_hash != hashing.summary_hash(call.request_hash, call.answer_key):
        return "has a summary hash that is not that of its parts"
    parent = None if call.parent_id is None else known.get(call.parent_id)
    if call.parent_id is not None and parent is None:
        return f"stands before its parent {call.parent_id}, or without it"
    if call.chain_hash != hashing.chain_hash(None if parent is None else parent.chain_hash, call.token_ids):
        return "has a chain hash that its tokens do not give"
    expected = (call.call_id, 0, 0) if parent is None else (parent.root_id, parent.depth + 1, parent.chain_len)
    if (call.root_id, call.depth, call.prev_len) != expected:
        return f"does not fit its parent: {(call.root_id, call.depth, call.prev_len)}, not {expected}"
    return None


def _writers(by_response: dict[str, list[CallCompleted]], found: Found) -> None:
    counts: dict[UUID, list[int]] = {}
    for calls in by_response.values():
        for call in calls:
            counts.setdefault(call.writer_id, []).append(call.writer_seq)
    for writer, used in counts.items():
        if len(set(used)) != len(used):
            found.wrong.append(f"writer {writer} used a count twice")
        found.holes += max(used) + 1 - len(set(used))
    found.writers = len(counts)


def _answer(
    note: dict[str, Any],
    by_response: dict[str, list[CallCompleted]],
    found: Found,
    tokenizer: PreTrainedTokenizerFast,
    *,
    exact: bool,
) -> None:
    """One noted answer: once in the log, with the text that the agent read, under the parent that it went on from."""
    calls = by_response.get(note["response_id"], [])
    found.lost += not calls
    found.doubled += len(calls) > 1
    if len(calls) != 1:
        found.wrong.append(f"answer {note['response_id']} of {note['rollout']} is {len(calls)} times in the log")
        return
    (call,) = calls
    tokens = token_array(call.token_ids)[call.prompt_len - call.prev_len :].tolist()
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    shown = str(tokenizer.decode(tokens))  # some APIs show the special tokens that a random model samples
    said = note["text"].strip()
    whole = said == text.strip() if exact else said in text or said in shown
    if call.rollout_id != note["rollout"] or not whole or not tokens:
        found.wrong.append(f"answer {note['response_id']} says {note['text']!r}, the log {text!r} in {call.rollout_id}")
    if note["tokens"] is not None and note["tokens"] != tokens:
        found.wrong.append(f"answer {note['response_id']} came with other tokens than the log has")
    if note["parent"] is None or call.decision == "root":
        if call.parent_id is not None:
            found.wrong.append(f"answer {note['response_id']} went on from nothing, the log has {call.parent_id}")
        if note["parent"] is not None:
            found.reasons[call.reason] += 1
        return
    parents = [each for each in by_response.get(note["parent"], []) if each.call_id == call.parent_id]
    if len(parents) != 1:
        found.wrong.append(f"answer {note['response_id']} went on from {note['parent']}, the log has {call.parent_id}")
