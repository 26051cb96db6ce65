import dataclasses
import random
from itertools import repeat
from time import process_time
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.errors import BadPlan, PlanMismatch
from replay.pack import pack, packs
from replay.plan import Measured, StepPlan, first_fit, plan
from replay.row import Row


def row(name: str, length: int) -> Row:
    source = np.random.default_rng(length)
    mask = np.arange(length) % 3 != 0
    return Row(
        row_id=name,
        rollout_id=f"rollout-{name}",
        group_id=None,
        reward=None,
        calls=UUID(int=1).bytes,
        call_numbers=(1,),
        token_ids=source.integers(0, 100, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -source.random(length), 0).astype(np.float32),
        version_spans=np.array([[0, length, 0]]),
    )


LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 4), st.integers(0, 3), st.randoms())
def test_a_plan_places_each_fitting_row_once_within_budget_and_order_changes_nothing(
    lengths: list[int], world: int, step: int, source: random.Random
) -> None:
    rows = [row(f"row{n}", length) for n, length in enumerate(lengths)]
    planned = plan(rows, seed=7, step=step, world=world, token_budget=40)
    size = {each.row_id: each.length - 1 for each in rows}
    placed = [row_id for rank in planned.ranks for micro_batch in rank for row_id in micro_batch]
    assert sorted(placed + [each.row_id for each in planned.too_long]) == sorted(size)
    assert all(sum(size[row_id] for row_id in micro_batch) <= 40 for rank in planned.ranks for micro_batch in rank)
    assert {len(rank) for rank in planned.ranks} == {planned.micro_batches}
    assert {(each.row_id, each.length - 1) for each in planned.too_long} == {
        item for item in size.items() if item[1] > 40
    }
    shuffled = rows.copy()
    source.shuffle(shuffled)
    assert plan(shuffled, seed=7, step=step, world=world, token_budget=40) == planned


@given(st.lists(st.integers(0, 40), max_size=60))
def test_first_fit_is_what_looking_at_each_pack_in_turn_gives(sizes: list[int]) -> None:
    named = {str(place): size for place, size in enumerate(sizes)}
    packs: list[list[str]] = []
    for name, size in named.items():
        fits = (pack for pack in packs if sum(named[other] for other in pack) + size <= 40)
        found = next(fits, None)
        if found is None:
            packs.append([name])
        else:
            found.append(name)
    assert first_fit(named, named, 40) == [tuple(pack) for pack in packs]


def test_ten_times_the_rows_take_about_ten_times_as_long() -> None:
    def seconds(count: int) -> float:
        rows = [Measured(str(number), 60 + number % 7) for number in range(count)]  # a row a pack: the most packs
        began = process_time()
        planned = plan(rows, seed=0, step=0, token_budget=70)
        assert planned.packs == count
        return process_time() - began

    assert min(map(seconds, repeat(20_000, 3))) < 30 * min(map(seconds, repeat(2_000, 3)))


