"""Which rows go to which rank and micro-batch of one training step.

Knows row ids and lengths; does not know tokens, advantages or trainers.
Law: a plan is a pure function of its arguments. The same rows, seed, step, world and budget give the same plan on every
machine and release, and the order in which the rows are given changes nothing.

Rows are packed first-fit-decreasing into packs of at most `token_budget` positions. A row of T tokens takes T - 1: rows
are shifted before they are packed. Every rank gets the same number of packs; what is missing is filled with empty ones,
which train nothing. A row longer than the budget is reported, never cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from replay.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """A row that fits no pack of the budget."""

    row_id: str
    length: int
    """Its tokens, T."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One training step: row ids by rank, then by micro-batch, then in their order within the pack."""

    seed: int
    step: int
    token_budget: int
    ranks: tuple[tuple[tuple[str, ...], ...], ...]
    too_long: tuple[TooLong, ...]

    @property
    def world(self) -> int:
        """Data-parallel ranks."""
        return len(self.ranks)

    @property
    def micro_batches(self) -> int:
        """Packs per rank, empty ones included; the same on every rank."""
        return len(self.ranks[0])


def plan(rows: Iterable[Row], *, seed: int, step: int, world: int = 1, token_budget: int) -> StepPlan:
    """Plan one step over all of the rows.

    Args:
        rows: all rows of the step, for all ranks.
        seed: of the run.
        step: number of the step in its run; with the seed it breaks ties between rows of one length.
        world: data-parallel size.
        token_budget: most positions of one pack.
    """
    if world < 1 or token_budget < 1:
        raise ValueError(f"world {world} and token budget {token_budget} must both be at least 1")
    lengths = {row.row_id: row.length for row in rows}
    too_long = tuple(
        TooLong(row_id=row_id, length=length) for row_id, length in sorted(lengths.items()) if length - 1 > token_budget
    )
    fitting = {row_id: length - 1 for row_id, length in lengths.items() if length - 1 <= token_budget}
    order = sorted(fitting, key=lambda row_id: (-fitting[row_id], _lot(seed, step, row_id)))
    packs = _first_fit(order, fitting, token_budget)
    packs.sort(key=lambda pack: -sum(fitting[row_id] for row_id in pack))  # stable
    return StepPlan(seed=seed, step=step, token_budget=token_budget, ranks=_deal(packs, world), too_long=too_long)


def _lot(seed: int, step: int, row_id: str) -> bytes:
    """A draw that no library's random generator can change."""
    return hashlib.sha256(f"{seed}/{step}/{row_id}".encode()).digest()


def _first_fit(order: Iterable[str], sizes: dict[str, int], capacity: int) -> list[tuple[str, ...]]:
    packs: list[list[str]] = []
    room: list[int] = []
    for row_id in order:
        size = sizes[row_id]
        place = next((index for index, left in enumerate(room) if left >= size), None)
        if place is None:
            packs.append([row_id])
            room.append(capacity - size)
        else:
            packs[place].append(row_id)
            room[place] -= size
    return [tuple(pack) for pack in packs]


def _deal(packs: list[tuple[str, ...]], world: int) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Deal packs, fullest first, forwards and backwards in turn, so that ranks get equal work.

    >>> _deal([("a",), ("b",), ("c",)], 2)
    ((('a',), ()), (('b',), ('c',)))
    """
    rounds = max(1, -(-len(packs) // world))
    dealt = [packs[start : start + world] for start in range(0, rounds * world, world)]
    padded = [pack + [()] * (world - len(pack)) for pack in dealt]
    snake = [pack if index % 2 == 0 else pack[::-1] for index, pack in enumerate(padded)]
    return tuple(tuple(pack[rank] for pack in snake) for rank in range(world))
