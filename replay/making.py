"""One part of a log into rows: read, select, walk, check, fill.

Knows the order of these steps; each of their rules lives in its own module, and `replay.rowset` says which parts there
are. Law: what a part gives is a pure function of the request, whichever process makes it and whatever it made before.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import duckdb
import pyarrow as pa

from replay import chain, fill, source, walk
from replay.advantage import Score
from replay.chain import Chains, Refusal, Refusals
from replay.media import MediaSource
from replay.outline import outline
from replay.piece import Piece
from replay.reader import Reader, open_reader_apart
from replay.row import Block
from replay.selection import Selected, Selection, select
from replay.source import Contents, Position


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

    @classmethod
    def total(cls, parts: Sequence[Counts]) -> Counts:
        """Of several parts together."""
        return cls(
            refusals=Refusals(tuple(refusal for part in parts for refusal in part.refusals.rollouts)),
            left_out=sum((Counter(part.left_out) for part in parts), Counter[str]()),
            scores=tuple(score for part in parts for score in part.scores),
            rollouts=sum(part.rollouts for part in parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Rows to make; a process that gets it needs nothing else."""

    url: str
    """Of the log."""
    archive: str | None
    snapshot: str | None = None
    """Of the reader that found the parts."""
    media: MediaSource
    position: Position
    selection: Selection
    parts: Sequence[Contents]
    tokens: int | None
    """Of rows held at once; None for outlines, which hold none."""


Made: TypeAlias = Block | pa.Table | Counts


def make_apart(request: Request) -> Iterator[Made]:
    """What `make` gives, by a process of a pool, which has nothing of the log open."""
    with open_reader_apart(request.url, request.archive, request.snapshot) as reader:
        yield from make(reader, request)


def make(reader: Reader, request: Request) -> Iterator[Made]:
    """Of each part its rows in blocks, or its outline as one table; and after these its counts."""
    if reader.sealed is not None and request.tokens is not None:
        reader.sealed.expect(file for part in request.parts for file in part.file.tolist())
    with _engine(os.getpid()).cursor() as engine:
        for part in request.parts:
            piece = source.piece(reader, part, request.position, answers=request.selection.reads_answers)
            selected = select(request.selection, piece)
            chains, refused = _chains(piece, selected, engine)
            if request.tokens is None:
                yield outline([chains])
            else:
                for each in fill.cut(chains, tokens=request.tokens):
                    stored, proven = source.payloads(reader, fill.sequences(each)), source.proven(reader, each)
                    filled = fill.fill(each, stored, request.media, proven)
                    refused += filled.refused
                    yield Block.of(filled)
            yield _counts(piece, selected, refused)


@cache
def _engine(process: int) -> duckdb.DuckDBPyConnection:  # noqa: ARG001  # each process has its own, also after a fork
    """For the recursive query; kept, since to start one takes as long as to walk a thousand calls.

    One thread: the query has a round for each call of a chain, in which threads would wait for each other.
    """
    return duckdb.connect(":memory:", config={"threads": 1})


def _chains(piece: Piece, selected: Selected, engine: duckdb.DuckDBPyConnection) -> tuple[Chains, list[Refusal]]:
    """The checked chains of what is selected, and the rollouts that have none for a reason."""
    chains, refused = chain.check(piece, selected.counts, walk.paths(piece, selected.counts, engine))
    for place, answer in selected.not_selectable.items():
        rollout_id = piece.rollouts[place].rollout_id
        detail = f"rollout {rollout_id}: {answer.detail}"
        refused.append(Refusal(rollout_id=rollout_id, call_id=None, reason=answer.reason, detail=detail))
    return chains, refused


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
