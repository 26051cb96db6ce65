"""Why rows begin, counted: by reason, week and harness, and how many rows rollouts have.

Knows the roots of the log; does not know plots or HTML. Law: each root is counted once, and by narrow columns alone.

Counting costs what is counted. So it is the newest `CALLS` of the log that are looked at, unless all are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from pydantic import BaseModel, ConfigDict
from sqlalchemy import ColumnElement, Connection, Integer, select, type_coerce

from store import schema
from turnlog.ui.listing import RECENT, Day, Words, day_begins, first_and_last

FIRST = "first_call"
"""The reason of a rollout's first row, which is no change of mind of its harness."""
CALLS = 100_000
_DAY = 24 * 3600 * 1_000_000
_WEEK = 7 * _DAY
_MONDAY = 3 * _DAY
"""Time zero was a Thursday."""


class Window(BaseModel):
    """What is counted, as the URL says it."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    harness: Words = None
    since: Day = None
    until: Day = None
    """The last day, included."""
    all: bool = False
    """Whether to look at all calls, however long that takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often rows began, and why."""

    reasons: Mapping[str, int]
    """All of them but first calls, the most frequent first."""
    firsts: int
    weeks: Mapping[date, Mapping[str, int]]
    """By the Monday that a week begins with, without gaps; first calls are left out."""
    harnesses: Mapping[str, Mapping[str, int]]
    """By harness, the most frequent first; first calls are left out. An empty name is of rollouts that name none."""
    rows: Mapping[int, int]
    """How many rollouts have so many roots."""
    back_to: int | None
    """When the oldest of the newest calls began, where the log has more; None when all were looked at."""

    @property
    def boundaries(self) -> int:
        """Rows that began though the rollout had a context already."""
        return sum(self.reasons.values())


def counts(connection: Connection, window: Window) -> Counts:
    """Count what began within the window."""
    call, rollout = schema.model_call.c, schema.rollout.c
    wanted: list[ColumnElement[bool]] = [call.decision == "root"]
    lowest, highest = first_and_last(connection, schema.model_call)
    back_to: int | None = None
    if not window.all and lowest is not None and highest is not None and highest - lowest >= CALLS:
        wanted.append(call.sequence > highest - CALLS)
        oldest = select(call.started_at).where(call.sequence > highest - CALLS).order_by(call.sequence).limit(1)
        back_to = connection.execute(oldest).scalar_one()
    if window.since is not None:
        wanted.append(call.started_at >= day_begins(window.since))
    if window.until is not None:
        wanted.append(call.started_at < day_begins(window.until + timedelta(days=1)))
    week = type_coerce((call.started_at + _MONDAY) / _WEEK, Integer)
    # Counted here: SQLite would group by an index that goes through all calls.
    asked = select(call.rollout_id, call.reason, week, rollout.harness)
    asked = asked.join_from(schema.model_call, schema.rollout, rollout.rollout_id == call.rollout_id).where(*wanted)
    if window.harness is not None:
        asked = asked.where(rollout.harness == window.harness)
    rows, kinds = Counter[str](), Counter[tuple[str, int, str | None]]()
    for lines in connection.execute(asked).partitions(10_000):
        rows.update(line[0] for line in lines)
        kinds.update((line[1], int(line[2]), line[3]) for line in lines)
    reasons, harnesses = Counter[str](), Counter[str]()
    by_week: dict[int, Counter[str]] = {}
    by_harness: dict[str, Counter[str]] = {}
    firsts = 0
    for (reason, begun, named), roots in kinds.items():
        of_week = by_week.setdefault(begun, Counter())
        if reason == FIRST:
            firsts += roots
            continue
        harness = named or ""
        reasons[reason] += roots
        harnesses[harness] += roots
        of_week[reason] += roots
        by_harness.setdefault(harness, Counter())[reason] += roots
    return Counts(
        reasons=dict(reasons.most_common()),
        firsts=firsts,
        weeks=_without_gaps(by_week),
        harnesses={harness: by_harness[harness] for harness, _ in harnesses.most_common()},
        rows=dict(sorted(Counter(rows.values()).items())),
        back_to=back_to,
    )


def reasons(connection: Connection) -> list[str]:
    """Reasons of the newest boundaries, for choice."""
    call = schema.model_call.c
    newest = select(call.reason, call.decision).order_by(call.sequence.desc()).limit(RECENT).subquery()
    found = connection.execute(select(newest.c.reason).distinct().where(newest.c.decision == "root"))
    return sorted(found.scalars())


def _without_gaps(weeks: Mapping[int, Counter[str]]) -> dict[date, Mapping[str, int]]:
    """Weeks in order; those between them in which nothing began are empty."""
    if not weeks:
        return {}
    return {
        datetime.fromtimestamp((week * _WEEK - _MONDAY) // 1_000_000, UTC).date(): weeks.get(week, Counter())
        for week in range(max(min(weeks), max(weeks) - 103), max(weeks) + 1)
    }
