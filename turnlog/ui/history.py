"""One rollout for the eye: its calls without what grows with their prompts, and the row that each call is part of.

Knows the narrow columns of the log and how rows are cut; does not know pictures or HTML. Law: every call that was
admitted is there, whatever became of it, and the rows are those that replay makes when all completed calls count.

A chain's tip makes a row. Rows are counted by the place of their root, then of their tip, and a call that two rows
share trains in the first of them, which it is drawn in:

>>> a, b, c, d = (UUID(int=n) for n in range(1, 5))
>>> rows_of([(a, None), (b, a), (c, a), (d, b)]) == {a: 1, c: 1, b: 2, d: 2}
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from pydantic import JsonValue
from sqlalchemy import Connection, func, select

from replay.errors import UnknownRollout
from store import log, schema
from store.events import RolloutOpened, RolloutScored

State = Literal["completed", "pending", "failed", "refused", "abandoned", "lost"]
_NARROW = (
    *("call_id", "parent_id", "root_id", "decision", "reason", "prev_len", "prompt_len", "sampled_len"),
    *("finish_reason", "media_count", "started_at", "completed_at", "evidence", "hints"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """One call of a rollout, whatever became of it."""

    call_id: UUID
    number: int | None
    """Place among the completed calls of the rollout, from 1; None for a call that did not complete."""
    state: State
    decision: str | None
    """None when the call was refused before its decision was logged."""
    reason: str
    parent_id: UUID | None
    row: int | None
    """The row that it trains in, from 1; None for a call that did not complete."""
    started_at: int
    ended_at: int | None
    """None while it is pending."""
    end: str | None = None
    """How it ended: its finish reason, or why there is no answer."""
    prev_len: int = 0
    prompt_len: int = 0
    sampled_len: int = 0
    media_count: int = 0
    evidence: Mapping[str, JsonValue] | None = None
    role: str | None = None
    """What the harness says the call is for."""

    @property
    def name(self) -> str:
        """As people call it: its number, or what became of it."""
        return f"call {self.number}" if self.number is not None else f"{self.state} call"

    @property
    def delta_len(self) -> int:
        """Tokens that the log stores of it."""
        return self.prompt_len - self.prev_len + self.sampled_len


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRow:
    """One row: the calls that train in it, and where it begins."""

    number: int
    calls: tuple[SeenCall, ...]
    """Those drawn in it, in order; shared ones are in an earlier row."""
    parent: SeenCall | None
    """Where it branches off; None when it begins with a root."""
    tokens: int
    """The row's length."""
    trained: int
    """Tokens that train in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRollout:
    """A rollout, its calls in the order they began, its rows and its latest outcome."""

    opened: RolloutOpened
    calls: tuple[SeenCall, ...]
    rows: tuple[SeenRow, ...]
    outcome: RolloutScored | None
    trained: tuple[tuple[str, int, int], ...]
    """(run, step, rows) that its rows went into."""

    def call(self, call_id: UUID | None) -> SeenCall | None:
        """One of its calls."""
        return next((call for call in self.calls if call.call_id == call_id), None)


def load(connection: Connection, rollout_id: str) -> SeenRollout:
    """Read one rollout, without tokens. Raises UnknownRollout."""
    opened = log.rollout(connection, rollout_id)
    if opened is None:
        raise UnknownRollout(rollout_id)
    outcomes = log.outcomes(connection, rollout_id)
    calls = _calls(connection, rollout_id)
    return SeenRollout(
        opened=opened,
        calls=calls,
        rows=cut(calls),
        outcome=outcomes[-1] if outcomes else None,
        trained=trained(connection, rollout_id),
    )


def trained(connection: Connection, rollout_id: str) -> tuple[tuple[str, int, int], ...]:
    """(run, step, rows) that rows of the rollout went into, in order."""
    row = schema.trained_row.c
    asked = select(row.run, row.step, func.count()).where(row.rollout_id == rollout_id).group_by(row.run, row.step)
    return tuple((run, step, rows) for run, step, rows in connection.execute(asked.order_by(row.run, row.step)))


def rows_of(calls: Sequence[tuple[UUID, UUID | None]]) -> dict[UUID, int]:
    """The row that each completed call trains in, from (call, parent) in the order of the log."""
    place = {call_id: at for at, (call_id, _) in enumerate(calls)}
    parents = dict(calls)
    roots: dict[UUID, UUID] = {}
    for call_id, parent in calls:
        roots[call_id] = call_id if parent is None else roots.get(parent, call_id)
    extended = {parent for _, parent in calls if parent is not None}
    tips = [call_id for call_id, _ in calls if call_id not in extended]
    found: dict[UUID, int] = {}
    for number, tip in enumerate(sorted(tips, key=lambda tip: (place[roots[tip]], place[tip])), start=1):
        above: UUID | None = tip
        while above is not None and above not in found:
            found[above] = number
            above = parents.get(above)
    return found


def _calls(connection: Connection, rollout_id: str) -> tuple[SeenCall, ...]:
    call, end, intent = schema.model_call.c, schema.call_end.c, schema.call_intent.c
    mine = select(*(call[name] for name in _NARROW)).where(call.rollout_id == rollout_id).order_by(call.sequence)
    completed = connection.execute(mine).all()
    rows = rows_of([(each.call_id, each.parent_id) for each in completed])
    found = {
        each.call_id: _completed(number, each, rows[each.call_id]) for number, each in enumerate(completed, start=1)
    }
    ended = select(end.call_id, end.state, end.reason, end.at, func.length(end.logprobs).label("bytes"))
    ends = {each.call_id: each for each in connection.execute(ended.where(end.rollout_id == rollout_id))}
    admitted = select(intent.call_id, intent.decision, intent.reason, intent.parent_id, intent.at)
    for each in connection.execute(admitted.where(intent.rollout_id == rollout_id)):
        if each.call_id not in found:
            found[each.call_id] = _unanswered(each, ends.get(each.call_id))
    for call_id, each in ends.items():
        if call_id not in found:
            found[call_id] = _refused(each)
    return tuple(sorted(found.values(), key=lambda each: (each.started_at, each.number or 0, each.call_id)))


def _completed(number: int, row: Any, trains_in: int) -> SeenCall:
    role = row.hints.get("role")
    return SeenCall(
        call_id=row.call_id,
        number=number,
        state="completed",
        decision=row.decision,
        reason=row.reason,
        parent_id=row.parent_id,
        row=trains_in,
        started_at=row.started_at,
        ended_at=row.completed_at,
        end=row.finish_reason,
        prev_len=row.prev_len,
        prompt_len=row.prompt_len,
        sampled_len=row.sampled_len,
        media_count=row.media_count,
        evidence=row.evidence,
        role=role if isinstance(role, str) else None,
    )


def _unanswered(intent: Any, end: Any) -> SeenCall:
    return SeenCall(
        call_id=intent.call_id,
        number=None,
        state="pending" if end is None else end.state,
        decision=intent.decision,
        reason=intent.reason,
        parent_id=intent.parent_id,
        row=None,
        started_at=intent.at,
        ended_at=None if end is None else end.at,
        end=None if end is None else end.reason,
        sampled_len=0 if end is None else end.bytes // 4,
    )


def _refused(end: Any) -> SeenCall:
    return SeenCall(
        call_id=end.call_id,
        number=None,
        state=end.state,
        decision=None,
        reason=end.reason,
        parent_id=None,
        row=None,
        started_at=end.at,
        ended_at=end.at,
        sampled_len=end.bytes // 4,
    )


def cut(calls: Sequence[SeenCall]) -> tuple[SeenRow, ...]:
    """The rows of a rollout, from its calls."""
    by_id = {call.call_id: call for call in calls}
    members: dict[int, list[SeenCall]] = {}
    for call in sorted((call for call in calls if call.number is not None), key=lambda call: call.number or 0):
        members.setdefault(call.row or 0, []).append(call)
    return tuple(
        SeenRow(
            number=number,
            calls=tuple(mine),
            parent=None if mine[0].parent_id is None else by_id.get(mine[0].parent_id),
            tokens=mine[-1].prompt_len + mine[-1].sampled_len,
            trained=sum(call.sampled_len for call in mine),
        )
        for number, mine in sorted(members.items())
    )
