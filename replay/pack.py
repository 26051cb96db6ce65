"""Rows in, packs out: one micro-batch each, as the `thd` arrays that packed attention reads.

Knows the layout of a pack; does not know devices, trainers or how rows were assigned.
Law: rows are shifted before they are packed, so that no position predicts the first token of another row; nothing is
cut, and a pack of no rows trains nothing.

Two rows of tokens 7 8 9 and 4 5 give positions 2 + 1:

    tokens        7 8 | 4        labels       8 9 | 5
    position_ids  0 1 | 0        cu_seqlens   0 2 3

`labels`, `loss_mask`, `logprobs` and `advantages` at a position belong to the label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.errors import PlanMismatch
from replay.media import MediaHandle
from replay.plan import StepPlan
from replay.row import Row
from store import hashing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """The rows of one micro-batch, end to end."""

    row_ids: tuple[str, ...]
    tokens: npt.NDArray[np.int64]  # [P]
    labels: npt.NDArray[np.int64]  # [P]
    position_ids: npt.NDArray[np.int64]  # [P]
    loss_mask: npt.NDArray[np.bool_]  # [P]
    logprobs: npt.NDArray[np.float32]  # [P] under which the labels were sampled
    advantages: npt.NDArray[np.float32]  # [P]
    cu_seqlens: npt.NDArray[np.int32]  # [rows + 1]
    media: tuple[tuple[MediaHandle, ...], ...] = ()
    """Of each row what stands among its tokens, counted from the row's first; empty when no row shows any."""

    @property
    def max_seqlen(self) -> int:
        """Positions of the longest row."""
        return int(np.diff(self.cu_seqlens).max())

    @property
    def trained(self) -> int:
        """Tokens that this pack trains."""
        return int(np.count_nonzero(self.loss_mask))

    def digest(self) -> str:
        """SHA-256 over all that it holds, in hex: equal digests mean the same pack, byte for byte."""
        arrays = (self.tokens, self.labels, self.position_ids, self.loss_mask, self.logprobs, self.advantages)
        content = (
            array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in (*arrays, self.cu_seqlens)
        )
        shown = [hashing.canonical_json([[each.as_json() for each in row] for row in self.media])] if self.media else []
        return hashing.tagged_digest("pack", "/".join(self.row_ids).encode(), *content, *shown).hex()


def pack(rows: Sequence[Row], advantages: Mapping[str, float]) -> Pack:
    """Pack rows in the order given; `advantages` are by rollout id. No rows give the filler: one masked position."""
    rows = [row for row in rows if row.length > 1]
    if not rows:
        return _filler()
    missing = [row.rollout_id for row in rows if row.rollout_id not in advantages]
    if missing:
        raise PlanMismatch(f"rollout {missing[0]!r}", "has rows to train and no advantage")
    lengths = np.array([row.length - 1 for row in rows], np.int64)
    return Pack(
        row_ids=tuple(row.row_id for row in rows),
        tokens=np.concatenate([row.token_ids[:-1] for row in rows]).astype(np.int64),
        labels=np.concatenate([row.token_ids[1:] for row in rows]).astype(np.int64),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        loss_mask=np.concatenate([row.loss_mask[1:] for row in rows]),
        logprobs=np.concatenate([row.logprobs[1:] for row in rows]),
        advantages=np.repeat(np.array([advantages[row.rollout_id] for row in rows], np.float32), lengths),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        media=tuple(row.media for row in rows) if any(row.media for row in rows) else (),
    )


def packs(plan: StepPlan, rows: Iterable[Row], advantages: Mapping[str, float], *, rank: int = 0) -> list[Pack]:
    """One rank's packs of the plan, one per micro-batch."""
    by_id = {row.row_id: row for row in rows}
    missing = [row_id for micro_batch in plan.ranks[rank] for row_id in micro_batch if row_id not in by_id]
    if missing:
        raise PlanMismatch(f"row {missing[0]!r}", "is planned and not among the rows")
    return [pack([by_id[row_id] for row_id in micro_batch], advantages) for micro_batch in plan.ranks[rank]]


def _filler() -> Pack:
    return Pack(
        row_ids=(),
        tokens=np.zeros(1, np.int64),
        labels=np.zeros(1, np.int64),
        position_ids=np.zeros(1, np.int64),
        loss_mask=np.zeros(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        advantages=np.zeros(1, np.float32),
        cu_seqlens=np.array([0, 1], np.int32),
    )
