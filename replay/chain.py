"""Paths of recorded calls in, checked chains and the reason of each refusal out.

Knows what must hold for a chain before its tokens are read; does not know how its path was found, nor rows. What must
hold for the tokens, `replay.fill` checks as it reads them.
Law: one bad chain refuses its whole rollout, with one named reason; other rollouts go on (design §10.4).

Checked: the path starts at a root and every call on it is selected; depths, roots and lengths agree with the parent
links; every sampled token has one policy version; no call has media that the log does not hold, or holds at another
place; and every selected call lies on a path, and every chain trains at least one token that no earlier chain trains.

A call that two chains share trains in the first one: chains are ordered by the place of their root in the rollout,
then by the place of their last call. Calls 1 <- 2 and 1 <- 3 give chains (1, 2) and (1, 3), and 1 trains with 2 only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from replay.piece import Flags, Ints, Piece, flags
from replay.walk import Paths
from store import hashing


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a rollout gives no rows."""

    rollout_id: str
    call_id: UUID | None
    """The first call that does not hold; None when the reason is the rollout's."""
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Refusals:
    """Every refused rollout.

    >>> why = Refusal(rollout_id="r", call_id=None, reason="nothing_declared", detail="...")
    >>> Refusals((why,)).by_reason()
    {'nothing_declared': 1}
    """

    rollouts: tuple[Refusal, ...]

    def by_reason(self) -> dict[str, int]:
        """How many rollouts each reason refused, most frequent first."""
        return dict(Counter(refusal.reason for refusal in self.rollouts).most_common())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """The checked chains of a piece in the order of their rows: chain r has the lines `start[r]` to `start[r + 1]`."""

    piece: Piece
    call: Ints  # [L]
    """Places of calls in the piece, each chain from its root to its tip."""
    start: Ints  # [R + 1]
    carried: Ints  # [R]
    """How many calls at the head of the chain train in an earlier one."""

    @property
    def rollout(self) -> npt.NDArray[np.int32]:
        """[R] the place of each chain's rollout in the piece."""
        return self.piece.rollout[self.call[self.start[:-1]]]

    @property
    def length(self) -> Ints:
        """[R] tokens of each chain."""
        return self.piece.chain_len[self.call[self.start[1:] - 1]]

    @property
    def trains(self) -> Flags:
        """[L] whether the call of this line trains in this chain."""
        chain = np.repeat(np.arange(len(self.carried)), np.diff(self.start))
        return np.arange(len(self.call)) - self.start[chain] >= self.carried[chain]

    def only(self, kept: Flags) -> Self:
        """The chains of which `kept`, [R], is true."""
        sizes = np.diff(self.start)
        return type(self)(
            piece=self.piece,
            call=self.call[np.repeat(kept, sizes)],
            start=np.append(0, np.cumsum(sizes[kept])),
            carried=self.carried[kept],
        )


def check(piece: Piece, counts: Flags, paths: Paths) -> tuple[Chains, list[Refusal]]:
    """The chains of every rollout in which all holds, and the first reason for each of the others."""
    line = np.arange(len(paths.call))
    path = np.repeat(np.arange(len(paths.start) - 1), np.diff(paths.start))
    position = line - paths.start[path]
    first_line = np.zeros(len(counts), np.int64)
    first_line[paths.call[::-1]] = line[::-1]
    fresh = first_line[paths.call] == line  # a call trains where it comes first
    faults = _faults(piece, counts, paths.call, position)
    trained = np.zeros(len(paths.start) - 1, np.int64)
    np.add.at(trained, path, np.where(fresh, piece.ints("sampled_len")[paths.call], 0))
    untrained = paths.start[1:][trained == 0] - 1
    faults[untrained] = np.where(faults[untrained], faults[untrained], len(_WHY) - 1)
    refused: dict[int, Refusal] = {}
    for at in np.flatnonzero(faults).tolist():
        call = int(paths.call[at])
        if (place := int(piece.rollout[call])) not in refused:
            reason, detail = _WHY[int(faults[at])]
            facts = _facts(piece, call, int(paths.top[path[at]]), int(paths.call[at - 1]) if position[at] else None)
            refused[place] = refusal(piece, call, reason, detail.format(**facts, position=position[at]))
    walked = np.zeros(len(counts), np.bool_)
    walked[paths.call] = True
    for call in np.flatnonzero(counts & ~walked).tolist():
        place = int(piece.rollout[call])
        if place not in refused:
            refused[place] = refusal(piece, call, *_CYCLE)
    chains = Chains(
        piece=piece,
        call=paths.call,
        start=paths.start,
        carried=np.bincount(path[~fresh], minlength=len(paths.start) - 1),
    )
    if refused:
        chains = chains.only(~np.isin(chains.rollout, [*refused]))
    return chains, [refused[place] for place in sorted(refused)]


def refusal(piece: Piece, call: int, reason: str, detail: str) -> Refusal:
    """What is wrong with one call."""
    call_id = piece.call_id(call)
    return Refusal(
        rollout_id=piece.rollouts[piece.rollout[call]].rollout_id,
        call_id=call_id,
        reason=reason,
        detail=f"call {piece.number[call]} ({call_id}): {detail}",
    )


