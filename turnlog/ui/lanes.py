"""The lane picture of a rollout: where each call stands, as numbers that a template turns into SVG.

Knows calls, rows and geometry; does not know the log, SVG's syntax or colours. Law: what began earlier stands further
left, what overlaps in time overlaps in the picture, and every call is drawn once.

Time is drawn in steps between one beginning or end of a call and the next. A step is as wide as it is long, within
bounds: else one call that took an hour, or a tool that did, would make all others too thin to see.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from uuid import UUID

from turnlog.ui.history import SeenCall, SeenRollout, SeenRow

MOST = 600
"""Calls in one picture."""
TOP, LANE, BAR = 34, 52, 24
"""Pixels above the first lane, of a lane, and of a bar in it."""
LEFT, RIGHT = 16, 170
_BUSY, _IDLE = (18, 120), (8, 30)
"""Least and most pixels of a step in which calls run, and of one in which none does."""
_USUAL = 52
"""Pixels of a call that takes as long as most."""
_TICK = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One call."""

    call: SeenCall
    x: int
    y: int
    width: int
    begins: str | None
    """Why a row begins with it, in words; None inside a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """From the end of one call to the beginning of another: what it continues, branches off or was compared with."""

    kind: str
    """`branch`, `nearest` or `attempt`."""
    x1: int
    y1: int
    x2: int
    y2: int

    @property
    def path(self) -> str:
        """As SVG draws it."""
        bend = max(14, min(60, abs(self.x2 - self.x1) // 2))
        return f"M{self.x1} {self.y1}C{self.x1 + bend} {self.y1} {self.x2 - bend} {self.y2} {self.x2} {self.y2}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One line of the picture: a row, or calls without an answer that fit into none."""

    y: int
    row: SeenRow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A time on the axis, in microseconds since the rollout's first call."""

    x: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All of it."""

    width: int
    height: int
    lanes: tuple[Lane, ...]
    bars: tuple[Bar, ...]
    links: tuple[Link, ...]
    ticks: tuple[Tick, ...]
    idle: tuple[tuple[int, int], ...]
    """(x, width) of stretches in which no call ran and that are drawn shorter than they were."""
    first: int
    """Place of its first call among all of the rollout, from 1."""
    calls: int
    """How many calls the rollout has."""


def draw(rollout: SeenRollout, *, first: int = 1) -> Picture:
    """Draw at most `MOST` calls, from the `first` one on."""
    first = max(1, min(first, len(rollout.calls)))
    calls = rollout.calls[first - 1 : first - 1 + MOST]
    axis = _Axis(calls)
    lanes: list[Lane] = []
    placed: dict[UUID, tuple[int, int, int]] = {}  # x, y, width
    rows = {row.number: row for row in rollout.rows}
    busy: dict[int, list[tuple[int, int]]] = {}  # by the y of a lane
    of_row: dict[int, int] = {}
    for call in calls:
        if call.row is not None:
            if call.row not in of_row:
                of_row[call.row] = TOP + LANE * len(lanes)
                lanes.append(Lane(y=of_row[call.row], row=rows[call.row]))
            placed[call.call_id] = axis.place(call, of_row[call.row])
            busy.setdefault(of_row[call.row], []).append(axis.span(call))
    for call in calls:
        if call.row is None:
            y = _room(call, rollout, of_row, busy, axis, lanes)
            placed[call.call_id] = axis.place(call, y)
            busy.setdefault(y, []).append(axis.span(call))
    begun = {row.calls[0].call_id: _why(row) for row in rollout.rows}
    bars = tuple(
        Bar(
            call=call,
            x=placed[call.call_id][0],
            y=placed[call.call_id][1],
            width=placed[call.call_id][2],
            begins=begun.get(call.call_id),
        )
        for call in calls
    )
    return Picture(
        width=axis.width + LEFT + RIGHT,
        height=TOP + LANE * max(1, len(lanes)),
        lanes=tuple(lanes),
        bars=bars,
        links=tuple(_links(calls, placed, begun)),
        ticks=axis.ticks(rollout.calls[0].started_at if rollout.calls else 0),
        idle=axis.idle,
        first=first,
        calls=len(rollout.calls),
    )


def _why(row: SeenRow) -> str:
    """Why a row begins, in a few words."""
    if row.parent is not None:
        return f"branches off {row.parent.name}"
    root = row.calls[0]
    evidence = root.evidence or {}
    place = evidence.get("first_difference")
    if not isinstance(evidence.get("nearest_call"), str) or place is None:
        return root.reason
    return f"{root.reason} at item {place}"


def _room(
    call: SeenCall,
    rollout: SeenRollout,
    of_row: Mapping[int, int],
    busy: Mapping[int, Sequence[tuple[int, int]]],
    axis: _Axis,
    lanes: list[Lane],
) -> int:
    """The lane of a call without an answer: its parent's where nothing is in the way, else one for such calls."""
    parent = rollout.call(call.parent_id)
    start, end = axis.span(call)
    wanted = [] if parent is None or parent.row not in of_row else [of_row[parent.row or 0]]
    for y in [*wanted, *(lane.y for lane in lanes if lane.row is None)]:
        if all(end <= low or high <= start for low, high in busy.get(y, ())):
            return y
    lanes.append(Lane(y=TOP + LANE * len(lanes), row=None))
    return lanes[-1].y


