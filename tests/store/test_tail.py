"""The tail: nothing missed, nothing twice, and never an event before one that it names."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args
from uuid import UUID

import pytest
from sqlalchemy import Engine, select

from store import log, schema, tail
from store.database import open_database, read, write
from store.errors import BadPosition
from store.events import (
    AnyEvent,
    CallAdmitted,
    CallCompleted,
    CallEnded,
    Event,
    RolloutOpened,
    RolloutScored,
    RowTrained,
)
from store.settled import Position
from store.tail import Told


def intent(call: CallCompleted) -> CallAdmitted:
    return CallAdmitted(
        call_id=call.call_id,
        rollout_id=call.rollout_id,
        decision=call.decision,
        reason=call.reason,
        parent_id=call.parent_id,
        worker="w",
        at=call.started_at,
    )


def a_rollout(chain_maker: Any, rollout_id: str) -> list[Event]:
    """One of everything, as it happens: three calls, one that failed, an outcome, a row that trained."""
    calls = chain_maker(rollout_id=rollout_id)
    opened_at = calls[0].started_at - 10
    failed = intent(calls[1]).model_copy(update={"call_id": UUID(int=calls[1].call_id.int ^ 1)})
    last = calls[-1].completed_at
    return [
        RolloutOpened(rollout_id=rollout_id, opened_at=opened_at, group_id="g", secret_hash=bytes(32)),
        *(event for call in calls for event in (intent(call), call)),
        failed,
        CallEnded(call_id=failed.call_id, rollout_id=rollout_id, state="failed", reason="x", at=last + 1),
        RolloutScored(outcome_id=UUID(int=calls[0].call_id.int ^ 2), rollout_id=rollout_id, reward=1.0, at=last + 2),
        RowTrained(
            run="run",
            step=1,
            row_id=f"row of {rollout_id}",
            rollout_id=rollout_id,
            tip_call_id=calls[-1].call_id,
            selection="completed",
            selection_version=1,
            advantage=0.5,
            trainer_policy_version=3,
            at=last + 3,
        ),
    ]


def remember(database: Engine, events: Iterable[Event]) -> None:
    with write(database) as connection:
        log.append(connection, events)


def told_of(database: Engine, *, after: Position | None = None, **options: Any) -> list[Told]:
    """All that is told from a position on, page by page."""
    position, found = after or Position(), list[Told]()
    while (page := tail.read(database, after=position, **options)).events:
        found += page.events
        position = page.position
    return found


def names(told: Iterable[Told]) -> list[tuple[str, int]]:
    return [(each.kind, each.sequence) for each in told]


def assert_in_order(told: Sequence[Told]) -> None:
    """By sequence within a kind, and nothing before what it names; nothing twice."""
    assert len(set(names(told))) == len(told)
    last: dict[str, int] = {}
    opened, admitted, completed = set[Any](), set[Any](), set[Any]()
    for each in told:
        assert last.get(each.kind, 0) < each.sequence
        last[each.kind] = each.sequence
        fields = each.fields
        match each.kind:
            case "rollout_opened":
                opened.add(fields["rollout_id"])
            case "call_admitted":
                assert fields["rollout_id"] in opened
                assert fields["parent_id"] is None or fields["parent_id"] in completed
                admitted.add(fields["call_id"])
            case "call_completed" | "call_ended":
                assert fields["call_id"] in admitted
                if each.kind == "call_completed":
                    completed.add(fields["call_id"])
            case "rollout_scored":
                assert fields["rollout_id"] in opened
            case "row_trained":
                assert fields["tip_call_id"] in completed


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_every_event_is_told_once_and_after_those_it_names(database, chain_maker, limit):
    histories = [a_rollout(chain_maker, f"r{number}") for number in range(4)]
    dice = random.Random(limit)
    waiting = [list(reversed(history)) for history in histories]
    while any(waiting):  # four rollouts at once, each in its own order
        remember(database, [dice.choice([each for each in waiting if each]).pop()])
    told = told_of(database, limit=limit)
    assert len(told) == sum(map(len, histories))
    assert_in_order(told)
    assert names(told) == names(told_of(database))
    for rollout_id in ("r0", "r3"):
        alone = told_of(database, rollouts=[rollout_id], limit=limit)
        assert {each.fields["rollout_id"] for each in alone} == {rollout_id}
        assert sorted(names(alone)) == sorted(names(each for each in told if each.fields["rollout_id"] == rollout_id))
        assert_in_order(alone)


def test_a_tail_goes_on_behind_any_event(database, chain_maker):
    for number in range(3):
        remember(database, a_rollout(chain_maker, f"r{number}"))
    told = told_of(database)
    for at, each in enumerate(told):
        assert Position.parse(str(each.position)) == each.position
        rest = told_of(database, after=each.position, limit=4)
        assert sorted(names(rest)) == sorted(names(told[at + 1 :]))
        assert_in_order([*told[: at + 1], *rest])
    end = tail.now(database)
    assert end == tail.read(database, after=end).position
    assert told_of(database, after=end) == []
    remember(database, a_rollout(chain_maker, "r9"))
    assert {each.fields["rollout_id"] for each in told_of(database, after=end)} == {"r9"}


def test_kinds_that_are_not_asked_for_stay_where_they_are(database, chain_maker):
    remember(database, a_rollout(chain_maker, "r1"))
    page = tail.read(database, after=Position(), kinds=["rollout_scored", "call_completed"])
    assert [each.kind for each in page.events] == ["call_completed"] * 3 + ["rollout_scored"]
    assert page.position == Position(calls=3, outcomes=1)
    rest = told_of(database, after=page.position)
    assert {each.kind for each in rest} == {"rollout_opened", "call_admitted", "call_ended", "row_trained"}


def test_with_its_tokens_an_event_reads_back_whole_and_without_them_it_is_narrow(database, chain_maker):
    events = [
        event.model_copy(update={"secret_hash": None} if isinstance(event, RolloutOpened) else {})
        for event in a_rollout(chain_maker, "r1")
    ]
    remember(database, events)
    whole = [AnyEvent.validate_python(dict(each.fields)) for each in told_of(database, tokens=True)]
    assert sorted(event.digest() for event in whole) == sorted(event.digest() for event in events)
    for each in told_of(database):
        assert not each.fields.keys() & {"token_ids", "logprobs", "request_items", "answer_items", "digest"}
        assert each.fields["kind"] == each.kind


def test_the_hash_of_a_secret_is_told_to_nobody(database, chain_maker):
    remember(database, a_rollout(chain_maker, "r1"))
    for tokens in (False, True):
        opening = told_of(database, tokens=tokens)[0]
        assert opening.kind == "rollout_opened"
        assert "secret_hash" not in opening.fields


def test_an_outcome_comes_after_the_calls_of_its_rollout_though_its_clock_is_behind(database, chain_maker):
    events = a_rollout(chain_maker, "r1")
    early = [
        event.model_copy(update={"at": event.at - 5_000_000}) if isinstance(event, RolloutScored) else event
        for event in events
    ]
    remember(database, early)
    kinds = [each.kind for each in told_of(database)]
    assert kinds.index("rollout_scored") > max(at for at, kind in enumerate(kinds) if kind == "call_completed")


def test_calls_that_came_before_their_intents_are_told_all_the_same(database, chain_maker):
    calls = chain_maker([(5, 2)] * 6)
    remember(database, calls)
    remember(database, [*map(intent, reversed(calls)), RolloutOpened(rollout_id="r1", opened_at=1)])
    for limit in (1, 2, 100):
        assert len(told_of(database, limit=limit)) == 13


def test_kinds_are_those_of_events():
    assert sorted(tail.KINDS) == sorted(get_args(tail.Kind))
    assert sorted(tail.KINDS) == sorted(event.model_fields["kind"].default for event in get_args(Event))


@pytest.mark.parametrize("text", ["", "yesterday", "1.2.3.4", "1.2.3.4.5.6.7", "1.2.3.4.5.-6", "1.2.3.4.5.٣"])
def test_what_is_no_position_is_refused(text):
    with pytest.raises(BadPosition, match="is no position of the log: give the one that a tail printed"):
        Position.parse(text)


def without_ends(events: Iterable[Event]) -> list[Event]:
    """An end would wait for the open transaction's completed calls."""
    return [event for event in events if not isinstance(event, CallEnded)]


