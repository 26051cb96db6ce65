"""A training step in the log: written once and whole, and found again from either end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from sqlalchemy import Engine, text

from replay.errors import PlanMismatch, StepRecorded, UnknownRow
from replay.history import TRAINED
from replay.plan import plan
from replay.provenance import events, origin, record, steps_of, trained
from replay.queries import query
from replay.rowset import RowSet, build
from store.database import read
from store.events import CallCompleted, RolloutOpened, RowTrained


@pytest.fixture
def calls(
    database: Engine, chain_maker: Any, grow: Callable[..., list[CallCompleted]], remember: Callable[..., None]
) -> list[CallCompleted]:
    """A rollout of two rows that share a root, beside another rollout."""
    forest = grow(chain_maker, [None, 0, 0, 1])
    remember(database, [RolloutOpened(rollout_id="r1", opened_at=0), *forest])
    remember(database, [RolloutOpened(rollout_id="r2", opened_at=1), *chain_maker([(9, 3)], rollout_id="r2")])
    return forest


@pytest.fixture
def found(database: Engine, calls: list[CallCompleted]) -> RowSet:
    return build(database)


def step(
    found: RowSet, number: int, *, advantages: Mapping[str, float] | None = None, **facts: Any
) -> list[RowTrained]:
    planned = plan(found.rows, seed=0, step=number, token_budget=1000)
    given = {"run": "x", "selection": found.selection, "trainer_version": 7, "at": 5, **facts}
    return events(planned, found.rows, advantages or {"r1": 0.5, "r2": -1.0}, **given)


def test_a_row_of_a_step_leads_to_its_calls_rule_and_versions(
    database: Engine, found: RowSet, calls: list[CallCompleted]
) -> None:
    assert record(database, step(found, 3))
    row = found.rows[1]
    known = origin(database, "x", 3, row.row_id)
    assert tuple(call.call_id for call in known.calls) == row.call_ids == tuple(calls[n].call_id for n in (0, 1, 3))
    assert [call.decision for call in known.calls] == ["root", "continuation", "continuation"]
    assert known.calls[0].policy_versions == (1, 2)
    assert [call.sampled_len for call in known.calls] == [3, 4, 6]
    assert (known.trained.selection, known.trained.selection_version) == ("completed", 1)
    assert (known.trained.advantage, known.trained.trainer_policy_version) == (0.5, 7)


def test_a_rollout_leads_to_the_steps_it_went_into(database: Engine, found: RowSet) -> None:
    for number, run in ((0, "x"), (1, "x"), (0, "y")):
        record(database, step(found, number, run=run))
    went = steps_of(database, "r2")
    assert [(event.run, event.step) for event in went] == [("x", 0), ("x", 1), ("y", 0)]
    assert {event.row_id for event in went} == {found.rows[-1].row_id}
    assert steps_of(database, "r3") == []


def test_the_same_step_again_changes_nothing_though_the_clock_went_on(database: Engine, found: RowSet) -> None:
    assert record(database, step(found, 0, at=5))
    before = trained(database)
    assert not record(database, step(found, 0, at=99))
    assert trained(database).equals(before)
    assert {event.at for event in steps_of(database, "r1")} == {5}


def test_another_step_under_a_recorded_number_is_refused_and_leaves_nothing(database: Engine, found: RowSet) -> None:
    record(database, step(found, 0)[:-1])
    before = trained(database)
    with pytest.raises(StepRecorded, match="step 0 of run 'x' is in the log already and has 2 rows there, not these 3"):
        record(database, step(found, 0))
    record(database, step(found, 1))
    otherwise = step(found, 1, advantages={"r1": 0.5, "r2": -2.0})
    with pytest.raises(StepRecorded, match=f"row '{found.rows[-1].row_id}' was trained otherwise there"):
        record(database, otherwise)
    assert len(trained(database)) == len(before) + 3


def test_what_was_trained_is_read_up_to_a_position(database: Engine, found: RowSet) -> None:
    assert trained(database).schema == TRAINED
    assert len(trained(database)) == 0
    record(database, step(found, 0))
    with read(database) as connection:
        reached = connection.scalar(text("select max(sequence) from trained_row"))
    first = trained(database)
    record(database, step(found, 1))
    assert trained(database, reached).equals(first)
    assert len(trained(database)) == 2 * len(first) == 6
    assert first.column("rollout_id").to_pylist().count("r1") == 2


def test_only_what_the_plan_placed_has_trained(database: Engine, found: RowSet) -> None:
    planned = plan(found.rows, seed=0, step=0, token_budget=20)
    assert planned.too_long
    facts: dict[str, Any] = {"run": "x", "selection": found.selection, "trainer_version": 7, "at": 5}
    recorded = events(planned, found.rows, {"r1": 0.5, "r2": -1.0}, **facts)
    assert {event.row_id for event in recorded}.isdisjoint(each.row_id for each in planned.too_long)
    with pytest.raises(PlanMismatch, match="rollout 'r2' has rows to train and no advantage"):
        events(planned, found.rows, {"r1": 0.5}, **facts)
    with pytest.raises(PlanMismatch, match="is planned and not among the rows"):
        events(planned, [], {"r1": 0.5, "r2": -1.0}, **facts)


def test_a_step_without_rows_records_nothing_and_steps_are_recorded_one_by_one(database: Engine, found: RowSet) -> None:
    assert not record(database, [])
    with pytest.raises(ValueError, match="record one step at a time"):
        record(database, [*step(found, 0), *step(found, 1)])
    assert len(trained(database)) == 0


def test_a_row_that_did_not_train_is_named(database: Engine, found: RowSet) -> None:
    with pytest.raises(UnknownRow, match="row 'abc' did not train in step 0 of run 'x': list the rows that did"):
        origin(database, "x", 0, "abc")


@pytest.mark.parametrize(
    ("name", "asked"), [("row_calls", ("run", "step", "row_id")), ("rollout_steps", ("rollout_id",))]
)
def test_the_way_back_uses_indexes(sqlite_database: Engine, name: str, asked: tuple[str, ...]) -> None:
    with read(sqlite_database) as connection:
        statement = text(f"explain query plan {query(name, 'sqlalchemy')}")
        steps = [line.detail for line in connection.execute(statement, dict.fromkeys(asked, 0))]
    assert any("USING" in line and "INDEX" in line for line in steps)
    assert not [line for line in steps if line.startswith("SCAN") and line != "SCAN ancestor"], steps
