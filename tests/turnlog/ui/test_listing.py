"""The list of rollouts: what fits, in which order, and that no page depends on how long the log is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Connection, Engine

from store import schema
from store.database import read
from turnlog.ui import listing
from turnlog.ui.listing import Filters, Page

Fits = Callable[..., list[str]]


def names(page: Page) -> list[str]:
    return [each.rollout_id for each in page.rollouts]


@pytest.fixture
def fits(filled: Engine) -> Fits:
    def fits(**fields: Any) -> list[str]:
        with read(filled) as connection:
            return names(listing.page(connection, Filters.model_validate(fields)))

    return fits


def test_the_newest_come_first(fits: Fits) -> None:
    assert fits()[:3] == ["forked", "r28", "r27"]
    assert len(fits()) == 30


FILTERED: list[tuple[dict[str, Any], list[str]]] = [
    ({"task": "NUMBER 1"}, ["r19", "r18", "r17", "r16", "r15", "r14", "r13", "r12", "r11", "r10", "r01"]),
    ({"task": "100 % of"}, ["forked"]),
    ({"task": "100 _ of"}, []),
    ({"harness": "claude", "task": "number 2"}, ["r28", "r25", "r22"]),
    ({"group": "g2"}, [f"r{n}" for n in range(28, 19, -1)]),
    ({"reward_min": 2.5}, ["r27", "r25"]),
    ({"reward_min": 0.4, "reward_max": 0.5}, ["forked", "r05"]),
    ({"reward_max": "0.3"}, ["r03", "r01"]),
    ({"state": "pending"}, ["forked"]),
    ({"state": "failed"}, ["forked"]),
    ({"state": "refused"}, ["forked"]),
    ({"state": "lost"}, []),
    ({"state": "scored", "group": "g0"}, ["r09", "r07", "r05", "r03", "r01"]),
    ({"state": "unscored", "group": "g0"}, ["r08", "r06", "r04", "r02", "r00"]),
    ({"reason": "item_edited"}, ["forked"]),
    ({"reason": "context_replaced", "group": "g1"}, ["r16", "r12"]),
    ({"since": "2023-11-16", "until": "2023-11-18"}, ["r04", "r03", "r02"]),
    ({"until": "2023-11-15"}, ["forked", "r01", "r00"]),
]


def test_each_filter_leaves_what_fits(fits: Fits) -> None:
    found = [(fields, fits(**fields)) for fields, _ in FILTERED]
    assert found == FILTERED


def test_pages_go_through_the_whole_list_and_back(filled: Engine) -> None:
    for fields in ({}, {"task": "number"}, {"harness": "codex"}, {"group": "g1"}):
        with read(filled) as connection:
            _there_and_back(connection, fields)


def _there_and_back(connection: Connection, fields: dict[str, str]) -> None:
    def page(**place: Any) -> Page:
        return listing.page(connection, Filters.model_validate({**fields, **place}), size=4)

    everything = names(listing.page(connection, Filters.model_validate(fields)))
    forwards = [page()]
    while (older := forwards[-1].older) is not None:
        forwards.append(page(before=older))
    assert [name for each in forwards for name in names(each)] == everything
    assert forwards[0].newer is None
    backwards = [forwards[-1]]
    while (newer := backwards[-1].newer) is not None and len(backwards) < 20:
        backwards.append(page(after=newer))
    assert [name for each in reversed(backwards) for name in names(each)] == everything


def test_a_search_that_takes_long_says_how_far_it_came_and_goes_on_from_there(
    filled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "WINDOW", 4)
    clock = count()
    found: list[str] = []
    pages: list[Page] = []
    place: dict[str, Any] = {}
    with read(filled) as connection:
        while True:
            filters = Filters.model_validate({"reason": "context_replaced", "state": "scored", **place})
            pages.append(listing.page(connection, filters, clock=lambda: float(next(clock))))
            found += names(pages[-1])
            if pages[-1].older is None:
                break
            place = {"before": pages[-1].older}
        assert len(pages) > 4
        assert found == []
        assert pages[0].searched == 4
        assert pages[0].reached is not None
        lowest, highest = listing.first_and_last(connection, schema.rollout)
        assert lowest is not None
        assert highest is not None
        left = highest - lowest + 1
        for each in pages[:-1]:
            left -= each.searched or 0
            assert each.left == left
        assert pages[-1].searched is None
        some = listing.page(connection, Filters(reason="context_replaced"), clock=lambda: float(next(clock)))
        assert names(some) == ["r28"]


def test_a_rollout_is_drawn_as_the_contexts_that_it_had(filled: Engine) -> None:
    with read(filled) as connection:
        first = listing.page(connection, Filters(), size=2).rollouts
    forked, last = first
    assert [(cut.row, cut.begins) for cut in forked.strip] == [(1, True), (1, False), (2, True), (3, True)]
    assert (forked.calls, forked.roots, forked.reward) == (4, 2, 0.5)
    assert dict(forked.ends) == {"pending": 1, "failed": 1, "refused": 1}
    assert (last.calls, last.roots, dict(last.ends)) == (3, 2, {})


def test_more_calls_than_are_drawn_are_counted_all_the_same(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "STRIP", 2)
    with read(filled) as connection:
        (forked,) = listing.page(connection, Filters(), size=1).rollouts
    assert (forked.calls, forked.roots, len(forked.strip)) == (4, 2, 2)


def test_an_empty_log_has_an_empty_list(database: Engine) -> None:
    with read(database) as connection:
        assert listing.page(connection, Filters()) == Page(rollouts=(), older=None, newer=None)
        assert listing.harnesses(connection) == []
