"""The rows of a log: the shell that opens it, cuts it into parts and has rows made of each.

Knows which parts there are and who makes them; how, `replay.making` knows.
Law: the rows are a pure function of (position, selection, which rollouts were asked for); how much is held in memory at
once, and how many processes make them, changes nothing.

    found = build(open_database("sqlite:///turnlog.db"))
    for row in found.rows:
        print(row.rollout_id, row.call_numbers, row.length, row.trained)
    print(found.refusals.by_reason(), found.digest())

`build` holds all rows; `stream` holds a few million tokens of a log of any size, and `outlined` none:

    for part in stream(database, selection):
        for row in part.rows: ...

A `Pool` lets several processes make them: `with Pool(4) as pool: stream(database, pool=pool)`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypedDict

import pyarrow as pa
from sqlalchemy import Engine

from replay import row, source
from replay.making import Counts, Made, Request, make, make_apart
from replay.media import MediaSource
from replay.pool import AHEAD, Pool
from replay.reader import open_reader
from replay.row import Block, Row
from replay.selection import Selection
from replay.source import Contents, Position

Progress = Callable[[int, int], None]
"""Called with the number of rollouts done and of all."""

_CALLS_AT_ONCE = 50_000
"""Calls whose narrow columns are held at once: 25 MB."""
_TOKENS_AT_ONCE = 8_000_000
"""Tokens of rows held at once: 72 MB, and as much again while they are read."""


class _Asked(TypedDict):
    rollouts: Sequence[str] | None
    position: Position | None
    archive: str | None
    media: str | None
    pool: Pool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some rows of a log, in their order; or, after the last rows of some rollouts, what was counted of these."""

    rows: tuple[Row, ...]
    counts: Counts | None
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet(Counts):
    """What a log gives under a selection."""

    rows: tuple[Row, ...]
    """By rollout in the order of their opening; within one by the place of the root, then of the tip."""
    position: Position
    selection: Selection

    def digest(self) -> str:
        """SHA-256 of the rows in hex: equal for equal rows, whichever database holds the log."""
        return row.rows_digest(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline(Counts):
    """What a log gives under a selection, without reading a token: damaged tokens are not found out."""

    table: pa.Table
    """One line a row, see `replay.outline.SCHEMA`."""
    position: Position
    selection: Selection


def build(
    database: Engine,
    selection: Selection | None = None,
    *,
    rollouts: Sequence[str] | None = None,
    position: Position | None = None,
    archive: str | None = None,
    media: str | None = None,
    progress: Progress | None = None,
    pool: Pool | None = None,
) -> RowSet:
    """Build all rows of the log, or of some rollouts of it; arguments and errors are those of `stream`."""
    selection = selection or Selection()
    asked: _Asked = {"rollouts": rollouts, "position": position, "archive": archive, "media": media, "pool": pool}
    parts = [*stream(database, selection, progress=progress, **asked)]
    total = Counts.total([part.counts for part in parts if part.counts is not None])
    return RowSet(
        rows=tuple(row for part in parts for row in part.rows),
        refusals=total.refusals,
        left_out=total.left_out,
        scores=total.scores,
        rollouts=total.rollouts,
        position=parts[-1].position,
        selection=selection,
    )


def stream(
    database: Engine,
    selection: Selection | None = None,
    *,
    rollouts: Sequence[str] | None = None,
    position: Position | None = None,
    archive: str | None = None,
    media: str | None = None,
    progress: Progress | None = None,
    tokens: int = _TOKENS_AT_ONCE,
    pool: Pool | None = None,
) -> Iterator[Part]:
    """The rows of the log in their order, in parts of about so many tokens; the last part has counts and no rows.

    Args:
        database: from `store.database.open_database`.
        selection: which calls count; None for `completed`.
        rollouts: ids of the rollouts to build; None for all.
        position: as of when; None for now. The position used is in each part.
        archive: read with the log as one, see `replay.reader.open_reader`.
        media: where images and other media lie; None for where the log's servers put them, `store.media.open_media`.
        progress: called after each part that has counts.
        tokens: held at once, by each process that makes rows; one rollout is never cut.
        pool: processes that make the rows side by side; None for this one alone. The rows are the same.

    Raises UnknownRollout, PositionAhead, and what reading the log raises; WorkerLost when a process of the pool ended.
    """
    asked: _Asked = {"rollouts": rollouts, "position": position, "archive": archive, "media": media, "pool": pool}
    with _making(database, selection or Selection(), tokens=tokens, **asked) as (position, total, made):
        done = 0
        for part, each in made:
            if isinstance(each, Block):
                yield Part(rows=tuple(each.rows(part.rollouts)), counts=None, position=position)
            elif isinstance(each, Counts):
                yield Part(rows=(), counts=each, position=position)
                done += each.rollouts
                if progress is not None:
                    progress(done, total)


def outlined(
    database: Engine,
    selection: Selection | None = None,
    *,
    rollouts: Sequence[str] | None = None,
    position: Position | None = None,
    archive: str | None = None,
    progress: Progress | None = None,
    pool: Pool | None = None,
) -> Outline:
    """What `stream` would give, without reading a token; arguments and errors are its own."""
    selection = selection or Selection()
    kept: list[pa.Table] = []
    counted: list[Counts] = []
    asked: _Asked = {"rollouts": rollouts, "position": position, "archive": archive, "media": None, "pool": pool}
    with _making(database, selection, tokens=None, **asked) as (position, total, made):
        for _, each in made:
            if isinstance(each, pa.Table):
                kept.append(each)
            elif isinstance(each, Counts):
                counted.append(each)
                if progress is not None:
                    progress(sum(one.rollouts for one in counted), total)
    counts = Counts.total(counted)
    return Outline(
        table=pa.concat_tables(kept),
        refusals=counts.refusals,
        left_out=counts.left_out,
        scores=counts.scores,
        rollouts=counts.rollouts,
        position=position,
        selection=selection,
    )


@contextmanager
def _making(
    database: Engine,
    selection: Selection,
    *,
    rollouts: Sequence[str] | None,
    position: Position | None,
    archive: str | None,
    media: str | None,
    pool: Pool | None,
    tokens: int | None,
) -> Generator[tuple[Position, int, Iterator[tuple[Contents, Made]]]]:
    """The position, how many rollouts there are, and what is made of them part by part; each part ends with counts."""
    url = database.url.render_as_string(hide_password=False)
    with open_reader(database, archive) as reader:
        if position is None:
            position = source.reached(reader)
        else:
            source.require_reached(reader, position)
        found = source.contents(reader, position, rollouts)
        at_once = _CALLS_AT_ONCE
        if pool is not None:
            if tokens is not None:
                at_once = max(1, min(at_once, tokens // source.tokens_a_call(reader)))
                # What a process makes while another one has its turn: its blocks wait, none of them for a later part.
                tokens //= 1 + AHEAD
            calls = int(found.calls.sum())
            turns = -(-calls // (at_once * pool.processes))  # as many for each process
            at_once = max(1, -(-calls // (max(1, turns) * pool.processes)))
        request = Request(
            url=url,
            archive=archive,
            media=MediaSource(url, media),
            position=position,
            selection=selection,
            parts=found.cut(calls=at_once),
            tokens=tokens,
        )
        if pool is None:
            making: Sequence[Iterator[Made]] = [make(reader, request)]
        else:
            request = replace(request, snapshot=reader.snapshot)
            shares = (replace(request, parts=request.parts[at :: pool.processes]) for at in range(pool.processes))
            making = pool.run(make_apart, [(share,) for share in shares])
        yield position, len(found.rollouts), _in_turns(request.parts, making)


def _in_turns(parts: Sequence[Contents], making: Sequence[Iterator[Made]]) -> Iterator[tuple[Contents, Made]]:
    """What is made of each part, in their order; they were dealt in turns."""
    for number, part in enumerate(parts):
        for each in making[number % len(making)]:
            yield part, each
            if isinstance(each, Counts):
                break
    for each in making:
        next(each, None)  # its end
