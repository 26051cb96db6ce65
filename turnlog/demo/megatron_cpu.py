"""Make megatron-core run on a machine without a GPU: for the demo and the tests, never for training.

Knows which CUDA calls megatron-core makes on its way through a GPT model; does not know replay, rows or weights.
Law: it refuses to act where a GPU is, and puts back everything it replaced.

megatron-core writes `device="cuda"` in its schedule and optimizer, asks `torch.cuda` for the current device, and its
local attention refuses packed sequences. Inside `installed()` such a device means the CPU; `PackedAttention` is the
core attention to build a model with.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class GpuPresent(RuntimeError):
    """The machine has a GPU, which megatron-core needs no help to use."""

    def __init__(self) -> None:
        super().__init__("this machine has a GPU, on which megatron-core runs as it is: do not install the CPU shim")


@contextmanager
def installed() -> Generator[None]:
    """Run megatron-core on the CPU inside this block; raises GpuPresent where there is a GPU."""
    if torch.cuda.is_available():
        raise GpuPresent
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # megatron's own tracker without CUDA state
    with (
        patch.object(torch.cuda, "current_device", _current_device),
        patch.object(torch.cuda, "current_stream", _Stream),
        patch.object(torch.cuda, "synchronize", _nothing),
        _CudaMeansCpu(),
    ):
        yield


@contextmanager
def single_process(store: str) -> Generator[None]:
    """A process group of this process alone, and megatron's parallel state on it.

    Args:
        store: a file that does not exist yet, over which torch's processes find each other.
    """
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


class PackedAttention(DotProductAttention):  # type: ignore[misc]  # megatron ships no types
    """megatron's local attention, for packed sequences too: each segment of the pack attends to itself alone."""

    def forward(
        self,
        query: torch.Tensor,  # [tokens, heads, dim] when packed
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """The attention's output, [tokens, heads * dim] when packed."""
        if packed_seq_params is None:
            plain: torch.Tensor = super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
            return plain
        heads_per_group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(heads_per_group, dim=1)
        value = value.repeat_interleave(heads_per_group, dim=1)
        edges: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(
                query[start:end].transpose(0, 1),
                key[start:end].transpose(0, 1),
                value[start:end].transpose(0, 1),
                is_causal=True,
                scale=self.softmax_scale,
            ).transpose(0, 1)
            for start, end in pairwise(edges)
        ]
        return torch.cat(outputs).flatten(1)


class _CudaMeansCpu(TorchFunctionMode):
    """Every torch call that names a CUDA device gets the CPU; `Tensor.type()` answers with the CUDA name."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(_on_cpu(arg) for arg in args)
        named = {name: _on_cpu(arg) if name == "device" else arg for name, arg in (kwargs or {}).items()}
        answer = func(*args, **named)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)  # megatron asserts it of every gradient it clips
        return answer


class _Stream:
    """The stream of a device that has none."""

    def wait_event(self, event: object) -> None:
        """Nothing runs beside the caller."""

    def wait_stream(self, stream: object) -> None:
        """Nothing runs beside the caller."""


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return CPU if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def _current_device() -> torch.device:
    return CPU


def _nothing(*_: object) -> None:
    return None
