"""Which recorded rollouts a run trains on, and which of them each of its steps takes.

Knows the outline of a log and what was trained before; does not know tokens, plans or databases.
Law: a draw is a pure function of (outline, what was trained before, policy, seed, step). Outline and trained rows are
functions of a position of the log, so that what is appended later, the machine and the release change nothing.

A policy says both. First it judges every rollout, and counts what it leaves out by the first reason that holds:

    not_scored         it has no reward, so nothing to learn from
    trains_nothing     none of its tokens trains
    opened_outside     it was opened outside [opened_since, opened_until)
    completed_outside  its last call ended outside [completed_since, completed_until)
    other_task, other_harness   its task or harness is none of those wanted
    reward_outside     its reward is outside [min_reward, max_reward]
    version_outside    a token that trains was sampled by a version outside [oldest_version, newest_version]
    too_stale          the trainer's version is more than max_staleness ahead of its oldest
    trained_before     it went into more than max_trained steps, of the run trained_in or of any
    group_too_small    its group has fewer than min_group rollouts after all of that

Then it draws. `epochs` deals whole groups without replacement: every epoch is a new shuffle, cut into steps of equal
width, and each group is in one step of it. `priority` draws each step from all rollouts again: within the step without
replacement, the next one in proportion to its weight among those that are left. (This is successive sampling, whose
one-pass form is Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006. It is drawn one by one
here, with whole numbers: they are the same on every machine, and logarithms are not.) The weight of a rollout is

    floor + (1 - floor) · value / largest value       value =
        uniform    1
        reward     reward - lowest reward
        advantage  |reward - mean reward of its group|: what taught most teaches most
        recency    1 / (1 + age / half life), age being the time since the newest completed call
        staleness  1 / (1 + trainer's version - oldest version)

among the rollouts that the policy lets in, so with floor 0 a rollout of value 0 is never drawn, unless all are 0 and
therefore alike. A group that is drawn whole weighs what its rollouts weigh together.

>>> policy = Policy(harnesses=("codex*",), min_reward=0.5, max_trained=0)
>>> Policy.from_json(policy.as_json()) == policy
True
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import ClassVar, Literal

import duckdb
import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from replay.advantage import Score, advantages
from replay.errors import BadPolicy, NothingToDraw
from replay.queries import query

Sampling = Literal["epochs", "priority"]
Weight = Literal["uniform", "reward", "advantage", "recency", "staleness"]

TRAINED = pa.schema({"run": pa.string(), "step": pa.int64(), "row_id": pa.string(), "rollout_id": pa.string()})
"""What was trained before: a line for each row of each step, as `replay.provenance.trained` reads it."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FINE = 1 << 32
"""Weights are whole numbers of 1 / 2^32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What of the history trains, as a value: stored beside what it drew. See the module for what each part means."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    """Of the rules and formulas; a changed one is a new version."""
    opened_since: datetime | None = None
    opened_until: datetime | None = None
    completed_since: datetime | None = None
    completed_until: datetime | None = None
    tasks: tuple[str, ...] = ()
    """Exact, or with `*`, `?` and `[...]`; none: all."""
    harnesses: tuple[str, ...] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    max_staleness: int | None = None
    max_trained: int | None = None
    """0: only what was never trained."""
    trained_in: str | None = None
    """The run whose steps `max_trained` counts; None for all runs."""
    min_group: int = 1
    sampling: Sampling = "epochs"
    weight: Weight = "uniform"
    floor: float = 0.0
    half_life_hours: float = 168.0

    def __post_init__(self) -> None:
        for name in ("opened_since", "opened_until", "completed_since", "completed_until"):
            time: datetime | None = getattr(self, name)
            if time is None:
                continue
            if time.tzinfo is None:
                raise BadPolicy(name, time.isoformat(), "says no time zone: end it with Z or an offset such as +02:00")
            object.__setattr__(self, name, time.astimezone(UTC))  # one JSON for one moment
        for low, high in (
            ("opened_since", "opened_until"),
            ("completed_since", "completed_until"),
            ("min_reward", "max_reward"),
            ("oldest_version", "newest_version"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise BadPolicy(low, least, f"lies above {high} {most}: nothing would be let in")
        for name in ("min_reward", "max_reward"):
            bound: float | None = getattr(self, name)
            if bound is not None and not np.isfinite(bound):
                raise BadPolicy(name, bound, "is no number that a reward can have: leave it out for no bound")
        if self.max_trained is not None and self.max_trained < 0:
            raise BadPolicy("max_trained", self.max_trained, "is less than 0: 0 means never trained before")
        if self.trained_in is not None and self.max_trained is None:
            raise BadPolicy("trained_in", self.trained_in, "counts nothing without max_trained: give that too")
        if self.min_group < 1:
            raise BadPolicy("min_group", self.min_group, "is less than 1: a group has a rollout at least")
        if self.sampling == "epochs" and self.weight != "uniform":
            raise BadPolicy("weight", self.weight, "weighs nothing in epochs: give sampling 'priority' too")
        if not 0 <= self.floor <= 1:
            raise BadPolicy("floor", self.floor, "is not between 0 and 1: it is the least part of the largest weight")
        if not 0 < self.half_life_hours < float("inf"):
            raise BadPolicy("half_life_hours", self.half_life_hours, "is no time: give hours above 0")

    def as_json(self) -> dict[str, JsonValue]:
        """Every part, the same for equal policies; times as ISO 8601."""
        parts: dict[str, JsonValue] = _POLICY.dump_python(self, mode="json")
        return parts

    @classmethod
    def from_json(cls, value: JsonValue) -> Policy:
        """Read what `as_json` wrote, or some of its parts: what is left out has its default. Raises BadPolicy."""
        try:
            return _POLICY.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "policy"
            raise BadPolicy(name, first["input"], f"{first['msg'].lower()}: {_KNOWN}") from error

    @property
    def needs_trainer_version(self) -> bool:
        """Whether it compares with the trainer's policy version."""
        return self.max_staleness is not None or self.weight == "staleness"


