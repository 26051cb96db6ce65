"""The demo's training step: rows in, one real Megatron optimizer step out, on a GPU or without one.

Knows how to set Megatron up in this one process; does not know the log, the server, or how rows were made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from replay.megatron import StepReport, train_step
from replay.pack import packs
from replay.plan import plan
from replay.row import Row
from turnlog.demo import megatron_cpu, qwen3


def grpo_step(model: Path, rows: Sequence[Row], advantages: Mapping[str, float]) -> StepReport:
    """Take one optimizer step over all rows with the weights in `model`; `advantages` are by rollout id.

    The longest row sets the size of a pack, so that the short ones share packs.
    """
    planned = plan(rows, seed=0, step=0, token_budget=max(row.length for row in rows))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(megatron_cpu.installed())
        stack.enter_context(megatron_cpu.single_process(f"{scratch}/store"))
        wrapped, optimizer = qwen3.trainable(qwen3.load(model, megatron_cpu.PackedAttention), learning_rate=1e-4)
        return train_step(wrapped, optimizer, packs(planned, rows, advantages))
