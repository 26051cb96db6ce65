"""The NeMo-RL batch: its keys, shapes and alignment, and that its loss is the one that packs give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import Engine

from replay.advantage import advantages
from replay.errors import PlanMismatch
from replay.loss import Targets, policy_loss
from replay.nemo import train_data
from replay.objective import Clip, Correction
from replay.pack import pack
from replay.rowset import RowSet, build


@pytest.fixture
def found(sqlite_database: Engine, remember: Any, groups_of_rollouts: Any, chain_maker: Any) -> RowSet:
    remember(sqlite_database, groups_of_rollouts(chain_maker, ["g0", "g1"]))
    return build(sqlite_database)


def test_keys_shapes_types_and_alignment_are_those_of_the_trainer(found: RowSet) -> None:
    gains = advantages(found.scores)
    batch = train_data(found.rows, gains, pad_id=7, length_multiple=16, batch_multiple=4)
    rows = len(found.rows)
    size, places = -(-rows // 4) * 4, batch["input_ids"].shape[1]
    longest = max(row.length for row in found.rows)
    assert (rows % 4, longest % 16) != (0, 0)
    assert (places % 16, longest <= places < longest + 16) == (0, True)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {  # type: ignore[attr-defined]
        "input_ids": ((size, places), "int64"),
        "input_lengths": ((size,), "int64"),
        "token_mask": ((size, places), "int64"),
        "sample_mask": ((size,), "float32"),
        "generation_logprobs": ((size, places), "float32"),
        "prev_logprobs": ((size, places), "float32"),
        "advantages": ((size, places), "float32"),
    }
    for place, row in enumerate(found.rows):
        length = row.length
        assert batch["input_lengths"][place] == length
        assert batch["input_ids"][place].tolist() == [*row.token_ids.tolist(), *[7] * (places - length)]
        assert batch["token_mask"][place].tolist() == [*row.loss_mask.tolist(), *[0] * (places - length)]
        assert batch["generation_logprobs"][place, :length].tolist() == row.logprobs.tolist()
        assert set(batch["advantages"][place, :length].tolist()) == {np.float32(gains[row.rollout_id])}
        assert not batch["generation_logprobs"][place, length:].any()
        assert not batch["advantages"][place, length:].any()
    assert batch["sample_mask"].tolist() == [1.0] * rows + [0.0] * (size - rows)
    assert not batch["token_mask"][rows:].any()
    assert batch["input_lengths"][rows:].tolist() == [1] * (size - rows)
    assert not batch["token_mask"][:, 0].any()
    assert not batch["generation_logprobs"][:, 0].any()
    assert (batch["prev_logprobs"] == batch["generation_logprobs"]).all()


def test_its_loss_is_that_of_the_packs(found: RowSet) -> None:
    gains = advantages(found.scores)
    batch = {name: torch.from_numpy(array) for name, array in train_data(found.rows, gains, batch_multiple=5).items()}  # type: ignore[arg-type]
    source = torch.Generator().manual_seed(0)
    policy = batch["generation_logprobs"].double() - torch.rand(batch["input_ids"].shape, generator=source).double() / 2
    # As NeMo-RL's clipped loss reads the batch: first column dropped, a sum over the mask, one count for the step.
    mask = (batch["token_mask"] * batch["sample_mask"].unsqueeze(-1))[:, 1:]
    ratio = (policy - batch["prev_logprobs"])[:, 1:].exp()
    gain = batch["advantages"][:, 1:]
    theirs = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * mask
    packed = pack(found.rows, gains)
    labels = torch.cat([policy[place, 1 : row.length] for place, row in enumerate(found.rows)])
    targets = Targets.of(packed, torch.device("cpu"))
    ours = policy_loss(labels, targets, clip=Clip(), correction=Correction())
    assert mask.sum() == ours.tokens
    assert 0 < ours.limited < ours.tokens
    torch.testing.assert_close(theirs.sum(), ours.total, rtol=1e-12, atol=1e-12)


def test_rows_need_an_advantage_and_a_batch_a_row(found: RowSet) -> None:
    with pytest.raises(PlanMismatch, match=r"rollout 'g0\.0' has rows to train and no advantage"):
        train_data(found.rows, {})
    with pytest.raises(PlanMismatch, match="no row is given"):
        train_data([], {})
