"""A run of training steps as a value, and each of its steps from its number.

Knows the order in which outline, policy, advantages, plan, rows and packs follow one another; each of their rules lives
in its own module. Law: what a step trains is a pure function of (the run, the events of the log up to its position,
the step's number). A trainer that was killed goes on from that number alone: the batches that remain are those it would
have got, byte for byte, whatever was appended to the log since, on another machine, and with any number of loaders.

    run = Run(name="grpo-7", position=position, steps=100, rollouts_per_step=64, world=8, token_budget=16_384)
    steps = Steps.of(database, run)
    for number in range(first, run.steps):
        train_step(model, optimizer, [each.pack for each in steps.packs(database, number, rank=rank)])

The plan is made of lengths alone, so every rank plans the whole step and reads only the rollouts of its own packs.
Tokens that turn out damaged when they are read refuse their rollout, as ever: its rows are missing from their packs,
on every rank, and each pack says which rollouts it misses and why.

>>> run = Run(name="a", position=Position.parse("9.3.3.0"), steps=2, groups_per_step=1, token_budget=100)
>>> Run.from_json(run.as_json()) == run
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

import pyarrow as pa
from pydantic import ConfigDict, JsonValue, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from sqlalchemy import Engine

from replay import provenance
from replay.advantage import Baseline, advantages
from replay.chain import Refusal
from replay.errors import BadRun, PlanMismatch
from replay.history import Policy, draw, eligible
from replay.media import MediaSource
from replay.objective import Clip, Correction
from replay.pack import Pack, pack
from replay.plan import Measured, StepPlan, plan
from replay.rowset import Outline, RowSet, build, outlined
from replay.selection import Selection
from replay.source import Position
from store import hashing
from store.events import RowTrained

Population = Literal["scored", "with_rows"]


def _position(value: object) -> Position:
    return value if isinstance(value, Position) else Position.parse(str(value))


def _policy(value: object) -> Policy:
    return value if isinstance(value, Policy) else Policy.from_json(_JSON.validate_python(value))


_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that the steps of a run follow from, besides the events: to be kept beside each checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    """Of how steps follow from the rest; a changed way is a new version."""
    name: str
    """Under which its steps are recorded: `replay.provenance`."""
    position: Annotated[Position, PlainValidator(_position), PlainSerializer(str)]
    """How much of the log counts, from the first step to the last."""
    selection: Annotated[Selection, PlainSerializer(Selection.as_json)] = field(default_factory=Selection)
    policy: Annotated[Policy, PlainValidator(_policy), PlainSerializer(Policy.as_json)] = field(default_factory=Policy)
    trainer_version: int | None = None
    """Policy version of the weights that the run starts from, for policies that compare with it."""
    seed: int = 0
    steps: int
    rollouts_per_step: int | None = None
    groups_per_step: int | None = None
    """Instead of rollouts."""
    world: int = 1
    """Data-parallel ranks."""
    token_budget: int
    """Most positions of a pack."""
    baseline: Baseline = "mean"
    divide_by_std: bool = False
    population: Population = "scored"
    """Whose rewards make a group's baseline: of all its scored rollouts, or of those that have rows; in both cases of
    the whole group in the log, however much of it a step draws. See `replay.advantage`."""
    clip: Clip = field(default_factory=Clip)
    correction: Correction = field(default_factory=Correction)
    """What the trainer optimises: kept here so that a run says it, see `replay.objective`."""

    def __post_init__(self) -> None:
        for part in ("steps", "world", "token_budget"):
            if getattr(self, part) < 1:
                raise BadRun(part, getattr(self, part), "is less than 1")
        asked = self.rollouts_per_step if self.groups_per_step is None else self.groups_per_step
        if asked is None or (self.rollouts_per_step is not None and self.groups_per_step is not None):
            raise BadRun("rollouts_per_step", self.rollouts_per_step, "or its groups_per_step: give one of them")
        if asked < 1:
            part = "rollouts_per_step" if self.groups_per_step is None else "groups_per_step"
            raise BadRun(part, asked, "is less than 1")

    def as_json(self) -> dict[str, JsonValue]:
        """Every part, the same for equal runs."""
        parts: dict[str, JsonValue] = _RUN.dump_python(self, mode="json")
        return parts

    @classmethod
    def from_json(cls, value: JsonValue) -> Run:
        """Read what `as_json` wrote, or some of its parts: what is left out has its default. Raises BadRun."""
        try:
            return _RUN.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            part = ".".join(map(str, first["loc"])) or "value"
            known = ", ".join(each.name for each in fields(cls))
            raise BadRun(part, first["input"], f"({first['msg'].lower()}): a run has {known}") from error

    def digest(self) -> str:
        """SHA-256 in hex: equal digests mean the same run."""
        return hashing.tagged_digest("run", hashing.canonical_json(self.as_json())).hex()


_RUN = TypeAdapter(Run)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedPack:
    """One micro-batch of one rank, and its place in the run."""

    step: int
    micro_batch: int
    micro_batches: int
    """Of the step, on each rank."""
    pack: Pack
    refused: tuple[Refusal, ...]
    """Rollouts with rows planned here whose tokens or media do not hold: these rows are not in the pack."""
    source: MediaSource
    """Where the log's media lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    rollouts: tuple[str, ...]
    plan: StepPlan


