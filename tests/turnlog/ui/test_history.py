"""One rollout for the eye: the rows of its calls, and where each call stands in the picture."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from replay.errors import UnknownRollout
from replay.rowset import build
from store.database import read, write
from store.events import RolloutOpened
from store.log import append
from tests.turnlog.played import played_log
from turnlog.ui import history, lanes
from turnlog.ui.history import SeenCall, SeenRollout


def seen(database: Engine, rollout: str) -> SeenRollout:
    with read(database) as connection:
        return history.load(connection, rollout)


def test_every_call_is_there_whatever_became_of_it(filled: Engine) -> None:
    found = seen(filled, "forked")
    assert sorted((call.state, call.number, call.row) for call in found.calls if call.number) == [
        ("completed", 1, 1),
        ("completed", 2, 1),
        ("completed", 3, 2),
        ("completed", 4, 3),
    ]
    assert sorted(call.state for call in found.calls if not call.number) == ["failed", "pending", "refused"]
    assert found.outcome is not None
    assert found.outcome.reward == 0.5
    assert [(row.number, row.tokens, row.trained, row.parent and row.parent.number) for row in found.rows] == [
        (1, 43, 15, None),
        (2, 40, 3, 1),
        (3, 34, 4, None),
    ]


def test_an_unknown_rollout_is_said_to_be_unknown(filled: Engine) -> None:
    with pytest.raises(UnknownRollout):
        seen(filled, "nobody")


def test_rows_are_those_that_replay_makes(tmp_path: Path) -> None:
    """Where nobody asked for an answer twice, and all rows train something."""
    database = played_log(tmp_path)
    rows: dict[str, list[tuple[int, ...]]] = {}
    for row in build(database).rows:
        rows.setdefault(row.rollout_id, []).append(tuple(row.call_numbers))
    compared = 0
    for rollout, expected in rows.items():
        found = seen(database, rollout)
        if len(found.rows) != len(expected):
            continue  # replay leaves retries out, and refuses what trains nothing
        compared += 1
        claimed: set[int] = set()
        for mine, theirs in zip(found.rows, expected, strict=True):
            own = tuple(number for number in theirs if number not in claimed)
            claimed.update(theirs)
            assert tuple(call.number for call in mine.calls) == own
    database.dispose()
    assert compared > 30


@pytest.fixture
def picture(filled: Engine) -> lanes.Picture:
    return lanes.draw(seen(filled, "forked"))


def test_the_picture_holds_each_call_once_and_says_why_rows_begin(picture: lanes.Picture) -> None:
    assert len({bar.call.call_id for bar in picture.bars}) == len(picture.bars) == 7
    assert {bar.call.number: bar.begins for bar in picture.bars if bar.begins} == {
        1: "first_call",
        3: "branches off call 1",
        4: "item_edited at item 3",
    }
    assert sorted(link.kind for link in picture.links) == ["attempt", "branch", "nearest"]
    numbers = [lane.row and lane.row.number for lane in picture.lanes]
    assert numbers[:3] == [1, 2, 3]
    assert set(numbers[3:]) == {None}


def test_calls_of_one_lane_never_lie_on_each_other(picture: lanes.Picture) -> None:
    for one, other in combinations(picture.bars, 2):
        if one.y == other.y:
            assert one.x + one.width <= other.x or other.x + other.width <= one.x


def calls_of(spans: list[tuple[int, int]]) -> list[SeenCall]:
    maker = iter(range(1, len(spans) + 1))
    found = [
        SeenCall(
            call_id=history.UUID(int=number), number=number, state="completed", decision="root", reason="fresh_context",
            parent_id=None, row=number, started_at=start, ended_at=start + length,
        )
        for number, (start, length) in zip(maker, spans, strict=False)
    ]  # fmt: skip
    return sorted(found, key=lambda call: call.started_at)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8)), min_size=1, max_size=12))
def test_order_and_overlap_in_time_are_those_of_the_picture(spans: list[tuple[int, int]]) -> None:
    calls = calls_of(spans)
    rollout = SeenRollout(
        opened=RolloutOpened(rollout_id="r", opened_at=0), calls=tuple(calls), rows=history.cut(calls), outcome=None,
        trained=(),
    )  # fmt: skip
    bars = lanes.draw(rollout).bars
    for one, other in combinations(bars, 2):
        if one.call.started_at < other.call.started_at:
            assert one.x < other.x
        end = max(one.call.ended_at or 0, one.call.started_at + 1)
        if end <= other.call.started_at:
            assert one.x + one.width <= other.x
        elif end >= other.call.started_at + 2:
            assert one.x + one.width > other.x


def test_a_long_rollout_is_drawn_in_parts(sqlite_database: Engine, chain_maker: Any) -> None:
    most = lanes.MOST
    calls = chain_maker([(2, 1)] * (most + 5), rollout_id="long")
    with write(sqlite_database) as connection:
        append(connection, [RolloutOpened(rollout_id="long", opened_at=0), *calls])
    rollout = seen(sqlite_database, "long")
    first, last = lanes.draw(rollout), lanes.draw(rollout, first=most + 1)
    assert (len(first.bars), first.first, first.calls) == (most, 1, most + 5)
    assert [bar.call.number for bar in last.bars] == list(range(most + 1, most + 6))
    assert lanes.draw(rollout, first=10**9).bars[0].call.number == most + 5


def test_a_rollout_without_calls_has_an_empty_picture(sqlite_database: Engine) -> None:
    with write(sqlite_database) as connection:
        append(connection, [RolloutOpened(rollout_id="empty", opened_at=0)])
    found = lanes.draw(seen(sqlite_database, "empty"))
    assert (found.bars, found.lanes, found.ticks) == ((), (), ())