@pytest.mark.postgres
def test_nothing_is_told_that_a_late_commit_could_come_before(postgres_database, make_chain_maker):
    """An open transaction has taken sequences of every kind; what is committed behind it waits for it."""
    late, early = (without_ends(a_rollout(make_chain_maker(n), name)) for n, name in enumerate(("late", "early")))
    with write(postgres_database) as connection:
        log.append(connection, late[:3])
        remember(postgres_database, early)
        assert [each.kind for each in told_of(postgres_database)] == []
        log.append(connection, late[3:])
    assert_in_order(told := told_of(postgres_database))
    assert len(told) == len(late) + len(early)


@pytest.mark.postgres
def test_an_event_waits_for_one_that_it_names_and_that_is_not_settled(postgres_database, make_chain_maker):
    """An open transaction holds up completed calls alone: what names those behind it waits as well."""
    held = make_chain_maker(0)([(5, 2)], rollout_id="held")
    events = without_ends(a_rollout(make_chain_maker(1), "r1"))
    with write(postgres_database) as connection:
        log.append(connection, held)
        remember(postgres_database, events)
        first = told_of(postgres_database)
        assert [each.kind for each in first] == ["rollout_opened", "call_admitted"], "the next intent names a parent"
    rest = told_of(postgres_database, after=first[-1].position)
    told = [each for each in (*first, *rest) if each.fields["rollout_id"] == "r1"]
    assert_in_order(told)
    assert len(told) == len(events)
    assert told[-2].kind == "rollout_scored"


