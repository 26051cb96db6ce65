"""What a stream of rows gave, counted as it passes.

Knows parts and their counts; does not know what becomes of the rows, and holds none of them.
Law: the count and the digest are those of the rows, however the stream is cut into parts.

    found = tally(stream(database, selection), selection)
    print(found.rows, found.trained, found.refusals.by_reason(), found.sha256)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from replay.chain import Refusal, Refusals
from replay.row import Row, rows_digest
from replay.rowset import Part
from replay.selection import Selection
from replay.source import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A row set without its rows."""

    rollouts: int
    rows: int
    tokens: int
    trained: int
    refusals: Refusals
    left_out: Mapping[str, int]
    position: Position
    selection: Selection
    sha256: str
    """Of the rows: `replay.row.rows_digest`."""


def tally(parts: Iterable[Part], selection: Selection) -> Tally:
    """Count all of a stream of `replay.rowset.stream` under this selection."""
    sizes, left_out = Counter[str](), Counter[str]()
    refused: list[Refusal] = []
    position: Position | None = None

    def passing() -> Iterator[Row]:
        nonlocal position
        for part in parts:
            position = part.position
            if part.counts is not None:
                sizes["rollouts"] += part.counts.rollouts
                refused.extend(part.counts.refusals.rollouts)
                left_out.update(part.counts.left_out)
            for row in part.rows:
                sizes["rows"] += 1
                sizes["tokens"] += row.length
                sizes["trained"] += row.trained
                yield row

    sha256 = rows_digest(passing())
    if position is None:
        raise ValueError("a stream without a part says no position: pass what `replay.rowset.stream` gives")
    return Tally(
        rollouts=sizes["rollouts"],
        rows=sizes["rows"],
        tokens=sizes["tokens"],
        trained=sizes["trained"],
        refusals=Refusals(tuple(refused)),
        left_out=left_out,
        position=position,
        selection=selection,
        sha256=sha256,
    )
