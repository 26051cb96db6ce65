from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.pack import Pack, pack
from replay.padding import align


def made(lengths: list[int]) -> Pack:
    size = sum(lengths)
    return Pack(
        row_ids=tuple(map(str, range(len(lengths)))),
        tokens=np.arange(1, size + 1),
        labels=np.arange(2, size + 2),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        loss_mask=np.ones(size, np.bool_),
        logprobs=np.full(size, -1, np.float32),
        advantages=np.ones(size, np.float32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
    )


FEED = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=4)


@given(feed=FEED, multiple=st.integers(1, 8), equal=st.booleans())
def test_padding_adds_untrained_segments_no_longer_than_the_longest_row(
    feed: list[list[int]], multiple: int, equal: bool
) -> None:
    packs = [*(made(lengths) for lengths in feed), pack([], {})]
    aligned = align(packs, multiple=multiple, equal=equal)
    sizes = {len(each.tokens) for each in aligned}
    assert all(size % multiple == 0 for size in sizes)
    assert len(sizes) == 1 or not equal
    longest = max(each.max_seqlen for each in packs)
    for before, after in zip(packs, aligned, strict=True):
        size = len(before.tokens)
        assert len(after.tokens) < size + multiple or equal
        assert (after.row_ids, after.trained) == (before.row_ids, before.trained)
        assert after.cu_seqlens.tolist()[: len(before.cu_seqlens)] == before.cu_seqlens.tolist()
        assert after.cu_seqlens[-1] == len(after.tokens)
        assert after.max_seqlen <= longest
        segments = np.diff(after.cu_seqlens)
        assert (segments > 0).all()
        assert after.position_ids.tolist() == [place for length in segments for place in range(length)]
        for name in ("tokens", "labels", "loss_mask", "logprobs", "advantages"):
            ours, theirs = getattr(after, name), getattr(before, name)
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours[:size], theirs)
            assert not ours[size:].any()


@pytest.mark.parametrize("equal", [True, False])
def test_packs_that_need_no_padding_are_handed_on(equal: bool) -> None:
    packs = [made([3, 1]), made([4])]
    assert align(packs, multiple=2, equal=equal) == packs
