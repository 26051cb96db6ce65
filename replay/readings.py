"""Ways to read passages as answers of calls, each call once and in order: which there are, and what all of them share.

Knows places and the order of calls, as numbers; does not know what a passage or a call holds. Law: a reading of the
whole covers every passage from its start exactly once, by calls that only rise, and has every call that is required.

Two passages that are equal, and calls 0, 1 and 2 that could each have written them:

>>> either = [[Reading(at, at + 1, call) for call in (0, 1, 2)] for at in (0, 1)]
>>> [[reading.call for reading in here] for here in possible(either, 0, [])]
[[0, 1], [1, 2]]
>>> [[reading.call for reading in here] for here in possible(either, 0, [0, 2])]
[[0], [2]]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """Passages [start, end) as the answer of one call, by its place in the order of calls."""

    start: int
    end: int
    call: int


Readings = Sequence[Sequence[Reading]]
"""For each place, the readings that begin there."""


def forward(found: Readings, start: int, required: Sequence[int]) -> list[dict[int, int]]:
    """For each place and count of required calls so far, the earliest call that the one before this place can be."""
    reached: list[dict[int, int]] = [{} for _ in range(len(found) + 1)]
    reached[start][0] = -1
    for here in found[start:]:
        for reading in here:
            last = reached[reading.start].get(bisect_left(required, reading.call))
            if last is not None and last < reading.call:
                count = bisect_right(required, reading.call)
                reached[reading.end][count] = min(reading.call, reached[reading.end].get(count, reading.call))
    return reached


def possible(found: Readings, start: int, required: Sequence[int]) -> list[list[Reading]]:
    """Those readings that are part of a reading of the whole; `required` in rising order.

    Calls only rise, so a way on to the end fits a way up to here when its first call comes after the other's last and
    no required call lies between. One number for each place and count is therefore enough, in either direction.
    """
    reached = forward(found, start, required)
    onward: list[dict[int, int]] = [{} for _ in range(len(found) + 1)]
    onward[-1][len(required)] = max((reading.call for here in found for reading in here), default=0) + 1
    kept: list[list[Reading]] = [[] for _ in found]
    for here in reversed(found):
        for reading in here:
            before, count = bisect_left(required, reading.call), bisect_right(required, reading.call)
            if onward[reading.end].get(count, -1) <= reading.call:
                continue
            onward[reading.start][before] = max(reading.call, onward[reading.start].get(before, -1))
            last = reached[reading.start].get(before)
            if last is not None and last < reading.call:
                kept[reading.start].append(reading)
    return kept


def certain(kept: Readings) -> dict[int, int]:
    """Calls that every reading of the whole has, each with the place where it begins.

    Every passage is covered once: a passage that one call alone can cover makes that call certain.
    """
    covering: list[dict[int, int]] = [{} for _ in kept]
    for here in kept:
        for reading in here:
            for place in range(reading.start, reading.end):
                covering[place].setdefault(reading.call, reading.start)
    return {call: begin for ways in covering if len(ways) == 1 for call, begin in ways.items()}
