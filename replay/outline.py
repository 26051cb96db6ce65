"""Rows without their tokens: what a log would give under a selection, cheaply, for choosing what to train on.

Knows the narrow columns of chains; does not read tokens, so it does not find out that tokens were damaged.
Law: an outline is a pure function of (position, selection, which rollouts were asked for), and agrees with the rows
that are built of it: one line a row, in row order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from replay.chain import Chains
from replay.row import row_ids

SCHEMA = pa.schema(
    {
        "row_id": pa.string(),
        "rollout_id": pa.string(),
        "group_id": pa.string(),
        "reward": pa.float64(),
        "task": pa.string(),
        "harness": pa.string(),
        "opened_at": pa.int64(),  # Unix time in microseconds
        "completed_at": pa.int64(),  # of the tip
        "calls": pa.list_(pa.int64()),  # sequences, root to tip
        "call_numbers": pa.list_(pa.int32()),
        "carried": pa.int32(),  # leading calls that train in an earlier row
        "length": pa.int64(),  # tokens, T
        "trained": pa.int64(),  # tokens that train in this row
        "oldest": pa.int64(),  # policy versions of the trained tokens
        "newest": pa.int64(),
    }
)


def outline(parts: Iterable[Chains]) -> pa.Table:
    """The lines of the rows of these chains."""
    return pa.Table.from_batches([_lines(chains) for chains in parts], SCHEMA)


def _lines(chains: Chains) -> pa.RecordBatch:
    piece = chains.piece
    rollouts = [piece.rollouts[place] for place in chains.rollout.tolist()]
    tips = chains.call[chains.start[1:] - 1]
    edges = pa.array(chains.start, pa.int32())
    oldest, newest = _versions(chains)
    trained = np.where(chains.trains, piece.ints("sampled_len")[chains.call], 0)
    columns = {
        "row_id": row_ids(chains),
        "rollout_id": [each.rollout_id for each in rollouts],
        "group_id": [each.group_id for each in rollouts],
        "reward": [each.reward for each in rollouts],
        "task": [each.task for each in rollouts],
        "harness": [each.harness for each in rollouts],
        "opened_at": [each.opened_at for each in rollouts],
        "completed_at": piece.ints("completed_at")[tips],
        "calls": pa.ListArray.from_arrays(edges, pa.array(piece.ints("sequence")[chains.call])),
        "call_numbers": pa.ListArray.from_arrays(edges, pa.array(piece.number[chains.call], pa.int32())),
        "carried": chains.carried,
        "length": chains.length,
        "trained": np.add.reduceat(trained, chains.start[:-1]) if len(trained) else trained,
        "oldest": oldest,
        "newest": newest,
    }
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def _versions(chains: Chains) -> tuple[np.ndarray, np.ndarray]:
    """[R] oldest and [R] newest policy version of the tokens that train; every row trains one."""
    piece, spans = chains.piece, chains.piece.spans
    low = np.full(len(piece.calls), np.iinfo(np.int64).max)
    high = np.full(len(piece.calls), np.iinfo(np.int64).min)
    some = spans.end > spans.start
    np.minimum.at(low, spans.at[some], spans.version[some])
    np.maximum.at(high, spans.at[some], spans.version[some])
    if not len(chains.call):
        return low[:0], high[:0]
    oldest = np.where(chains.trains, low[chains.call], np.iinfo(np.int64).max)
    newest = np.where(chains.trains, high[chains.call], np.iinfo(np.int64).min)
    return np.minimum.reduceat(oldest, chains.start[:-1]), np.maximum.reduceat(newest, chains.start[:-1])
