"""Training steps and boundary counts, against what the log was filled with."""

from __future__ import annotations

from datetime import date, timedelta
from itertools import pairwise

import pytest
from sqlalchemy import Engine

from store.database import read
from turnlog.ui import boundaries, runs
from turnlog.ui.boundaries import Window
from turnlog.ui.errors import UnknownRun
from turnlog.ui.runs import Asked

RUN = "a/b run"


def test_runs_are_found_by_their_names(filled: Engine) -> None:
    with read(filled) as connection:
        assert [(run.name, run.first_step, run.last_step) for run in runs.runs(connection)] == [(RUN, 0, 5)]


def test_steps_say_what_their_rows_add_up_to(filled: Engine) -> None:
    with read(filled) as connection:
        found = runs.steps(connection, Asked(name=RUN, budget=20))
    assert [step.number for step in found.steps] == [0, 1, 2, 3, 4, 5]
    assert found.older is None
    both, alone = found.steps[0], found.steps[1]
    assert [(row.tokens, row.calls, row.trained, row.oldest, row.staleness) for row in both.rows] == [
        (15, 1, 3, 1, 3),
        (18, 2, 6, 1, 3),
    ]
    assert (both.tokens, both.trained, both.rollouts, both.staleness) == (33, 9, 1, (3, 3.0, 3))
    assert (both.packs, both.fill) == (2, (14 + 17) / 40)
    assert (alone.tokens, alone.packs, alone.too_long) == (18, 1, 0)


def test_without_a_budget_nobody_knows_how_full_packs_were(filled: Engine) -> None:
    with read(filled) as connection:
        assert runs.step(connection, RUN, 0).fill is None


def test_steps_come_in_pages(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ROWS", 3)
    seen: list[int] = []
    before: int | None = None
    with read(filled) as connection:
        while True:
            found = runs.steps(connection, Asked(name=RUN, before=before))
            seen = [*[step.number for step in found.steps], *seen]
            if (before := found.older) is None:
                break
    assert seen == [0, 1, 2, 3, 4, 5]


def test_a_page_of_long_rows_has_fewer_steps(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CALLS", 5)  # steps 5 and 4 have 2 and 3
    with read(filled) as connection:
        found = runs.steps(connection, Asked(name=RUN))
        assert [step.number for step in found.steps] == [4, 5]
        assert found.older == 4
        monkeypatch.setattr(runs, "CALLS", 1)
        assert [step.number for step in runs.steps(connection, Asked(name=RUN)).steps] == [5]


def test_an_unknown_run_or_step_is_said_to_be_unknown(filled: Engine) -> None:
    with read(filled) as connection:
        with pytest.raises(UnknownRun):
            runs.steps(connection, Asked(name="none"))
        with pytest.raises(UnknownRun):
            runs.step(connection, RUN, 99)


def test_boundaries_are_counted_by_reason_week_and_harness(filled: Engine) -> None:
    with read(filled) as connection:
        found = boundaries.counts(connection, Window())
    assert dict(found.reasons) == {"context_replaced": 8, "item_edited": 1}
    assert (found.firsts, found.boundaries) == (30, 9)
    assert {harness: dict(mine) for harness, mine in found.harnesses.items()} == {
        "codex": {"context_replaced": 3},
        "claude": {"context_replaced": 3},
        "": {"context_replaced": 2},
        "codex <b>": {"item_edited": 1},
    }
    assert dict(found.rows) == {1: 21, 2: 9}
    weeks = list(found.weeks)
    assert weeks[0] == date(2023, 11, 13)
    assert {later - earlier for earlier, later in pairwise(weeks)} == {timedelta(days=7)}
    assert sum(sum(week.values()) for week in found.weeks.values()) == found.boundaries


def test_a_window_leaves_out_the_rest(filled: Engine) -> None:
    with read(filled) as connection:
        codex = boundaries.counts(connection, Window(harness="codex"))
        days = boundaries.counts(connection, Window(since=date(2023, 11, 15), until=date(2023, 11, 22)))
    assert (dict(codex.reasons), codex.firsts, dict(codex.rows)) == ({"context_replaced": 3}, 10, {1: 7, 2: 3})
    assert dict(days.reasons) == {"context_replaced": 2}  # r04 and r08
    assert days.firsts == 8


def test_the_newest_calls_are_counted_unless_all_are_asked_for(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "CALLS", 9)  # the four of `forked`, three of r28, two of r27
    with read(filled) as connection:
        newest = boundaries.counts(connection, Window())
        everything = boundaries.counts(connection, Window(all=True))
    assert (newest.firsts, dict(newest.reasons)) == (3, {"item_edited": 1, "context_replaced": 1})
    assert newest.back_to is not None
    assert (everything.firsts, everything.boundaries, everything.back_to) == (30, 9, None)


def test_an_empty_log_has_no_boundary(database: Engine) -> None:
    with read(database) as connection:
        found = boundaries.counts(connection, Window())
        assert (found.boundaries, found.firsts, dict(found.weeks), dict(found.rows)) == (0, 0, {}, {})
        assert boundaries.reasons(connection) == []
        assert runs.runs(connection) == []
