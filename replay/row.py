"""Checked chains in, rows of equal-length arrays out.

Knows the layout of a row; does not know where chains come from, packs or trainers.
Law: a row is its chain's deltas end to end, unshifted and unpadded, and each sampled token trains in one row.

A root of prompt 7 8 that sampled 9, continued by one that was shown 5 and sampled 6 4:

    token_ids        7    8    9     5    6     4
    loss_mask        0    0    1     0    1     1
    logprobs         0    0  -0.1    0  -0.2  -0.3     position t scores token t
    policy_versions -1   -1    3    -1    3     4      -1 where the policy did not sample

A call shared with an earlier row keeps its log-probabilities and versions here and has loss mask 0: it trains there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from replay.call import Payload, Rollout
from replay.chain import Chain
from store import hashing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One training sequence."""

    row_id: str
    """32 hex digits, derived from the row's whole content: the same row, the same id, whenever it is replayed."""
    rollout_id: str
    group_id: str | None
    reward: float | None
    """Of the rollout's latest outcome; not part of the row id, since a rollout may be scored again."""
    call_ids: tuple[UUID, ...]
    """Root first; the last one is the tip."""
    call_numbers: tuple[int, ...]
    """Place of each call among the completed calls of its rollout, counted from 1: the row {3,4}."""
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.bool_]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    policy_versions: npt.NDArray[np.int64]  # [T]

    @property
    def tip(self) -> UUID:
        """The chain's last call."""
        return self.call_ids[-1]

    @property
    def length(self) -> int:
        """Tokens of the row, T."""
        return len(self.token_ids)

    @property
    def trained(self) -> int:
        """Tokens that train in this row."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def policy_range(self) -> tuple[int, int]:
        """Oldest and newest policy version that sampled a token trained here."""
        versions = self.policy_versions[self.loss_mask]
        return int(versions.min()), int(versions.max())


def build(rollout: Rollout, chains: Iterable[Chain], payloads: Mapping[UUID, Payload]) -> list[Row]:
    """One row per chain, in the order given."""
    return [_row(rollout, chain, payloads) for chain in chains]


def _row(rollout: Rollout, chain: Chain, payloads: Mapping[UUID, Payload]) -> Row:
    length = chain.calls[-1].chain_len
    token_ids = np.empty(length, np.int32)
    loss_mask = np.zeros(length, np.bool_)
    logprobs = np.zeros(length, np.float32)
    policy_versions = np.full(length, -1, np.int64)
    for call, trained in zip(chain.calls, chain.trained, strict=True):
        payload = payloads[call.call_id]
        sampled = slice(call.prompt_len, call.chain_len)
        token_ids[call.prev_len : call.chain_len] = payload.token_ids
        loss_mask[sampled] = trained
        logprobs[sampled] = payload.logprobs
        for span in call.policy_spans:
            policy_versions[call.prompt_len + span.start : call.prompt_len + span.end] = span.policy_version
    call_ids = tuple(call.call_id for call in chain.calls)
    arrays = (token_ids, loss_mask, logprobs, policy_versions)
    for array in arrays:
        array.flags.writeable = False
    return Row(
        row_id=_content_digest(rollout.rollout_id, call_ids, *arrays).hex()[:32],
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        reward=rollout.reward,
        call_ids=call_ids,
        call_numbers=tuple(call.number for call in chain.calls),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        policy_versions=policy_versions,
    )


def rows_digest(rows: Iterable[Row]) -> str:
    """SHA-256 over all that the rows say, in their order, in hex: equal digests mean the same rows, byte for byte."""
    parts: list[bytes] = []
    for row in rows:
        facts: JsonValue = {"group": row.group_id, "reward": row.reward, "call_numbers": [*row.call_numbers]}
        arrays = (row.token_ids, row.loss_mask, row.logprobs, row.policy_versions)
        parts.append(_content_digest(row.rollout_id, row.call_ids, *arrays) + hashing.canonical_json(facts))
    return hashing.tagged_digest("rows", *parts).hex()


def _content_digest(rollout_id: str, call_ids: Iterable[UUID], *arrays: npt.NDArray[np.generic]) -> bytes:
    content = (array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays)
    calls = b"".join(call_id.bytes for call_id in call_ids)
    return hashing.tagged_digest("row", rollout_id.encode(), calls, *content)
