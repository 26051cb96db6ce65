"""What the plots of the page show: counted boundaries and training steps as columns.

Knows what is counted and which colour a thing has; does not know pixels or HTML. Law: a plot shows all of what it is
given, and each column says in words what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from turnlog.ui.boundaries import Counts
from turnlog.ui.plot import Column, Part, Plot, columns
from turnlog.ui.runs import Step
from turnlog.ui.words import count, percent, spoken

COLOURS = 7
"""Reasons that have a colour of their own; the rest share one."""
_MOST_ROWS = 24
"""Rows of a rollout from which on rollouts share a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """How often one harness had one reason."""

    roots: int
    depth: int
    """0 for none, up to 5 for the most of the harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Harnesses beside the reasons of their boundaries."""

    reasons: Sequence[str]
    lines: Sequence[tuple[str, int, Sequence[Cell]]]
    """(harness, boundaries, a cell a reason)"""


def colour(counts: Counts, reason: str) -> str:
    """The class of a reason's colour."""
    return f"kind{min(COLOURS, list(counts.reasons).index(reason))}"


def week_plot(counts: Counts) -> Plot:
    """Boundaries by week, a colour a reason."""
    found: list[Column] = []
    for monday, reasons in counts.weeks.items():
        parts = tuple(
            Part(value=reasons[reason], kind=colour(counts, reason)) for reason in counts.reasons if reasons.get(reason)
        )
        said = ", ".join(f"{count(reasons[each])} {spoken(each)}" for each in counts.reasons if reasons.get(each))
        title = f"week of {monday:%Y-%m-%d}: {said or 'no boundary'}"
        found.append(Column(label=f"{monday:%m-%d}", parts=parts, title=title))
    return columns(found)


def row_plot(counts: Counts) -> Plot:
    """How many rollouts have how many rows."""
    most = max(counts.rows, default=1)
    found = [
        Column(
            label=str(number),
            parts=(Part(value=counts.rows.get(number, 0), kind="plain"),),
            title=f"{count(counts.rows.get(number, 0))} rollouts with {number} row{'s' * (number > 1)}",
        )
        for number in range(1, min(most, _MOST_ROWS) + 1)
    ]
    if more := sum(rollouts for number, rollouts in counts.rows.items() if number > _MOST_ROWS):
        title = f"{count(more)} rollouts with more than {_MOST_ROWS} rows, at most {count(most)}"
        found.append(Column(label="more", parts=(Part(value=more, kind="plain"),), title=title))
    return columns(found)


def harness_table(counts: Counts) -> Table:
    """How often each harness had each reason."""
    reasons = list(counts.reasons)
    return Table(
        reasons=reasons,
        lines=[(harness, sum(mine.values()), _cells(mine, reasons)) for harness, mine in counts.harnesses.items()],
    )


def _cells(mine: Mapping[str, int], reasons: Sequence[str]) -> list[Cell]:
    most = max(mine.values(), default=1)
    return [Cell(roots=mine.get(reason, 0), depth=-(-5 * mine.get(reason, 0) // most)) for reason in reasons]


def token_plot(run: str, steps: Sequence[Step]) -> Plot:
    """Tokens of each step's rows: those that train, and the rest."""
    return columns(
        [
            Column(
                label=str(step.number),
                parts=(Part(value=step.trained, kind="trained"), Part(value=step.tokens - step.trained, kind="rest")),
                title=f"step {step.number}: {count(step.tokens)} tokens in {count(len(step.rows))} rows, "
                f"{count(step.trained)} of them trained",
                href=_step(run, step),
            )
            for step in steps
        ]
    )


def staleness_plot(run: str, steps: Sequence[Step]) -> Plot:
    """How many policy versions the rows of each step are behind: from the least to the most, and the mean."""
    found: list[Column] = []
    for step in steps:
        parts: tuple[Part, ...] = ()
        title = f"step {step.number}: nothing sampled"
        if (stale := step.staleness) is not None:
            least, mean, most = stale
            parts = (
                Part(base=least, value=most - least, kind="range"),
                Part(base=mean - _HAIR, value=2 * _HAIR, kind="mean"),
            )
            title = f"step {step.number}: staleness {least} to {most}, mean {mean:.2f}"
        found.append(Column(label=str(step.number), parts=parts, title=title, href=_step(run, step)))
    return columns(found)


def fill_plot(run: str, steps: Sequence[Step]) -> Plot:
    """How full the packs of each step are."""
    return columns(
        [
            Column(
                label=str(step.number),
                parts=(
                    Part(value=step.fill or 0.0, kind="trained"),
                    Part(value=1 - (step.fill or 0.0), kind="empty-part"),
                ),
                title=f"step {step.number}: {percent(step.fill or 0.0)} of {step.packs} packs",
                href=_step(run, step),
            )
            for step in steps
        ],
        whole=False,
    )


def _step(run: str, step: Step) -> str:
    return f"/step?{urlencode({'run': run, 'number': step.number})}"


_HAIR = 0.02
