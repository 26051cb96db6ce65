"""The rows of a log: the shell that reads it, selects, walks, checks and builds.

Knows the order of these steps; each of their rules lives in its own module.
Law: a row set is a pure function of (position, selection, which rollouts were asked for).

    found = build(open_database("sqlite:///turnlog.db"))
    for row in found.rows:
        print(row.rollout_id, row.call_numbers, row.length, row.trained)
    print(found.refusals.by_reason(), found.digest())
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine

from replay import chain, row, source, walk
from replay.advantage import Score
from replay.call import Payload, Rollout
from replay.chain import Chain, Path, Refusal, Refusals
from replay.row import Row
from replay.selection import NotSelectable, Selected, Selection, select
from replay.source import Position
from store.database import read

Progress = Callable[[int, int], None]
"""Called with the number of rollouts done and of all."""

_TOKENS_AT_ONCE = 8_000_000
"""Tokens of calls read at once: 64 MB with their log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """What a log gives under a selection."""

    rows: tuple[Row, ...]
    """By rollout in the order of their opening; within one by the place of the root, then of the tip."""
    refusals: Refusals
    """Rollouts that give no rows because something does not hold, each with its reason."""
    left_out: Mapping[str, int]
    """Completed calls that the selection does not count, by reason."""
    scores: tuple[Score, ...]
    """Of every rollout that has an outcome, whether it gave rows or not."""
    rollouts: int
    """How many were read."""
    position: Position
    selection: Selection

    def digest(self) -> str:
        """SHA-256 of the rows in hex: equal for equal rows, whichever database holds the log."""
        return row.rows_digest(self.rows)


def build(
    database: Engine,
    selection: Selection | None = None,
    *,
    rollouts: Sequence[str] | None = None,
    position: Position | None = None,
    progress: Progress | None = None,
) -> RowSet:
    """Build the rows of the log.

    Args:
        database: from `store.database.open_database`.
        selection: which calls count; None for `completed`.
        rollouts: ids of the rollouts to build; None for all.
        position: as of when; None for now. The position used is in the result.
        progress: called after each piece of the log.

    Raises UnknownRollout, PositionAhead, and what reading the log raises.
    """
    selection = selection or Selection()
    with read(database) as connection:
        if position is None:
            position = source.reached(connection)
        else:
            source.require_reached(connection, position)
        recorded = source.rollouts(connection, position, rollouts)
        selected = {each.rollout_id: select(selection, each) for each in recorded}
        counted = [answer for answer in selected.values() if isinstance(answer, Selected)]
        paths = walk.paths(recorded, {call_id for answer in counted for call_id in answer.call_ids})
        rows: list[Row] = []
        refused: list[Refusal] = []
        done = 0
        for batch in source.batches(recorded, tokens=_TOKENS_AT_ONCE):
            wanted = {call.call_id for each in batch for path in paths.get(each.rollout_id, ()) for call in path}
            payloads = source.payloads(connection, [each.rollout_id for each in batch], wanted)
            for each in batch:
                chains = _chains(each, selected[each.rollout_id], paths.get(each.rollout_id, ()), payloads)
                if isinstance(chains, Refusal):
                    refused.append(chains)
                else:
                    rows += row.build(each, chains, payloads)
            done += len(batch)
            if progress is not None:
                progress(done, len(recorded))
    return RowSet(
        rows=tuple(rows),
        refusals=Refusals(tuple(refused)),
        left_out=sum((Counter(answer.left_out) for answer in counted), Counter()),
        scores=tuple(
            Score(rollout_id=each.rollout_id, group_id=each.group_id, reward=each.reward)
            for each in recorded
            if each.reward is not None
        ),
        rollouts=len(recorded),
        position=position,
        selection=selection,
    )


def _chains(
    rollout: Rollout, answer: Selected | NotSelectable, paths: Sequence[Path], payloads: Mapping[UUID, Payload]
) -> tuple[Chain, ...] | Refusal:
    if isinstance(answer, NotSelectable):
        detail = f"rollout {rollout.rollout_id}: {answer.detail}"
        return Refusal(rollout_id=rollout.rollout_id, call_id=None, reason=answer.reason, detail=detail)
    return chain.check(rollout, answer.call_ids, paths, payloads)
