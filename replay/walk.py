"""Find the paths from selected calls to their roots: the recursive query `chain`, run by DuckDB over Arrow.

Knows which columns the query reads and how its result becomes paths; does not know what makes a path a chain.
Law: a path is placed by the position that the query computes, never by the order in which its lines come.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa

from replay.piece import Flags, Ints, Piece
from replay.queries import query


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paths:
    """Paths of calls, topmost first, end to end: path p has the lines `start[p]` to `start[p + 1]`.

    There is one for each selected call that no selected call continues, up to where its parent links end, in the order
    of (topmost call, last call).
    """

    call: Ints  # [L]
    start: Ints  # [P + 1]

    @property
    def tip(self) -> Ints:
        """[P] the last call of each path."""
        return self.call[self.start[1:] - 1]

    @property
    def top(self) -> Ints:
        """[P] the topmost call of each path."""
        return self.call[self.start[:-1]]


def paths(piece: Piece, counts: Flags, engine: duckdb.DuckDBPyConnection | None = None) -> Paths:
    """The paths over the calls that count.

    Args:
        piece: of the log.
        counts: which of its calls are selected, [N].
        engine: to use again; a new one takes longer to start than a small piece to walk.
    """
    model_call = piece.calls.select(["call_id", "parent_id"])
    model_call = model_call.append_column("call", pa.array(np.arange(len(counts))))
    model_call = model_call.append_column("rollout", pa.array(piece.rollout))
    longest = int(np.diff(piece.first).max(initial=0))  # ends a walk in a circle
    with nullcontext(engine) if engine is not None else duckdb.connect(":memory:") as running:
        running.register("model_call", model_call)
        running.register("selected", pa.table({"call": pa.array(np.flatnonzero(counts))}))
        lines = running.sql(query("chain"), params={"max_depth": longest}).to_arrow_table()
    tip, position, call = (lines[name].to_numpy() for name in ("tip", "position", "call"))
    top = np.zeros(len(counts), np.int64)
    top[tip[position == 0]] = call[position == 0]
    order = np.lexsort((position, tip, top[tip]))
    start = np.flatnonzero(position[order] == 0)
    return Paths(call=call[order], start=np.append(start, len(call)))
