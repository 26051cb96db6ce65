"""The shell around megatron-core: packs in, one optimizer step out.

Knows megatron's schedule, its parallel groups, its packed sequences and its loss contract; does not know rows, logs or
where weights come from. It needs a GPU or, on a CPU, a caller that made megatron-core run there.

Law: the loss of a step is a sum over all trained tokens of all micro-batches and ranks, divided by their one global
count. Neither the number of rows, nor how they are packed, nor how the model is split over ranks changes it, and one
step is one optimizer step.

Data-parallel ranks hold packs of their own, as many each; the ranks that share a model, by tensor or by pipeline, hold
the same ones (docs/decisions/0013).
"""

from __future__ import annotations

import hashlib
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
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from replay.errors import NothingToTrain, PlanMismatch, TrainerSetup
from replay.loss import Targets, policy_loss
from replay.objective import Clip, Correction
from replay.pack import Pack
from replay.padding import align


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one training step did, over all ranks; the same on every rank."""

    loss: float
    """Sum over the trained tokens / their count."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Trained tokens."""
    micro_batches: int
    """Per data-parallel rank, empty ones included."""
    clipped: int
    """Trained tokens whose ratio lay outside the clip range, or whose weight the correction's cap cut."""
    max_logprob_difference: float
    """Largest difference between a trained token's stored log-probability and the model's own before the step."""
    updated: bool
    """False when the optimizer refused the step (gradients that are not finite)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """A pack on its device, as the model's forward takes it; every stage of a pipeline has it whole."""

    tokens: torch.Tensor  # [1, P]
    labels: torch.Tensor  # [1, P]
    position_ids: torch.Tensor  # [1, P]
    targets: Targets
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
            targets=Targets.of(pack, device),
            packed=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=pack.max_seqlen,
                max_seqlen_kv=pack.max_seqlen,
            ),
        )


