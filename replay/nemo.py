"""Rows in, the batch that NeMo-RL's `policy.train` takes out.

Knows its keys, shapes and alignment; does not know NeMo-RL, torch, or which rows make a step.
Law: position i of every array is of token i itself; nothing is shifted, and a place that is padding, or of no policy's
choice, is 0. NeMo-RL drops the first column of all of them alike.

Rows of tokens 7 8 9 and 4 5, of which 9 and 5 train, padded to four places:

    input_ids            7 8 9 0    4 5 0 0          input_lengths  3 2
    token_mask           0 0 1 0    0 1 0 0          sample_mask    1 1
    generation_logprobs  0 0 p 0    0 q 0 0
    prev_logprobs        0 0 p 0    0 q 0 0
    advantages           A A A 0    B B 0 0

`prev_logprobs` are the stored log-probabilities too, so that a ratio is that of the weights to the policy that sampled,
as in `replay.objective`. A NeMo-RL loop that computes them again overwrites them. With a KL penalty it also reads
`reference_policy_logprobs`: they are of a model that the log does not know, and the loop adds them.

    batch = train_data(rows, advantages, length_multiple=8, batch_multiple=data_parallel_size)
    data = BatchedDataDict({name: torch.from_numpy(array) for name, array in batch.items()})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from replay.errors import PlanMismatch
from replay.row import Row

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class TrainData(TypedDict):
    """The batch, B rows of S places."""

    input_ids: Ints  # [B, S]
    input_lengths: Ints  # [B]
    token_mask: Ints  # [B, S]
    sample_mask: Floats  # [B]
    generation_logprobs: Floats  # [B, S]
    prev_logprobs: Floats  # [B, S]
    advantages: Floats  # [B, S]


def train_data(
    rows: Sequence[Row],
    advantages: Mapping[str, float],
    *,
    pad_id: int = 0,
    length_multiple: int = 1,
    batch_multiple: int = 1,
    media_apart: bool = False,
) -> TrainData:
    """The rows in their order, padded on the right to one length.

    Args:
        rows: of one step, at least one.
        advantages: by rollout id.
        pad_id: the tokenizer's token for padding; it trains nowhere.
        length_multiple: that S divides by: NeMo-RL's `make_sequence_length_divisible_by`.
        batch_multiple: that B divides by, such as the data-parallel size; what fills up has sample mask 0.
        media_apart: that the caller adds the tensors of images itself; else a row with images is an error.
    """
    if not rows:
        raise PlanMismatch("no row", "is given, and a batch has one at least")
    if not media_apart and (shows := [row.row_id for row in rows if row.media]):
        raise PlanMismatch(
            f"row {shows[0]!r}",
            "shows images, which this batch does not carry: add their tensors (replay.media_tensors), say media_apart",
        )
    missing = [row.rollout_id for row in rows if row.rollout_id not in advantages]
    if missing:
        raise PlanMismatch(f"rollout {missing[0]!r}", "has rows to train and no advantage")
    size = -(-len(rows) // batch_multiple) * batch_multiple
    lengths = np.ones(size, np.int64)
    lengths[: len(rows)] = [row.length for row in rows]
    longest = -(-int(lengths.max()) // length_multiple) * length_multiple
    batch = TrainData(
        input_ids=np.full((size, longest), pad_id, np.int64),
        input_lengths=lengths,
        token_mask=np.zeros((size, longest), np.int64),
        sample_mask=(np.arange(size) < len(rows)).astype(np.float32),
        generation_logprobs=np.zeros((size, longest), np.float32),
        prev_logprobs=np.zeros((size, longest), np.float32),
        advantages=np.zeros((size, longest), np.float32),
    )
    for place, row in enumerate(rows):
        batch["input_ids"][place, : row.length] = row.token_ids
        batch["token_mask"][place, : row.length] = row.loss_mask
        batch["generation_logprobs"][place, : row.length] = row.logprobs
        batch["advantages"][place, : row.length] = advantages[row.rollout_id]
    batch["prev_logprobs"][:] = batch["generation_logprobs"]
    return batch