def _links(
    calls: Sequence[SeenCall], placed: Mapping[UUID, tuple[int, int, int]], begun: Mapping[UUID, str]
) -> list[Link]:
    found: list[Link] = []
    for call in calls:
        x, y, _ = placed[call.call_id]
        other, kind = call.parent_id, "branch" if call.call_id in begun else "attempt"
        if other is None:
            named = (call.evidence or {}).get("nearest_call")
            other, kind = (UUID(named), "nearest") if isinstance(named, str) else (None, kind)
        if other is None or other not in placed or (kind == "attempt" and placed[other][1] == y):
            continue
        before = placed[other]
        found.append(Link(kind=kind, x1=before[0] + before[2], y1=before[1] + BAR // 2, x2=x, y2=y + BAR // 2))
    return found


class _Axis:
    """Time to pixels, for some calls."""

    def __init__(self, calls: Sequence[SeenCall]) -> None:
        starts = [call.started_at for call in calls]
        last = max([*starts, *(call.ended_at or 0 for call in calls)], default=0)
        self._spans = {call.call_id: _span(call, last) for call in calls}
        self._times = sorted({time for span in self._spans.values() for time in span})
        usual = median([max(1, end - start) for start, end in self._spans.values()]) if calls else 1
        running = _running(self._times, list(self._spans.values()))
        self._x = [LEFT] if self._times else []
        idle: list[tuple[int, int]] = []
        for (low, high), runs in zip(pairwise(self._times), running, strict=True):
            least, most = _BUSY if runs else _IDLE
            wide = int(_USUAL * (high - low) / usual)
            step = max(least, min(most, wide))
            if not runs and wide > most:
                idle.append((self._x[-1], step))
            self._x.append(self._x[-1] + step)
        self.idle = tuple(idle)
        self.width = (self._x[-1] - LEFT) if self._x else 0

    def span(self, call: SeenCall) -> tuple[int, int]:
        """From when to when it is drawn."""
        return self._spans[call.call_id]

    def place(self, call: SeenCall, y: int) -> tuple[int, int, int]:
        """Its x, y and width."""
        start, end = self.span(call)
        x = self._x[bisect_left(self._times, start)]
        return x, y, max(self._x[bisect_left(self._times, end)] - x - 2, 6)

    def ticks(self, since: int) -> tuple[Tick, ...]:
        """Some of the times, none too near another."""
        found: list[Tick] = []
        for time, x in zip(self._times, self._x, strict=True):
            if not found or x - found[-1].x >= _TICK:
                found.append(Tick(x=x, after=time - since))
        return tuple(found)


def _span(call: SeenCall, last: int) -> tuple[int, int]:
    """A call that is pending goes on until now; one that took no time is drawn as a moment."""
    end = last if call.ended_at is None else call.ended_at
    return call.started_at, max(end, call.started_at + 1)


def _running(times: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether any call runs, for each step between two times."""
    change = dict.fromkeys(times, 0)
    for start, end in spans:
        change[start] += 1
        change[end] -= 1
    count, found = 0, []
    for time in times[:-1]:
        count += change[time]
        found.append(count > 0)
    return found
