"""The loss of one pack: the formulas of `replay.objective` on tensors.

Knows torch and the layout of a pack; does not know models, trainers, devices' names or how packs were planned.
Law: the loss is a sum over trained tokens and comes with their count; who adds packs up divides once, at the end.

It computes in the type of the log-probabilities it is given, so that a test can have it in double precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from replay.objective import Clip, Correction
from replay.pack import Pack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """What the loss of a pack is made from, beside the policy's own log-probabilities."""

    loss_mask: torch.Tensor  # [P]
    behaviour: torch.Tensor  # [P] log-probabilities under which the labels were sampled
    advantages: torch.Tensor  # [P]
    lengths: tuple[int, ...]
    """Positions of each row of the pack."""

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> Targets:
        """The targets of a pack, on a device."""
        return cls(
            loss_mask=torch.from_numpy(pack.loss_mask).to(device),
            behaviour=torch.from_numpy(pack.logprobs).to(device),
            advantages=torch.from_numpy(pack.advantages).to(device),
            lengths=tuple(np.diff(pack.cu_seqlens).tolist()),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """The loss of one pack; every field is a scalar."""

    total: torch.Tensor
    """Sum over the trained tokens."""
    tokens: torch.Tensor
    """Trained tokens, an integer."""
    limited: torch.Tensor
    """Trained tokens whose ratio lay outside the clip range, or whose weight the cap cut."""
    difference: torch.Tensor
    """Largest difference between a trained token's stored log-probability and the policy's own."""


def policy_loss(logprobs: torch.Tensor, targets: Targets, *, clip: Clip, correction: Correction) -> Loss:
    """The loss of one pack.

    Args:
        logprobs: the policy's own log-probability of every label, [P]; the gradient flows into them.
        targets: of the same pack.
        clip: used when `correction` is of kind `none`.
        correction: see `replay.objective`.
    """
    mask = targets.loss_mask
    log_ratio = torch.where(mask, logprobs - targets.behaviour, 0.0)
    if correction.kind == "none":
        ratio = log_ratio.exp()
        clamped = ratio.clamp(1 - clip.low, 1 + clip.high)
        losses = -torch.minimum(ratio * targets.advantages, clamped * targets.advantages)
        limited = clamped != ratio
    else:
        log_weight = log_ratio.detach()
        if correction.kind == "sequence":
            log_weight = _row_sums(log_weight.double(), targets.lengths)
        limited = log_weight > math.log(correction.cap)
        weight = log_weight.clamp(max=math.log(correction.cap)).exp().to(logprobs.dtype)  # no weight overflows
        unit = (log_ratio - log_ratio.detach()).exp()  # one, with the gradient of the log-probability
        losses = -weight * targets.advantages * unit
    return Loss(
        total=torch.where(mask, losses, 0.0).sum(),
        tokens=mask.sum().to(torch.int),
        limited=(mask & limited).sum(),
        difference=log_ratio.detach().abs().max(),
    )


def _row_sums(values: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """At every position the sum over its row: a sum a row, since a scatter's order would vary from run to run."""
    return torch.cat([row.sum().expand_as(row) for row in torch.split(values, [*lengths])])
