"""The contract of the log, run against every database."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import Engine, select, text
from sqlalchemy.event import listen

from store import codec, hashing, lineage, log, schema
from store.database import read, write
from store.errors import BrokenLink, DamagedArray, EventConflict, LogUnavailable, UnknownCodec
from store.events import (
    CallAdmitted,
    CallCompleted,
    CallEnded,
    Event,
    MediaShown,
    MediaStored,
    RolloutOpened,
    RolloutScored,
    RowTrained,
    logprob_bytes,
    token_array,
    token_bytes,
    uuid7,
)

ONE = uuid7(1, bytes(10))
TWO = uuid7(2, bytes(10))


def opened(**change: object) -> RolloutOpened:
    fields = {"rollout_id": "r1", "group_id": "g", "slot": 3, "task": "täsk", "harness": "h", "opened_at": 5}
    return RolloutOpened.model_validate(
        fields | {"metadata": {"n": 1, "x": 1.0, "s": "\ud800", "big": 10**30}} | change
    )


def admitted(call_id: UUID = ONE, *, worker: str = "w1", rollout_id: str = "r1") -> CallAdmitted:
    return CallAdmitted(
        call_id=call_id,
        rollout_id=rollout_id,
        decision="root",
        reason="first_call",
        parent_id=None,
        worker=worker,
        at=7,
    )


def ended(call_id: UUID = ONE, **change: object) -> CallEnded:
    fields = {"call_id": call_id, "rollout_id": "r1", "state": "abandoned", "reason": "client gone", "at": 9}
    arrays = {"token_ids": token_bytes(range(100)), "logprobs": logprob_bytes([-0.5] * 100)}
    return CallEnded.model_validate(fields | arrays | change)


def scored(**change: object) -> RolloutScored:
    fields = {"outcome_id": ONE, "rollout_id": "r1", "reward": 0.1, "accepted": ("a", "b"), "at": 11}
    json = {"output": [{"role": "assistant"}, None, 1.5], "declared_rewrites": ({"at": 3},)}
    return RolloutScored.model_validate(fields | json | change)


def trained(**change: object) -> RowTrained:
    fields = {
        "run": "run",
        "step": 1,
        "row_id": "row",
        "rollout_id": "r1",
        "tip_call_id": ONE,
        "selection": "completed",
    }
    numbers = {"selection_version": 1, "advantage": -1 / 3, "trainer_policy_version": 4, "at": 13}
    return RowTrained.model_validate(fields | numbers | change)


OTHER_KINDS: list[tuple[Event, Event]] = [
    (opened(), opened(task="other")),
    (admitted(), admitted(worker="other")),
    (ended(), ended(reason="other")),
    (scored(), scored(reward=0.2)),
    (trained(), trained(advantage=0.5)),
    (MediaStored.example(), MediaStored.example().model_copy(update={"size": 1})),
    (MediaShown.example(), MediaShown.example().model_copy(update={"start": 2})),
]
"""An event of each kind but the completed call, and another one under its id."""


def append(database: Engine, *events: Event) -> None:
    with write(database) as connection:
        log.append(connection, events)


def stored_calls(database: Engine, rollout_id: str = "r1") -> list[CallCompleted]:
    with read(database) as connection:
        return log.calls(connection, rollout_id)


def count(database: Engine, table: str) -> int:
    with read(database) as connection:
        return len(connection.execute(select(schema.metadata.tables[table].c.sequence)).all())


def test_every_kind_of_event_reads_back_as_it_was_appended(database, chain_maker):
    other = opened(rollout_id="r2", group_id=None, slot=None, task=None, harness=None, metadata={})
    chain = chain_maker()
    append(
        database,
        opened(),
        other,
        admitted(),
        ended(),
        *chain,
        scored(),
        scored(outcome_id=TWO, accepted=None, output=None),
    )
    with read(database) as connection:
        assert log.rollout(connection, "r1") == opened()
        assert log.rollout(connection, "r3") is None
        assert log.rollouts(connection) == [opened(), other]
        assert log.intents(connection, "r1") == [admitted()]
        assert log.ends(connection, "r1") == [ended()]
        assert log.calls(connection, "r1") == chain
        assert log.calls(connection, "r2") == []
        assert log.outcomes(connection, "r1") == [scored(), scored(outcome_id=TWO, accepted=None, output=None)]


def test_what_reads_back_gives_the_stored_digest(database, chain_maker):
    append(database, opened(), admitted(), ended(), *chain_maker(), scored())
    with read(database) as connection:
        for table, events in (
            (schema.rollout, log.rollouts(connection)),
            (schema.call_intent, log.intents(connection, "r1")),
            (schema.call_end, log.ends(connection, "r1")),
            (schema.model_call, log.calls(connection, "r1")),
            (schema.rollout_outcome, log.outcomes(connection, "r1")),
        ):
            stored = connection.scalars(select(table.c.digest).order_by(table.c.sequence)).all()
            assert [event.digest() for event in events] == stored
            assert stored


def test_the_digest_of_a_call_covers_its_tokens_in_both_versions_of_the_hashes(database, chain_maker):
    for version in (1, 2):
        chain = [call.model_copy(update={"hash_version": version}) for call in chain_maker(rollout_id=f"r{version}")]
        append(database, *chain)
        append(database, *chain)  # the same events: nothing is written twice, and nothing conflicts
        assert stored_calls(database, f"r{version}") == chain
        for call in chain:
            changed = call.model_copy(update={"token_ids": call.token_ids[4:] + call.token_ids[:4]})
            assert changed.digest() != call.digest() == call.digest_with(call.json_texts())


def test_the_digest_of_a_root_covers_its_chain_hash_for_its_tokens_since_version_2(chain_maker):
    root, call = chain_maker([(20, 10), (8, 5)])
    for each, version, covered in (
        (root, 1, root.token_ids),
        (root, 2, hashing.chain_hash(None, root.token_ids)),
        (call, 1, call.token_ids),
        (call, 2, call.token_ids),
    ):
        of_version = each.model_copy(update={"hash_version": version})
        derived = hashing.event_digest("call_completed", of_version.json_texts(), covered, each.logprobs)
        assert of_version.digest() == derived


def test_numbers_and_text_at_their_limits_read_back(database, chain_maker):
    (call,) = chain_maker([(3, 0)])
    call = call.model_copy(
        update={"started_at": 2**63 - 1, "reason": "ünïcödé \U0001f600 ' \" \\ \n %s :x ?", "hints": {"": 1e308}}
    )
    append(database, call, scored(reward=5e-324), scored(outcome_id=TWO, reward=-0.0))
    with read(database) as connection:
        assert log.calls(connection, "r1") == [call]
        assert [outcome.digest() for outcome in log.outcomes(connection, "r1")] == [
            scored(reward=5e-324).digest(),
            scored(outcome_id=TWO, reward=0.0).digest(),
        ]


@pytest.mark.parametrize(
    "change",
    [
        {"task": "nul\0"},
        {"task": "half \ud800"},
        {"slot": 2**63},
        {"metadata": {"x": float("nan")}},
        {"rollout_id": "a/b"},
    ],
)
def test_what_a_database_could_not_give_back_is_no_event(change):
    with pytest.raises(ValidationError):
        opened(**change)


def test_small_arrays_are_raw_and_large_ones_compressed(database, chain_maker):
    append(database, *chain_maker([(40, 23), (40, 24)]))
    call = schema.model_call.c
    with read(database) as connection:
        stored = connection.execute(select(call.codec, call.token_ids).order_by(call.sequence)).all()
    assert [row.codec for row in stored] == [codec.RAW, codec.ZSTD]
    assert [codec.unpack(row.codec, row.token_ids) for row in stored] == [c.token_ids for c in stored_calls(database)]


def test_a_damaged_array_is_a_log_error():
    damaged = bytearray(codec.pack(bytes(4000)).data)
    damaged[3] ^= 0xFF
    with pytest.raises(DamagedArray, match="restore"):
        codec.unpack(codec.ZSTD, bytes(damaged))


def test_an_unknown_codec_is_named():
    with pytest.raises(UnknownCodec, match="codec 7"):
        codec.unpack(7, b"")


def test_the_same_events_again_change_nothing(database, chain_maker):
    events = [*chain_maker(), *(event for event, _ in OTHER_KINDS)]
    append(database, *events)
    append(database, *events)
    append(database, *events, *reversed(events))
    assert {table: count(database, table) for table in schema.metadata.tables} == {
        "rollout": 1,
        "call_intent": 1,
        "model_call": 3,
        "call_end": 1,
        "rollout_outcome": 1,
        "trained_row": 1,
        "media_object": 1,
        "call_media": 1,
    }


def test_a_batch_of_which_the_log_has_a_part_gets_the_rest(database, chain_maker):
    chain = chain_maker([(5, 5)] * 12)
    append(database, *chain[:3])
    append(database, *chain)
    assert stored_calls(database) == chain
    other = chain[9].model_copy(update={"reason": "other"})
    later = chain_maker([(5, 5)] * 8, rollout_id="r2")
    with pytest.raises(EventConflict):
        append(database, *later, other)
    assert stored_calls(database) == chain


@pytest.mark.parametrize(("event", "other"), OTHER_KINDS, ids=lambda event: event.kind)
def test_other_content_under_a_known_id_is_refused_and_nothing_of_its_batch_is_kept(
    database, chain_maker, event, other
):
    append(database, event)
    chain = chain_maker(rollout_id="r2")
    with pytest.raises(EventConflict, match="already in the log with other content"):
        append(database, *chain, other)
    assert stored_calls(database, "r2") == []
    with pytest.raises(EventConflict, match=event.kind):
        append(database, *chain, event, other)
    assert stored_calls(database, "r2") == []


def test_two_contents_under_one_new_id_in_one_batch_are_refused(database):
    for event, other in OTHER_KINDS:
        with pytest.raises(EventConflict):
            append(database, event, other)
    assert count(database, "rollout") == 0


def test_other_content_under_a_known_call_id_is_refused(database, chain_maker):
    chain = chain_maker()
    append(database, *chain)
    with pytest.raises(EventConflict, match=str(chain[1].call_id)) as caught:
        append(database, chain[1].model_copy(update={"finish_reason": "length"}))
    assert caught.value.kind == "call_completed"
    assert stored_calls(database) == chain


def test_a_count_that_a_writer_uses_twice_loses_no_call(database, chain_maker):
    chain = chain_maker()
    (other,) = chain_maker([(5, 5)], rollout_id="r2")
    again = other.model_copy(update={"writer_seq": chain[0].writer_seq})
    append(database, *chain, again)
    with read(database) as connection:
        assert log.calls(connection, "r2") == [again]


def test_an_implicit_opening_is_satisfied_by_any_other(database):
    append(database, opened(), RolloutOpened(rollout_id="r1", opened_at=99))
    append(database, RolloutOpened(rollout_id="r1", opened_at=100), RolloutOpened(rollout_id="r2", opened_at=101))
    append(database, RolloutOpened(rollout_id="r2", opened_at=102))
    with read(database) as connection:
        assert log.rollouts(connection) == [opened(), RolloutOpened(rollout_id="r2", opened_at=101)]
    with pytest.raises(EventConflict):
        append(database, opened(rollout_id="r2"))


def test_an_implicit_opening_in_one_batch_with_any_other_changes_nothing(database):
    append(
        database, opened(), RolloutOpened(rollout_id="r1", opened_at=99), RolloutOpened(rollout_id="r1", opened_at=1)
    )
    with read(database) as connection:
        assert log.rollouts(connection) == [opened()]
    with pytest.raises(EventConflict, match="rollout_opened r2 is already in the log with other content"):
        append(database, RolloutOpened(rollout_id="r2", opened_at=99), opened(rollout_id="r2"))
    assert count(database, "rollout") == 1


def test_a_known_parent_is_not_looked_up_and_still_checked(database, chain_maker):
    root, call = chain_maker([(20, 10), (8, 5)])
    append(database, root)
    asked: list[str] = []
    listen(database, "before_cursor_execute", lambda *what: asked.append(what[2]))
    known = {root.call_id: log.Tip.of(root)}
    with pytest.raises(BrokenLink, match="has depth 0, the call 2"), write(database) as connection:
        log.append(connection, [call.model_copy(update={"depth": 2})], known=known)
    with write(database) as connection:
        log.append(connection, [call], known=known)
    assert not [words for words in asked if "model_call" in words]
    assert stored_calls(database) == [root, call]


def test_a_full_disk_is_an_unavailable_log_and_keeps_nothing(sqlite_database, chain_maker):
    large = chain_maker([(20, 10)] * 400)

    def append_to_a_full_disk() -> None:
        with write(sqlite_database) as connection:
            connection.exec_driver_sql("pragma max_page_count = 1")  # it cannot be less than there are
            log.append(connection, large)

    with pytest.raises(LogUnavailable, match="full"):
        append_to_a_full_disk()
    sqlite_database.dispose()
    assert stored_calls(sqlite_database) == []
    append(sqlite_database, *large)
    assert stored_calls(sqlite_database) == large


def test_implicit_openings_at_the_same_time_open_once(database):
    failures: list[Exception] = []
    start = threading.Barrier(4)

    def open_many(worker: int) -> None:
        start.wait()
        for number in range(25):
            try:
                append(database, RolloutOpened(rollout_id=f"r{number}", opened_at=worker))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=open_many, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert count(database, "rollout") == 25


def test_a_parent_may_stand_earlier_in_the_same_batch_or_in_the_log(database, chain_maker):
    chain = chain_maker()
    append(database, *chain[:2])
    more = chain_maker([(4, 4), (4, 4)], parent=chain[1])
    append(database, chain[2], *more)
    assert stored_calls(database) == [*chain, *more]


def test_a_batch_longer_than_one_query_asks_for_is_appended_whole(database, chain_maker):
    chain = chain_maker([(5, 1)] + [(1, 1)] * 1300)
    append(database, *chain)
    assert stored_calls(database) == chain


def broken(root: CallCompleted, call: CallCompleted, other: CallCompleted) -> list[tuple[str, CallCompleted]]:
    """Each way in which a call can fail to extend its root, and what is said about it."""
    of_other = hashing.chain_hash(other.chain_hash, call.token_ids)
    shifted = call.token_ids[4:] + call.token_ids[:4]
    changes: list[tuple[str, dict[str, object]]] = [
        ("is not in the log", {"parent_id": ONE}),
        ("is in rollout 'r1', the call in 'r2'", {"rollout_id": "r2"}),
        ("has root", {"root_id": ONE}),
        ("has depth 0, the call 2", {"depth": 2}),
        ("has a chain of 30 tokens, the call extends 29", {"prev_len": 29, "prompt_len": call.prompt_len - 1}),
        ("does not give its chain hash", {"chain_hash": root.chain_hash}),
        ("does not give its chain hash", {"chain_hash": of_other}),
        ("does not give its chain hash", {"token_ids": shifted}),
        ("has a summary hash", {"summary_hash": root.summary_hash}),
        ("has hashes of version 3", {"hash_version": 3}),
    ]
    return [(why, call.model_copy(update=change)) for why, change in changes]


def test_a_call_that_does_not_extend_its_parent_is_refused(database, chain_maker):
    root, call = chain_maker([(20, 10), (8, 5)])
    (other,) = chain_maker([(20, 10)])
    for why, damaged in broken(root, call, other):
        with pytest.raises(BrokenLink, match=why) as caught:
            append(database, root, damaged)
        assert caught.value.call_id == str(call.call_id)
    assert stored_calls(database) == []
    append(database, root)
    for why, damaged in broken(root, call, other):
        with pytest.raises(BrokenLink, match=why):
            append(database, damaged)
    append(database, call)
    assert stored_calls(database) == [root, call]


def test_a_child_before_its_parent_is_refused(database, chain_maker):
    root, call = chain_maker([(20, 10), (8, 5)])
    with pytest.raises(BrokenLink, match="append a parent before its children"):
        append(database, call, root)
    assert stored_calls(database) == []


def test_a_root_whose_chain_hash_is_not_of_its_tokens_is_refused(database, chain_maker):
    (root,) = chain_maker([(20, 10)])
    with pytest.raises(BrokenLink, match=r"root call .* has a chain hash not of its tokens"):
        append(database, root.model_copy(update={"chain_hash": bytes(32)}))


def test_a_call_ends_once(database, chain_maker):
    (call,) = chain_maker([(20, 10)])
    append(database, call, ended(ONE))
    with pytest.raises(EventConflict, match="names a call that is completed"):
        append(database, ended(call.call_id))
    late = chain_maker.call(3, 3, rollout_id="r2", parent=None)
    late = late.model_copy(update={"call_id": ONE, "root_id": ONE})
    with pytest.raises(EventConflict, match="names a call that has ended"):
        append(database, late)
    both = chain_maker.call(3, 3, rollout_id="r2", parent=None)
    with pytest.raises(EventConflict, match="names a call that has ended"):
        append(database, both, ended(both.call_id))
    assert count(database, "model_call") == 1
    assert count(database, "call_end") == 1


@pytest.mark.postgres
def test_a_call_ends_once_even_when_both_ends_come_at_the_same_time(postgres_database, chain_maker):
    (call,) = chain_maker([(20, 10)])
    outcome: list[Exception | None] = []

    def end() -> None:
        try:
            append(postgres_database, ended(call.call_id))
            outcome.append(None)
        except EventConflict as error:
            outcome.append(error)

    late = threading.Thread(target=end)
    with write(postgres_database) as connection:
        log.append(connection, [call])
        late.start()
        late.join(0.5)
        assert late.is_alive()  # it waits for this transaction
    late.join()
    assert "already completed" in str(outcome[0])
    assert count(postgres_database, "call_end") == 0


@pytest.mark.postgres
def test_a_duplicate_at_the_same_time_waits_and_is_recognised(postgres_database, chain_maker):
    (call,) = chain_maker([(20, 10)])
    outcome: list[Exception | None] = []

    def again(event: CallCompleted) -> None:
        try:
            append(postgres_database, event)
            outcome.append(None)
        except EventConflict as error:
            outcome.append(error)

    same = threading.Thread(target=again, args=(call,))
    other = threading.Thread(target=again, args=(call.model_copy(update={"reason": "other"}),))
    with write(postgres_database) as connection:
        log.append(connection, [call])
        same.start()
        other.start()
        same.join(0.5)
    same.join()
    other.join()
    assert sorted(type(error).__name__ for error in outcome) == ["EventConflict", "NoneType"]
    assert stored_calls(postgres_database) == [call]


def test_pending_are_the_intents_with_neither_a_call_nor_an_end(database, chain_maker):
    (call,) = chain_maker([(20, 10)])
    three, four = uuid7(3, bytes(10)), uuid7(4, bytes(10))
    append(database, admitted(call.call_id), admitted(ONE), admitted(TWO), admitted(three, worker="w2"), admitted(four))
    append(database, call, ended(ONE))
    with read(database) as connection:
        assert log.pending(connection) == [admitted(TWO), admitted(three, worker="w2"), admitted(four)]
        assert log.pending(connection, worker="w1") == [admitted(TWO), admitted(four)]
        assert log.pending(connection, worker="w3") == []
        assert log.unfinished(connection) == {"abandoned": 1, "pending": 3}
        assert log.unfinished(connection, ["r2"]) == {}


def test_sequences_follow_the_order_of_append(database, chain_maker):
    append(database, *chain_maker([(5, 5)]), *chain_maker([(5, 5)], rollout_id="r2"), *chain_maker([(5, 5)]))
    with read(database) as connection:
        rows = connection.execute(text("select sequence, writer_seq from model_call order by sequence")).all()
    assert [row.writer_seq for row in rows] == [0, 1, 2]
    assert all(row.sequence > 0 for row in rows)


shapes = st.lists(st.tuples(st.integers(-1, 30), st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=12)
"""Trees of calls: the place of each call's parent (modulo the calls before it; -1: none) and its two lengths."""


