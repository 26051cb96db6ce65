"""The shell around megatron-core: packs in, one optimizer step out.

Knows megatron's schedule, its packed sequences and its loss contract; does not know rows, logs or where weights come
from. It needs a GPU or, on a CPU, a caller that made megatron-core run there.

Law: the loss of a step is a sum over all trained tokens of all micro-batches and ranks, divided by their one global
count. Neither the number of rows nor how they are packed changes it, and one step is one optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from replay.errors import NothingToTrain, TrainerSetup
from replay.pack import Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Range of the probability ratio, policy over behaviour: [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one training step did, over all data-parallel ranks."""

    loss: float
    """Sum over the trained tokens / their count."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Trained tokens."""
    micro_batches: int
    """Per rank, empty ones included."""
    clipped: int
    """Trained tokens whose ratio lay outside the clip range."""
    max_logprob_difference: float
    """Largest difference between a trained token's stored log-probability and the model's own before the step."""
    updated: bool
    """False when the optimizer refused the step (gradients that are not finite)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """A pack on its device, as the model's forward takes it; every array is [1, P]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    packed: PackedSeqParams


def micro_batches(packs: Iterable[Pack], device: torch.device) -> Iterator[MicroBatch]:
    """The data iterator that the schedule calls once per micro-batch."""

    def one_row(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).unsqueeze(0).to(device)

    for pack in packs:
        cu_seqlens = torch.from_numpy(pack.cu_seqlens).to(device)
        yield MicroBatch(
            tokens=one_row(pack.tokens),
            labels=one_row(pack.labels),
            position_ids=one_row(pack.position_ids),
            loss_mask=one_row(pack.loss_mask),
            logprobs=one_row(pack.logprobs),
            advantages=one_row(pack.advantages),
            packed=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=pack.max_seqlen,
                max_seqlen_kv=pack.max_seqlen,
            ),
        )


def token_logprobs(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """The model's own log-probability of every label, [1, P]."""
    losses: torch.Tensor = model(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=None,
        labels=batch.labels,
        packed_seq_params=batch.packed,
    )
    return -losses


LossReturn = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""What the schedule takes from a loss function: the sum, how many tokens it is over, and what to keep."""


def forward_step(
    batches: Iterator[MicroBatch], model: torch.nn.Module, *, clip: Clip
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossReturn]]:
    """One forward pass, and the loss function to call on its output: megatron's `forward_step_func`."""
    batch = next(batches)
    return token_logprobs(model, batch), partial(token_loss, batch=batch, clip=clip)


def token_loss(logprobs: torch.Tensor, *, batch: MicroBatch, clip: Clip) -> LossReturn:
    """The clipped policy-gradient loss, summed over the trained tokens of one micro-batch."""
    log_ratio = logprobs - batch.logprobs
    ratio = log_ratio.exp()
    clamped = ratio.clamp(1 - clip.low, 1 + clip.high)
    losses = -torch.minimum(ratio * batch.advantages, clamped * batch.advantages)
    loss = torch.where(batch.loss_mask, losses, 0.0).sum()
    with torch.no_grad():
        kept = {
            "loss": loss.detach().clone(),  # the schedule divides the returned loss in place
            "clipped": (batch.loss_mask & (clamped != ratio)).sum(),
            "difference": torch.where(batch.loss_mask, log_ratio.abs(), 0.0).max(),
        }
    return loss, batch.loss_mask.sum().to(torch.int), kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """The gradients of one step are in the model; this is what was seen while they were made."""

    loss: float
    tokens: int
    clipped: int
    max_logprob_difference: float


def accumulate(model: torch.nn.Module, packs: Sequence[Pack], *, clip: Clip) -> Accumulated:
    """Forward and backward over all packs of this rank: afterwards `main_grad` holds the step's gradients.

    Args:
        model: megatron's DistributedDataParallel around the model, with zeroed gradient buffers.
        packs: this rank's, as many as every other rank has.
        clip: of the loss.
    """
    config = get_model_config(model)
    _check_setup(config.calculate_per_token_loss)
    device = next(model.parameters()).device
    group = parallel_state.get_data_parallel_group()
    counts = torch.tensor([sum(pack.trained for pack in packs)], device=device)
    torch.distributed.all_reduce(counts, group=group)
    tokens = int(counts[0])
    if tokens == 0:
        raise NothingToTrain
    if config.finalize_model_grads_func is None:
        config.finalize_model_grads_func = finalize_model_grads
    kept = get_forward_backward_func()(
        forward_step_func=partial(forward_step, clip=clip),
        data_iterator=micro_batches(packs, device),
        model=[model],
        num_microbatches=len(packs),
        seq_length=max(len(pack.tokens) for pack in packs),
        micro_batch_size=1,
        forward_only=False,
    )
    sums = torch.stack([torch.stack([each["loss"].double(), each["clipped"].double()]) for each in kept]).sum(0)
    difference = torch.stack([each["difference"] for each in kept]).max()
    torch.distributed.all_reduce(sums, group=group)
    torch.distributed.all_reduce(difference, op=torch.distributed.ReduceOp.MAX, group=group)
    return Accumulated(
        loss=float(sums[0]) / tokens,
        tokens=tokens,
        clipped=int(sums[1]),
        max_logprob_difference=float(difference),
    )


def train_step(
    model: torch.nn.Module, optimizer: MegatronOptimizer, packs: Sequence[Pack], *, clip: Clip | None = None
) -> StepReport:
    """One optimizer step over all packs of this rank; every data-parallel rank calls it with as many packs.

    Args:
        model: megatron's DistributedDataParallel around the model, its config with `calculate_per_token_loss`.
        optimizer: from `get_megatron_optimizer`.
        packs: from `replay.pack.packs`.
        clip: of the loss; None for 0.2 on both sides.
    """
    config = get_model_config(model)
    if config.grad_scale_func is None:
        config.grad_scale_func = optimizer.scale_loss
    model.zero_grad_buffer()  # type: ignore[operator]  # megatron's wrapper, see `model`
    optimizer.zero_grad()
    seen = accumulate(model, packs, clip=clip or Clip())
    updated, grad_norm, _ = cast("tuple[bool, float | None, int | None]", optimizer.step())
    return StepReport(
        loss=seen.loss,
        grad_norm=float("nan") if grad_norm is None else float(grad_norm),
        tokens=seen.tokens,
        micro_batches=len(packs),
        clipped=seen.clipped,
        max_logprob_difference=seen.max_logprob_difference,
        updated=bool(updated),
    )


def _check_setup(calculate_per_token_loss: bool) -> None:
    if not calculate_per_token_loss:
        raise TrainerSetup(
            "calculate_per_token_loss",
            False,
            "set it to True, else the weight of a token depends on how rows are packed",
        )
    for name, size in (
        ("pipeline_model_parallel_size", parallel_state.get_pipeline_model_parallel_world_size()),
        ("context_parallel_size", parallel_state.get_context_parallel_world_size()),
    ):
        if size != 1:
            raise TrainerSetup(name, size, "packs are fed whole to one stage, use 1")
