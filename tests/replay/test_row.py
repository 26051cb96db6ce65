import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replay import walk
from replay.chain import check
from replay.fill import fill
from replay.row import Block, Row, rows_digest
from store.events import logprob_array


def rows_of(recorded: Any) -> list[Row]:
    counts = np.ones(len(recorded.piece.calls), np.bool_)
    chains, refused = check(recorded.piece, counts, walk.paths(recorded.piece, counts))
    filled = fill(chains, recorded.payloads)
    assert (refused, filled.refused) == ([], ())
    return [*Block.of(filled).rows(filled.chains.piece.rollouts)]


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        ([None, None, 0, 1], [(1, 3), (2, 4)]),
        ([None, 0, 0], [(1, 2), (1, 3)]),
        ([None, None, 0, None, 1, 3], [(1, 3), (2, 5), (4, 6)]),
        ([None, None, None, 1, 2, 0], [(1, 6), (2, 4), (3, 5)]),
        ([None, None, 0, None, 1, 3, 2], [(1, 3, 7), (2, 5), (4, 6)]),
        ([None, None, 0, None, 3, None, 4, 5], [(1, 3), (2,), (4, 5, 7), (6, 8)]),
        ([None, 0, 0, 1, 1, 2], [(1, 2, 4), (1, 2, 5), (1, 3, 6)]),
        ([None, *range(19)], [tuple(range(1, 21))]),
        ([None, *range(9), None, *range(10, 19)], [tuple(range(1, 11)), tuple(range(11, 21))]),
    ],
)
def test_a_forest_gives_one_row_per_tip_and_trains_each_sampled_token_once(
    parents: list[int | None],
    expected: list[tuple[int, ...]],
    grow: Callable[..., Any],
    chain_maker: Any,
    recorded: Callable[..., Any],
) -> None:
    calls = grow(chain_maker, parents)
    found = rows_of(recorded(calls))
    assert [each.call_numbers for each in found] == expected
    assert sum(each.trained for each in found) == sum(call.sampled_len for call in calls)
    trained = [
        (number, position - calls[number - 1].prompt_len)
        for each in found
        for number in each.call_numbers
        for position in range(calls[number - 1].prompt_len, calls[number - 1].chain_len)
        if each.loss_mask[position]
    ]
    assert len(set(trained)) == len(trained) == sum(call.sampled_len for call in calls)


def test_a_row_is_the_deltas_end_to_end(grow: Any, chain_maker: Any, recorded: Any) -> None:
    root, child = grow(chain_maker, [None, 0], lengths=[(2, 2), (3, 4)])
    (built,) = rows_of(recorded([root, child]))
    first, second = (logprob_array(call.logprobs) for call in (root, child))
    assert built.token_ids.tobytes() == root.token_ids + child.token_ids
    assert built.loss_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 3 + [True] * 4
    assert built.logprobs.tolist() == [0, 0, *first.tolist(), 0, 0, 0, *second.tolist()]
    assert built.policy_versions.tolist() == [-1, -1, 1, 2, -1, -1, -1, 1, 1, 2, 2]
    assert (built.tip, built.length, built.trained, built.policy_range) == (child.call_id, 11, 6, (1, 2))
    assert [built.token_ids.dtype, built.loss_mask.dtype, built.logprobs.dtype, built.policy_versions.dtype] == [
        np.int32,
        np.bool_,
        np.float32,
        np.int64,
    ]


def test_a_shared_call_keeps_its_logprobs_in_the_row_where_it_does_not_train(
    grow: Any, chain_maker: Any, recorded: Any
) -> None:
    first, second = rows_of(recorded(grow(chain_maker, [None, 0, 0], lengths=[(2, 2), (1, 1), (1, 1)])))
    assert first.loss_mask.tolist() == [False, False, True, True, False, True]
    assert second.loss_mask.tolist() == [False, False, False, False, False, True]
    assert second.logprobs[:4].tolist() == first.logprobs[:4].tolist()
    assert second.policy_versions[:4].tolist() == [-1, -1, 1, 2]


def test_the_row_id_follows_the_calls_and_not_the_reward(grow: Any, chain_maker: Any, recorded: Any) -> None:
    calls = grow(chain_maker, [None, 0])
    (before,) = rows_of(recorded(calls))
    (after,) = rows_of(recorded(calls, reward=1.0))
    assert before.row_id == after.row_id
    (shorter,) = rows_of(recorded(calls[:1]))
    assert shorter.row_id != before.row_id


def test_the_digest_sees_every_byte(grow: Any, chain_maker: Any, recorded: Any) -> None:
    first, second = rows_of(recorded(grow(chain_maker, [None, 0, 0])))
    digest = rows_digest([first, second])
    assert digest == rows_digest((first, second))
    assert rows_digest([second, first]) != digest
    for name in ("token_ids", "loss_mask", "logprobs", "version_spans"):
        array = getattr(second, name).copy()
        array[-1] = not array[-1] if array.dtype == np.bool_ else array[-1] + 1
        assert rows_digest([first, dataclasses.replace(second, **{name: array})]) != digest, name
    assert rows_digest([first, dataclasses.replace(second, reward=0.5)]) != digest


def test_the_arrays_of_a_row_cannot_be_changed(grow: Any, chain_maker: Any, recorded: Any) -> None:
    (built,) = rows_of(recorded(grow(chain_maker, [None])))
    with pytest.raises(ValueError, match="read-only"):
        built.loss_mask[0] = True
