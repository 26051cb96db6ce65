"""Checked chains and the stored arrays of their calls in, packed rows out.

Knows how a call's arrays are placed into rows, and what must hold for them; does not know databases or how chains were
found. Law: a row holds its chain's deltas end to end, unshifted and unpadded, and no token that was not verified: each
call's chain hash is derived again from its tokens on top of its parent's. One bad call refuses its whole rollout.

Arrays come in the order of the log, each is read once, decoded once, and copied into every row that it is part of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from replay.chain import Chains, Refusal, refusal
from replay.piece import Flags, Ints
from replay.reader import Payload
from store import codec, hashing
from store.errors import DamagedArray, UnknownCodec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """The rows of some chains end to end: row r has the places `offset[r]` to `offset[r + 1]` of each array."""

    chains: Chains
    offset: Ints  # [R + 1]
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.bool_]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T] 0 where not sampled
    refused: tuple[Refusal, ...]
    """Rollouts whose arrays do not hold; their chains are left out."""


def cut(chains: Chains, *, tokens: int) -> Iterator[Chains]:
    """Cut chains between rollouts into runs of about so many tokens."""
    length, rollout = chains.length, chains.rollout
    begun = np.cumsum(length) - length
    run_of = np.zeros(len(chains.piece.rollouts), np.int64)
    np.maximum.at(run_of, rollout, begun // tokens)  # a rollout belongs where its last chain begins
    run = run_of[rollout]
    for each in np.unique(run):
        yield chains.only(run == each)


def sequences(chains: Chains) -> Ints:
    """The sequences of the calls of these chains, ascending, each once."""
    return np.sort(chains.piece.ints("sequence")[np.unique(chains.call)])


def fill(chains: Chains, payloads: Iterable[Sequence[Payload]]) -> Filled:
    """Place the arrays of every call into the rows.

    Args:
        chains: checked.
        payloads: in batches, by ascending sequence; those of other calls are passed over.
    """
    piece = chains.piece
    offset = np.append(0, np.cumsum(chains.length))
    row = np.repeat(np.arange(len(chains.carried)), np.diff(chains.start))
    starts = offset[row] + piece.ints("prev_len")[chains.call]  # [L] where the call's delta goes
    sampled = offset[row] + piece.ints("prompt_len")[chains.call]  # [L] where its sampled tokens go
    token_ids = np.empty(offset[-1], np.dtype("<i4"))  # every place is written, or its row is left out
    logprobs = np.zeros(offset[-1], np.dtype("<f4"))
    why = _place(chains, payloads, starts, sampled, _bytes(token_ids), _bytes(logprobs))
    if not np.isfinite(logprobs).all():
        for line in np.unique(np.searchsorted(sampled, np.flatnonzero(~np.isfinite(logprobs)), side="right") - 1):
            why.setdefault(int(chains.call[line]), _NOT_FINITE)
    filled = Filled(
        chains=chains,
        offset=offset,
        token_ids=token_ids,
        loss_mask=_mask(chains, sampled, int(offset[-1])),
        logprobs=logprobs,
        refused=(),
    )
    return _without(filled, why) if why else filled


_NOT_FINITE = ("logprob_not_finite", "a sampled token has no finite log-probability")
_Why = dict[int, tuple[str, str]]
"""Reason and detail by the place of a call."""


def _place(
    chains: Chains,
    payloads: Iterable[Sequence[Payload]],
    starts: Ints,
    sampled: Ints,
    token_ids: memoryview,
    logprobs: memoryview,
) -> _Why:
    """Decode, verify and copy; returns which calls do not hold."""
    why: _Why = {}
    unpack = codec.Unpacker()
    wanted = _expected(chains, starts, sampled)
    at, call, above, chain_hash, size, count, places = next(wanted, _END)
    for batch in payloads:
        for sequence, kind, stored, scores in batch:
            if sequence != at:
                continue
            try:
                raw = stored if kind == codec.RAW else unpack(kind, stored)
            except (DamagedArray, UnknownCodec) as error:
                why[call] = ("array_unreadable", str(error))
            else:
                if len(raw) != size or len(scores) != count:
                    why[call] = (
                        "length_mismatch",
                        f"it holds {len(raw) // 4} tokens and {len(scores) // 4} log-probabilities, "
                        f"its counts say {size // 4} and {count // 4}",
                    )
                elif hashing.chain_hash(above, raw) != chain_hash:
                    why[call] = ("chain_hash_mismatch", "its tokens on top of its parent's do not give its chain hash")
                else:
                    for start, after in places:
                        token_ids[start : start + size] = raw
                        logprobs[after : after + count] = scores
            at, call, above, chain_hash, size, count, places = next(wanted, _END)
    if at != _END[0]:
        raise ValueError(f"the log did not give the call at sequence {at} again, which it named before")
    return why


_Expected = tuple[int, int, bytes | None, bytes, int, int, list[tuple[int, int]]]
"""Of a call: its sequence, its place, its parent's chain hash, its own, how many bytes its tokens and its
log-probabilities have, and at which byte of the rows these go, for each row."""
_END: _Expected = (-1, -1, None, b"", 0, 0, [])


def _expected(chains: Chains, starts: Ints, sampled: Ints) -> Iterator[_Expected]:
    """By ascending sequence."""
    piece = chains.piece
    by_sequence = np.argsort(piece.ints("sequence")[chains.call], kind="stable")
    calls = chains.call[by_sequence]
    places = list(zip((4 * starts[by_sequence]).tolist(), (4 * sampled[by_sequence]).tolist(), strict=True))
    first = np.flatnonzero(np.append(True, calls[1:] != calls[:-1])) if len(calls) else np.zeros(0, np.int64)
    calls = calls[first]
    goes = (places[low:high] for low, high in pairwise([*first.tolist(), len(places)]))
    taken = pa.array(calls)
    parent = pc.index_in(piece.column("parent_id").take(taken), piece.column("call_id"), skip_nulls=True)
    above, own = (piece.column("chain_hash").take(each).to_pylist() for each in (parent, taken))
    lengths = (piece.ints("sequence"), 4 * piece.delta_len, 4 * piece.ints("sampled_len"))
    sequence, size, count = (each[calls].tolist() for each in lengths)
    return zip(sequence, calls.tolist(), above, own, size, count, goes, strict=True)


def _bytes(array: npt.NDArray[np.generic]) -> memoryview:
    """An array's bytes, to write into."""
    return memoryview(array.view(np.uint8).data)


