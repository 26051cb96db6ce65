"""The demo's trainer: packs in, real Megatron optimizer steps out, on a GPU or without one, and the weights back.

Knows how to set Megatron up in this one process; does not know the log, the server, or how rows were made.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from replay.megatron import StepReport, forward, micro_batches, train_step
from replay.objective import Correction
from replay.pack import Pack, packs
from replay.plan import plan
from replay.row import Row
from turnlog.demo import megatron_cpu, qwen3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A model in training: its weights and its optimizer, kept from step to step."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    folder: Path
    """The Hugging Face folder that the weights came from."""

    def step(self, packs: Sequence[Pack], *, correction: Correction | None = None) -> StepReport:
        """Take one optimizer step over all of the packs."""
        return train_step(self.model, self.optimizer, packs, correction=correction)

    def mean_logprob(self, packs: Sequence[Pack]) -> float:
        """Mean log-probability that the model as it is gives the tokens that the packs train."""
        total, tokens = 0.0, 0
        with torch.no_grad():
            for batch in micro_batches(packs, next(self.model.parameters()).device):
                found = -forward(self.model, batch)[0][batch.targets.loss_mask]
                total += float(found.sum())
                tokens += len(found)
        return total / tokens

    def save(self, folder: Path) -> None:
        """Write the weights as they are, with the tokenizer and the rest that a server needs, to another folder."""
        left = shutil.ignore_patterns("*.safetensors", "turnlog_build.json")
        shutil.copytree(self.folder, folder, ignore=left, dirs_exist_ok=True)
        qwen3.save(cast("GPTModel", self.model.module), folder)


@contextmanager
def trainer(folder: Path, *, learning_rate: float) -> Generator[Trainer]:
    """Set Megatron up for the block, with the weights of a Hugging Face folder."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(megatron_cpu.installed())
        stack.enter_context(megatron_cpu.single_process(f"{scratch}/store"))
        model = qwen3.load(folder, megatron_cpu.PackedAttention)
        wrapped, optimizer = qwen3.trainable(model, learning_rate=learning_rate)
        yield Trainer(model=wrapped, optimizer=optimizer, folder=folder)


def grpo_step(model: Path, rows: Sequence[Row], advantages: Mapping[str, float]) -> StepReport:
    """Take one optimizer step over all rows with the weights in `model`; `advantages` are by rollout id.

    The longest row sets the size of a pack, so that the short ones share packs.
    """
    planned = plan(rows, seed=0, step=0, token_budget=max(row.length for row in rows))
    with trainer(model, learning_rate=1e-4) as training:
        return training.step(packs(planned, rows, advantages))
