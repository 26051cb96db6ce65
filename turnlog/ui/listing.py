"""The list of rollouts: which fit the filters, newest first, a page at a time.

Knows the narrow tables of the log and how a page is searched; does not know HTML. Law: a page costs what it shows. It
is found by its place in the log's order and never by counting, and a search that finds little stops after `SECONDS` and
says how far it came, so no filter makes a page slow however long the log is.

A search goes through the log in windows of sequences. What of a filter a rollout's own row says is asked first; what
other events say (reward, state, boundaries) is asked by one indexed look-up a rollout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal, get_args
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sqlalchemy import ColumnElement, Connection, Table, and_, bindparam, exists, func, not_, select

from store import schema

PAGE = 50
WINDOW = 2000
"""Sequences that one statement of a search looks at."""
SECONDS = 0.3
"""After this long a search shows what it has."""
STRIP = 80
"""Calls of a rollout that the list draws."""
RECENT = 2000
"""Rollouts whose harnesses are offered for choice."""

State = Literal["scored", "unscored", "pending", "failed", "refused", "abandoned", "lost"]
STATES: tuple[State, ...] = get_args(State)


def _none_if_blank(value: object) -> object:
    """A field of a form that was left empty says nothing."""
    return None if isinstance(value, str) and not value.strip() else value


_BLANK = BeforeValidator(_none_if_blank)
Words = Annotated[Annotated[str, Field(max_length=500)] | None, _BLANK]
Day = Annotated[date | None, _BLANK]
_Reward = Annotated[Annotated[float, Field(allow_inf_nan=False)] | None, _BLANK]
WholeNumber = Annotated[Annotated[int, Field(ge=0, lt=2**63)] | None, _BLANK]


class Filters(BaseModel):
    """What to list, as the URL says it; a field that is absent or empty does not limit.

    >>> Filters.model_validate({"task": "", "harness": "codex", "reward_min": "0.5"}).given()
    {'harness': 'codex', 'reward_min': '0.5'}
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    task: Words = None
    """Part of the task's text, small and capital letters alike."""
    harness: Words = None
    group: Words = None
    reward_min: _Reward = None
    reward_max: _Reward = None
    state: Annotated[State | None, _BLANK] = None
    reason: Words = None
    """Of a boundary that the rollout has."""
    since: Day = None
    until: Day = None
    """The last day, included."""
    before: WholeNumber = None
    """Rollouts older than this place in the log."""
    after: WholeNumber = None
    """Rollouts newer than this place in the log; `before` wins."""

    def given(self) -> dict[str, str]:
        """The filters that limit, as a URL has them; not the place in the list."""
        fields = self.model_dump(exclude={"before", "after"}, exclude_none=True)
        return {name: str(value) for name, value in fields.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One call of a rollout as the list draws it."""

    row: int
    """Contexts begun until then: calls of one number are of one root or a branch of it."""
    begins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One rollout of the list."""

    sequence: int
    rollout_id: str
    group_id: str | None
    slot: int | None
    task: str | None
    harness: str | None
    opened_at: int
    reward: float | None
    status: str | None
    calls: int
    roots: int
    ends: Mapping[str, int]
    """Calls that ended without an answer, by their state, and those that are pending."""
    strip: Sequence[Cut]
    """The first `STRIP` calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of the list, newest first, and where it goes on."""

    rollouts: Sequence[Listed]
    older: int | None
    """`before` of the page that follows; None at the end of the log."""
    newer: int | None
    """`after` of the page in front; None at its beginning."""
    searched: int | None = None
    """Sequences that were looked at, when the search stopped before it had a whole page."""
    left: int | None = None
    """Sequences that were not, then."""
    reached: int | None = None
    """Opening time of the rollout up to which it looked, then; None when no rollout is near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    sequences: list[int] = field(default_factory=list)
    searched: int = 0
    stopped: int | None = None
    """The edge of what was looked at, when time ran out."""


def page(
    connection: Connection, filters: Filters, *, size: int = PAGE, clock: Callable[[], float] = time.monotonic
) -> Page:
    """One page of the list; the clock, in seconds, is asked whether the search has taken long enough."""
    lowest, highest = first_and_last(connection, _R)
    if highest is None or lowest is None:
        return Page(rollouts=(), older=None, newer=None)
    upwards = filters.before is None and filters.after is not None
    found = _search(connection, filters, size=size + 1, lowest=lowest, highest=highest, clock=clock)
    whole = len(found.sequences) > size
    shown = found.sequences[:size]
    if upwards:
        shown.reverse()
    at_start = filters.before is None and filters.after is None
    further: int | None = found.stopped
    if whole:
        further = shown[0] if upwards else shown[-1]
    back = (shown[-1] if upwards else shown[0]) if shown else (filters.after if upwards else filters.before)
    stopped = None if whole else found.stopped
    return Page(
        rollouts=_described(connection, shown),
        older=(back if upwards else further),
        newer=(further if upwards else None if at_start else back),
        searched=None if stopped is None else found.searched,
        left=None if stopped is None else highest - stopped if upwards else stopped - lowest,
        reached=None if stopped is None else _opened_near(connection, stopped),
    )


def harnesses(connection: Connection) -> list[str]:
    """Harnesses of the newest rollouts, for choice."""
    newest = select(_R.c.harness).order_by(_R.c.sequence.desc()).limit(RECENT).subquery()
    found = connection.execute(select(newest.c.harness).distinct().where(newest.c.harness.is_not(None)))
    return sorted(found.scalars())


def _search(
    connection: Connection, filters: Filters, *, size: int, lowest: int, highest: int, clock: Callable[[], float]
) -> _Found:
    """Sequences of rollouts that fit, away from where the page begins."""
    began = clock()
    wanted = and_(*_conditions(filters))
    upwards = filters.before is None and filters.after is not None
    found: list[int] = []
    searched = 0
    order = _R.c.sequence.asc() if upwards else _R.c.sequence.desc()
    low, high = lowest, highest + 1  # what is still to be looked at: low to below high
    if upwards:
        low = max(lowest, (filters.after or 0) + 1)
    elif filters.before is not None:
        high = min(high, filters.before)
    # A group has an index of its own; without filters the order of the log is one.
    window = high - low if filters.group is not None or not filters.given() else WINDOW
    while low < high and len(found) < size:
        edges = (low, min(high, low + window)) if upwards else (max(low, high - window), high)
        asked = select(_R.c.sequence).where(_R.c.sequence >= edges[0], _R.c.sequence < edges[1], wanted)
        found += connection.execute(asked.order_by(order).limit(size - len(found))).scalars()
        searched += edges[1] - edges[0]
        low, high = (edges[1], high) if upwards else (low, edges[0])
        if clock() - began > SECONDS and low < high and len(found) < size:
            return _Found(sequences=found, searched=searched, stopped=low - 1 if upwards else high)
    return _Found(sequences=found, searched=searched)


def _conditions(filters: Filters) -> list[ColumnElement[bool]]:
    """What a rollout must fulfil; what its own row says comes first."""
    asked: list[ColumnElement[bool]] = [_R.c.sequence > 0]
    if filters.group is not None:
        asked.append(_R.c.group_id == filters.group)
    if filters.harness is not None:
        asked.append(_R.c.harness == filters.harness)
    if filters.task is not None:
        asked.append(func.lower(_R.c.task).contains(filters.task.lower(), autoescape=True))
    if filters.since is not None:
        asked.append(_R.c.opened_at >= day_begins(filters.since))
    if filters.until is not None:
        asked.append(_R.c.opened_at < day_begins(filters.until + timedelta(days=1)))
    if filters.reward_min is not None:
        asked.append(_latest("reward") >= filters.reward_min)
    if filters.reward_max is not None:
        asked.append(_latest("reward") <= filters.reward_max)
    if filters.reason is not None:
        call = schema.model_call
        asked.append(_any_of_many(call, call.c.decision == "root", call.c.reason == filters.reason))
    if filters.state is not None:
        asked.append(_in_state(filters.state))
    return asked


def _in_state(state: State) -> ColumnElement[bool]:
    if state in ("scored", "unscored"):
        scored = _any(schema.rollout_outcome)
        return scored if state == "scored" else not_(scored)
    if state == "pending":
        return _any_of_many(schema.call_intent, *_UNENDED)
    return _any(schema.call_end, schema.call_end.c.state == state)


def _any(table: Table, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists().where(table.c.rollout_id == _R.c.rollout_id, *conditions).correlate(_R)


def _any_of_many(table: Table, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """The same of a table that is as long as the log: PostgreSQL may make a join of `exists`, and read all of it."""
    mine = select(table.c.sequence).where(table.c.rollout_id == _R.c.rollout_id, *conditions)
    return mine.limit(1).correlate(_R).scalar_subquery().is_not(None)


def _latest(column: str) -> Any:
    """A column of the rollout's latest outcome, which counts."""
    outcome = schema.rollout_outcome
    mine = select(outcome.c[column]).where(outcome.c.rollout_id == _R.c.rollout_id)
    return mine.order_by(outcome.c.sequence.desc()).limit(1).correlate(_R).scalar_subquery()


def first_and_last(connection: Connection, table: Table) -> tuple[int | None, int | None]:
    """The lowest and the highest sequence of a table; None when it is empty. Each is asked alone, for asked together
    SQLite goes through all of an index.
    """
    lowest, highest = (select(end(table.c.sequence)).scalar_subquery() for end in (func.min, func.max))
    first, last = connection.execute(select(lowest, highest)).one()
    return first, last


def day_begins(day: date) -> int:
    """The first microsecond of a day, in UTC."""
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000


def _opened_near(connection: Connection, sequence: int) -> int | None:
    near = select(_R.c.opened_at).where(_R.c.sequence >= sequence).order_by(_R.c.sequence).limit(1)
    return connection.execute(near).scalar()


def _described(connection: Connection, sequences: Sequence[int]) -> list[Listed]:
    """What the list says of each of these rollouts, in this order."""
    columns = [_R.c[name] for name in ("sequence", "rollout_id", "group_id", "slot", "task", "harness", "opened_at")]
    statement = select(*columns, _latest("reward").label("reward"), _latest("status").label("status"))
    asked = connection.execute(statement.where(_R.c.sequence.in_(sequences))).mappings()
    rows = {int(row["sequence"]): row for row in asked}
    names = [str(row["rollout_id"]) for row in rows.values()]
    ends = _ends(connection, names)
    found: list[Listed] = []
    for sequence in sequences:
        row = rows[sequence]
        first = connection.execute(_FIRST_CALLS, {"rollout": row["rollout_id"]}).all()
        calls, roots = len(first), sum(call.decision == "root" for call in first)
        if calls > STRIP:
            calls, roots = connection.execute(_COUNTS, {"rollout": row["rollout_id"]}).one()
        found.append(
            Listed(
                **row,
                calls=calls,
                roots=roots,
                ends=ends.get(row["rollout_id"], {}),
                strip=_strip([(call.call_id, call.parent_id) for call in first[:STRIP]]),
            )
        )
    return found


def _ends(connection: Connection, rollouts: Sequence[str]) -> dict[str, dict[str, int]]:
    """Calls without an answer by rollout and state."""
    end, intent = schema.call_end.c, schema.call_intent.c
    found: dict[str, dict[str, int]] = {}
    pending = select(intent.rollout_id, func.count().label("calls")).where(intent.rollout_id.in_(rollouts), *_UNENDED)
    for rollout_id, calls in connection.execute(pending.group_by(intent.rollout_id)):
        found.setdefault(rollout_id, {})["pending"] = calls
    grouped = select(end.rollout_id, end.state, func.count()).where(end.rollout_id.in_(rollouts))
    for rollout_id, state, calls in connection.execute(grouped.group_by(end.rollout_id, end.state)):
        found.setdefault(rollout_id, {})[state] = calls
    return found


def _strip(calls: Sequence[tuple[UUID, UUID | None]]) -> list[Cut]:
    """The row that each call is on: a root begins one, and so does a second call on one parent.

    >>> a, b, c = (UUID(int=n) for n in range(3))
    >>> [(cut.row, cut.begins) for cut in _strip([(a, None), (b, a), (c, a)])]
    [(1, True), (1, False), (2, True)]
    """
    rows: dict[UUID, int] = {}
    extended: set[UUID] = set()
    count = 0
    cuts: list[Cut] = []
    for call_id, parent in calls:
        begins = parent is None or parent in extended or parent not in rows
        count += begins
        rows[call_id] = count if begins or parent is None else rows[parent]
        if parent is not None:
            extended.add(parent)
        cuts.append(Cut(row=rows[call_id], begins=begins))
    return cuts


_R = schema.rollout
_UNENDED = (
    ~exists().where(schema.model_call.c.call_id == schema.call_intent.c.call_id).correlate(schema.call_intent),
    ~exists().where(schema.call_end.c.call_id == schema.call_intent.c.call_id).correlate(schema.call_intent),
)
_C = schema.model_call
_OF_ROLLOUT = _C.c.rollout_id == bindparam("rollout")
_FIRST_CALLS = (
    select(_C.c.call_id, _C.c.parent_id, _C.c.decision).where(_OF_ROLLOUT).order_by(_C.c.sequence).limit(STRIP + 1)
)
_COUNTS = select(
    select(func.count()).where(_OF_ROLLOUT).scalar_subquery(),
    select(func.count()).where(_OF_ROLLOUT, _C.c.decision == "root").scalar_subquery(),
)
