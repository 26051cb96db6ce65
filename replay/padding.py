"""Packs in, packs of the lengths that a trainer asks for out.

Knows the layout of a pack; does not know why a trainer wants a length.
Law: padding trains nothing, no row attends to it, and no segment of it is longer than the longest row of the packs, so
that it asks a model for no position and no memory that the rows do not ask for.

A pack of rows of 3 and 2 positions, made 9 long, gets a segment of 3 and one of 1:

    position_ids  0 1 2 | 0 1 | 0 1 2 | 0        cu_seqlens   0 3 5 8 9
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from replay.pack import Pack


def align(packs: Sequence[Pack], *, multiple: int = 1, equal: bool = False) -> list[Pack]:
    """The packs, each padded to the next multiple, or all to one common multiple.

    Args:
        packs: of one step and rank.
        multiple: that every length divides by.
        equal: give all packs the length of the longest.
    """
    lengths = [-(-len(pack.tokens) // multiple) * multiple for pack in packs]
    if equal:
        lengths = [max(lengths)] * len(packs)
    longest = max(pack.max_seqlen for pack in packs)
    return [_padded(pack, length, longest) for pack, length in zip(packs, lengths, strict=True)]


def _padded(pack: Pack, length: int, longest: int) -> Pack:
    missing = length - len(pack.tokens)
    if missing == 0:
        return pack
    ends = np.minimum(np.arange(longest, missing + longest, longest), missing)  # of the segments of padding
    return replace(
        pack,
        tokens=np.pad(pack.tokens, (0, missing)),
        labels=np.pad(pack.labels, (0, missing)),
        position_ids=np.concatenate([pack.position_ids, np.arange(missing) % longest]),
        loss_mask=np.pad(pack.loss_mask, (0, missing)),
        logprobs=np.pad(pack.logprobs, (0, missing)),
        advantages=np.pad(pack.advantages, (0, missing)),
        cu_seqlens=np.concatenate([pack.cu_seqlens, len(pack.tokens) + ends]).astype(np.int32),
    )
