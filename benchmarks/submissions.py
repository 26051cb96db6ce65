"""What agents' calls submit to a writer: made before any clock starts, right in all that the log checks.

Knows events and what text looks like to a compressor; does not know writers or databases. *small* continues chains by
2,000 tokens of which 500 are sampled, *large* are roots of 32,000 of which 500 are, *mix* is what an agent does: a root
of 8,000 and nine continuations of about 1,000, each call with its intent, which is committed first.
"""

from __future__ import annotations

import time

import numpy as np
from synthetic_log import corpus

from store import hashing
from store.events import CallAdmitted, CallCompleted, Event, PolicySpan, RolloutOpened, logprob_bytes, uuid7

Submissions = list[list[Event]]
"""Of one task, each to be durable before the next."""


def prepared(kind: str, number: int, rounds: int, at_once: int) -> list[Submissions]:
    """What each task of a process submits, one after the other."""
    dice = np.random.default_rng(number)
    text = _text_like(dice)
    length = {"small": 20, "large": 1, "mix": 10}[kind]
    templates = [_chain(kind, length, dice, text) for _ in range(8)]
    writer = uuid7(time.time_ns() // 10**6, dice.bytes(10))
    tasks: list[Submissions] = []
    count = 0
    for task in range(at_once):
        submissions: Submissions = []
        for at in range(rounds):
            place = at % length
            if place == 0:
                rollout_id = f"r{number}.{task}.{at}"
                template = templates[int(dice.integers(len(templates)))]
                root = parent = None
            now = time.time_ns()
            call_id = uuid7(now // 10**6, dice.bytes(10))
            root = root or call_id
            call = template[place].model_copy(
                update={
                    "call_id": call_id,
                    "rollout_id": rollout_id,
                    "parent_id": parent,
                    "root_id": root,
                    "writer_id": writer,
                    "writer_seq": count,
                    "response_id": f"chatcmpl-{call_id.hex}",
                    "started_at": now // 1000,
                    "completed_at": now // 1000 + 1,
                }
            )
            count += 1
            before: list[Event] = [] if place else [RolloutOpened(rollout_id=rollout_id, opened_at=now // 1000)]
            if kind == "mix":
                submissions += [[*before, _intent(call)], [call]]
            else:
                submissions.append([*before, call])
            parent = call_id
        tasks.append(submissions)
    return tasks


def _text_like(dice: np.random.Generator, size: int = 500_000) -> np.ndarray:
    """Tokens that compress as real text was measured to: to 1.1 bytes a token in deltas of 2,000."""
    text = corpus(size, seed=int(dice.integers(1000)))
    noise = dice.random(len(text)) < 0.1
    text[noise] = np.minimum(dice.zipf(1.15, int(noise.sum())), 150_999)
    return text


def _intent(call: CallCompleted) -> CallAdmitted:
    """That the call was admitted."""
    return CallAdmitted(
        call_id=call.call_id,
        rollout_id=call.rollout_id,
        decision=call.decision,
        reason=call.reason,
        parent_id=call.parent_id,
        worker="benchmark:8000",
        at=call.started_at,
    )


def _chain(kind: str, length: int, dice: np.random.Generator, text: np.ndarray) -> list[CallCompleted]:
    """A root and its continuations, right in all that the log checks; ids are put in later."""
    found: list[CallCompleted] = []
    example = CallCompleted.example()
    for place in range(length):
        match kind:
            case "small":
                tokens, sampled = 2000, 500
            case "large":
                tokens, sampled = 32_000, 500
            case _:
                tokens = 8000 if place == 0 else int(np.clip(dice.lognormal(np.log(1000), 0.6), 60, 8000))
                sampled = max(1, tokens // 4 if place else 300)
        start = int(dice.integers(len(text) - tokens))
        raw = text[start : start + tokens].astype("<i4").tobytes()
        parent = found[-1] if found else None
        prev_len = 0 if parent is None else parent.chain_len
        request, answer = (
            hashing.tagged_digest("request", dice.bytes(32)),
            hashing.tagged_digest("answer", dice.bytes(32)),
        )
        call_id = uuid7(place, dice.bytes(10))
        found.append(
            CallCompleted.model_validate(
                {
                    **example.model_dump(),
                    "call_id": call_id,
                    "parent_id": None if parent is None else parent.call_id,
                    "root_id": call_id if parent is None else parent.root_id,
                    "depth": place,
                    "decision": "root" if parent is None else "continuation",
                    "reason": "first_call" if parent is None else "answer_found",
                    "evidence": {"splice": "marker", "render": "suffix"},
                    "request_hash": request,
                    "answer_key": answer,
                    "summary_hash": hashing.summary_hash(request, answer),
                    "prev_len": prev_len,
                    "prompt_len": prev_len + tokens - sampled,
                    "sampled_len": sampled,
                    "chain_hash": hashing.chain_hash(None if parent is None else parent.chain_hash, raw),
                    "policy_spans": [PolicySpan(start=0, end=sampled, policy_version=7)],
                    "sampling": {"temperature": 1.0, "top_p": 0.95, "max_tokens": 2048},
                    "request_items": [{"role": "tool_result", "digest": request}],
                    "answer_items": [{"role": "reasoning", "digest": answer}, {"role": "tool_call", "digest": request}],
                    "token_ids": raw,
                    "logprobs": logprob_bytes(-dice.exponential(0.5, sampled)),
                }
            )
        )
    return found
