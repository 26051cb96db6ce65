"""Paths of recorded calls in, checked chains or the reason of refusal out.

Knows what must hold for a chain; does not know how its path was found, nor rows.
Law: one bad chain refuses its whole rollout, with one named reason; other rollouts go on (design §10.4).

Checked: the path starts at a root and every call on it is selected; depths, roots and lengths agree with the parent
links; each call's chain hash is derived again from its tokens on top of its parent's; every sampled token has one
finite log-probability and one policy version; no call has media that the log does not hold; and every selected call
lies on a path, and every chain trains at least one token that no earlier chain trains.

A call that two chains share trains in the first one: chains are ordered by the place of their root in the rollout,
then by the place of their last call. Calls 1 <- 2 and 1 <- 3 give chains (1, 2) and (1, 3), and 1 trains with 2 only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from replay.call import Call, Payload, Rollout
from store import hashing
from store.events import token_bytes

Path = Sequence[Call]
"""The calls from one selected call that no selected call continues up to where the parent links end, topmost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The checked calls from a root to a tip."""

    calls: tuple[Call, ...]
    trained: tuple[bool, ...]
    """Per call, whether its sampled tokens train in this chain's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a rollout gives no rows."""

    rollout_id: str
    call_id: UUID | None
    """The first call that does not hold; None when the reason is the rollout's."""
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Refusals:
    """Every refused rollout.

    >>> why = Refusal(rollout_id="r", call_id=None, reason="nothing_declared", detail="...")
    >>> Refusals((why,)).by_reason()
    {'nothing_declared': 1}
    """

    rollouts: tuple[Refusal, ...]

    def by_reason(self) -> dict[str, int]:
        """How many rollouts each reason refused, most frequent first."""
        return dict(Counter(refusal.reason for refusal in self.rollouts).most_common())


def check(
    rollout: Rollout, selected: Set[UUID], paths: Iterable[Path], payloads: Mapping[UUID, Payload]
) -> tuple[Chain, ...] | Refusal:
    """The rollout's chains in the order of their rows, or the first reason why it has none."""
    known = {call.call_id for call in rollout.calls}
    ordered = sorted(paths, key=lambda path: (path[0].number, path[-1].number))
    chains: list[Chain] = []
    checked: set[UUID] = set()
    for path in ordered:
        fault = _check_links(path, known, selected)
        if fault is not None:
            return fault
        for parent, call in zip([None, *path], path, strict=False):
            if call.call_id not in checked:
                fault = _check_payload(parent, call, payloads[call.call_id])
                if fault is not None:
                    return fault
        trained = tuple(call.call_id not in checked for call in path)
        if not any(first and call.sampled_len for first, call in zip(trained, path, strict=True)):
            return _fault(path[-1], "nothing_trained", "no token of its chain is trained: sampled none of its own")
        chains.append(Chain(calls=tuple(path), trained=trained))
        checked.update(call.call_id for call in path)
    for call in rollout.calls:
        if call.call_id in selected and call.call_id not in checked:
            return _fault(call, "parent_cycle", "its parent links run in a circle")
    return tuple(chains)


def _fault(call: Call, reason: str, detail: str) -> Refusal:
    return Refusal(
        rollout_id=call.rollout_id,
        call_id=call.call_id,
        reason=reason,
        detail=f"call {call.number} ({call.call_id}): {detail}",
    )


def _check_links(path: Path, known: Set[UUID], selected: Set[UUID]) -> Refusal | None:
    top = path[0]
    if top.parent_id in known:
        return _fault(top, "parent_cycle", "its parent links run in a circle")
    if top.parent_id is not None:
        return _fault(top, "parent_missing", f"its parent {top.parent_id} is not in the log of its rollout")
    if top.prompt_len == 0:
        return _fault(top, "empty_prompt", "it is a root without a prompt, so nothing predicts its first token")
    for depth, call in enumerate(path):
        if call.call_id not in selected:
            return _fault(
                call, "parent_not_selected", "the selection leaves it out but counts a call that continues it"
            )
        if call.depth != depth or call.root_id != top.call_id:
            return _fault(
                call,
                "root_mismatch",
                f"it says depth {call.depth} of root {call.root_id}, its links say depth {depth} of {top.call_id}",
            )
        before = path[depth - 1].chain_len if depth else 0
        if call.prev_len != before or call.prompt_len < call.prev_len:
            return _fault(
                call,
                "length_mismatch",
                f"its prompt of {call.prompt_len} tokens starts with {call.prev_len} of its parent, which has {before}",
            )
        if call.media_count:
            return _fault(
                call, "media_not_captured", f"its prompt has {call.media_count} media that the log does not hold"
            )
    return None


def _check_payload(parent: Call | None, call: Call, payload: Payload) -> Refusal | None:
    tokens, logprobs = payload.token_ids, payload.logprobs
    if len(tokens) != call.delta_len or len(logprobs) != call.sampled_len:
        return _fault(
            call,
            "length_mismatch",
            f"it holds {len(tokens)} tokens and {len(logprobs)} log-probabilities, "
            f"its counts say {call.delta_len} and {call.sampled_len}",
        )
    if call.hash_version != hashing.HASH_VERSION:
        return _fault(
            call,
            "hash_version",
            f"its hashes have version {call.hash_version}, this release derives {hashing.HASH_VERSION}",
        )
    if hashing.chain_hash(None if parent is None else parent.chain_hash, token_bytes(tokens)) != call.chain_hash:
        return _fault(call, "chain_hash_mismatch", "its tokens on top of its parent's do not give its chain hash")
    if not np.isfinite(logprobs).all():
        return _fault(call, "logprob_not_finite", "a sampled token has no finite log-probability")
    edges = [0, *(span.end for span in call.policy_spans)]
    if [span.start for span in call.policy_spans] != edges[:-1] or edges[-1] != call.sampled_len:
        return _fault(
            call, "policy_spans", f"its policy spans do not cover its {call.sampled_len} sampled tokens in order"
        )
    return None