_CYCLE = ("parent_cycle", "its parent links run in a circle")
_WHY: Sequence[tuple[str, str]] = (
    ("", ""),
    _CYCLE,
    ("parent_missing", "its parent {parent} is not in the log of its rollout"),
    ("empty_prompt", "it is a root without a prompt, so nothing predicts its first token"),
    ("parent_not_selected", "the selection leaves it out but counts a call that continues it"),
    ("root_mismatch", "it says depth {depth} of root {root}, its links say depth {position} of {top}"),
    (
        "length_mismatch",
        "its prompt of {prompt_len} tokens starts with {prev_len} of its parent, which has {parent_len}",
    ),
    ("media_not_captured", "its prompt has {media_count} media, and the log does not hold each of them"),
    ("media_misplaced", "its media do not lie in order in what it adds to the prompt"),
    ("hash_version", "its hashes have version {hash_version}, this release derives up to {this_version}"),
    ("policy_spans", "its policy spans do not cover its {sampled_len} sampled tokens in order"),
    ("nothing_trained", "no token of its chain is trained: sampled none of its own"),
)
"""Reasons by number, in the order in which they are looked for."""


def _faults(piece: Piece, counts: Flags, call: Ints, position: Ints) -> Ints:
    """[L] number of the first reason why a line does not hold, 0 when all is well."""
    top = position == 0
    column = {
        name: piece.ints(name)[call] for name in ("depth", "prev_len", "prompt_len", "media_count", "hash_version")
    }
    has_parent = flags(pc.is_valid(piece.column("parent_id")))[call]
    root_id = piece.column("root_id").take(call)
    top_id = piece.column("call_id").take(call[np.maximum.accumulate(np.where(top, np.arange(len(call)), 0))])
    root_fits = flags(pc.equal(root_id, top_id))
    parent_len = np.where(top, 0, np.append(0, piece.chain_len[call][:-1]))
    conditions = (
        top & has_parent & _parent_known(piece)[call],
        top & has_parent,
        top & (column["prompt_len"] == 0),
        ~counts[call],
        (column["depth"] != position) | ~root_fits,
        (column["prev_len"] != parent_len) | (column["prompt_len"] < column["prev_len"]),
        column["media_count"] != _captured(piece, call, position),
        _misplaced(piece)[call],
        ~np.isin(column["hash_version"], [*hashing.DERIVED]),
        ~_covered(piece)[call],
    )
    found: Ints = np.select(conditions, range(1, len(_WHY) - 1), 0)
    return found


def _captured(piece: Piece, call: Ints, position: Ints) -> Ints:
    """[L] how many media of the call's prompt the log has: its own and those of the calls above it."""
    if piece.media is None:
        return np.zeros(len(call), np.int64)
    new = piece.media.count(len(piece.rollout))[call]
    total = np.cumsum(new)
    line = np.arange(len(call))
    found: Ints = total - (total - new)[line - position]
    return found


def _misplaced(piece: Piece) -> Flags:
    """[N] whether media of the call are not where its own part of the prompt is."""
    found = np.zeros(len(piece.rollout), np.bool_)
    if piece.media is not None:
        found[piece.media.misplaced(piece.ints("prev_len"), piece.ints("prompt_len"))] = True
    return found


def _parent_known(piece: Piece) -> Flags:
    """[N] whether the call's parent is in its rollout. Only asked of tops, whose parent is rarely set."""
    known = pc.index_in(piece.column("parent_id"), piece.column("call_id"))
    same = np.zeros(len(piece.rollout), np.bool_)
    found = np.flatnonzero(flags(pc.is_valid(known)))
    same[found] = piece.rollout[known.drop_null().to_numpy()] == piece.rollout[found]
    return same


def _covered(piece: Piece) -> Flags:
    """[N] whether the call's policy spans follow each other from its first sampled token to its last."""
    spans, sampled = piece.spans, piece.ints("sampled_len")
    covered: Flags = sampled == 0
    if len(spans.at) == 0:
        return covered
    opens = np.append(True, spans.at[1:] != spans.at[:-1])
    closes = np.append(opens[1:], True)
    follows = spans.start == np.where(opens, 0, np.append(0, spans.end[:-1]))
    covered[spans.at[closes]] = spans.end[closes] == sampled[spans.at[closes]]
    covered[spans.at[~follows]] = False
    return covered


def _facts(piece: Piece, call: int, top: int, above: int | None) -> dict[str, object]:
    """What the details of a refusal may name."""
    counts = ("depth", "prev_len", "prompt_len", "sampled_len", "media_count", "hash_version")
    ids = {name: piece.column(f"{name}_id")[call].as_py() for name in ("parent", "root")}
    return {
        **{name: piece.ints(name)[call] for name in counts},
        **{name: "none" if value is None else UUID(bytes=value) for name, value in ids.items()},
        "top": piece.call_id(top),
        "parent_len": 0 if above is None else piece.chain_len[above],
        "this_version": hashing.HASH_VERSION,
    }
