"""The datasets in torch's loader and torchdata's: one order for any number of workers, and a place to go on from."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sqlalchemy import Engine
from torch.utils.data import DataLoader

from replay.dataset import Batch, MicroBatches, WholeSteps, step_tensors, tensors
from replay.errors import OtherRun
from replay.pack import Pack
from replay.rowset import build
from replay.run import PlacedPack, Run, Steps
from store.events import Event

Remember = Callable[[Engine, Iterable[Event]], None]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]


@pytest.fixture
def steps(sqlite_database: Engine, remember: Remember, groups_of_rollouts: Any, chain_maker: Any) -> Steps:
    remember(sqlite_database, groups_of_rollouts(chain_maker, ["g0", "g1", "g2"]))
    position = build(sqlite_database, rollouts=()).position
    run = Run(name="r", position=position, steps=3, groups_per_step=2, world=2, token_budget=90)
    return Steps.of(sqlite_database, run)


@pytest.fixture
def expected(steps: Steps, sqlite_database: Engine) -> list[str]:
    return [each.pack.digest() for step in range(3) for each in steps.packs(sqlite_database, step, rank=1)]


def loaded(dataset: MicroBatches, workers: int) -> list[PlacedPack]:
    return [*DataLoader(dataset, batch_size=None, num_workers=workers)]


def digests(found: Iterable[PlacedPack]) -> list[str]:
    return [each.pack.digest() for each in found]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_number_of_workers_changes_nothing_and_any_goes_on_for_any(
    steps: Steps, sqlite_url: str, expected: list[str], workers: int
) -> None:
    dataset = MicroBatches(steps, sqlite_url, rank=1)
    found = loaded(dataset, workers)
    assert digests(found) == expected
    at = 4
    again = MicroBatches(steps, sqlite_url, rank=1)
    again.load_state_dict(dataset.place_after(step=found[at].step, micro_batch=found[at].micro_batch))
    assert digests(loaded(again, (workers + 2) % 4)) == expected[at + 1 :]
    again.load_state_dict(dataset.place_after(step=found[-1].step, micro_batch=found[-1].micro_batch))
    assert loaded(again, workers) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stateful_loader_goes_on_after_any_batch(
    steps: Steps, sqlite_url: str, expected: list[str], workers: int
) -> None:
    for taken in (1, 4, len(expected)):
        loader = StatefulDataLoader(MicroBatches(steps, sqlite_url, rank=1), batch_size=None, num_workers=workers)
        batches = iter(loader)
        assert digests(next(batches) for _ in range(taken)) == expected[:taken]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        del batches
        resumed = StatefulDataLoader(MicroBatches(steps, sqlite_url, rank=1), batch_size=None, num_workers=workers)
        resumed.load_state_dict(state)
        assert digests(resumed) == expected[taken:]


def test_a_place_of_one_process_is_a_place_for_several(steps: Steps, sqlite_url: str, expected: list[str]) -> None:
    dataset = MicroBatches(steps, sqlite_url, rank=1)
    batches = iter(dataset)
    assert digests(next(batches) for _ in range(3)) == expected[:3]
    several = MicroBatches(steps, sqlite_url, rank=1)
    several.load_state_dict(dataset.state_dict())
    assert digests(loaded(several, 3)) == expected[3:]


def test_a_place_of_another_run_or_rank_is_refused(steps: Steps, sqlite_database: Engine, sqlite_url: str) -> None:
    place = MicroBatches(steps, sqlite_url, rank=1).state_dict()
    with pytest.raises(OtherRun, match="the place was saved with rank 1, here it is 0"):
        MicroBatches(steps, sqlite_url, rank=0).load_state_dict(place)
    other = Steps.of(sqlite_database, replace(steps.run, seed=5))
    with pytest.raises(OtherRun, match="the place was saved with run"):
        MicroBatches(other, sqlite_url, rank=1).load_state_dict(place)


def test_whole_steps_are_items_of_a_dataset(steps: Steps, sqlite_url: str, expected: list[str]) -> None:
    dataset = WholeSteps(steps, sqlite_url, rank=1)
    assert digests(each for step in dataset for each in step) == expected  # opens the log here, before workers start
    first = len(dataset[0])
    loader = DataLoader(dataset, batch_size=None, sampler=range(1, len(dataset)), num_workers=2)
    assert digests(each for step in loader for each in step) == expected[first:]
    assert digests(dataset[0]) == expected[:first]  # and the log that was opened here is as it was
    sent: WholeSteps = pickle.loads(pickle.dumps(dataset))  # to a worker that is spawned
    assert digests(sent[0]) == expected[:first]


def test_batches_are_plain_tensors_on_the_cpu(steps: Steps, sqlite_database: Engine, sqlite_url: str) -> None:
    loader = DataLoader(MicroBatches(steps, sqlite_url), batch_size=None, collate_fn=tensors, num_workers=1)
    batches: list[Batch] = [*loader]
    placed = [each for step in range(3) for each in steps.packs(sqlite_database, step)]
    for batch, each in zip(batches, placed, strict=True):
        whole = (batch["step"], batch["micro_batch"], batch["micro_batches"], batch["max_seqlen"])
        assert whole == (each.step, each.micro_batch, each.micro_batches, each.pack.max_seqlen)
        assert batch["row_ids"] == [*each.pack.row_ids]
        assert batch["refused"] == {}
        assert pack_of(batch).digest() == each.pack.digest()
        kinds = {name: value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor)}
        assert kinds == {
            **dict.fromkeys(("tokens", "labels", "position_ids"), torch.int64),
            **dict.fromkeys(("loss_mask", "logprobs", "advantages"), torch.float32),
            "cu_seqlens": torch.int32,
        }
    whole_steps = DataLoader(WholeSteps(steps, sqlite_url), batch_size=None, collate_fn=step_tensors)
    again = [batch["tokens"].tolist() for step in whole_steps for batch in step]
    assert again == [batch["tokens"].tolist() for batch in batches]


def pack_of(batch: Batch) -> Pack:
    return Pack(
        row_ids=tuple(batch["row_ids"]),
        tokens=batch["tokens"].numpy(),
        labels=batch["labels"].numpy(),
        position_ids=batch["position_ids"].numpy(),
        loss_mask=batch["loss_mask"].bool().numpy(),
        logprobs=batch["logprobs"].numpy(),
        advantages=batch["advantages"].numpy(),
        cu_seqlens=batch["cu_seqlens"].numpy(),
    )
