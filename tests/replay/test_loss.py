"""The loss of a pack against the formulas of `replay.objective`, written out in numpy, and against autograd."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay.loss import Targets, policy_loss
from replay.objective import Clip, Correction
from replay.pack import pack

CLIP = Clip(low=0.2, high=0.3)
Floats = npt.NDArray[np.float64]


def example(lengths: list[int], seed: int) -> tuple[Floats, Targets]:
    """Log-probabilities of a policy that drifted, and targets: rows of these lengths, two tokens in three trained."""
    source = np.random.default_rng(seed)
    size = sum(lengths)
    behaviour = np.where(mask := source.random(size) < 2 / 3, -3 * source.random(size), 0.0).astype(np.float32)
    targets = Targets(
        loss_mask=torch.from_numpy(mask),
        behaviour=torch.from_numpy(behaviour),
        advantages=torch.from_numpy(np.repeat(source.standard_normal(len(lengths)), lengths).astype(np.float32)),
        lengths=tuple(lengths),
    )
    return behaviour - 1 + 0.5 * source.standard_normal(size), targets


def weights(logprobs: Floats, targets: Targets, correction: Correction) -> Floats:
    """The correction of every position, by definition."""
    ratios = np.where(targets.loss_mask, np.exp(logprobs - targets.behaviour.numpy()), 1.0)
    if correction.kind == "sequence":
        edges = np.cumsum(targets.lengths)[:-1]
        ratios = np.concatenate([np.full(len(row), row.prod()) for row in np.split(ratios, edges)])
    return np.minimum(ratios, correction.cap)


def taken(logprobs: Floats, targets: Targets, correction: Correction) -> tuple[float, Floats, int]:
    """Loss, its gradient by position, and how many tokens were limited."""
    own = torch.from_numpy(logprobs).requires_grad_()
    loss = policy_loss(own, targets, clip=CLIP, correction=correction)
    loss.total.backward()
    assert own.grad is not None
    assert int(loss.tokens) == int(targets.loss_mask.sum())
    return float(loss.total.detach()), own.grad.numpy(), int(loss.limited)


rows = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", ["token", "sequence"])
@given(lengths=rows, seed=st.integers(0, 1000), cap=st.floats(0.01, 3))
def test_a_correction_weighs_the_gradient_of_each_trained_token(
    kind: Literal["token", "sequence"], lengths: list[int], seed: int, cap: float
) -> None:
    correction = Correction(kind=kind, cap=cap)
    logprobs, targets = example(lengths, seed)
    mask, advantages = targets.loss_mask.numpy(), targets.advantages.numpy().astype(np.float64)
    expected = -np.where(mask, weights(logprobs, targets, correction) * advantages, 0.0)
    loss, gradient, limited = taken(logprobs, targets, correction)
    assert loss == pytest.approx(expected.sum(), rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx(expected, rel=1e-12, abs=1e-12)
    unlimited = weights(logprobs, targets, Correction(kind=kind, cap=1e300))
    assert limited == np.count_nonzero(mask & (unlimited > cap))


@given(lengths=rows, seed=st.integers(0, 1000))
def test_without_correction_a_token_outside_the_clip_range_learns_only_the_way_back(
    lengths: list[int], seed: int
) -> None:
    logprobs, targets = example(lengths, seed)
    mask, advantages = targets.loss_mask.numpy(), targets.advantages.numpy().astype(np.float64)
    ratio = np.exp(logprobs - targets.behaviour.numpy())
    clipped = np.clip(ratio, 1 - CLIP.low, 1 + CLIP.high)
    held = np.where(advantages > 0, ratio > 1 + CLIP.high, ratio < 1 - CLIP.low)
    loss, gradient, limited = taken(logprobs, targets, Correction())
    assert loss == pytest.approx(-np.minimum(ratio * advantages, clipped * advantages)[mask].sum(), abs=1e-12)
    assert gradient == pytest.approx(-np.where(mask & ~held, ratio * advantages, 0.0), abs=1e-12)
    assert limited == np.count_nonzero(mask & (clipped != ratio))


def test_on_fresh_rows_every_kind_gives_the_same_gradient() -> None:
    _, targets = example([4, 1, 7], 0)
    logprobs = targets.behaviour.double().numpy()
    gradients = [taken(logprobs, targets, Correction(kind=kind))[1] for kind in ("none", "token", "sequence")]
    assert np.array_equal(gradients[0], gradients[1])
    assert np.array_equal(gradients[0], gradients[2])


def test_a_weight_of_one_row_leaves_the_other_rows_alone() -> None:
    logprobs, targets = example([5, 6], 3)
    moved = logprobs.copy()
    moved[:5] -= 0.1
    before, after = (taken(each, targets, Correction(kind="sequence"))[1] for each in (logprobs, moved))
    assert np.array_equal(before[5:], after[5:])
    assert not np.array_equal(before[:5], after[:5])


def test_a_weight_beyond_float_range_is_its_cap() -> None:
    targets = Targets(
        loss_mask=torch.ones(3, dtype=torch.bool),
        behaviour=torch.full((3,), -500.0),
        advantages=torch.ones(3),
        lengths=(3,),
    )
    for kind in ("token", "sequence"):
        own = torch.full((3,), -1.0).requires_grad_()
        loss = policy_loss(own, targets, clip=CLIP, correction=Correction(kind=kind, cap=2.0))
        loss.total.backward()
        assert own.grad is not None
        assert own.grad.tolist() == pytest.approx([-2.0] * 3)
        assert int(loss.limited) == 3


def test_a_pack_of_no_rows_has_no_loss_and_no_tokens() -> None:
    targets = Targets.of(pack([], {}), torch.device("cpu"))
    for kind in ("none", "token", "sequence"):
        loss = policy_loss(torch.tensor([-2.0]), targets, clip=CLIP, correction=Correction(kind=kind))
        assert (float(loss.total), int(loss.tokens), int(loss.limited), float(loss.difference)) == (0, 0, 0, 0)