def test_a_plan_says_how_well_its_packs_are_filled_beside_what_none_could_beat() -> None:
    source = random.Random(0)
    rows = [Measured(str(number), min(8000, 200 + int(source.expovariate(1 / 1500)))) for number in range(2000)]
    planned = plan(rows, seed=0, step=0, world=8, token_budget=8192)
    placed = {row_id for rank in planned.ranks for micro_batch in rank for row_id in micro_batch}
    assert planned.positions == sum(row.length - 1 for row in rows if row.row_id in placed)
    assert planned.least_packs == -(-planned.positions // 8192)
    assert planned.fill == planned.positions / (planned.packs * 8192)
    print(f"{len(rows)} rows: {planned.packs} packs, at least {planned.least_packs}, fill {planned.fill:.4f}")
    assert planned.packs <= planned.least_packs + 1
    nothing = plan([], seed=0, step=0, world=2, token_budget=10)
    assert (nothing.packs, nothing.least_packs, nothing.fill, nothing.micro_batches) == (0, 0, 1.0, 1)


def test_a_plan_is_stored_by_value() -> None:
    rows = [Measured("a", 30), Measured("b", 5), Measured("c", 99)]
    planned = plan(rows, seed=1, step=2, world=2, token_budget=40)
    again = StepPlan.from_json(planned.as_json())
    assert again == planned
    assert again.digest() == planned.digest() != dataclasses.replace(planned, step=3).digest()
    for broken in ({}, {**planned.as_json(), "more": 1}, {**planned.as_json(), "ranks": [[], [["a"]]]}, None):
        with pytest.raises(BadPlan, match="is not of a step plan"):
            StepPlan.from_json(broken)


def test_seed_and_step_draw_lots_between_rows_of_one_length() -> None:
    rows = [row(f"row{n}", 10) for n in range(20)]
    plans = {plan(rows, seed=seed, step=step, token_budget=30).ranks for seed in (0, 1) for step in (0, 1)}
    assert len(plans) == 4


def test_a_plan_is_the_same_on_every_machine_and_release() -> None:
    planned = plan([row(name, 10) for name in "abcde"], seed=3, step=5, world=2, token_budget=20)
    assert planned.ranks == ((("a", "b"), ()), (("e", "c"), ("d",)))


def test_ranks_get_equal_numbers_of_micro_batches_and_fillers_train_nothing() -> None:
    rows = [row(name, 10) for name in "abc"]
    planned = plan(rows, seed=0, step=0, world=2, token_budget=9)
    assert planned.micro_batches == 2
    advantages = {each.rollout_id: 1.0 for each in rows}
    per_rank = [packs(planned, rows, advantages, rank=rank) for rank in (0, 1)]
    assert sorted(each.trained for rank in per_rank for each in rank) == [0, 6, 6, 6]
    (filler,) = [each for rank in per_rank for each in rank if not each.row_ids]
    assert (filler.cu_seqlens.tolist(), filler.max_seqlen, len(filler.tokens)) == ([0, 1], 1, 1)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="world 0"):
        plan([], seed=0, step=0, world=0, token_budget=10)


def test_rows_are_shifted_before_they_are_packed() -> None:
    first, second = row("a", 4), row("b", 3)
    packed = pack([first, second], {"rollout-a": 0.5, "rollout-b": -2.0})
    assert packed.row_ids == ("a", "b")
    assert packed.tokens.tolist() == [*first.token_ids[:3], *second.token_ids[:2]]
    assert packed.labels.tolist() == [*first.token_ids[1:], *second.token_ids[1:]]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert packed.loss_mask.tolist() == [True, True, False, True, True]
    assert packed.logprobs.tolist() == [*first.logprobs[1:], *second.logprobs[1:]]
    assert packed.advantages.tolist() == [0.5, 0.5, 0.5, -2.0, -2.0]
    assert (packed.cu_seqlens.tolist(), packed.max_seqlen, packed.trained) == ([0, 3, 5], 3, 4)
    assert packed.cu_seqlens.dtype == np.int32
    assert packed.tokens.dtype == packed.labels.dtype == packed.position_ids.dtype == np.int64


def test_equal_digests_mean_the_same_pack() -> None:
    rows, advantages = [row("a", 4), row("b", 3)], {"rollout-a": 0.5, "rollout-b": -2.0}
    packed = pack(rows, advantages)
    assert pack(rows, advantages).digest() == packed.digest()
    assert pack(rows[::-1], advantages).digest() != packed.digest()
    assert pack(rows, {**advantages, "rollout-b": -2.5}).digest() != packed.digest()
    assert dataclasses.replace(packed, row_ids=("a", "c")).digest() != packed.digest()
    for name in ("tokens", "labels", "position_ids", "loss_mask", "logprobs", "advantages", "cu_seqlens"):
        other = getattr(packed, name).copy()
        other[-1] = other[-1] == 0
        assert dataclasses.replace(packed, **{name: other}).digest() != packed.digest(), name


def test_a_pack_needs_the_advantage_of_each_rollout_and_the_rows_of_its_plan() -> None:
    rows = [row("a", 4)]
    with pytest.raises(PlanMismatch, match="rollout 'rollout-a' has rows to train and no advantage"):
        pack(rows, {})
    planned = plan(rows, seed=0, step=0, token_budget=10)
    with pytest.raises(PlanMismatch, match="row 'a' is planned and not among the rows"):
        packs(planned, [], {})
