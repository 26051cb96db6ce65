"""Pure: a request's decision, its generation and its answer in, events out.

Knows what each field of an event means; does not know vLLM, HTTP or the database, and reads no clock. Law: a
continuation's prompt starts with its parent's tokens, bit for bit; it is checked here once more, against the prompt
that the engine itself reported, before an event exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from engine.decide import Continuation, Root
from engine.errors import EngineError
from engine.items import Answer, Item, answer_key, reasoning_digest, traces
from engine.media import Shown
from store import hashing
from store.events import (
    CallAdmitted,
    CallCompleted,
    CallEnded,
    PolicySpan,
    ReasoningPolicy,
    logprob_bytes,
    token_bytes,
)

Tokens = npt.NDArray[np.int32]


class CaptureFailed(EngineError):
    """What the engine reported cannot be a true event: nothing is stored under this call but its failure."""

    status = 500


@dataclass(slots=True, kw_only=True)
class Sampled:
    """What one choice has sampled so far; grows with each output of the engine."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    versions: tuple[tuple[str, int, int], ...] = ()
    """(weight version, start, end) over the sampled tokens, as the engine labels them; empty when it does not."""

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add newly sampled tokens, one natural-log probability each."""
        if len(token_ids) != len(logprobs):
            raise CaptureFailed(f"the engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)


@dataclass(slots=True, kw_only=True)
class Generation:
    """What the engine did for one request: the prompt it reports, and what each choice sampled."""

    prompt_ids: Sequence[int] = ()
    choices: dict[int, Sampled] = field(default_factory=dict)

    def choice(self, index: int) -> Sampled:
        """The choice of that index, empty if it has not sampled yet."""
        return self.choices.setdefault(index, Sampled())


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A call as decided, before a token exists: all that the event will say about why and on top of what."""

    rollout_id: str
    call_ids: tuple[UUID, ...]
    """One per choice: `n` choices are `n` sibling calls."""
    dialect: str
    model: str
    items: tuple[Item, ...]
    echo: Sequence[JsonValue] = ()
    """Of `decide.Keys`."""
    decision: Root | Continuation
    policy: ReasoningPolicy
    request_hash: bytes
    render_hash: bytes
    tools_digest: bytes
    parent_chain: Tokens | None
    """[prev_len] the parent's whole chain; None for a root"""
    prompt_ids: list[int]
    """[prompt_len] what the engine is asked to continue"""
    sampling: Mapping[str, JsonValue] = field(default_factory=dict)
    hints: Mapping[str, JsonValue] = field(default_factory=dict)
    media_count: int = 0
    media: tuple[Shown, ...] = ()
    """What is new in the prompt, in its order."""
    worker: str
    started_at: int

    @property
    def parent_id(self) -> UUID | None:
        """The parent's id; None for a root."""
        return self.decision.parent.call_id if isinstance(self.decision, Continuation) else None

    @property
    def prev_len(self) -> int:
        """Tokens of the parent's chain; 0 for a root."""
        return 0 if self.parent_chain is None else len(self.parent_chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who writes: the process's id, and its next count."""

    writer_id: UUID
    writer_seq: int


def spliced(parent_chain: Tokens, suffix: Sequence[int]) -> list[int]:
    """The prompt of a continuation: the parent's chain, then the suffix."""
    prompt: list[int] = parent_chain.tolist()
    prompt.extend(suffix)
    return prompt


def intents(admission: Admission) -> list[CallAdmitted]:
    """The intent of each choice, to be durable before the first token."""
    return [
        CallAdmitted(
            call_id=call_id,
            rollout_id=admission.rollout_id,
            decision="root" if admission.parent_id is None else "continuation",
            reason=admission.decision.reason,
            parent_id=admission.parent_id,
            worker=admission.worker,
            at=admission.started_at,
        )
        for call_id in admission.call_ids
    ]


def completed(
    admission: Admission,
    generation: Generation,
    answer: Answer,
    *,
    response_id: str | None,
    policy_version: int,
    writer: Writer,
    completed_at: int,
) -> CallCompleted:
    """The event of one choice that was answered in full.

    `policy_version` stands for tokens whose weights the engine does not label with a number. Raises CaptureFailed when
    the engine's prompt is not the one that was decided, or log-probabilities are missing.
    """
    decision = admission.decision
    parent = decision.parent if isinstance(decision, Continuation) else None
    sampled = generation.choices.get(answer.index)
    if sampled is None or not sampled.token_ids:
        raise CaptureFailed(f"choice {answer.index} was answered, but the engine reported no tokens for it")
    if list(generation.prompt_ids) != admission.prompt_ids:
        raise CaptureFailed("the engine reports another prompt than the one decided on: refuse to store it")
    prompt = token_bytes(admission.prompt_ids)
    if admission.parent_chain is not None and prompt[: 4 * admission.prev_len] != token_bytes(admission.parent_chain):
        raise CaptureFailed("the prompt does not start with the parent's tokens: refuse to store it")
    delta = prompt[4 * admission.prev_len :] + token_bytes(sampled.token_ids)
    key = answer_key(answer.items)
    call_id = admission.call_ids[answer.index]
    return CallCompleted.model_validate(
        {
            "call_id": call_id,
            "rollout_id": admission.rollout_id,
            "parent_id": None if parent is None else parent.call_id,
            "root_id": call_id if parent is None else parent.root_id,
            "depth": 0 if parent is None else parent.depth + 1,
            "decision": "root" if parent is None else "continuation",
            "reason": decision.reason,
            "evidence": {**decision.evidence, "echo": [*admission.echo]},
            "candidates": decision.candidates,
            "reasoning_policy": admission.policy,
            "summary_hash": hashing.summary_hash(admission.request_hash, key),
            "request_hash": admission.request_hash,
            "answer_key": key,
            "render_hash": admission.render_hash,
            "tools_digest": admission.tools_digest,
            "reasoning_digest": reasoning_digest(answer.items),
            "request_items": traces(admission.items[decision.start if isinstance(decision, Continuation) else 0 :]),
            "answer_items": traces(answer.items),
            "answer_item_ids": tuple(item.item_id for item in answer.items if item.item_id is not None),
            "prev_len": admission.prev_len,
            "prompt_len": len(admission.prompt_ids),
            "sampled_len": len(sampled.token_ids),
            "chain_hash": hashing.chain_hash(None if parent is None else parent.chain_hash, delta),
            "policy_spans": policy_spans(sampled, policy_version),
            "finish_reason": answer.finish_reason or sampled.finish_reason or "unknown",
            "sampling": dict(admission.sampling),
            "dialect": admission.dialect,
            "model": admission.model,
            "response_id": response_id,
            "choice": answer.index,
            "hints": dict(admission.hints),
            "media_count": admission.media_count,
            "writer_id": writer.writer_id,
            "writer_seq": writer.writer_seq,
            "started_at": admission.started_at,
            "completed_at": completed_at,
            "token_ids": delta,
            "logprobs": logprob_bytes(sampled.logprobs),
        }
    )


def ended(admission: Admission, generation: Generation, *, state: str, reason: str, at: int) -> list[CallEnded]:
    """How each choice of an unanswered call ended, with the tokens sampled until then."""
    found: list[CallEnded] = []
    for index, call_id in enumerate(admission.call_ids):
        sampled = generation.choices.get(index, Sampled())
        found.append(
            CallEnded.model_validate(
                {
                    "call_id": call_id,
                    "rollout_id": admission.rollout_id,
                    "state": state,
                    "reason": storable(reason),
                    "at": at,
                    "token_ids": token_bytes(sampled.token_ids),
                    "logprobs": logprob_bytes(sampled.logprobs),
                }
            )
        )
    return found


def storable(text: str) -> str:
    r"""A text that every database can hold: what a harness sent may be quoted in it.

    >>> storable("a\0b\ud800")
    'a\\x00b\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def policy_spans(sampled: Sampled, policy_version: int) -> tuple[PolicySpan, ...]:
    """Which policy version sampled which tokens; a label that is no number counts as `policy_version`.

    >>> spans = policy_spans(Sampled(token_ids=[1, 2, 3], versions=(("7", 0, 2), ("8", 2, 3))), 0)
    >>> [(span.start, span.end, span.policy_version) for span in spans]
    [(0, 2, 7), (2, 3, 8)]
    >>> [span.policy_version for span in policy_spans(Sampled(token_ids=[1], versions=(("default", 0, 1),)), 5)]
    [5]
    """
    if not sampled.versions:
        return (PolicySpan(start=0, end=len(sampled.token_ids), policy_version=policy_version),)
    return tuple(
        PolicySpan(
            start=start, end=end, policy_version=int(label) if label.isascii() and label.isdigit() else policy_version
        )
        for label, start, end in sampled.versions
    )
