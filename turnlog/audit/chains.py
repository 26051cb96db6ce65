"""Roots, depths, chains and trained rows, found by the recursive query and by nothing else.

Knows the recursive query and how a row is laid out; does not know training. Law: a row that trained is put together
again from its verified calls, byte for byte as replay gives it today.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from replay import walk
from replay.chain import check as checked_chains
from replay.piece import CALLS, Piece, Rollout
from replay.row import Row
from replay.walk import Paths
from store import hashing
from store.events import CallCompleted, RowTrained, logprob_array, token_array
from turnlog.audit.events import name
from turnlog.audit.findings import Findings
from turnlog.audit.source import RolloutEvents


def check(batch: Sequence[RolloutEvents], findings: Findings, engine: duckdb.DuckDBPyConnection) -> None:
    """Root, depth and rows of every call of some rollouts."""
    piece = _piece(batch)
    if not len(piece.calls):
        return
    every = np.ones(len(piece.calls), np.bool_)
    paths = walk.paths(piece, every, engine)
    _roots(batch, piece, paths, findings)
    _trains_once(piece, paths, findings)


def _piece(batch: Sequence[RolloutEvents]) -> Piece:
    """The calls as replay reads them."""
    lines: dict[str, list[object]] = {column: [] for column in CALLS.names}
    for rollout in batch:
        for sequence, call in rollout.calls:
            spans = [span.__dict__ for span in call.policy_spans]
            derived: dict[str, object] = {
                "sequence": sequence,
                "digest": b"",  # only row ids are made of it, and no row is made here
                "policy_spans": hashing.canonical_json([{**each} for each in spans]).decode(),
                "hints": hashing.canonical_json(call.hints).decode(),
            }
            for column, values in lines.items():
                value = derived[column] if column in derived else getattr(call, column)
                values.append(value.bytes if isinstance(value, UUID) else value)
    rollouts = [
        Rollout(
            rollout_id=rollout.rollout_id,
            group_id=None,
            task=None,
            harness=None,
            opened_at=0,
            reward=None,
            accepted=None,
            output=None,
        )
        for rollout in batch
    ]
    return Piece.of(rollouts, pa.table(lines, schema=CALLS))


def _roots(batch: Sequence[RolloutEvents], piece: Piece, paths: Paths, findings: Findings) -> None:
    """Stored root and depth against those of the paths; a call that no path reaches stands in a circle of links."""
    calls = [(rollout.rollout_id, call) for rollout in batch for _, call in rollout.calls]
    depth = np.full(len(calls), -1, np.int64)
    root = np.full(len(calls), -1, np.int64)
    line = np.arange(len(paths.call))
    path = np.repeat(np.arange(len(paths.start) - 1), np.diff(paths.start))
    depth[paths.call] = line - paths.start[path]
    root[paths.call] = paths.top[path]
    for at, (rollout_id, call) in enumerate(calls):
        findings.checked["root"] += 1
        if depth[at] < 0:
            findings.differs("root", rollout_id, name(call), stored=call.parent_id, derived="parent links in a circle")
            continue
        found = piece.call_id(int(root[at]))
        if (call.root_id, call.depth) != (found, int(depth[at])):
            findings.differs(
                "root",
                rollout_id,
                name(call),
                stored=f"depth {call.depth} of root {call.root_id}",
                derived=f"depth {depth[at]} of root {found}",
            )


def _trains_once(piece: Piece, paths: Paths, findings: Findings) -> None:
    """Each call trains in exactly one of the rows that all calls give."""
    chains, refused = checked_chains(piece, np.ones(len(piece.calls), np.bool_), paths)
    times = np.zeros(len(piece.calls), np.int64)
    np.add.at(times, chains.call, chains.trains)
    out = {refusal.rollout_id for refusal in refused}
    for at in np.flatnonzero(times != 1).tolist():
        rollout_id = piece.rollouts[piece.rollout[at]].rollout_id
        if rollout_id not in out:
            findings.differs(
                "mask",
                rollout_id,
                f"call_completed {piece.call_id(at)}",
                stored=f"trains {times[at]} times",
                derived="once",
            )
    for refusal in refused:
        if refusal.reason == "media_not_captured":
            findings.note("media_not_captured", f"rollout {refusal.rollout_id}: {refusal.detail}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rebuilt:
    """The arrays of a row, put together from its calls."""

    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.bool_]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    policy_versions: npt.NDArray[np.int64]  # [T]


def rebuild(path: Sequence[CallCompleted], carried: int) -> Rebuilt:
    """The row of these calls, root first, of which the first `carried` train in an earlier row."""
    tokens, mask, logprobs, versions = [], [], [], []
    for place, call in enumerate(path):
        before = call.prompt_len - call.prev_len
        tokens.append(token_array(call.token_ids))
        mask += [np.zeros(before, np.bool_), np.full(call.sampled_len, place >= carried)]
        logprobs += [np.zeros(before, np.float32), logprob_array(call.logprobs)]
        versions.append(np.full(before, -1, np.int64))
        versions += [np.full(span.end - span.start, span.policy_version, np.int64) for span in call.policy_spans]
    return Rebuilt(
        token_ids=np.concatenate(tokens),
        loss_mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        policy_versions=np.concatenate(versions),
    )


def trained(rollout: RolloutEvents, today: Mapping[str, Row], findings: Findings) -> None:
    """Each row that trained: its id follows from its calls, and its arrays are those that replay gives.

    Args:
        rollout: with its events.
        today: rows that replay gives at the same position under the rows' selections, by id.
        findings: to add to.
    """
    calls = {call.call_id: call for _, call in rollout.calls}
    for row in rollout.trained:
        findings.checked["trained_row"] += 1
        event = f"row_trained {row.run}/{row.step}/{row.row_id}"
        path = _path(calls, row.tip_call_id)
        if path is None:
            findings.differs(
                "trained_row",
                rollout.rollout_id,
                event,
                stored=f"tip {row.tip_call_id}",
                derived="no whole chain to it",
            )
            continue
        carried = next((each for each in range(len(path)) if _row_id(row, path, each) == row.row_id), None)
        if carried is None:
            findings.differs(
                "trained_row",
                rollout.rollout_id,
                event,
                stored=row.row_id,
                derived=f"{_row_id(row, path, 0)} from the {len(path)} calls to its tip",
            )
            continue
        if (again := today.get(row.row_id)) is not None:
            _compare(rollout.rollout_id, event, rebuild(path, carried), again, findings)


def _path(calls: Mapping[UUID, CallCompleted], tip: UUID) -> list[CallCompleted] | None:
    """The calls from a root to a tip; None when one is missing."""
    path: list[CallCompleted] = []
    above: UUID | None = tip
    while above is not None:
        if above not in calls or len(path) > len(calls):
            return None
        path.append(calls[above])
        above = calls[above].parent_id
    return path[::-1]


def _row_id(row: RowTrained, path: Iterable[CallCompleted], carried: int) -> str:
    """As `replay.row.row_ids` has it, from digests that were derived and not read."""
    digests = b"".join(call.digest() for call in path)
    return hashing.tagged_digest("row", row.rollout_id.encode(), digests, carried.to_bytes(8, "big")).hex()[:32]


def _compare(rollout_id: str, event: str, rebuilt: Rebuilt, again: Row, findings: Findings) -> None:
    for part in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
        here, there = getattr(rebuilt, part), getattr(again, part)
        if here.dtype != there.dtype or here.tobytes() != there.tobytes():
            findings.differs("trained_row", rollout_id, f"{event}: {part}", stored=_short(there), derived=_short(here))


def _short(array: npt.NDArray[np.generic]) -> str:
    return hashing.tagged_digest("array", array.tobytes()).hex()[:16]
