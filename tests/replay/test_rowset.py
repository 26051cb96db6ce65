"""The whole of replay on real databases: the log in, rows out."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from replay.advantage import Score
from replay.errors import BadPosition, PositionAhead, UnknownRollout
from replay.rowset import RowSet, build
from replay.selection import Selection
from replay.source import Position
from store import log
from store.database import open_database, read, write
from store.events import CallCompleted, CallEnded, Event, RolloutOpened, RolloutScored, token_array, uuid7

Remember = Callable[[Engine, Iterable[Event]], None]


def opened(rollout_id: str, at: int, **facts: Any) -> RolloutOpened:
    return RolloutOpened(rollout_id=rollout_id, opened_at=at, **facts)


def scored(rollout_id: str, reward: float, at: int = 0, accepted: tuple[str, ...] | None = None) -> RolloutScored:
    outcome_id = uuid7(at, rollout_id.encode()[:10].ljust(10))
    return RolloutScored(outcome_id=outcome_id, rollout_id=rollout_id, reward=reward, at=at, accepted=accepted)


def numbers(found: RowSet) -> list[tuple[str, tuple[int, ...]]]:
    return [(row.rollout_id, row.call_numbers) for row in found.rows]


def test_five_turns_that_rewrite_after_two_give_three_rows(
    database: Engine, remember: Remember, grow: Any, chain_maker: Any
) -> None:
    calls = grow(chain_maker, [None, 0, None, 2, None])
    remember(database, [opened("r1", 1, group_id="g"), *calls, scored("r1", 0.5)])
    found = build(database)
    assert numbers(found) == [("r1", (1, 2)), ("r1", (3, 4)), ("r1", (5,))]
    assert {(row.group_id, row.reward) for row in found.rows} == {("g", 0.5)}
    assert found.scores == (Score(rollout_id="r1", group_id="g", reward=0.5),)
    assert found.refusals.by_reason() == {}
    assert found.left_out == {}
    assert sum(row.trained for row in found.rows) == sum(call.sampled_len for call in calls)


def test_an_empty_log_gives_no_rows(database: Engine) -> None:
    found = build(database)
    assert (found.rows, found.rollouts, str(found.position)) == ((), 0, "0.0.0.0")


def test_a_chain_of_2000_calls_gives_one_row_quickly(database: Engine, remember: Remember, chain_maker: Any) -> None:
    calls = chain_maker([(3, 2)] * 2000)
    remember(database, [opened("r1", 1), *calls])
    started = time.perf_counter()
    found = build(database)
    seconds = time.perf_counter() - started
    (row,) = found.rows
    assert row.call_numbers == tuple(range(1, 2001))
    assert row.token_ids.tobytes() == b"".join(call.token_ids for call in calls)
    assert (row.length, row.trained) == (10_000, 4000)
    assert seconds < 5, f"{seconds:.1f} s"


@pytest.mark.postgres
def test_both_databases_give_the_same_rows_byte_for_byte(
    sqlite_database: Engine, postgres_database: Engine, remember: Remember, grow: Any, make_chain_maker: Any
) -> None:
    events: list[Event] = []
    for number, parents in enumerate([[None, 0, None, 2, None], [None, 0, 0, 1, 1, 2], [None, *range(40)]]):
        rollout_id = f"r{number}"
        events.append(opened(rollout_id, 10 - number, group_id="g"))
        events += grow(make_chain_maker(number), parents, rollout_id=rollout_id)
        events.append(scored(rollout_id, number / 3))
    remember(sqlite_database, events)
    remember(postgres_database, events[:1])
    remember(postgres_database, events)  # the repeated event takes a sequence: gaps change nothing
    ours, theirs = build(sqlite_database), build(postgres_database)
    assert ours.digest() == theirs.digest()
    assert numbers(ours) == numbers(theirs)
    assert [each for each, _ in numbers(ours)] == ["r2", *["r1"] * 3, *["r0"] * 3], "in the order of their opening"


@st.composite
def forests(draw: st.DrawFn) -> list[int | None]:
    """The parent of each call: None or an earlier call."""
    size = draw(st.integers(1, 8))
    return [draw(st.none() | st.integers(0, index - 1)) if index else None for index in range(size)]


PROPERTY = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # make_chain_maker keeps nothing between examples
)


@given(data=st.data())
@PROPERTY
def test_append_then_replay_gives_the_tokens_back(
    data: st.DataObject, fresh_log: Any, remember: Remember, grow: Any, make_chain_maker: Any
) -> None:
    parents = data.draw(forests())
    calls: list[CallCompleted] = grow(make_chain_maker(0), parents)
    with fresh_log() as database:
        remember(database, calls)
        found = build(database)
    by_id = {call.call_id: call for call in calls}
    assert found.refusals.by_reason() == {}
    assert len(found.rows) == len(set(range(len(calls))) - set(parents))
    for row in found.rows:
        chain = [by_id[call_id] for call_id in row.call_ids]
        assert [call.parent_id for call in chain] == [None, *(call.call_id for call in chain[:-1])]
        assert row.token_ids.tobytes() == b"".join(call.token_ids for call in chain)
    assert sum(row.trained for row in found.rows) == sum(call.sampled_len for call in calls)


@given(data=st.data())
@PROPERTY
def test_the_order_of_arrival_of_independent_rollouts_changes_nothing(
    data: st.DataObject, fresh_log: Any, remember: Remember, grow: Any, make_chain_maker: Any
) -> None:
    streams: list[list[Event]] = []
    for number in range(3):
        calls = grow(make_chain_maker(number), data.draw(forests()), rollout_id=f"r{number}")
        streams.append([opened(f"r{number}", data.draw(st.integers(0, 2))), *calls, scored(f"r{number}", number)])
    turns = data.draw(st.permutations([number for number, stream in enumerate(streams) for _ in stream]))
    rest = [iter(stream) for stream in streams]
    digests: set[str] = set()
    for events in ([event for stream in streams for event in stream], [next(rest[turn]) for turn in turns]):
        with fresh_log() as database:
            remember(database, events)
            digests.add(build(database).digest())
    assert len(digests) == 1


def test_a_position_gives_the_same_rows_after_the_log_grew(
    database: Engine, remember: Remember, grow: Any, chain_maker: Any
) -> None:
    calls = grow(chain_maker, [None, 0, None])
    remember(database, [opened("r1", 1), *calls[:2], scored("r1", 1.0, at=1)])
    before = build(database)
    remember(database, [calls[2], scored("r1", 0.0, at=2), opened("r2", 0)])
    now = build(database)
    assert numbers(now) == [("r1", (1, 2)), ("r1", (3,))]
    assert now.scores[0].reward == 0.0, "the latest outcome counts"
    again = build(database, position=Position.parse(str(before.position)))
    assert again.digest() == before.digest() != now.digest()
    assert again.scores == before.scores


def test_a_position_that_the_log_has_not_reached_is_refused(
    database: Engine, remember: Remember, chain_maker: Any
) -> None:
    remember(database, chain_maker())
    with pytest.raises(PositionAhead, match=r"rows as of 99\.0\.0\.0, but the log has reached 3\.0\.0\.0"):
        build(database, position=Position.parse("99.0.0.0"))
    with pytest.raises(BadPosition, match="'yesterday' is not a position"):
        Position.parse("yesterday")


def test_one_rollout_can_be_built_alone(database: Engine, remember: Remember, make_chain_maker: Any) -> None:
    for number in range(3):
        remember(database, make_chain_maker(number)(rollout_id=f"r{number}"))
    everything = build(database)
    alone = build(database, rollouts=["r1"])
    assert numbers(alone) == [("r1", (1, 2, 3))]
    assert alone.rollouts == 1
    assert [row.row_id for row in alone.rows] == [row.row_id for row in everything.rows if row.rollout_id == "r1"]
    with pytest.raises(UnknownRollout, match="rollout 'r9' is not in the log"):
        build(database, rollouts=["r1", "r9"])


def test_calls_that_did_not_complete_never_train(database: Engine, remember: Remember, chain_maker: Any) -> None:
    calls = chain_maker()
    abandoned = CallEnded(
        call_id=uuid7(1, b"0123456789"),
        rollout_id="r1",
        state="abandoned",
        reason="client gone",
        at=1,
        token_ids=calls[0].token_ids,
        logprobs=calls[0].token_ids,
    )
    remember(database, [*calls, abandoned])
    assert numbers(build(database)) == [("r1", (1, 2, 3))]


def test_one_bad_call_refuses_its_rollout_and_siblings_go_on(
    sqlite_database: Engine, remember: Remember, grow: Any, make_chain_maker: Any
) -> None:
    for number in range(3):
        calls = grow(make_chain_maker(number), [None, 0, None], rollout_id=f"r{number}")
        remember(sqlite_database, [opened(f"r{number}", number), *calls, scored(f"r{number}", number)])
    with sqlite_database.connect() as connection:  # as someone with the file in hand can
        connection.exec_driver_sql("pragma query_only = off")
        triggers = connection.scalars(text("select name from sqlite_master where type = 'trigger'")).all()
        for trigger in triggers:
            connection.exec_driver_sql(f'drop trigger "{trigger}"')
        connection.execute(
            text("update model_call set chain_hash = zeroblob(32) where rollout_id = 'r1' and depth = 1")
        )
        connection.commit()
    found = build(sqlite_database)
    assert numbers(found) == [("r0", (1, 2)), ("r0", (3,)), ("r2", (1, 2)), ("r2", (3,))]
    assert found.refusals.by_reason() == {"chain_hash_mismatch": 1}
    (refusal,) = found.refusals.rollouts
    assert refusal.rollout_id == "r1"
    assert refusal.detail.startswith("call 2 (")
    assert [score.rollout_id for score in found.scores] == ["r0", "r1", "r2"]


def test_media_that_the_log_does_not_hold_refuse_the_rollout(
    database: Engine, remember: Remember, chain_maker: Any
) -> None:
    calls = chain_maker()
    remember(database, [*calls[:2], calls[2].model_copy(update={"media_count": 2})])
    found = build(database)
    assert found.rows == ()
    assert found.refusals.by_reason() == {"media_not_captured": 1}


def test_declared_calls_train_and_the_rest_is_counted(
    database: Engine, remember: Remember, grow: Any, chain_maker: Any
) -> None:
    calls = grow(chain_maker, [None, 0, None, 0])
    accepted = tuple(str(call.call_id) for call in calls[:2])
    remember(database, [*calls, scored("r1", 1.0, accepted=accepted)])
    found = build(database, Selection(rule="declared"))
    assert numbers(found) == [("r1", (1, 2))]
    assert found.left_out == {"not_accepted": 2}


def test_declared_refuses_by_reason(database: Engine, remember: Remember, make_chain_maker: Any) -> None:
    accepted: Sequence[tuple[str, ...] | None] = [None, ("chatcmpl-unknown",), ()]
    for number, ids in enumerate(accepted):
        rollout_id = f"r{number}"
        remember(database, [*make_chain_maker(number)(rollout_id=rollout_id), scored(rollout_id, 1, accepted=ids)])
    found = build(database, Selection(rule="declared"))
    assert found.refusals.by_reason() == {"nothing_declared": 1, "accepted_unknown": 1}
    assert found.left_out == {"not_accepted": 3}


def test_a_hint_names_a_role_that_can_be_excluded(
    database: Engine, remember: Remember, grow: Any, chain_maker: Any
) -> None:
    calls = grow(chain_maker, [None, None])
    remember(database, [calls[0], calls[1].model_copy(update={"hints": {"role": "title"}})])
    assert numbers(build(database, Selection(excluded_roles=frozenset({"title"})))) == [("r1", (1,))]
    assert numbers(build(database)) == [("r1", (1,)), ("r1", (2,))]


def test_progress_counts_rollouts_to_the_end(database: Engine, remember: Remember, make_chain_maker: Any) -> None:
    for number in range(3):
        remember(database, make_chain_maker(number)(rollout_id=f"r{number}"))
    seen: list[tuple[int, int]] = []
    build(database, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)


def test_long_prompts_are_stored_compressed_and_read_back(
    database: Engine, remember: Remember, chain_maker: Any
) -> None:
    (call,) = chain_maker([(5000, 500)])
    remember(database, [call])
    (row,) = build(database).rows
    np.testing.assert_array_equal(row.token_ids, token_array(call.token_ids))
    with read(database) as connection:
        assert connection.scalar(text("select codec from model_call")) == 1


def test_the_calls_that_an_output_holds_train(
    database: Engine, remember: Remember, grow: Any, chain_maker: Any
) -> None:
    """Call 1, continued by 2 and, after its answer was rejected, by 3."""
    calls = grow(chain_maker, [None, 0, 0])
    outcome = scored("r1", 1.0).model_copy(update={"output": output_of(calls[0], calls[2])})
    remember(database, [*calls, outcome, *grow(chain_maker, [None], rollout_id="r2"), scored("r2", 0.0)])
    found = build(database, Selection(rule="output"))
    assert numbers(found) == [("r1", (1, 3))]
    assert found.left_out == {"not_in_output": 1}
    assert found.refusals.by_reason() == {"no_output": 1}
    alone = build(database, Selection(rule="output"), rollouts=["r1"])
    assert alone.digest() == found.digest()


def output_of(*calls: CallCompleted) -> Any:
    """A harness's output of these calls' answers, as an outcome keeps it."""
    passages = [
        {
            "at": f"output[{at}]",
            "roles": [item.role for item in call.answer_items],
            "digests": [item.digest.hex() for item in call.answer_items],
            "keys": [call.answer_key.hex()],
        }
        for at, call in enumerate(calls)
    ]
    return {"version": 1, "hash_version": 1, "form": "chat", "source": "00" * 32, "passages": passages}


@pytest.mark.postgres
def test_a_position_is_not_passed_by_a_commit_that_comes_late(
    postgres_database: Engine, remember: Remember, make_chain_maker: Any
) -> None:
    """Two servers write at once: the first takes lower sequences and commits later."""
    early, late = make_chain_maker(0)(rollout_id="early"), make_chain_maker(1)(rollout_id="late")
    remember(postgres_database, [opened("early", 1), early[0]])
    with write(postgres_database) as connection:
        log.append(connection, [opened("late", 2), late[0], scored("late", 1.0)])
        remember(postgres_database, [early[1], scored("early", 0.5)])
        before = build(postgres_database)
        assert numbers(before) == [("early", (1,))], "what was committed above an open transaction waits for it"
        log.append(connection, late[1:])
    again = build(postgres_database, position=Position.parse(str(before.position)))
    assert (again.digest(), again.scores) == (before.digest(), before.scores)
    now = build(postgres_database)
    assert numbers(now) == [("early", (1, 2)), ("late", (1, 2, 3))]
    assert len(now.scores) == 2
    ahead = Position(calls=now.position.calls + 1, outcomes=0, rollouts=0, trained=0)
    with write(postgres_database) as connection:
        log.append(connection, [make_chain_maker(2)(rollout_id="open")[0]])
        with pytest.raises(PositionAhead):
            build(postgres_database, position=ahead)


@pytest.mark.postgres
def test_sixteen_writers_never_pass_a_position(postgres_url: str, remember: Remember, make_chain_maker: Any) -> None:
    """Positions taken while they write give the same rows after they have written."""
    taken: list[RowSet] = []
    done = threading.Event()

    def write_some(number: int) -> None:
        dice = random.Random(number)
        database = open_database(postgres_url)
        for turn in range(6):
            calls = make_chain_maker(100 * number + turn)(rollout_id=f"r{number}.{turn}")
            with write(database) as connection:
                for call in calls:
                    log.append(connection, [call])
                    if dice.random() < 0.2:
                        time.sleep(0.05)
        database.dispose()

    def read_some() -> None:
        database = open_database(postgres_url)
        while not done.is_set():
            taken.append(build(database))
        database.dispose()

    reader = threading.Thread(target=read_some)
    reader.start()
    with ThreadPoolExecutor(16) as writers:
        list(writers.map(write_some, range(16)))
    done.set()
    reader.join()
    database = open_database(postgres_url)
    assert len(build(database).rows) == 16 * 6
    assert len({len(found.rows) for found in taken}) > 1, "positions were taken on the way"
    for found in taken[:: max(1, len(taken) // 20)]:
        assert build(database, position=found.position).digest() == found.digest()
    database.dispose()