def tree(chain_maker, shape: Sequence[tuple[int, int, int]], rollout_id: str) -> list[CallCompleted]:
    made: list[CallCompleted] = []
    for parent, interstitial, sampled in shape:
        above = made[parent % len(made)] if made and parent >= 0 else None
        made.append(chain_maker.call(interstitial, sampled, rollout_id=rollout_id, parent=above))
    return made


def chain_of(call: CallCompleted, calls: Sequence[CallCompleted]) -> list[int]:
    by_id = {known.call_id: known for known in calls}
    before = [] if call.parent_id is None else chain_of(by_id[call.parent_id], calls)
    return before + token_array(call.token_ids).tolist()


# The log only grows, and every example makes rollouts of its own.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, cut=st.integers(0, 12))
def test_append_then_replay_gives_the_tokens_back(database, chain_maker, shape, cut):
    rollout_id = f"r{chain_maker.made}"
    calls = tree(chain_maker, shape, rollout_id)
    append(database, *calls[:cut])
    append(database, *calls[cut:])
    assert stored_calls(database, rollout_id) == calls
    with read(database) as connection:
        for call in calls:
            assert lineage.chain_tokens(connection, call.call_id).tolist() == chain_of(call, calls)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, other_shape=shapes, order=st.lists(st.booleans(), max_size=24))
