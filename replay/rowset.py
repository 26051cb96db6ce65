"""The rows of a log: the shell that reads it, selects, walks, checks and fills.

Knows the order of these steps; each of their rules lives in its own module.
Law: the rows are a pure function of (position, selection, which rollouts were asked for); how much is held in memory at
once changes nothing.

    found = build(open_database("sqlite:///turnlog.db"))
    for row in found.rows:
        print(row.rollout_id, row.call_numbers, row.length, row.trained)
    print(found.refusals.by_reason(), found.digest())

`build` holds all rows; `stream` holds a few million tokens of a log of any size, and `outlined` none:

    for part in stream(database, selection):
        for row in part.rows: ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import duckdb
import pyarrow as pa
from sqlalchemy import Engine

from replay import chain, fill, row, source, walk
from replay.advantage import Score
from replay.chain import Chains, Refusal, Refusals
from replay.media import MediaSource
from replay.outline import outline
from replay.piece import Piece
from replay.reader import Reader, open_reader
from replay.row import Row
from replay.selection import Selected, Selection, select
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a log, or a part of it, gives under a selection besides rows."""

    refusals: Refusals
    """Rollouts that give no rows because something does not hold, each with its reason."""
    left_out: Mapping[str, int]
    """Completed calls that the selection does not count, by reason."""
    scores: tuple[Score, ...]
    """Of every rollout that has an outcome, whether it gave rows or not."""
    rollouts: int
    """How many were read."""


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
) -> RowSet:
    """Build all rows of the log, or of some rollouts of it; arguments and errors are those of `stream`."""
    selection = selection or Selection()
    asked: _Asked = {"rollouts": rollouts, "position": position, "archive": archive, "media": media}
    parts = [*stream(database, selection, progress=progress, **asked)]
    total = _total([part.counts for part in parts if part.counts is not None])
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
        tokens: held at once; one rollout is never cut.

    Raises UnknownRollout, PositionAhead, and what reading the log raises.
    """
    held = MediaSource(database.url.render_as_string(hide_password=False), media)
    with open_reader(database, archive) as reader:
        position = _position(reader, position)
        found = source.contents(reader, position, rollouts)
        done = 0
        for piece, selected, chains, refused in _chains(reader, found, position, selection or Selection()):
            for each in fill.cut(chains, tokens=tokens):
                filled = fill.fill(each, source.payloads(reader, fill.sequences(each)), held)
                refused += filled.refused
                yield Part(rows=tuple(row.rows(filled)), counts=None, position=position)
            yield Part(rows=(), counts=_counts(piece, selected, refused), position=position)
            done += len(piece.rollouts)
            if progress is not None:
                progress(done, len(found.rollouts))


def outlined(
    database: Engine,
    selection: Selection | None = None,
    *,
    rollouts: Sequence[str] | None = None,
    position: Position | None = None,
    archive: str | None = None,
    progress: Progress | None = None,
) -> Outline:
    """What `stream` would give, without reading a token; arguments and errors are its own."""
    selection = selection or Selection()
    kept: list[pa.Table] = []
    counted: list[Counts] = []
    with open_reader(database, archive) as reader:
        position = _position(reader, position)
        found = source.contents(reader, position, rollouts)
        for piece, selected, chains, refused in _chains(reader, found, position, selection):
            kept.append(outline([chains]))
            counted.append(_counts(piece, selected, refused))
            if progress is not None:
                progress(sum(each.rollouts for each in counted), len(found.rollouts))
    total = _total(counted)
    return Outline(
        table=pa.concat_tables(kept) if kept else outline([]),
        refusals=total.refusals,
        left_out=total.left_out,
        scores=total.scores,
        rollouts=total.rollouts,
        position=position,
        selection=selection,
    )


def _position(reader: Reader, position: Position | None) -> Position:
    if position is None:
        return source.reached(reader)
    source.require_reached(reader, position)
    return position


def _chains(
    reader: Reader, found: Contents, position: Position, selection: Selection
) -> Iterator[tuple[Piece, Selected, Chains, list[Refusal]]]:
    """Each piece of the log, what is selected of it, its checked chains and the rollouts refused so far."""
    answers = selection.reads_answers
    with duckdb.connect(":memory:") as engine:
        for piece in source.pieces(reader, found, position, calls=_CALLS_AT_ONCE, answers=answers):
            selected = select(selection, piece)
            chains, refused = chain.check(piece, selected.counts, walk.paths(piece, selected.counts, engine))
            for place, answer in selected.not_selectable.items():
                rollout_id = piece.rollouts[place].rollout_id
                detail = f"rollout {rollout_id}: {answer.detail}"
                refused.append(Refusal(rollout_id=rollout_id, call_id=None, reason=answer.reason, detail=detail))
            yield piece, selected, chains, refused


def _counts(piece: Piece, selected: Selected, refused: Sequence[Refusal]) -> Counts:
    place = {rollout.rollout_id: place for place, rollout in enumerate(piece.rollouts)}
    return Counts(
        refusals=Refusals(tuple(sorted(refused, key=lambda refusal: place[refusal.rollout_id]))),
        left_out=selected.left_out,
        scores=tuple(
            Score(rollout_id=each.rollout_id, group_id=each.group_id, reward=each.reward)
            for each in piece.rollouts
            if each.reward is not None
        ),
        rollouts=len(piece.rollouts),
    )


def _total(parts: Sequence[Counts]) -> Counts:
    return Counts(
        refusals=Refusals(tuple(refusal for part in parts for refusal in part.refusals.rollouts)),
        left_out=sum((Counter(part.left_out) for part in parts), Counter[str]()),
        scores=tuple(score for part in parts for score in part.scores),
        rollouts=sum(part.rollouts for part in parts),
    )