class Steps:
    """The steps of a run, planned without a token; built once per process, or sent to it."""

    def __init__(self, run: Run, outline: Outline, trained: pa.Table) -> None:
        """The steps over an outline.

        Args:
            run: the run.
            outline: of the log under the run's selection, as of its position.
            trained: what was trained before, as of its position: `replay.provenance.trained`.
        """
        self.run = run
        self.eligible = eligible(outline.table, trained, run.policy, trainer_version=run.trainer_version)
        names = outline.table.column("rollout_id").to_pylist()
        population = {*names} if run.population == "with_rows" else None
        scores = [score for score in outline.scores if population is None or score.rollout_id in population]
        self.advantages: Mapping[str, float] = advantages(
            scores, baseline=run.baseline, divide_by_std=run.divide_by_std
        )
        """By rollout id."""
        wanted = {*self.eligible.table.column("rollout_id").to_pylist()}
        columns = (outline.table.column(name).to_pylist() for name in ("row_id", "length"))
        self._rows: dict[str, list[Measured]] = {}
        for rollout_id, row_id, length in zip(names, *columns, strict=True):
            if rollout_id in wanted:
                self._rows.setdefault(rollout_id, []).append(Measured(row_id, length))
        self._last: _Planned | None = None  # a step is asked for once for each of its micro-batches

    @classmethod
    def of(cls, database: Engine, run: Run) -> Steps:
        """Read the outline of the log. Raises PositionAhead when the log has not reached the run's position."""
        outline = outlined(database, run.selection, position=run.position)
        return cls(run, outline, provenance.trained(database, run.position.trained))

    def drawn(self, step: int) -> tuple[str, ...]:
        """The rollouts of a step. Raises NothingToDraw when the policy lets nothing in."""
        return self._step(step).rollouts

    def plan(self, step: int) -> StepPlan:
        """The plan of a step, for all ranks."""
        return self._step(step).plan

    def rows(self, database: Engine, step: int, *, archive: str | None = None) -> RowSet:
        """All rows of a step, of all ranks and whatever their length."""
        position, drawn = self.run.position, self.drawn(step)
        return build(database, self.run.selection, rollouts=drawn, position=position, archive=archive)

    def packs(
        self, database: Engine, step: int, *, rank: int = 0, only: Sequence[int] | None = None
    ) -> list[PlacedPack]:
        """The micro-batches of one rank.

        Args:
            database: the log.
            step: number of the step.
            rank: data-parallel rank.
            only: numbers of the micro-batches to read; None for all.
        """
        planned = self.plan(step)
        rollout_of = {row.row_id: rollout_id for rollout_id in self.drawn(step) for row in self._rows[rollout_id]}
        numbers = range(planned.micro_batches) if only is None else only
        row_ids = [row_id for number in numbers for row_id in planned.ranks[rank][number]]
        rollouts = [*dict.fromkeys(rollout_of[row_id] for row_id in row_ids)]
        rows, refused = {}, dict[str, Refusal]()
        if rollouts:
            found = build(database, self.run.selection, rollouts=rollouts, position=self.run.position)
            rows = {row.row_id: row for row in found.rows}
            refused = {refusal.rollout_id: refusal for refusal in found.refusals.rollouts}
        for row_id in row_ids:
            if row_id not in rows and rollout_of[row_id] not in refused:
                raise PlanMismatch(f"row {row_id!r}", "is planned, and the log at the run's position does not give it")
        source = MediaSource(database.url.render_as_string(hide_password=False))
        placed: list[PlacedPack] = []
        for number in numbers:
            here = planned.ranks[rank][number]
            missing = dict.fromkeys(rollout_of[row_id] for row_id in here if row_id not in rows)
            placed.append(
                PlacedPack(
                    step=step,
                    micro_batch=number,
                    micro_batches=planned.micro_batches,
                    pack=pack([rows[row_id] for row_id in here if row_id in rows], self.advantages),
                    refused=tuple(refused[rollout_id] for rollout_id in missing),
                    source=source,
                )
            )
        return placed

    def trained(self, step: int, found: RowSet, *, at: int) -> list[RowTrained]:
        """What to record when a step has trained: one event a row, none for the rows of rollouts that were refused.

        Args:
            step: number of the step.
            found: its rows, from `rows`.
            at: when, in Unix microseconds.

        Raises PlanMismatch when the log lacks a planned row of a rollout that was not refused, and ValueError when the
        run has no `trainer_version`.
        """
        if self.run.trainer_version is None:
            raise ValueError(
                f"run {self.run.name!r} has no trainer_version, which the log keeps with each row: give one"
            )
        refused = [row.row_id for each in found.refusals.rollouts for row in self._rows.get(each.rollout_id, ())]
        return provenance.events(
            self.plan(step),
            found.rows,
            self.advantages,
            run=self.run.name,
            selection=self.run.selection,
            trainer_version=self.run.trainer_version,
            at=at,
            without={*refused},
        )

    def _step(self, step: int) -> _Planned:
        run = self.run
        if not 0 <= step < run.steps:
            raise ValueError(f"step {step} is not of the run: it has steps 0 to {run.steps - 1}")
        if self._last is None or self._last.plan.step != step:
            rollouts = draw(
                self.eligible,
                run.policy,
                seed=run.seed,
                step=step,
                rollouts=run.rollouts_per_step,
                groups=run.groups_per_step,
            )
            rows = (row for rollout_id in rollouts for row in self._rows[rollout_id])
            planned = plan(rows, seed=run.seed, step=step, world=run.world, token_budget=run.token_budget)
            self._last = _Planned(rollouts=rollouts, plan=planned)
        return self._last