PROCESSES = {"postgresql": 16, "sqlite": 4}


def write_some(url: str, number: int, make_chain_maker: Callable[[int], Any]) -> None:
    """What a worker of its own process writes: rollouts by several transactions each, some of which stall."""
    dice = random.Random(number)
    database = open_database(url)
    slow = 0.1 if database.dialect.name == "postgresql" else 0.005
    for turn in range(4):
        events = a_rollout(make_chain_maker(100 * number + turn), f"r{number}.{turn}")
        while events:
            some = [events.pop(0)]
            while events and len(some) < dice.randint(1, 3) and not isinstance(events[0], CallEnded):
                some.append(events.pop(0))  # an end goes first, as in every group of a writer: it locks out completions
            with write(database) as connection:
                for event in some:
                    log.append(connection, [event])
                    if dice.random() < 0.15:
                        time.sleep(slow)
    database.dispose()


@pytest.fixture
def writers(database, make_chain_maker) -> Iterator[list[Any]]:
    """Processes that write to the log at once."""
    url = database.url.render_as_string(hide_password=False)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=write_some, args=(url, number, make_chain_maker))
        for number in range(PROCESSES[database.dialect.name])
    ]
    for process in processes:
        process.start()
    yield processes
    for process in processes:
        process.kill()
        process.join()


def test_many_processes_that_stall_are_followed_without_a_miss(database, writers):
    told: list[Told] = []
    position = Position()
    careless, careless_last = set[int](), 0  # who asks for what is above the last sequence that it saw
    calls = schema.model_call.c
    while True:
        running = any(process.is_alive() for process in writers)
        page = tail.read(database, after=position, limit=200)
        told += page.events
        position = page.position
        with read(database) as connection:
            seen = connection.scalars(select(calls.sequence).where(calls.sequence > careless_last)).all()
        careless |= {*seen}
        careless_last = max(seen, default=careless_last)
        if not running and not page.events:
            break
        time.sleep(0.005)
    assert [process.exitcode for process in writers] == [0] * len(writers)
    assert_in_order(told)
    assert len(told) == len(writers) * 4 * 11
    assert len({(each.fields["rollout_id"], each.sequence, each.kind) for each in told}) == len(told)
    assert len(careless) <= len(writers) * 4 * 3
    if database.dialect.name == "postgresql":
        assert len(careless) < len(writers) * 4 * 3, "nothing was committed late, so that nothing is shown"
    for rollout_id in {each.fields["rollout_id"] for each in told}:
        kinds = [each.kind for each in told if each.fields["rollout_id"] == rollout_id]
        assert kinds.index("rollout_scored") > max(at for at, kind in enumerate(kinds) if kind == "call_completed")