_POLICY = TypeAdapter(Policy)
_KNOWN = f"a policy has {', '.join(field.name for field in fields(Policy))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligible:
    """What a policy lets in, and what it leaves out and why."""

    table: pa.Table
    """One line a rollout in order of opening: rollout_id, group_id, reward, task, harness, opened_at, completed_at,
    oldest, newest, rows, trained_tokens, times_trained, weight (whole numbers, for `draw`)."""
    left_out: Mapping[str, int]
    """Rollouts by the first reason that keeps them out."""

    def __len__(self) -> int:
        return int(self.table.num_rows)


def eligible(outline: pa.Table, trained: pa.Table, policy: Policy, *, trainer_version: int | None = None) -> Eligible:
    """Judge every rollout of an outline.

    Args:
        outline: one line a row, `replay.rowset.Outline.table`.
        trained: what was trained before, as `TRAINED` has it.
        policy: what is wanted.
        trainer_version: policy version of the weights about to be trained, for policies that compare with it.
    """
    if policy.needs_trainer_version and trainer_version is None:
        raise BadPolicy(
            "max_staleness" if policy.max_staleness is not None else "weight",
            policy.max_staleness if policy.max_staleness is not None else policy.weight,
            "compares with the trainer's policy version, and none is given: give the version of its weights",
        )
    asked = {
        "opened_since": _microseconds(policy.opened_since),
        "opened_until": _microseconds(policy.opened_until),
        "completed_since": _microseconds(policy.completed_since),
        "completed_until": _microseconds(policy.completed_until),
        "tasks": policy.tasks,
        "harnesses": policy.harnesses,
        "min_reward": policy.min_reward,
        "max_reward": policy.max_reward,
        "oldest_version": policy.oldest_version,
        "newest_version": policy.newest_version,
        "trainer_version": trainer_version,
        "max_staleness": policy.max_staleness,
        "trained_in": policy.trained_in,
        "max_trained": policy.max_trained,
        "min_group": policy.min_group,
    }
    with duckdb.connect(":memory:") as engine:
        engine.register("outline", outline)
        engine.register("trained", trained)
        judged = engine.sql(query("history"), params=asked).to_arrow_table()
    reason = judged.column("reason")
    table = judged.filter(reason.is_null()).drop_columns("reason")
    table = table.append_column("weight", pa.array(_weights(table, judged, policy, trainer_version), pa.int64()))
    return Eligible(table=table, left_out=Counter(each for each in reason.to_pylist() if each is not None))


