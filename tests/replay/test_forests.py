"""Forests of calls and the rows they must give, through a real log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine

from replay.rowset import build
from store.events import CallCompleted, Event, RolloutOpened, token_array

Remember = Callable[[Engine, Iterable[Event]], None]
ROOT = None


def ancestors(parents: Sequence[int | None], tip: int) -> list[int]:
    path = [tip]
    while (above := parents[path[0]]) is not None:
        path.insert(0, above)
    return path


@pytest.mark.parametrize(
    ("parents", "rows"),
    [
        ([ROOT, ROOT, 0, 1], [(1, 3), (2, 4)]),
        ([ROOT, 0, 0], [(1, 2), (1, 3)]),
        ([ROOT, ROOT, 0, ROOT, 1, 3], [(1, 3), (2, 5), (4, 6)]),
        ([ROOT, ROOT, ROOT, 1, 2, 0], [(1, 6), (2, 4), (3, 5)]),
        ([ROOT, ROOT, 0, ROOT, 1, 3, 2], [(1, 3, 7), (2, 5), (4, 6)]),
        ([ROOT, ROOT, 0, ROOT, 3, ROOT, 4, 5], [(1, 3), (2,), (4, 5, 7), (6, 8)]),
        ([ROOT, 0, 0, 1, 1, 2], [(1, 2, 4), (1, 2, 5), (1, 3, 6)]),
        ([ROOT, *range(19)], [tuple(range(1, 21))]),
        ([ROOT, *range(9), ROOT, *range(10, 19)], [tuple(range(1, 11)), tuple(range(11, 21))]),
    ],
)
def test_a_forest_gives_a_row_for_each_tip(
    sqlite_database: Engine,
    remember: Remember,
    grow: Any,
    chain_maker: Any,
    parents: Sequence[int | None],
    rows: list[tuple[int, ...]],
) -> None:
    calls: list[CallCompleted] = grow(chain_maker, parents)
    remember(sqlite_database, [RolloutOpened(rollout_id="r1", group_id=None, opened_at=1), *calls])
    found = build(sqlite_database)
    assert [row.call_numbers for row in found.rows] == rows
    assert (found.refusals.by_reason(), found.left_out) == ({}, {})
    trained_before: set[int] = set()
    for row in found.rows:
        path = ancestors(parents, row.call_numbers[-1] - 1)
        assert row.call_numbers == tuple(index + 1 for index in path)
        assert row.token_ids.tobytes() == b"".join(calls[index].token_ids for index in path)
        masks = [
            np.arange(len(token_array(call.token_ids))) >= (call.prompt_len - call.prev_len)
            if index not in trained_before
            else np.zeros(len(token_array(call.token_ids)), np.bool_)
            for index in path
            for call in [calls[index]]
        ]
        assert row.loss_mask.tolist() == np.concatenate(masks).tolist()
        trained_before.update(path)
    assert trained_before == set(range(len(calls))), "every call trains, and in one row"