def test_the_order_in_which_independent_rollouts_are_appended_changes_nothing(
    database, chain_maker, shape, other_shape, order
):
    a, b = f"a{chain_maker.made}", f"b{chain_maker.made}"
    one, two = tree(chain_maker, shape, a), tree(chain_maker, other_shape, b)
    left, right = list(one), list(two)
    for first in order:
        if waiting := left if first else right:
            append(database, waiting.pop(0))
    append(database, *right, *left)
    assert stored_calls(database, a) == one
    assert stored_calls(database, b) == two
    with read(database) as connection:
        for call in (one[-1], two[-1]):
            assert lineage.chain_tokens(connection, call.call_id).tolist() == chain_of(call, [*one, *two])


def test_two_writers_that_store_the_same_media_in_opposite_orders_do_not_hold_each_other_up(database, make_chain_maker):
    objects = [MediaStored.example().model_copy(update={"sha256": bytes([number]) * 32}) for number in range(8)]
    ends = [ended(call_id=uuid7(50 + number, bytes(10))) for number in range(2)]
    failed: list[BaseException] = []

    def write_on(number: int) -> None:
        chain = make_chain_maker(number)(rollout_id=f"r{number}")
        try:
            for turn in range(20):
                mine = [each.model_copy(update={"size": each.size + turn, "sha256": each.sha256[:31] + bytes([turn])})
                        for each in objects]  # fmt: skip
                append(database, *(mine if number else reversed(mine)), *chain[turn : turn + 1], ends[number])
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=write_on, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert count(database, "media_object") == 160