def _mask(chains: Chains, sampled: Ints, size: int) -> Flags:
    """[T] true on the sampled tokens of the calls that train in their row."""
    trains = chains.trains & (chains.piece.ints("sampled_len")[chains.call] > 0)
    steps = np.zeros(size + 1, np.int8)
    steps[sampled[trains]] += 1
    steps[(sampled + chains.piece.ints("sampled_len")[chains.call])[trains]] -= 1
    return np.cumsum(steps[:-1], out=steps[:-1]).view(np.bool_)


def _without(filled: Filled, why: _Why) -> Filled:
    """Leave out the rollouts of the calls that do not hold; the first call of each stands for it."""
    piece = filled.chains.piece
    refused: dict[int, Refusal] = {}
    for call in sorted(why):
        refused.setdefault(int(piece.rollout[call]), refusal(piece, call, *why[call]))
    kept = ~np.isin(filled.chains.rollout, [*refused])
    sizes = np.diff(filled.offset)
    tokens = np.repeat(kept, sizes)
    return Filled(
        chains=filled.chains.only(kept),
        offset=np.append(0, np.cumsum(sizes[kept])),
        token_ids=filled.token_ids[tokens],
        loss_mask=filled.loss_mask[tokens],
        logprobs=filled.logprobs[tokens],
        refused=tuple(refused.values()),
    )
