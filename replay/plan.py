"""Which rows go to which rank and micro-batch of one training step.

Knows row ids and lengths; does not know tokens, advantages or trainers.
Law: a plan is a pure function of its arguments. The same rows, seed, step, world and budget give the same plan on every
machine and release, and the order in which the rows are given changes nothing.

Rows are packed first-fit-decreasing into packs of at most `token_budget` positions: each row, longest first, goes into
the first pack that has room for it. A row of T tokens takes T - 1: rows are shifted before they are packed. Every rank
gets the same number of packs; what is missing is filled with empty ones, which train nothing. A row longer than the
budget is reported, never cut.

How well the packs are filled is part of a plan, beside what no plan could beat:

>>> planned = plan([Measured("a", 7), Measured("b", 6), Measured("c", 5)], seed=0, step=0, token_budget=10)
>>> planned.ranks, planned.packs, planned.least_packs, planned.fill
(((('a', 'c'), ('b',)),), 2, 2, 0.75)
>>> StepPlan.from_json(planned.as_json()) == planned
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from replay.errors import BadPlan
from store import hashing


class Sized(Protocol):
    """What a plan has to know of a row: `replay.row.Row` is one."""

    @property
    def row_id(self) -> str:
        """Its id."""
        ...

    @property
    def length(self) -> int:
        """Its tokens, T."""
        ...


class Measured(NamedTuple):
    """A row that is known by its length alone."""

    row_id: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """A row that fits no pack of the budget."""

    row_id: str
    length: int
    """Its tokens, T."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One training step: row ids by rank, then by micro-batch, then in their order within the pack."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    seed: int
    step: int
    token_budget: int
    ranks: tuple[tuple[tuple[str, ...], ...], ...]
    positions: int
    """That the rows take, all ranks together."""
    too_long: tuple[TooLong, ...]

    @property
    def world(self) -> int:
        """Data-parallel ranks."""
        return len(self.ranks)

    @property
    def micro_batches(self) -> int:
        """Packs per rank, empty ones included; the same on every rank."""
        return len(self.ranks[0])

    @property
    def packs(self) -> int:
        """Packs of all ranks that hold a row."""
        return sum(bool(micro_batch) for rank in self.ranks for micro_batch in rank)

    @property
    def least_packs(self) -> int:
        """No plan has fewer packs than this: the positions of all rows over the budget, rounded up."""
        return -(-self.positions // self.token_budget)

    @property
    def fill(self) -> float:
        """Positions over the room of the packs that hold a row; 1 when there are none."""
        return self.positions / (self.packs * self.token_budget) if self.packs else 1.0

    def as_json(self) -> dict[str, JsonValue]:
        """Every part, the same for equal plans: to be kept beside what it trained."""
        parts: dict[str, JsonValue] = _PLAN.dump_python(self, mode="json")
        return parts

    @classmethod
    def from_json(cls, value: JsonValue) -> StepPlan:
        """Read what `as_json` wrote. Raises BadPlan for anything else."""
        try:
            planned = _PLAN.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            raise BadPlan(".".join(map(str, first["loc"])), first["msg"].lower()) from error
        if len({len(rank) for rank in planned.ranks}) != 1:
            raise BadPlan("ranks", "they have no equal number of micro-batches")
        return planned

    def digest(self) -> str:
        """SHA-256 in hex: equal digests mean the same plan."""
        return hashing.tagged_digest("plan", hashing.canonical_json(self.as_json())).hex()


_PLAN = TypeAdapter(StepPlan)


def plan(rows: Iterable[Sized], *, seed: int, step: int, world: int = 1, token_budget: int) -> StepPlan:
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
    packs = first_fit(order, fitting, token_budget)
    packs.sort(key=lambda pack: -sum(fitting[row_id] for row_id in pack))  # stable
    return StepPlan(
        seed=seed,
        step=step,
        token_budget=token_budget,
        ranks=_deal(packs, world),
        positions=sum(fitting.values()),
        too_long=too_long,
    )


def _lot(seed: int, step: int, row_id: str) -> bytes:
    """A draw that no library's random generator can change."""
    return hashlib.sha256(f"{seed}/{step}/{row_id}".encode()).digest()


def first_fit(order: Iterable[str], sizes: Mapping[str, int], capacity: int) -> list[tuple[str, ...]]:
    """Put each into the first pack that has room for it; in n log n steps.

    The room that is left is kept in a tree over all packs there could be, each node with the most room below it: the
    first pack with room is found by going down to the left where that suffices.

    >>> first_fit("abcd", {"a": 6, "b": 5, "c": 4, "d": 5}, 10)
    [('a', 'c'), ('b', 'd')]
    """
    order = list(order)
    leaves = 1 << max(0, len(order) - 1).bit_length()
    most = [capacity] * (2 * leaves)  # node n has the children 2 n and 2 n + 1; the leaves come last
    packs: list[list[str]] = []
    for name in order:
        size = sizes[name]
        node = 1
        while node < leaves:
            node = 2 * node if most[2 * node] >= size else 2 * node + 1
        if node - leaves == len(packs):
            packs.append([])
        packs[node - leaves].append(name)
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
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
