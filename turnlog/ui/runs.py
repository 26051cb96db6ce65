"""Training runs for the eye: their steps, the rows of each, how stale these were and how well they fill packs.

Knows the events of trained rows and the calls behind them; does not know HTML. Law: what is shown follows from the log.
The log holds no plan, so packs are planned again from the rows' lengths for the budget that the reader names; how full
they are depends on nothing else.

A page has as many steps as have `ROWS` rows and `CALLS` calls together, and at least one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from uuid import UUID

from pydantic import BaseModel, ConfigDict, field_validator
from sqlalchemy import BigInteger, Connection, TextualSelect, bindparam, column, text

from replay.plan import Measured, plan
from store import schema
from store.statements import named
from turnlog.ui.errors import UnknownRun
from turnlog.ui.listing import WholeNumber

ROWS, CALLS = 2000, 20_000
STEPS = 60
_MOST_RUNS = 500
_SQL = named((files("turnlog.ui") / "sql" / "runs.sql").read_text(encoding="utf-8"))


class Asked(BaseModel):
    """Which steps of a run, as the URL says it."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    name: str
    before: WholeNumber = None
    """Steps with a lower number; the latest ones without."""
    budget: WholeNumber = None
    """Most positions of a pack, to tell how full packs are."""

    @field_validator("budget")
    @classmethod
    def _holds_something(cls, budget: int | None) -> int | None:
        if budget == 0:
            raise ValueError("a pack holds at least one position")
        return budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run by its name."""

    name: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """One row of a step."""

    step: int
    row_id: str
    rollout_id: str
    tip_call_id: UUID
    selection: str
    advantage: float
    trainer_version: int
    at: int
    tokens: int
    calls: int
    trained: int
    """Sampled tokens of its calls."""
    oldest: int | None
    """Policy version; None when nothing of it was sampled."""

    @property
    def staleness(self) -> int | None:
        """The trainer's policy version less the row's oldest."""
        return None if self.oldest is None else self.trainer_version - self.oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step."""

    number: int
    rows: tuple[TrainedRow, ...]
    trained: int
    """Sampled tokens of its calls, those of shared calls once."""
    fill: float | None
    """Positions over the room of the packs that hold a row; None when no budget was named."""
    packs: int | None
    too_long: int
    """Rows that fit no pack of that budget."""

    @property
    def tokens(self) -> int:
        """Of all its rows."""
        return sum(row.tokens for row in self.rows)

    @property
    def rollouts(self) -> int:
        """That its rows are of."""
        return len({row.rollout_id for row in self.rows})

    @property
    def staleness(self) -> tuple[int, float, int] | None:
        """Least, mean and most of its rows; None when nothing was sampled."""
        known = [row.staleness for row in self.rows if row.staleness is not None]
        return (min(known), sum(known) / len(known), max(known)) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Some steps of a run, in order."""

    steps: tuple[Step, ...]
    older: int | None
    """`before` of the page with earlier steps; None when there are none."""


def runs(connection: Connection) -> list[Run]:
    """Every run, by name."""
    return [
        Run(name=row.run, first_step=row.first_step, last_step=row.last_step)
        for row in connection.execute(text(_SQL["runs"]), {"most": _MOST_RUNS})
    ]


def steps(connection: Connection, wanted: Asked) -> Steps:
    """The latest steps of a run, or those before one. Raises UnknownRun."""
    run = wanted.name
    below = 2**63 - 1 if wanted.before is None else wanted.before
    asked = connection.execute(_STEPS, {"run": run, "below": below, "most": STEPS + 1}).all()
    if not asked:
        raise UnknownRun(run)
    shown = [asked[0].step]
    rows = asked[0].rows
    for each in asked[1:STEPS]:
        rows += each.rows
        if rows > ROWS:
            break
        shown.append(each.step)
    deep = connection.execute(_DEPTHS, {"run": run, "low": shown[-1], "high": shown[0]}).all()
    enough = sum(calls <= CALLS for calls in accumulate(int(each.calls or 0) for each in deep))
    shown = shown[: max(1, enough)]
    found = _read(connection, run, shown[-1], shown[0])
    return Steps(
        steps=tuple(_step(number, *found[number], budget=wanted.budget) for number in sorted(found)),
        older=shown[-1] if len(shown) < len(asked) else None,
    )


def step(connection: Connection, run: str, number: int, *, budget: int | None = None) -> Step:
    """One step. Raises UnknownRun when the run has no such step."""
    found = _read(connection, run, number, number)
    if number not in found:
        raise UnknownRun(run, number)
    return _step(number, *found[number], budget=budget)


@dataclass(slots=True, kw_only=True)
class _Calls:
    """What the calls of one row add up to."""

    calls: int = 0
    trained: int = 0
    oldest: int | None = None


def _read(connection: Connection, run: str, low: int, high: int) -> dict[int, tuple[list[TrainedRow], int]]:
    """By step: its rows, and the sampled tokens of its calls."""
    which = {"run": run, "low": low, "high": high}
    of_row: dict[tuple[int, str], _Calls] = {}
    sampled: dict[int, dict[UUID, int]] = {}
    for call in connection.execute(_ROW_CALLS, which):
        mine = of_row.setdefault((call.step, call.row_id), _Calls())
        mine.calls += 1
        mine.trained += call.sampled_len
        versions = [span["policy_version"] for span in call.policy_spans if span["end"] > span["start"]]
        mine.oldest = min([*versions, *([] if mine.oldest is None else [mine.oldest])], default=None)
        sampled.setdefault(call.step, {})[call.call_id] = call.sampled_len
    found: dict[int, tuple[list[TrainedRow], int]] = {}
    for row in connection.execute(_ROWS, which):
        made = of_row.get((row.step, row.row_id), _Calls())
        trained = TrainedRow(
            step=row.step,
            row_id=row.row_id,
            rollout_id=row.rollout_id,
            tip_call_id=row.tip_call_id,
            selection=f"{row.selection} {row.selection_version}",
            advantage=row.advantage,
            trainer_version=row.trainer_policy_version,
            at=row.at,
            tokens=row.tokens or 0,
            calls=made.calls,
            trained=made.trained,
            oldest=made.oldest,
        )
        rows, _ = found.setdefault(row.step, ([], sum(sampled.get(row.step, {}).values())))
        rows.append(trained)
    return found


def _step(number: int, rows: Sequence[TrainedRow], trained: int, *, budget: int | None) -> Step:
    measured = [Measured(row.row_id, row.tokens) for row in rows if row.tokens]
    planned = None if budget is None else plan(measured, seed=0, step=number, token_budget=budget)
    return Step(
        number=number,
        rows=tuple(rows),
        trained=trained,
        fill=None if planned is None else planned.fill,
        packs=None if planned is None else planned.packs,
        too_long=0 if planned is None else len(planned.too_long),
    )


def _statement(name: str, columns: Sequence[str]) -> TextualSelect:
    types = {each.name: each.type for table in (schema.model_call, schema.trained_row) for each in table.c}
    whole = [bindparam(each, type_=BigInteger) for each in ("low", "high", "below") if f":{each}" in _SQL[name]]
    typed = [column(each, types[each]) if each in types else column(each) for each in columns]
    return text(_SQL[name]).bindparams(*whole).columns(*typed)


_STEPS = _statement("steps", ["step", "rows"])
_DEPTHS = _statement("depths", ["step", "calls"])
_ROWS = _statement(
    "rows",
    [
        *("step", "row_id", "rollout_id", "tip_call_id", "selection", "selection_version", "advantage"),
        *("trainer_policy_version", "at", "tokens"),
    ],
)
_ROW_CALLS = _statement("row_calls", ["step", "row_id", "call_id", "sampled_len", "policy_spans"])
