"""Find the paths from selected calls to their roots: the recursive query `chain`, run by DuckDB over Arrow.

Knows which columns the query reads and how its result becomes paths; does not know what makes a path a chain.
Law: a path is placed by the position that the query computes, never by the order in which its lines come.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise
from uuid import UUID

import duckdb
import numpy as np
import pyarrow as pa

from replay.call import Rollout
from replay.chain import Path
from replay.queries import query

_ID = pa.binary(16)


def paths(rollouts: Sequence[Rollout], selected: Set[UUID]) -> dict[str, list[Path]]:
    """By rollout id, one path for each selected call that no selected call continues."""
    calls = [call for rollout in rollouts for call in rollout.calls]
    numbers = range(len(calls))
    model_call = pa.table(
        {
            "call": pa.array(numbers, pa.int32()),
            "rollout": pa.array([place for place, rollout in enumerate(rollouts) for _ in rollout.calls], pa.int32()),
            "call_id": pa.array([call.call_id.bytes for call in calls], _ID),
            "parent_id": pa.array([call.parent_id and call.parent_id.bytes for call in calls], _ID),
        }
    )
    counted = pa.table({"call": pa.array([n for n in numbers if calls[n].call_id in selected], pa.int32())})
    with duckdb.connect(":memory:") as engine:
        engine.register("model_call", model_call)
        engine.register("selected", counted)
        longest = max((len(rollout.calls) for rollout in rollouts), default=0)  # ends a walk in a circle
        lines = engine.sql(query("chain"), params={"max_depth": longest}).to_arrow_table()
    tip, position, call = (lines[name].to_numpy() for name in ("tip", "position", "call"))
    order = np.lexsort((position, tip))
    starts = np.flatnonzero(position[order] == 0).tolist()
    found: dict[str, list[Path]] = {}
    placed = call[order].tolist()
    for start, end in pairwise([*starts, len(placed)]):
        path = [calls[index] for index in placed[start:end]]
        found.setdefault(path[-1].rollout_id, []).append(path)
    return found
