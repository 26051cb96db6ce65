from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from replay.advantage import Score, advantages
from replay.rowset import build
from store.events import RolloutOpened, RolloutScored, uuid7


def group(*rewards: float, of: str | None = "g") -> list[Score]:
    return [Score(rollout_id=f"{of}-{n}", group_id=of, reward=reward) for n, reward in enumerate(rewards)]


def test_the_baselines() -> None:
    assert list(advantages(group(0, 2, 10)).values()) == [-4, -2, 6]
    assert list(advantages(group(0, 2, 10), baseline="leave_one_out").values()) == [-6, -3, 9]
    assert list(advantages(group(0, 2), divide_by_std=True).values()) == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_a_baseline_counts_an_invalid_rollout_or_not(
    sqlite_database: Engine, remember: Any, grow: Any, chain_maker: Any
) -> None:
    for number, reward in enumerate([0.0, 2.0, 10.0]):
        name = f"r{number}"
        last = (4, 0 if reward == 10.0 else 2)  # the third rollout's second chain sampled nothing: it is invalid
        calls = grow(chain_maker, [None, None], lengths=[(5, 3), last], rollout_id=name)
        outcome_id = uuid7(0, name.encode().ljust(10))
        outcome = RolloutScored(outcome_id=outcome_id, rollout_id=name, reward=reward, at=0)
        remember(sqlite_database, [RolloutOpened(rollout_id=name, group_id="g", opened_at=number), *calls, outcome])
    found = build(sqlite_database)
    assert [row.rollout_id for row in found.rows] == ["r0", "r0", "r1", "r1"]
    assert found.refusals.by_reason() == {"nothing_trained": 1}
    assert advantages(found.scores) == {"r0": -4, "r1": -2, "r2": 6}
    gave_rows = {row.rollout_id for row in found.rows}
    assert advantages(score for score in found.scores if score.rollout_id in gave_rows) == {"r0": -1, "r1": 1}


def test_equal_rewards_and_lonely_rollouts_learn_nothing() -> None:
    assert set(advantages(group(3, 3, 3), divide_by_std=True).values()) == {0.0}
    assert set(advantages(group(3, 3, 3), baseline="leave_one_out").values()) == {0.0}
    assert advantages([*group(7), *group(5, 9, of=None)]) == {"g-0": 0.0, "None-0": 0.0, "None-1": 0.0}


def test_a_rollout_has_one_score() -> None:
    with pytest.raises(ValueError, match="two scores"):
        advantages([*group(1), *group(2)])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8), st.randoms())
def test_order_changes_nothing_and_advantages_balance(rewards: list[float], random: Random) -> None:
    scores = [*group(*rewards), *group(1, 2, of="h")]
    plain = advantages(scores)
    shuffled = scores.copy()
    random.shuffle(shuffled)
    assert advantages(shuffled) == plain
    assert sum(plain.values()) == pytest.approx(0, abs=1e-6 * max(1, *map(abs, rewards)))
