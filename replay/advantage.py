"""One advantage per rollout, from the rewards of its group.

Knows rewards and groups; does not know rows, tokens or losses.
Law: how many rows a rollout became changes nothing here, and a rollout's advantage is copied to its rows unscaled.

A group of rewards 0, 2, 10 has mean 4; a rollout alone in its group, or in none, learns nothing from its reward:

>>> group = [Score(rollout_id=name, group_id="g", reward=reward) for name, reward in [("a", 0), ("b", 2), ("c", 10)]]
>>> advantages([*group, Score(rollout_id="d", group_id=None, reward=7)])
{'a': -4.0, 'b': -2.0, 'c': 6.0, 'd': 0.0}

The population that a baseline is taken over is what the caller passes, and there are two to choose from when a rollout
was scored but refused as invalid. Say that of `c` above; a and b have rows, c has none.

*All scored rollouts* (`RowSet.scores` as it is): the reward of c is as true as the others', and a and b stay below the
mean of what this task can give. Their advantages no longer sum to zero, as what c would balance does not train:

>>> all_scored = advantages(group)
>>> [all_scored[name] for name in ("a", "b")]
[-4.0, -2.0]

*Only those that gave rows*: what trains is balanced within the step, and b, which the other population pushes down, is
pushed up. Right where an invalid rollout's reward says nothing, such as one that failed half-way:

>>> advantages(score for score in group if score.rollout_id in {"a", "b"})
{'a': -1.0, 'b': 1.0}
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Baseline = Literal["mean", "leave_one_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one rollout and the group it is compared in; None for a rollout of no group."""

    rollout_id: str
    group_id: str | None
    reward: float


def advantages(
    scores: Iterable[Score], *, baseline: Baseline = "mean", divide_by_std: bool = False
) -> dict[str, float]:
    """The advantage of each rollout, by rollout id.

    Args:
        scores: one per rollout.
        baseline: `mean` subtracts the mean of the whole group, `leave_one_out` that of the others.
        divide_by_std: divide by the standard deviation (n - 1) of the whole group; equal rewards give 0.

    >>> scores = [Score(rollout_id=name, group_id="g", reward=reward) for name, reward in [("a", 0), ("b", 3)]]
    >>> advantages(scores, baseline="leave_one_out")
    {'a': -3.0, 'b': 3.0}
    """
    result: dict[str, float] = {}
    groups: dict[str, list[Score]] = {}
    for score in scores:
        if score.rollout_id in result:
            raise ValueError(f"rollout {score.rollout_id!r} has two scores: pass its latest outcome only")
        result[score.rollout_id] = 0.0  # keeps the order of arrival, and is the answer for a rollout without peers
        if score.group_id is not None:
            groups.setdefault(score.group_id, []).append(score)
    for group in groups.values():
        if len(group) > 1:
            result.update(_within(group, baseline, divide_by_std=divide_by_std))
    return result


def _within(group: list[Score], baseline: Baseline, *, divide_by_std: bool) -> dict[str, float]:
    size = len(group)
    total = math.fsum(score.reward for score in group)  # fsum: the order of the group changes nothing
    mean = total / size
    scale = 1.0
    if divide_by_std:
        scale = math.sqrt(math.fsum((score.reward - mean) ** 2 for score in group) / (size - 1))
    if scale == 0.0:
        return {score.rollout_id: 0.0 for score in group}
    if baseline == "leave_one_out":
        return {s.rollout_id: (s.reward - (total - s.reward) / (size - 1)) / scale for s in group}
    return {score.rollout_id: (score.reward - mean) / scale for score in group}