def forward(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """What this rank's part of the model makes of a pack: on the last stage its negative log-probabilities, [1, P]."""
    output: torch.Tensor = model(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=None,
        labels=batch.labels,
        packed_seq_params=batch.packed,
    )
    return output


LossReturn = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""What the schedule takes from a loss function: the sum, how many tokens it is over, and what to keep."""


def forward_step(
    batches: Iterator[MicroBatch], model: torch.nn.Module, *, clip: Clip, correction: Correction
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossReturn]]:
    """One forward pass, and the loss function for the last stage's output: megatron's `forward_step_func`."""
    batch = next(batches)
    return forward(model, batch), partial(_loss, targets=batch.targets, clip=clip, correction=correction)


def _loss(output: torch.Tensor, *, targets: Targets, clip: Clip, correction: Correction) -> LossReturn:
    loss = policy_loss(-output[0], targets, clip=clip, correction=correction)
    kept = {
        "loss": loss.total.detach().clone(),  # the schedule divides the returned loss in place
        "limited": loss.limited,
        "difference": loss.difference,
    }
    return loss.total, loss.tokens, kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """The gradients of one step are in the model; this is what was seen while they were made."""

    loss: float
    tokens: int
    clipped: int
    max_logprob_difference: float


def accumulate(model: torch.nn.Module, packs: Sequence[Pack], *, clip: Clip, correction: Correction) -> Accumulated:
    """Forward and backward over all packs of this rank: afterwards `main_grad` holds the step's gradients.

    Args:
        model: megatron's DistributedDataParallel around this rank's part of the model, with zeroed gradient buffers.
        packs: this rank's; see the module.
        clip: of the loss.
        correction: of the loss.
    """
    config = get_model_config(model)
    _check_setup(config)
    device = next(model.parameters()).device
    tokens = _agree(packs, device)
    if tokens == 0:
        raise NothingToTrain
    if config.finalize_model_grads_func is None:
        config.finalize_model_grads_func = finalize_model_grads
    aligned = align(
        packs,
        multiple=parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1,
        equal=parallel_state.get_pipeline_model_parallel_world_size() > 1 and not config.variable_seq_lengths,
    )
    kept = get_forward_backward_func()(
        forward_step_func=partial(forward_step, clip=clip, correction=correction),
        data_iterator=micro_batches(aligned, device),
        model=[model],
        num_microbatches=len(aligned),
        seq_length=max(len(pack.tokens) for pack in aligned),
        micro_batch_size=1,
        forward_only=False,
    )
    loss, limited, difference = _over_all_ranks(kept, device)
    return Accumulated(loss=loss / tokens, tokens=tokens, clipped=int(limited), max_logprob_difference=difference)


def train_step(
    model: torch.nn.Module,
    optimizer: MegatronOptimizer,
    packs: Sequence[Pack],
    *,
    clip: Clip | None = None,
    correction: Correction | None = None,
) -> StepReport:
    """One optimizer step over all packs of all ranks; every rank calls it.

    Args:
        model: megatron's DistributedDataParallel around this rank's part of the model, its config with
            `calculate_per_token_loss`.
        optimizer: from `get_megatron_optimizer`.
        packs: from `replay.pack.packs`, with the data-parallel rank; the same on all ranks that share a model.
        clip: of the loss; None for 0.2 on both sides.
        correction: of the loss, for history; None for `none`.
    """
    config = get_model_config(model)
    if config.grad_scale_func is None:
        config.grad_scale_func = optimizer.scale_loss
    model.zero_grad_buffer()  # type: ignore[operator]  # megatron's wrapper, see `model`
    optimizer.zero_grad()
    seen = accumulate(model, packs, clip=clip or Clip(), correction=correction or Correction())
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


def _check_setup(config: TransformerConfig) -> None:
    if not config.calculate_per_token_loss:
        raise TrainerSetup(
            "calculate_per_token_loss",
            False,
            "set it to True, else the weight of a token depends on how rows are packed",
        )
    context = parallel_state.get_context_parallel_world_size()
    if context != 1:
        raise TrainerSetup(
            "context_parallel_size", context, "rows are not cut over ranks, use 1 and split by tensor or pipeline"
        )
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if chunks is not None:
        raise TrainerSetup(
            "virtual_pipeline_model_parallel_size", chunks, "a step takes one model chunk a rank, use None"
        )


def _agree(packs: Sequence[Pack], device: torch.device) -> int:
    """Trained tokens of the step; raises on all ranks where their packs do not belong together.

    Ranks that went on with other packs than their peers would wait for each other, or train a wrong gradient.
    """
    told = hashlib.sha256(repr([(pack.row_ids, len(pack.tokens), pack.trained) for pack in packs]).encode()).digest()
    digest = int.from_bytes(told[:7])
    alike = torch.tensor([digest, -digest], device=device)
    torch.distributed.all_reduce(
        alike, op=torch.distributed.ReduceOp.MIN, group=parallel_state.get_model_parallel_group()
    )
    group = parallel_state.get_data_parallel_group()
    bounds = torch.tensor([int(alike[0] == -alike[1]), len(packs), -len(packs)], device=device)
    torch.distributed.all_reduce(bounds, op=torch.distributed.ReduceOp.MIN, group=group)
    counts = [sum(pack.trained for pack in packs), sum(bool(pack.media) for pack in packs)]
    tokens = torch.tensor(counts, device=device)
    torch.distributed.all_reduce(tokens, group=group)
    all_alike, fewest, most = bounds.tolist()
    if not all_alike:
        raise PlanMismatch("the packs of ranks that share a model", "differ")
    if fewest != -most:
        raise PlanMismatch("data-parallel ranks", f"have from {fewest} to {-most} packs")
    if tokens[1]:
        raise PlanMismatch(
            f"{int(tokens[1])} packs of the step", "show images, and this step feeds its model tokens alone"
        )
    return int(tokens[0])


def _over_all_ranks(kept: Sequence[dict[str, torch.Tensor]], device: torch.device) -> tuple[float, float, float]:
    """Loss sum, limited tokens and largest difference: over data-parallel ranks, from the last stage to the others."""
    seen = torch.zeros(3, dtype=torch.double, device=device)
    if parallel_state.is_pipeline_last_stage():
        for each in kept:
            seen[0] += each["loss"]
            seen[1] += each["limited"]
            seen[2] = torch.maximum(seen[2], each["difference"])
        group = parallel_state.get_data_parallel_group()
        torch.distributed.all_reduce(seen[:2], group=group)
        torch.distributed.all_reduce(seen[2:], op=torch.distributed.ReduceOp.MAX, group=group)
    stages = cast("torch.distributed.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())
    last = torch.distributed.get_global_rank(stages, stages.size() - 1)
    torch.distributed.broadcast(seen, src=last, group=stages)
    loss, limited, difference = seen.tolist()
    return loss, limited, difference
