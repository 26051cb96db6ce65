from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.advantage import Score, advantages


def group(*rewards: float, of: str | None = "g") -> list[Score]:
    return [Score(rollout_id=f"{of}-{n}", group_id=of, reward=reward) for n, reward in enumerate(rewards)]


def test_the_baselines() -> None:
    assert list(advantages(group(0, 2, 10)).values()) == [-4, -2, 6]
    assert list(advantages(group(0, 2, 10), baseline="leave_one_out").values()) == [-6, -3, 9]
    assert list(advantages(group(0, 2), divide_by_std=True).values()) == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_the_population_is_what_the_caller_passes() -> None:
    assert list(advantages(group(0, 2, 10)[:2]).values()) == [-1, 1]


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
