"""Packed rows in, rows of equal-length arrays out.

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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import JsonValue

from replay.chain import Chains
from replay.fill import Filled
from replay.media import MediaHandle
from replay.piece import Rollout
from store import hashing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One training sequence. Its arrays cannot be written, and may be views into those of many rows."""

    row_id: str
    """32 hex digits, derived from the digests of the row's calls and which of them train: the same row, the same id,
    whenever it is replayed."""
    rollout_id: str
    group_id: str | None
    reward: float | None
    """Of the rollout's latest outcome; not part of the row id, since a rollout may be scored again."""
    calls: bytes
    """The ids of its calls end to end, 16 bytes each."""
    call_numbers: tuple[int, ...]
    """Place of each call among the completed calls of its rollout, counted from 1: the row {3,4}."""
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.bool_]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    version_spans: npt.NDArray[np.int64]  # [S, 3]
    """Half-open ranges of its tokens and the policy version that sampled them: start, end, version."""
    media: tuple[MediaHandle, ...] = ()
    """What stands among its tokens, in their order."""

    @property
    def call_ids(self) -> tuple[UUID, ...]:
        """Root first; the last one is the tip."""
        return tuple(UUID(bytes=self.calls[at : at + 16]) for at in range(0, len(self.calls), 16))

    @property
    def tip(self) -> UUID:
        """The chain's last call."""
        return UUID(bytes=self.calls[-16:])

    @property
    def length(self) -> int:
        """Tokens of the row, T."""
        return len(self.token_ids)

    @property
    def trained(self) -> int:
        """Tokens that train in this row."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def policy_versions(self) -> npt.NDArray[np.int64]:
        """[T] the version that sampled each token, -1 where the policy did not sample."""
        versions = np.full(self.length, -1, np.int64)
        for start, end, version in self.version_spans.tolist():
            versions[start:end] = version
        versions.flags.writeable = False
        return versions

    @property
    def policy_range(self) -> tuple[int, int]:
        """Oldest and newest policy version among the trained tokens."""
        versions = self.policy_versions[self.loss_mask]
        return int(versions.min()), int(versions.max())


def row_ids(chains: Chains) -> list[str]:
    """The id of each chain's row: the digests of its calls stand for their whole content, tokens included."""
    piece = chains.piece
    _, ends, digests = piece.column("digest").take(pa.array(chains.call)).buffers()
    edges = np.frombuffer(ends, np.int32)[chains.start].tolist() if len(chains.call) else [0]
    end_to_end = memoryview(digests) if digests is not None else memoryview(b"")
    return [
        hashing.tagged_digest(
            "row", piece.rollouts[rollout].rollout_id.encode(), end_to_end[low:high], carried.to_bytes(8, "big")
        ).hex()[:32]
        for rollout, low, high, carried in zip(
            chains.rollout.tolist(), edges[:-1], edges[1:], chains.carried.tolist(), strict=True
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Rows end to end, in the few large arrays in which they are made and go from one process to another."""

    row_ids: list[str]  # [R]
    rollout: list[int]
    """[R] places of their rollouts."""
    starts: list[int]
    """[R + 1] row r has the calls from start r to start r + 1."""
    calls: bytes
    numbers: list[int]
    offset: list[int]
    """[R + 1] row r has the tokens from offset r to offset r + 1."""
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.bool_]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    spans: npt.NDArray[np.int64]  # [S, 3] in each row's own places
    edges: list[int]
    """[R + 1] row r has the spans from edge r to edge r + 1."""
    media: list[tuple[MediaHandle, ...]] | None  # [R]

    @classmethod
    def of(cls, filled: Filled) -> Block:
        """The rows of filled chains."""
        chains, piece = filled.chains, filled.chains.piece
        spans, edges = _spans(chains)
        starts = chains.start.tolist()
        lines = [chains.call[low:high].tolist() for low, high in pairwise(starts)] if piece.media is not None else []
        return cls(
            row_ids=row_ids(chains),
            rollout=chains.rollout.tolist(),
            starts=starts,
            calls=bytes(piece.column("call_id").take(pa.array(chains.call)).buffers()[1])[: 16 * len(chains.call)],
            numbers=piece.number[chains.call].tolist(),
            offset=filled.offset.tolist(),
            token_ids=filled.token_ids,
            loss_mask=filled.loss_mask,
            logprobs=filled.logprobs,
            spans=spans,
            edges=edges,
            media=None if piece.media is None else [piece.media.handles(calls) for calls in lines],
        )

    def rows(self, rollouts: Sequence[Rollout]) -> Iterator[Row]:
        """The rows one by one, as views; of these rollouts."""
        for array in (self.token_ids, self.loss_mask, self.logprobs):
            array.flags.writeable = False
        for at, (row_id, place) in enumerate(zip(self.row_ids, self.rollout, strict=True)):
            rollout = rollouts[place]
            here, lines = slice(self.offset[at], self.offset[at + 1]), slice(self.starts[at], self.starts[at + 1])
            yield Row(
                row_id=row_id,
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                reward=rollout.reward,
                calls=self.calls[16 * lines.start : 16 * lines.stop],
                call_numbers=tuple(self.numbers[lines]),
                token_ids=self.token_ids[here],
                loss_mask=self.loss_mask[here],
                logprobs=self.logprobs[here],
                version_spans=self.spans[self.edges[at] : self.edges[at + 1]],
                media=() if self.media is None else self.media[at],
            )


def _spans(chains: Chains) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The policy spans of all rows, [S, 3] in each row's own places, and where each row's begin."""
    spans, prompt_len = chains.piece.spans, chains.piece.ints("prompt_len")
    first = np.searchsorted(spans.at, chains.call)
    count = np.searchsorted(spans.at, chains.call, side="right") - first
    begun = np.append(0, np.cumsum(count))
    which = np.arange(begun[-1]) - np.repeat(begun[:-1] - first, count)
    shift = np.repeat(prompt_len[chains.call], count)
    placed = np.stack([spans.start[which] + shift, spans.end[which] + shift, spans.version[which]], axis=1)
    return placed, begun[chains.start].tolist()


def rows_digest(rows: Iterable[Row]) -> str:
    """SHA-256 over all that the rows say, in their order, in hex: equal digests mean the same rows, byte for byte."""
    return hashing.digest_of_parts("rows", map(_digested, rows)).hex()


def _digested(row: Row) -> bytes:
    facts: dict[str, JsonValue] = {"group": row.group_id, "reward": row.reward, "call_numbers": [*row.call_numbers]}
    if row.media:
        facts["media"] = [each.as_json() for each in row.media]
    arrays = (row.token_ids, row.loss_mask, row.logprobs, row.policy_versions)
    return _content_digest(row.rollout_id, row.calls, *arrays) + hashing.canonical_json(facts)


def _content_digest(rollout_id: str, calls: bytes, *arrays: npt.NDArray[np.generic]) -> bytes:
    content = (array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays)
    return hashing.tagged_digest("row", rollout_id.encode(), calls, *content)
