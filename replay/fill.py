"""Checked chains and the stored arrays of their calls in, packed rows out.

Knows how a call's arrays are placed into rows, and what must hold for them; does not know databases or how chains were
found. Law: a row holds its chain's deltas end to end, unshifted and unpadded, and no token that was not verified: each
call's chain hash is derived again from its tokens on top of its parent's, or was before its seal was written, and the
file is the one that was sealed. One bad call refuses its whole rollout.

Arrays come in the order of the log, each is read once, decoded once, and copied into every row that it is part of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from replay.chain import Chains, Refusal, refusal
from replay.media import MediaSource, faults
from replay.piece import Flags, Ints
from replay.reader import Bytes, Payloads
from replay.sealed import Proven
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


def fill(
    chains: Chains, payloads: Iterable[Payloads], media: MediaSource | None = None, proven: Proven | None = None
) -> Filled:
    """Place the arrays of every call into the rows.

    Args:
        chains: checked.
        payloads: in batches, by ascending sequence; those of other calls are passed over.
        media: where what the calls show lies; None for rows that are not looked at beyond their tokens.
        proven: the arrays of the calls of these chains line by line, where seals prove their chain hashes. Payloads are
            not read then, unless an array has another length than its call says.
    """
    piece = chains.piece
    offset = np.append(0, np.cumsum(chains.length))
    row = np.repeat(np.arange(len(chains.carried)), np.diff(chains.start))
    sampled = offset[row] + piece.ints("prompt_len")[chains.call]  # [L] where a call's sampled tokens go
    arrays = _sealed(chains, proven) or _verified(chains, payloads)
    logprobs, why = arrays.logprobs, arrays.why
    if not np.isfinite(logprobs).all():
        for at in np.unique(np.searchsorted(sampled, np.flatnonzero(~np.isfinite(logprobs)), side="right") - 1):
            why.setdefault(int(chains.call[at]), _NOT_FINITE)
    if media is not None and piece.media is not None:
        why = {**faults(piece.media, np.unique(chains.call), media), **why}
    filled = Filled(
        chains=chains,
        offset=offset,
        token_ids=arrays.token_ids,
        loss_mask=_mask(chains),
        logprobs=logprobs,
        refused=(),
    )
    return _without(filled, why) if why else filled


_NOT_FINITE = ("logprob_not_finite", "a sampled token has no finite log-probability")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arrays:
    """The arrays of the rows, end to end."""

    token_ids: npt.NDArray[np.int32]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    why: dict[int, tuple[str, str]]
    """Reason and detail by the place of a call that does not hold; its arrays are zeros."""


def _sealed(chains: Chains, proven: Proven | None) -> _Arrays | None:
    """The arrays that seals prove; None where there are none, or where one has not the length that its call says."""
    if proven is None:
        return None
    size, sampled = chains.piece.delta_len[chains.call], chains.piece.ints("sampled_len")[chains.call]
    if not (np.array_equal(proven.token_ids.length, size) and np.array_equal(proven.logprobs.length, sampled)):
        return None
    return _Arrays(token_ids=proven.token_ids.joined(), logprobs=proven.logprobs.joined(gaps=size - sampled), why={})


def _verified(chains: Chains, payloads: Iterable[Payloads]) -> _Arrays:
    """The arrays that payloads hold, each decoded and verified once, in the order of the log."""
    piece = chains.piece
    calls, line = np.unique(chains.call, return_inverse=True)
    by_sequence = np.argsort(piece.ints("sequence")[calls])
    calls, line = calls[by_sequence], np.argsort(by_sequence)[line].tolist()
    stored = _stored(piece.ints("sequence")[calls].tolist(), payloads)
    size, count = ((4 * each[calls]).tolist() for each in (piece.delta_len, piece.ints("sampled_len")))
    taken = pa.array(calls)
    parent = pc.index_in(piece.column("parent_id").take(taken), piece.column("call_id"), skip_nulls=True)
    above, own = (piece.column("chain_hash").take(each).to_pylist() for each in (parent, taken))
    token_ids, faults = _decoded(stored)
    logprobs: list[Bytes] = [*stored.logprobs]
    lengths = [*map(len, token_ids)], [*map(len, logprobs)]
    for at in sorted({*_differing(lengths[0], size), *_differing(lengths[1], count)}):
        holds = f"{lengths[0][at] // 4} tokens and {lengths[1][at] // 4} log-probabilities"
        why = f"it holds {holds}, its counts say {size[at] // 4} and {count[at] // 4}"
        faults.setdefault(at, ("length_mismatch", why))
    for at in _differing([*map(hashing.chain_hash, above, token_ids)], own):
        faults.setdefault(at, ("chain_hash_mismatch", "its tokens on top of its parent's do not give its chain hash"))
    for at in faults:
        token_ids[at], logprobs[at] = bytes(size[at]), bytes(count[at])
    gaps = (4 * (piece.ints("prompt_len") - piece.ints("prev_len"))[chains.call]).tolist()
    nothing = memoryview(bytes(max(gaps, default=0)))
    scores = [part for at, gap in zip(line, gaps, strict=True) for part in (nothing[:gap], logprobs[at])]
    return _Arrays(
        token_ids=np.frombuffer(b"".join([token_ids[at] for at in line]), "<i4"),
        logprobs=np.frombuffer(b"".join(scores), "<f4"),
        why={int(calls[at]): fault for at, fault in faults.items()},
    )


def _differing(found: list[Any], expected: list[Any]) -> list[int]:
    """Places at which two equally long lists differ."""
    if found == expected:
        return []
    return [at for at, (here, there) in enumerate(zip(found, expected, strict=True)) if here != there]


def _decoded(stored: Payloads) -> tuple[list[Bytes], dict[int, tuple[str, str]]]:
    """The token arrays as bytes, and by place why one cannot be read, which then is empty."""
    unpack = codec.Unpacker()
    faults: dict[int, tuple[str, str]] = {}
    try:
        return unpack.all(stored.codec, stored.token_ids), faults
    except (DamagedArray, UnknownCodec):  # one by one, to tell which
        token_ids: list[Bytes] = []
        for at, (kind, packed) in enumerate(zip(stored.codec, stored.token_ids, strict=True)):
            try:
                token_ids.append(unpack(kind, packed))
            except (DamagedArray, UnknownCodec) as error:
                faults[at] = ("array_unreadable", str(error))
                token_ids.append(b"")
        return token_ids, faults


def _stored(wanted: list[int], payloads: Iterable[Payloads]) -> Payloads:
    """The heavy columns of the calls at these sequences, without those of other calls that were read along."""
    columns: tuple[list[Any], ...] = ([], [], [], [])
    found = Payloads(*columns)
    for batch in payloads:
        due = wanted[len(found.sequence) :][: len(batch.sequence)]
        if [*batch.sequence] == due:
            taken: Payloads = batch
        else:
            places = np.flatnonzero(np.isin(batch.sequence, due)).tolist()
            taken = Payloads(*([column[place] for place in places] for column in batch))
        for column, more in zip(columns, taken, strict=True):
            column += more
    if found.sequence != wanted:
        missing = min({*wanted}.difference(found.sequence))
        raise ValueError(f"the log did not give the call at sequence {missing} again, which it named before")
    return found


def _mask(chains: Chains) -> Flags:
    """[T] true on the sampled tokens of the calls that train in their row."""
    piece, call = chains.piece, chains.call
    sampled = piece.ints("sampled_len")[call]
    lengths = np.stack([piece.delta_len[call] - sampled, sampled], axis=1)
    return np.repeat(np.stack([np.zeros_like(chains.trains), chains.trains], axis=1).ravel(), lengths.ravel())


def _without(filled: Filled, why: Mapping[int, tuple[str, str]]) -> Filled:
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
