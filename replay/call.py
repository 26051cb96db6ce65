"""A completed call and its rollout as replay needs them: narrow values, apart from their tokens.

Knows what is read from the log for a plan and for a fill; does not know databases, selection rules or rows.
Law: a call here is what the log holds, unchecked. `replay.chain` checks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import numpy as np
import numpy.typing as npt

from store.events import PolicySpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The narrow columns of one completed call."""

    number: int
    """1 for the first completed call of its rollout by sequence, 2 for the next, ..."""
    call_id: UUID
    rollout_id: str
    parent_id: UUID | None
    root_id: UUID
    depth: int
    request_hash: bytes
    chain_hash: bytes
    hash_version: int
    prev_len: int
    prompt_len: int
    sampled_len: int
    policy_spans: tuple[PolicySpan, ...]
    response_id: str | None
    choice: int
    role: str | None
    """What the harness says the call is for (`hints["role"]`), such as `title`."""
    media_count: int

    @property
    def delta_len(self) -> int:
        """Tokens that this call adds to its parent's chain."""
        return self.prompt_len - self.prev_len + self.sampled_len

    @property
    def chain_len(self) -> int:
        """Tokens from the root's first to this call's last; a child's `prev_len`."""
        return self.prompt_len + self.sampled_len


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload:
    """The heavy columns of one completed call, decoded."""

    token_ids: npt.NDArray[np.int32]  # [delta_len]
    logprobs: npt.NDArray[np.float32]  # [sampled_len]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One rollout as of a position: what it was, what it got, and its completed calls in the order of the log."""

    rollout_id: str
    group_id: str | None
    reward: float | None
    """Of its latest outcome; None when it has none yet."""
    accepted: tuple[str, ...] | None
    """Call or response ids that its latest outcome lists; None when it does not say."""
    calls: tuple[Call, ...]