def draw(
    eligible: Eligible, policy: Policy, *, seed: int, step: int, rollouts: int | None = None, groups: int | None = None
) -> tuple[str, ...]:
    """The rollouts of one step, in the order in which they were drawn; those of a group by id.

    Args:
        eligible: what the policy lets in.
        policy: the same policy.
        seed: of the run.
        step: number of the step in its run, from 0 on.
        rollouts: how many to draw. Epochs keep groups whole, and so take a few more or less, this many or fewer on
            average (one group, if groups are larger). Priority takes exactly so many, if there are.
        groups: how many groups to draw instead; a rollout without a group counts as one.

    An epoch of three groups, two at a time, is two steps; the fourth one ends the second epoch:

    >>> table = pa.table({"rollout_id": ["a1", "a2", "b1", "c1"], "group_id": ["a", "a", "b", "c"], "weight": [1] * 4})
    >>> known = Eligible(table=table, left_out={})
    >>> [draw(known, Policy(), seed=1, step=step, groups=2) for step in range(4)]
    [('c1', 'b1'), ('a1', 'a2'), ('a1', 'a2', 'c1'), ('b1',)]
    """
    wanted = rollouts if groups is None else groups
    if wanted is None or wanted < 1 or (rollouts is not None and groups is not None):
        raise ValueError(f"{rollouts} rollouts and {groups} groups: ask for one of them, at least 1")
    if step < 0:
        raise ValueError(f"step {step} is less than 0: steps are counted from 0 on")
    units = _units(eligible.table, whole_groups=groups is not None or policy.sampling == "epochs")
    if not any(unit.weight for unit in units):
        raise NothingToDraw(eligible.left_out)
    if policy.sampling == "priority":
        drawn = _by_weight(units, seed=seed, step=step, wanted=wanted)
    else:
        drawn = _by_epoch(units, [1 if groups else len(unit.rollouts) for unit in units], seed, step, wanted)
    return tuple(rollout_id for unit in drawn for rollout_id in unit.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """What is drawn together: a group, or one rollout."""

    name: str
    rollouts: tuple[str, ...]
    weight: int


def _units(table: pa.Table, *, whole_groups: bool) -> list[_Unit]:
    """In the order of their names, whatever the order of the table."""
    columns = (table.column(name).to_pylist() for name in ("rollout_id", "group_id", "weight"))
    members: dict[str, list[tuple[str, int]]] = {}
    for rollout_id, group_id, weight in zip(*columns, strict=True):
        name = f"rollout/{rollout_id}" if group_id is None or not whole_groups else f"group/{group_id}"
        members.setdefault(name, []).append((rollout_id, weight))
    return [
        _Unit(
            name=name,
            rollouts=tuple(rollout_id for rollout_id, _ in sorted(found)),
            weight=sum(weight for _, weight in found),
        )
        for name, found in sorted(members.items())
    ]


def _by_epoch(units: Sequence[_Unit], sizes: Sequence[int], seed: int, step: int, wanted: int) -> list[_Unit]:
    """The step's part of the shuffle of its epoch: the units that begin in it, and at least one."""
    total = sum(sizes)
    steps = min(-(-total // wanted), len(units))
    epoch, part = divmod(step, steps)
    order = sorted(range(len(units)), key=lambda place: _lot(seed, f"epoch/{epoch}", units[place].name))
    begins = list(accumulate((sizes[place] for place in order), initial=0))[:-1]
    cuts = [0]
    for cut in range(1, part + 2):
        first = bisect_left(begins, -(-cut * total // steps))
        cuts.append(min(max(first, cuts[-1] + 1), len(units) - (steps - cut)))
    return [units[place] for place in order[cuts[part] : cuts[part + 1]]]


def _by_weight(units: Sequence[_Unit], *, seed: int, step: int, wanted: int) -> list[_Unit]:
    weights = np.array([unit.weight for unit in units], np.int64)
    found: list[_Unit] = []
    for place in range(wanted):
        ends = np.cumsum(weights)
        total = int(ends[-1])
        if total == 0:
            break
        point = _lot(seed, f"step/{step}", str(place)) * total >> 256
        drawn = int(np.searchsorted(ends, point, side="right"))
        found.append(units[drawn])
        weights[drawn] = 0
    return found


def _lot(seed: int, when: str, name: str) -> int:
    """A number below 2^256 that no library's random generator can change."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{when}/{name}".encode()).digest(), "big")


def _weights(table: pa.Table, judged: pa.Table, policy: Policy, trainer_version: int | None) -> list[int]:
    """Each rollout's weight. Only + - * / on doubles, which are the same on every machine."""
    values = _values(table, judged, policy, trainer_version)
    largest = max(values, default=0.0)
    shares = [value / largest if largest > 0 else 1.0 for value in values]
    return [int(_FINE * (policy.floor + (1 - policy.floor) * share)) for share in shares]


def _values(table: pa.Table, judged: pa.Table, policy: Policy, trainer_version: int | None) -> list[float]:
    rewards = table.column("reward").to_pylist()
    match policy.weight:
        case "uniform":
            return [1.0] * len(rewards)
        case "reward":
            lowest = min(rewards, default=0.0)
            return [reward - lowest for reward in rewards]
        case "advantage":
            columns = (judged.column(name).to_pylist() for name in ("rollout_id", "group_id", "reward"))
            found = advantages(
                Score(rollout_id=rollout_id, group_id=group_id, reward=reward)
                for rollout_id, group_id, reward in zip(*columns, strict=True)
                if reward is not None
            )
            return [abs(found[rollout_id]) for rollout_id in table.column("rollout_id").to_pylist()]
        case "recency":
            ends = table.column("completed_at").to_pylist()
            newest = max(ends, default=0)
            half_life = policy.half_life_hours * 3_600_000_000
            return [1 / (1 + (newest - end) / half_life) for end in ends]
        case "staleness":
            now = trainer_version or 0
            return [1 / (1 + max(0, now - oldest)) for oldest in table.column("oldest").to_pylist()]


def _microseconds(time: datetime | None) -> int | None:
    return None if time is None else (time - _EPOCH) // timedelta(microseconds=1)
