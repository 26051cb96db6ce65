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

from sqlalchemy import Engine

from replay import chain, row, source, walk
from replay.advantage import Score
from replay.call import Rollout
from replay.chain import Refusal, Refusals
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
        chosen: dict[str, Selected] = {}
        refused: list[Refusal] = []
        rows: list[Row] = []
        left_out: Counter[str] = Counter()
        for each in recorded:
            answer = select(selection, each)
            if isinstance(answer, NotSelectable):
                refused.append(_not_selectable(each, answer))
            else:
                chosen[each.rollout_id] = answer
                left_out.update(answer.left_out)
        paths = walk.paths(recorded, {call_id for selected in chosen.values() for call_id in selected.call_ids})
        done = 0
        for batch in source.batches(recorded, tokens=_TOKENS_AT_ONCE):
            on_paths = {call.call_id for each in batch for path in paths.get(each.rollout_id, ()) for call in path}
            payloads = source.payloads(connection, [each.rollout_id for each in batch], on_paths)
            for each in batch:
                if (selected := chosen.get(each.rollout_id)) is not None:
                    checked = chain.check(each, selected.call_ids, paths.get(each.rollout_id, ()), payloads)
                    if isinstance(checked, Refusal):
                        refused.append(checked)
                    else:
                        rows.extend(row.build(each, checked, payloads))
            done += len(batch)
            if progress is not None:
                progress(done, len(recorded))
    return RowSet(
        rows=tuple(rows),
        refusals=Refusals(tuple(refused)),
        left_out=dict(left_out),
        scores=tuple(
            Score(rollout_id=each.rollout_id, group_id=each.group_id, reward=each.reward)
            for each in recorded
            if each.reward is not None
        ),
        rollouts=len(recorded),
        position=position,
        selection=selection,
    )


def _not_selectable(rollout: Rollout, why: NotSelectable) -> Refusal:
    return Refusal(
        rollout_id=rollout.rollout_id,
        call_id=None,
        reason=why.reason,
        detail=f"rollout {rollout.rollout_id}: {why.detail}",
    )