def test_what_was_prepared_is_appended_as_what_was_not(database, make_chain_maker):
    chain = make_chain_maker(1)([(300, 3), (200, 2), (5, 2)])
    others = [admitted(TWO), RolloutOpened(rollout_id="r1", opened_at=1, task="t", metadata={"é": [1.5, None, {}]})]
    known = {chain[0].call_id: log.Tip.of(chain[0])}
    with write(database) as connection:
        log.append(connection, chain[:1])
    events = [*others, *chain[1:]]
    prepared = log.prepare(events, database.dialect.name, known=known)
    assert prepared.checked == {id(call) for call in chain[1:]}
    with write(database) as connection:
        log.append(connection, events, known=known, prepared=prepared)
    with read(database) as connection:
        assert log.calls(connection, "r1") == chain
        assert log.rollouts(connection) == others[1:]
        stored = connection.execute(select(schema.model_call.c.digest).order_by(schema.model_call.c.depth)).scalars()
        assert [*stored] == [call.digest() for call in chain]


def test_preparing_refuses_what_it_can_tell_and_leaves_the_rest_to_the_log(database, chain_maker):
    root, child = chain_maker([(9, 3), (5, 2)])
    with pytest.raises(BrokenLink, match="the call 7"):
        log.prepare([root, child.model_copy(update={"depth": 7})], database.dialect.name)
    orphan = log.prepare([child], database.dialect.name)
    assert orphan.checked == frozenset()
    with pytest.raises(BrokenLink, match="append a parent before its children"), write(database) as connection:
        log.append(connection, [child], prepared=orphan)


def test_a_digest_is_of_the_fields_as_one_json_encoder_has_them(chain_maker):
    def plain(value: object) -> object:
        return value.hex() if isinstance(value, bytes) else str(value) if isinstance(value, UUID) else vars(value)

    call = chain_maker()[-1].model_copy(
        update={"evidence": {"b": [1e16, -0.5, True, "é\n"], "a": {}}, "model": 'quote " and \x7f'}
    )
    for event in (call, RolloutOpened(rollout_id="r", opened_at=1, metadata={"x": [[], {"y": None}]}), admitted(TWO)):
        fields = {**vars(event)}
        arrays = [fields.pop(name) for name in ("token_ids", "logprobs") if name in fields]
        kind = fields.pop("kind").encode()
        fields = {name: value for name, value in fields.items() if not (name in event.added and value is None)}
        words = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=plain)
        assert event.digest() == hashing.tagged_digest("event", kind, words.encode(), *arrays)
