"""What a policy lets in, and what its draws promise: whole groups, each once an epoch, the same lots for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from replay.errors import BadPolicy, NothingToDraw
from replay.history import TRAINED, Eligible, Policy, draw, eligible

OUTLINE = pa.schema(
    {
        "row_id": pa.string(),
        "rollout_id": pa.string(),
        "group_id": pa.string(),
        "reward": pa.float64(),
        "task": pa.string(),
        "harness": pa.string(),
        "opened_at": pa.int64(),
        "completed_at": pa.int64(),
        "trained": pa.int32(),
        "oldest": pa.int64(),
        "newest": pa.int64(),
    }
)
NOTHING = TRAINED.empty_table()

# Draws that stored plans rely on: these lines never change.
EPOCHS = [
    ("r1.0", "r1.1", "r2.0", "r2.1"),
    ("r0.0", "r0.1", "r3.0", "r3.1"),
    ("r3.0", "r3.1", "r0.0", "r0.1"),
    ("r2.0", "r2.1", "r1.0", "r1.1"),
]
WEIGHTS = [429496729, 981706810, 1533916891, 2086126972, 2638337053, 3190547134, 3742757215, 4294967296]
PRIORITY = [("r5", "r6", "r4"), ("r6", "r7", "r5"), ("r7", "r4", "r6"), ("r6", "r4", "r1")]

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def microseconds(hour: int) -> int:
    return int((NOON + timedelta(hours=hour)).timestamp()) * 1_000_000


def outline(*rollouts: Mapping[str, Any], rows: int = 1) -> pa.Table:
    """Rollouts of `rows` rows each: opened an hour apart from noon on, each lasting half an hour."""
    lines = [
        {
            "row_id": f"{each['rollout_id']}/{row}",
            "group_id": None,
            "reward": 1.0,
            "opened_at": microseconds(place),
            "completed_at": microseconds(place) + 1_800_000_000 - row,
            "trained": 10,
            "oldest": 5 + row,
            "newest": 6 + row,
            **each,
        }
        for place, each in enumerate(rollouts)
        for row in range(rows)
    ]
    return pa.Table.from_pylist(lines, OUTLINE)


def named(*names: str, **facts: Any) -> list[dict[str, Any]]:
    return [{"rollout_id": name, **facts} for name in names]


def ids(found: pa.Table) -> list[str]:
    return found.column("rollout_id").to_pylist()


def trained(*steps: tuple[str, int, str]) -> pa.Table:
    lines = [
        {"run": run, "step": step, "row_id": f"{name}/{row}", "rollout_id": name}
        for run, step, name in steps
        for row in (0, 1)
    ]
    return pa.Table.from_pylist(lines, TRAINED)


def test_a_rollout_is_judged_over_all_its_rows() -> None:
    (line,) = eligible(outline(*named("a"), rows=3), NOTHING, Policy()).table.to_pylist()
    assert (line["oldest"], line["newest"]) == (5, 8)
    assert (line["rows"], line["trained_tokens"]) == (3, 30)
    assert line["completed_at"] == microseconds(0) + 1_800_000_000


@pytest.mark.parametrize(
    ("policy", "left", "reason"),
    [
        (Policy(opened_since=NOON + timedelta(hours=1)), ["b", "c"], "opened_outside"),
        (Policy(opened_until=NOON + timedelta(hours=1)), ["a"], "opened_outside"),
        (Policy(completed_since=NOON + timedelta(hours=1)), ["b", "c"], "completed_outside"),
        (Policy(completed_until=NOON + timedelta(minutes=90)), ["a"], "completed_outside"),
        (Policy(tasks=("fix *",)), ["b"], "other_task"),
        (Policy(tasks=("sort [1]", "absent")), ["a"], "other_task"),
        (Policy(harnesses=("codex",)), ["a"], "other_harness"),
        (Policy(harnesses=("codex*",)), ["a", "b"], "other_harness"),
        (Policy(min_reward=0.5), ["b", "c"], "reward_outside"),
        (Policy(max_reward=0.5), ["a", "b"], "reward_outside"),
        (Policy(oldest_version=2), ["b", "c"], "version_outside"),
        (Policy(newest_version=4), ["a", "b"], "version_outside"),
        (Policy(max_staleness=7), ["b", "c"], "too_stale"),
        (Policy(max_trained=0), ["c"], "trained_before"),
        (Policy(max_trained=0, trained_in="y"), ["b", "c"], "trained_before"),
        (Policy(max_trained=1), ["b", "c"], "trained_before"),
        (Policy(min_group=2), ["a", "b"], "group_too_small"),
    ],
)
def test_each_part_of_a_policy_leaves_out_what_it_says(policy: Policy, left: list[str], reason: str) -> None:
    log = outline(
        {"rollout_id": "a", "group_id": "g", "reward": 0.0, "task": "sort [1]", "harness": "codex", "oldest": 1},
        {"rollout_id": "b", "group_id": "g", "reward": 0.5, "task": "fix it", "harness": "codex-2", "oldest": 2},
        {"rollout_id": "c", "group_id": "h", "reward": 1.0, "oldest": 3, "newest": 9},
    )
    log = log.set_column(log.schema.get_field_index("newest"), "newest", pa.array([2, 4, 9], pa.int64()))
    before = trained(("x", 0, "a"), ("y", 0, "a"), ("x", 1, "b"))
    found = eligible(log, before, policy, trainer_version=9)
    assert ids(found.table) == left
    assert found.left_out == {reason: 3 - len(left)}


def test_a_rollout_is_left_out_for_the_first_reason_and_groups_are_counted_after_the_others() -> None:
    log = outline(
        *named("a", "b", group_id="g"),
        *named("c", "d", group_id="h"),
        {"rollout_id": "e", "reward": None, "task": "other"},
        {"rollout_id": "f", "oldest": None, "newest": None},
        {"rollout_id": "g"},
    )
    found = eligible(log, trained(("x", 0, "d")), Policy(max_trained=0, min_group=2))
    assert ids(found.table) == ["a", "b"]
    assert found.left_out == {"not_scored": 1, "trains_nothing": 1, "trained_before": 1, "group_too_small": 2}


def test_a_step_that_took_two_rows_of_a_rollout_trained_it_once() -> None:
    found = eligible(outline(*named("a")), trained(("x", 0, "a"), ("x", 1, "a"), ("y", 1, "a")), Policy())
    assert found.table.column("times_trained").to_pylist() == [3]


def test_a_policy_goes_through_json_and_equal_moments_are_equal_text() -> None:
    policy = Policy(
        opened_since=NOON, completed_until=NOON, tasks=("a",), min_reward=-1, max_staleness=3, max_trained=2,
        trained_in="x", min_group=4, sampling="priority", weight="recency", floor=0.25, half_life_hours=3,
    )  # fmt: skip
    assert Policy.from_json(policy.as_json()) == policy
    assert policy.as_json()["opened_since"] == "2026-11-01T12:00:00Z"
    elsewhere = Policy(opened_since=NOON.astimezone(timezone(timedelta(hours=2))))
    assert elsewhere.as_json() == Policy(opened_since=NOON).as_json()
    assert Policy.from_json({"opened_since": "2026-11-01T14:00:00+02:00"}) == elsewhere


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"min_rewards": 1}, "the policy's min_rewards 1 unexpected"),
        ({"min_reward": "much"}, "the policy's min_reward 'much' input should be a valid number"),
        ({"tasks": "sort"}, "the policy's tasks 'sort' input should be a valid tuple"),
        ({"version": 2}, "the policy's version 2 input should be 1"),
        ([], r"the policy's policy \[\]"),
        ({"opened_since": "2026-11-01T12:00:00"}, "says no time zone: end it with Z"),
        ({"min_reward": 2, "max_reward": 1}, "the policy's min_reward 2.0 lies above max_reward 1.0"),
        ({"min_reward": float("nan")}, "the policy's min_reward nan is no number that a reward can have"),
        ({"oldest_version": 2, "newest_version": 1}, "oldest_version 2 lies above newest_version 1"),
        ({"max_trained": -1}, "the policy's max_trained -1 is less than 0: 0 means never trained before"),
        ({"trained_in": "x"}, "the policy's trained_in 'x' counts nothing without max_trained"),
        ({"min_group": 0}, "the policy's min_group 0 is less than 1"),
        ({"weight": "reward"}, "the policy's weight 'reward' weighs nothing in epochs: give sampling 'priority' too"),
        ({"floor": 2}, "the policy's floor 2.0 is not between 0 and 1"),
        ({"half_life_hours": 0}, "the policy's half_life_hours 0.0 is no time"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_by_name_and_remedy(value: JsonValue, said: str) -> None:
    with pytest.raises(BadPolicy, match=said):
        Policy.from_json(value)


def test_a_policy_that_compares_with_the_trainer_needs_its_version() -> None:
    with pytest.raises(BadPolicy, match="max_staleness 3 compares with the trainer's policy version"):
        eligible(outline(*named("a")), NOTHING, Policy(max_staleness=3))


GROUPS = st.lists(st.integers(1, 5), min_size=1, max_size=12)


def let_in(sizes: Sequence[int]) -> Eligible:
    """Everything of `grouped`, in equal parts."""
    table = grouped(sizes).select(["rollout_id", "group_id"])
    return Eligible(table=table.append_column("weight", pa.array([1] * len(table), pa.int64())), left_out={})


def grouped(sizes: Sequence[int]) -> pa.Table:
    members = [(place, each) for place, size in enumerate(sizes) for each in range(size)]
    return outline(*({"rollout_id": f"r{place}.{each}", "group_id": f"g{place}"} for place, each in members))


@settings(deadline=None)
@given(GROUPS, st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_takes_every_group_once_and_whole_and_no_step_is_empty(
    sizes: list[int], wanted: int, seed: int
) -> None:
    found = let_in(sizes)
    total = sum(sizes)
    steps: list[tuple[str, ...]] = []
    for _ in range(2):
        epoch: list[str] = []
        while len(epoch) < total:
            steps.append(draw(found, Policy(), seed=seed, step=len(steps), rollouts=wanted))
            assert steps[-1]
            epoch += steps[-1]
        assert sorted(epoch) == sorted(found.table.column("rollout_id").to_pylist())
    for step in steps:
        taken = Counter(name.split(".")[0] for name in step)
        assert all(taken[name] == sizes[int(name[1:])] for name in taken)
        assert len(step) < wanted + max(sizes)


@settings(deadline=None)
@given(st.randoms(), st.sampled_from(["epochs", "priority"]))
def test_the_order_of_the_rollouts_changes_no_draw(source: Any, sampling: Any) -> None:
    policy = Policy(sampling=sampling)
    found = let_in([3, 1, 4, 2, 2])
    lines = found.table.to_pylist()
    source.shuffle(lines)
    shuffled = Eligible(table=pa.Table.from_pylist(lines, found.table.schema), left_out={})
    for step in range(3):
        drawn = [draw(each, policy, seed=1, step=step, rollouts=4) for each in (found, shuffled)]
        assert drawn[0] == drawn[1]


def test_draws_are_the_same_on_every_machine_and_release() -> None:
    found = eligible(grouped([2, 2, 2, 2]), NOTHING, Policy())
    assert [draw(found, Policy(), seed=7, step=step, rollouts=4) for step in range(4)] == EPOCHS
    by_reward = Policy(sampling="priority", weight="reward", floor=0.1)
    log = outline(*({"rollout_id": f"r{n}", "reward": float(n)} for n in range(8)))
    known = eligible(log, NOTHING, by_reward)
    assert known.table.column("weight").to_pylist() == WEIGHTS
    assert [draw(known, by_reward, seed=7, step=step, rollouts=3) for step in range(4)] == PRIORITY


def test_seed_and_epoch_shuffle_anew() -> None:
    found = eligible(grouped([1] * 30), NOTHING, Policy())
    drawn = {draw(found, Policy(), seed=seed, step=step, rollouts=30) for seed in (0, 1) for step in (0, 1)}
    assert len(drawn) == 4


def test_priority_draws_by_weight_without_replacement_in_a_step_and_anew_in_the_next() -> None:
    policy = Policy(sampling="priority", weight="reward", floor=0.0)
    log = outline(*({"rollout_id": f"r{n}", "reward": float(n)} for n in range(5)))  # values 0, 1, 2, 3, 4
    found = eligible(log, NOTHING, policy)
    steps = [draw(found, policy, seed=0, step=step, rollouts=1) for step in range(2000)]
    counts = Counter(name for (name,) in steps)
    assert counts["r0"] == 0
    for n in range(1, 5):  # four standard deviations of a binomial with p = n / 10
        assert abs(counts[f"r{n}"] - 200 * n) < 4 * (2000 * n / 10 * (1 - n / 10)) ** 0.5
    everything = draw(found, policy, seed=0, step=0, rollouts=9)
    assert sorted(everything) == ["r1", "r2", "r3", "r4"]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("uniform", [1, 1, 1, 1]),
        ("reward", [0, 0.1, 0.5, 1]),
        ("advantage", [4 / 9, 0, 1, 1]),
        ("recency", [1 / 4, 1 / 3, 1 / 2, 1]),
        ("staleness", [1, 1, 1 / 2, 1 / 3]),
    ],
)
def test_the_weights_are_those_of_the_formula(weight: Any, expected: list[float]) -> None:
    log = outline(
        {"rollout_id": "a", "group_id": "g", "reward": 0.0, "oldest": 10},
        {"rollout_id": "b", "group_id": None, "reward": 1.0, "oldest": 12},
        {"rollout_id": "c", "group_id": "h", "reward": 5.0, "oldest": 9},
        {"rollout_id": "d", "group_id": "h", "reward": 10.0, "oldest": 8},
        {"rollout_id": "e", "group_id": "g", "reward": 20 / 9, "oldest": 9},  # opened too late, yet of its group
    )
    policy = Policy(sampling="priority", weight=weight, half_life_hours=1, opened_until=NOON + timedelta(hours=4))
    found = eligible(log, NOTHING, policy, trainer_version=10)
    shares = [each / 2**32 for each in found.table.column("weight").to_pylist()]
    assert shares == pytest.approx(expected, abs=1e-9)
    found = eligible(log, NOTHING, replace(policy, floor=0.5), trainer_version=10)
    shares = [each / 2**32 for each in found.table.column("weight").to_pylist()]
    assert shares == pytest.approx([0.5 + each / 2 for each in expected], abs=1e-9)


def test_priority_can_draw_whole_groups() -> None:
    policy = Policy(sampling="priority")
    found = eligible(grouped([3, 2, 4]), NOTHING, policy)
    drawn = draw(found, policy, seed=3, step=0, groups=2)
    taken = Counter(name.split(".")[0] for name in drawn)
    assert len(taken) == 2
    assert all(taken[name] == [3, 2, 4][int(name[1:])] for name in taken)


def test_a_policy_that_leaves_nothing_says_why() -> None:
    found = eligible(outline(*named("a", "b")), NOTHING, Policy(min_reward=2))
    with pytest.raises(NothingToDraw, match=r"no rollout to draw \(2 reward_outside\): widen it"):
        draw(found, Policy(), seed=0, step=0, rollouts=1)


def test_a_step_says_how_much_it_wants() -> None:
    found = eligible(outline(*named("a")), NOTHING, Policy())
    with pytest.raises(ValueError, match="None rollouts and None groups: ask for one of them"):
        draw(found, Policy(), seed=0, step=0)
    with pytest.raises(ValueError, match="1 rollouts and 1 groups"):
        draw(found, Policy(), seed=0, step=0, rollouts=1, groups=1)
    with pytest.raises(ValueError, match="step -1 is less than 0"):
        draw(found, Policy(), seed=0, step=-1, rollouts=1)
