"""New events in one round trip: all or none, and what is refused is left to whoever can say why."""

from __future__ import annotations

from uuid import UUID

import pytest
from sqlalchemy import text

from store import log
from store.at_once import append_new, few
from store.database import Pen, open_database, read, write
from store.events import CallAdmitted, CallEnded, MediaStored, RolloutOpened


def opening(number: int, **change) -> RolloutOpened:
    return RolloutOpened.model_validate({"rollout_id": f"r{number}", "opened_at": number, "task": "t"} | change)


def intent(number: int) -> CallAdmitted:
    return CallAdmitted(
        call_id=UUID(int=number),
        rollout_id="r1",
        decision="root",
        reason="first_call",
        parent_id=None,
        worker="w",
        at=1,
    )


def at_once(pen: Pen, events, known=None) -> bool:
    return append_new(pen, events, log.prepare(events, "postgresql", known=known or {}))


@pytest.fixture
def pen(postgres_database):
    pen = Pen(postgres_database)
    yield pen
    pen.close()


def in_log(database):
    with read(database) as connection:
        return [*log.rollouts(connection), *log.intents(connection, "r1"), *log.calls(connection, "r1")]


@pytest.mark.postgres
def test_new_events_are_in_the_log_parents_before_children(pen, postgres_database, chain_maker):
    root, child = chain_maker([(9, 3), (5, 2)])
    assert at_once(pen, [child, root, intent(1), opening(1)]) is False  # in their order a child is not above its parent
    assert in_log(postgres_database) == []
    assert at_once(pen, [root, child, intent(1), opening(1)])
    assert in_log(postgres_database) == [opening(1), intent(1), root, child]


@pytest.mark.postgres
@pytest.mark.parametrize("there", [opening(1), intent(1)], ids=["opening", "intent"])
def test_an_event_that_is_there_leaves_all_to_the_log(pen, postgres_database, there):
    assert at_once(pen, [there])
    assert at_once(pen, [there]) is False
    assert at_once(pen, [opening(2), intent(2), there]) is False
    assert in_log(postgres_database) == [there]
    assert at_once(pen, [opening(2), intent(2)])  # the connection goes on
    assert len(in_log(postgres_database)) == 3


@pytest.mark.postgres
def test_an_opening_that_says_nothing_but_the_id_finds_another(pen, postgres_database):
    assert at_once(pen, [opening(1)])
    implicit = RolloutOpened(rollout_id="r1", opened_at=7)
    assert at_once(pen, [implicit, intent(1)])
    assert in_log(postgres_database) == [opening(1), intent(1)]


@pytest.mark.postgres
def test_a_call_that_has_ended_or_whose_parent_must_be_looked_up_is_left_to_the_log(
    pen, postgres_database, chain_maker
):
    root, child = chain_maker([(9, 3), (5, 2)])
    assert at_once(pen, [root])
    assert at_once(pen, [child]) is False
    assert at_once(pen, [child], {root.call_id: log.Tip.of(root)})
    ended = CallEnded(call_id=root.call_id, rollout_id="r1", state="failed", reason="x", at=1)
    assert at_once(pen, [ended, intent(1)]) is False
    assert in_log(postgres_database) == [root, child]


def test_four_of_a_kind_and_objects_are_not_for_it():
    assert few([intent(number) for number in range(3)] + [opening(number) for number in range(3)])
    assert not few([intent(number) for number in range(4)])
    assert not few([])
    assert not few([MediaStored.example()])


def backend(pen: Pen) -> int:
    with pen.write() as connection:
        return connection.scalar(text("select pg_backend_pid()"))


@pytest.mark.postgres
def test_a_pen_keeps_its_connection_and_takes_another_after_a_failure_or_when_it_is_cut(
    pen, postgres_database, postgres_url, monkeypatch
):
    first = backend(pen)
    assert backend(pen) == first
    with pytest.raises(RuntimeError), pen.write():
        raise RuntimeError
    second = backend(pen)
    assert second != first
    monkeypatch.setattr("store.database._REST_SECONDS", 0)
    other = open_database(postgres_url)
    with write(other) as connection:
        connection.execute(text(f"select pg_terminate_backend({second}, 10000)"))
    other.dispose()
    third = backend(pen)
    assert third != second
    postgres_database.dispose()
    assert backend(pen) != third
