"""The micro-batches of a run for a torch `DataLoader`, or for torchdata's `StatefulDataLoader`.

Knows torch's datasets and loader workers; does not know models, devices or how a step is planned.
Law: the order is the run's. How many workers load changes neither what comes nor when, and a place saved under one
number of workers is gone on from under any other.

    steps = Steps.of(database, run)
    micro_batches = MicroBatches(steps, url, rank=rank)
    for batch in DataLoader(micro_batches, batch_size=None, collate_fn=tensors, num_workers=4):
        loss = ...  # batch["tokens"], batch["cu_seqlens"], ...
        if batch["micro_batch"] + 1 == batch["micro_batches"]:
            optimizer.step()
            place = micro_batches.place_after(step=batch["step"], micro_batch=batch["micro_batch"])
            save(model, optimizer, place)  # load_state_dict goes on from there

Both datasets hold no connection: each worker opens the log for itself, since a connection does not survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from sqlalchemy import Engine
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from replay.errors import OtherRun
from replay.media import MediaSource
from replay.media_tensors import Packed, packed
from replay.run import PlacedPack, Steps
from store.database import open_database


class Batch(TypedDict):
    """One micro-batch as CPU tensors, P positions of R rows; see `replay.pack` for their layout."""

    step: int
    micro_batch: int
    micro_batches: int
    row_ids: list[str]
    refused: dict[str, str]
    """Rollouts whose rows are missing here, with the reason."""
    tokens: torch.Tensor  # [P] int64
    labels: torch.Tensor  # [P] int64
    position_ids: torch.Tensor  # [P] int64
    loss_mask: torch.Tensor  # [P] float32
    logprobs: torch.Tensor  # [P] float32
    advantages: torch.Tensor  # [P] float32
    cu_seqlens: torch.Tensor  # [R + 1] int32
    max_seqlen: int
    media: dict[str, Packed]
    """Fields of what stands among the tokens, such as `pixel_values`; see `replay.media_tensors`."""


def tensors(placed: PlacedPack, source: MediaSource | None = None) -> Batch:
    """A micro-batch as tensors: the `collate_fn` of a loader over `MicroBatches`.

    Args:
        placed: the micro-batch.
        source: where its media lie; None for where the log's servers put them, as the micro-batch says.
    """
    pack = placed.pack
    return Batch(
        step=placed.step,
        micro_batch=placed.micro_batch,
        micro_batches=placed.micro_batches,
        row_ids=[*pack.row_ids],
        refused={refusal.rollout_id: refusal.reason for refusal in placed.refused},
        tokens=torch.from_numpy(pack.tokens),
        labels=torch.from_numpy(pack.labels),
        position_ids=torch.from_numpy(pack.position_ids),
        loss_mask=torch.from_numpy(pack.loss_mask).float(),
        logprobs=torch.from_numpy(pack.logprobs),
        advantages=torch.from_numpy(pack.advantages),
        cu_seqlens=torch.from_numpy(pack.cu_seqlens),
        max_seqlen=pack.max_seqlen,
        media=packed(pack.media, len(pack.row_ids), source or placed.source) if pack.media else {},
    )


def step_tensors(placed: Sequence[PlacedPack]) -> list[Batch]:
    """The micro-batches of a step as tensors: the `collate_fn` of a loader over `WholeSteps`."""
    return [tensors(each) for each in placed]


class MicroBatches(IterableDataset[PlacedPack]):
    """One rank's micro-batches in the order of the run; give loaders `batch_size=None`."""

    def __init__(self, steps: Steps, url: str, *, rank: int = 0) -> None:
        """The whole run, from its start.

        Args:
            steps: of the run.
            url: of the log, as `store.database.open_database` takes it.
            rank: data-parallel rank.
        """
        self._steps = steps
        self._url = url
        self._rank = rank
        self._place = {"step": 0, "micro_batch": 0}
        self._skip: int | None = None
        """Micro-batches from the place on that come from other workers; None for the number of this worker."""

    def __iter__(self) -> Iterator[PlacedPack]:
        """From the place that was loaded, or from the start."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        skip = number if self._skip is None else self._skip
        first, start = self._place["step"], self._place["micro_batch"]
        database = open_database(self._url)
        try:
            for step in range(first, self._steps.run.steps):
                here = range(start if step == first else 0, self._steps.plan(step).micro_batches)
                for placed in self._steps.packs(database, step, rank=self._rank, only=here[skip::workers]):
                    self._place = {"step": step, "micro_batch": placed.micro_batch + 1}
                    self._skip = workers - 1 or None
                    yield placed
                skip = (skip - len(here)) % workers
        finally:
            database.dispose()

    def place_after(self, *, step: int, micro_batch: int) -> dict[str, int | str]:
        """The place that follows a micro-batch, for `load_state_dict`: the same for any number of workers."""
        return {**self._named(), "step": step, "micro_batch": micro_batch + 1}

    def state_dict(self) -> dict[str, int | str]:
        """The place of this copy of the dataset: what `StatefulDataLoader` asks each of its workers for."""
        named = {**self._named(), **self._place}
        return named if self._skip is None else {**named, "skip": self._skip}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from a place; before any loader is made, except by `StatefulDataLoader`. Raises OtherRun."""
        for part, here in self._named().items():
            if state[part] != here:
                raise OtherRun(part, state[part], here)
        self._place = {part: int(state[part]) for part in ("step", "micro_batch")}
        self._skip = int(state["skip"]) if "skip" in state else None

    def _named(self) -> dict[str, int | str]:
        return {"run": self._steps.run.digest(), "rank": self._rank}


class WholeSteps(Dataset[list[PlacedPack]]):
    """One rank's steps by number, each with all of its micro-batches: `loader(sampler=range(first, len(dataset)))`."""

    def __init__(self, steps: Steps, url: str, *, rank: int = 0) -> None:
        """The whole run; arguments are those of `MicroBatches`."""
        self._steps = steps
        self._url = url
        self._rank = rank
        self._database: Engine | None = None
        self._opened_by = 0

    def __len__(self) -> int:
        return self._steps.run.steps

    def __getitem__(self, step: int) -> list[PlacedPack]:
        if step >= len(self):
            raise IndexError(step)
        return self._steps.packs(self._opened(), step, rank=self._rank)

    def __getstate__(self) -> dict[str, object]:
        """Without the database: it belongs to this process."""
        return {**self.__dict__, "_database": None}

    def _opened(self) -> Engine:
        """The log, opened by this process: what a parent opened is left to the parent."""
        if self._database is not None and self._opened_by != os.getpid():
            self._database.dispose(close=False)
            self._database = None
        if self._database is None:
            self._database, self._opened_by = open_database(self._url), os.getpid()
        return self._database
