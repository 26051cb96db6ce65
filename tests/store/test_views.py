"""The views of auditors say the same on both databases, and no secret; a secret changes no older event's digest."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from store import hashing, log, schema
from store.database import read, write
from store.events import CallAdmitted, CallEnded, RolloutOpened, RolloutScored, uuid7

SECRET = bytes(range(32))


def at(number: int) -> CallAdmitted:
    return CallAdmitted(
        call_id=uuid7(number, bytes(10)),
        rollout_id="r1",
        decision="root",
        reason="x",
        parent_id=None,
        worker="w",
        at=number,
    )


def test_a_rollout_is_one_line_with_what_became_of_its_calls(database, chain_maker):
    chain = chain_maker()
    states = ("failed", "refused", "abandoned", "lost", "lost")
    ends = [
        CallEnded(call_id=uuid7(10 + number, bytes(10)), rollout_id="r1", state=state, reason="", at=50)
        for number, state in enumerate(states)
    ]
    outcomes = [
        RolloutScored(outcome_id=uuid7(number, bytes(10)), rollout_id="r1", reward=number / 2, status=status, at=60)
        for number, status in ((1, "first"), (2, "second"))
    ]
    opened = RolloutOpened(rollout_id="r1", group_id="g", slot=2, task="t", opened_at=40, secret_hash=SECRET)
    with write(database) as connection:
        log.append(connection, [opened, RolloutOpened(rollout_id="r2", opened_at=7), at(1), at(2), at(10), *ends])
        log.append(connection, [*chain, *chain_maker([(5, 5)]), *outcomes])
    with read(database) as connection:
        one, two = connection.execute(text("select * from rollout_state order by rollout_id")).mappings()
    said = {
        "rollout_id": "r1",
        "group_id": "g",
        "slot": 2,
        "task": "t",
        "harness": None,
        "metadata": "{}",
        "opened_at": 40,
        "calls": 4,
        "roots": 2,
        "failed": 1,
        "refused": 1,
        "abandoned": 1,
        "lost": 2,
        "pending": 2,
        "reward": 1.0,
        "status": "second",
        "first_at": 1,
        "last_at": chain[-1].completed_at + 1000,
        "served_tokens": 30 + 43 + 53 + 10,
        "stored_tokens": 30 + 13 + 10 + 10,
        "sampled_tokens": 10 + 5 + 4 + 5,
    }
    assert {**one} == said
    assert (two["calls"], two["pending"], two["reward"], two["first_at"], two["last_at"]) == (0, 0, None, 7, 7)


def test_every_root_is_a_boundary_with_its_reason_and_difference(database, chain_maker):
    first, second = chain_maker()[0], chain_maker([(5, 5)])[0]
    evidence = {
        "nearest_call": str(first.call_id),
        "first_difference": 3,
        "role_here": "user",
        "role_there": "tool_result",
        "digest_here": "aa",
        "digest_there": None,
    }
    second = second.model_copy(update={"reason": "item_edited", "evidence": evidence})
    with write(database) as connection:
        log.append(connection, [first, second])
    with read(database) as connection:
        found = connection.execute(text("select * from row_boundary order by sequence")).mappings().all()
    assert [line["reason"] for line in found] == ["first_call", "item_edited"]
    assert {name: found[1][name] for name in evidence} == evidence
    assert {name: found[0][name] for name in evidence} == dict.fromkeys(evidence)
    assert (found[1]["started_at"], found[1]["completed_at"]) == (second.started_at, second.completed_at)


def test_an_opening_without_a_secret_has_the_digest_that_it_had_before_there_were_secrets():
    opened = RolloutOpened(rollout_id="r1", opened_at=1)
    fields = '{"group_id":null,"harness":null,"metadata":{},"opened_at":1,"rollout_id":"r1","slot":null,"task":null}'
    assert opened.digest() == hashing.tagged_digest("event", b"rollout_opened", fields.encode())
    assert opened.model_copy(update={"secret_hash": SECRET}).digest() != opened.digest()
    assert opened.implicit
    assert not opened.model_copy(update={"secret_hash": SECRET}).implicit
    assert SECRET.hex() not in repr(opened.model_copy(update={"secret_hash": SECRET}))


def test_a_chain_is_a_line_a_call_with_root_and_position_found_by_its_links(database, chain_maker):
    one, two, three = chain_maker()
    fork = chain_maker([(4, 3)], parent=two)[0]
    with write(database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=1), one, two, three, fork])
    with read(database) as connection:
        found = connection.execute(
            text(
                "select tip_sequence, position, sequence, depth, superseded from chain order by tip_sequence, position"
            )
        ).all()
        rows = connection.execute(text("select * from row_token_count order by tip_sequence")).mappings().all()
    assert [tuple(line[:4]) for line in found] == [
        (3, 0, 1, 0), (3, 1, 2, 1), (3, 2, 3, 2), (4, 0, 1, 0), (4, 1, 2, 1), (4, 2, 4, 2),
    ]  # fmt: skip
    assert [(row["calls"], row["tokens"], row["sampled"], row["trained"]) for row in rows] == [
        (3, 53, 19, 19),
        (3, 50, 18, 3),
    ]
    assert {(row["oldest_version"], row["newest_version"], row["reason"]) for row in rows} == {(1, 2, "first_call")}


def test_a_retried_answer_is_superseded_and_trains_nothing(database, chain_maker):
    (one,) = chain_maker([(5, 4)])
    again = chain_maker([(5, 4)])[0]
    again = again.model_copy(update={"request_hash": one.request_hash})
    again = again.model_copy(update={"summary_hash": hashing.summary_hash(again.request_hash, again.answer_key)})
    with write(database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=1), one, again])
    with read(database) as connection:
        found = connection.execute(
            text("select superseded, sampled, trained from row_token_count order by tip_sequence")
        ).all()
    assert [(int(line[0]), *line[1:]) for line in found] == [(1, 4, 0), (0, 4, 4)]


def test_declared_rewrites_are_matched_with_found_ones_both_ways(database, chain_maker):
    def root(number, reason="item_edited", **hints):
        call = chain_maker([(5, 5)], rollout_id="r1")[0]
        return call.model_copy(update={"reason": reason, "hints": hints, "response_id": f"resp_{number}"})

    calls = [
        root(1, "first_call"),
        root(2),  # declared by id
        root(3),  # not declared
        root(4, "tools_changed", role="summary"),
        root(5, "fresh_context"),  # declared by number
        *chain_maker([(5, 5), (4, 4)], rollout_id="r1"),
    ]
    silent = chain_maker([(5, 5)], rollout_id="r2")[0].model_copy(update={"reason": "item_edited"})
    windows = [
        chain_maker([(5, 5)], rollout_id="r3")[0].model_copy(
            update={"reason": reason, "hints": {"window": window, "thread": "t"}}
        )
        for reason, window in (("first_call", 0), ("fresh_context", 1))
    ]
    declared = ({"call": "resp_2"}, {"at": 5}, {"call": str(calls[-1].call_id)}, {"call": "nobody"}, 7)
    outcomes = [
        RolloutScored(outcome_id=uuid7(1, bytes(10)), rollout_id="r1", reward=1, declared_rewrites=("old",), at=1),
        RolloutScored(outcome_id=uuid7(2, bytes(10)), rollout_id="r1", reward=1, declared_rewrites=declared, at=2),
    ]
    opened = [RolloutOpened(rollout_id=each, opened_at=1) for each in ("r1", "r2", "r3")]
    with write(database) as connection:
        log.append(connection, [*opened, *calls, silent, *windows, *outcomes])
    with read(database) as connection:
        found = (
            connection.execute(text("select * from declared_vs_found order by rollout_id, sequence")).mappings().all()
        )
    by_state = [(line["rollout_id"], line["sequence"], line["source"], line["state"]) for line in found]
    assert sorted(by_state, key=str) == sorted(
        [
            ("r1", 2, "outcome", "both"),
            ("r1", 3, None, "found_only"),
            ("r1", 4, None, "side_call"),
            ("r1", 5, "outcome", "both"),
            ("r1", 7, "outcome", "declared_only"),
            ("r1", None, "outcome", "unreadable"),
            ("r1", None, "outcome", "unreadable"),
            ("r2", 8, None, "not_declaring"),
            ("r3", 10, "window", "both"),
        ],
        key=str,
    )


def test_drift_is_an_echo_that_is_not_what_was_served(database, chain_maker):
    one, two, three = chain_maker()
    dropped = three.model_copy(
        update={
            "request_items": three.request_items[1:],
            "evidence": {"flags": ["reasoning_dropped"], "path": "marker"},
        }
    )
    (four,) = chain_maker([(3, 3)], parent=dropped)
    respelled = four.model_copy(update={"request_items": (four.request_items[0], *one.request_items)})
    with write(database) as connection:
        log.append(connection, [one, two, dropped, respelled])
    with read(database) as connection:
        found = connection.execute(text("select sequence, kind, kept_tokens, path from drift order by sequence")).all()
    assert [tuple(line) for line in found] == [
        (3, "reasoning_dropped", dropped.prev_len, "marker"),
        (4, "respelled", respelled.prev_len, None),
    ]


def test_one_rollout_of_a_view_is_found_by_index(sqlite_database):
    with read(sqlite_database) as connection:
        for view in schema.VIEWS:
            plan = connection.execute(text(f"explain query plan select * from {view} where rollout_id = 'r1'")).all()
            scans = [step[3] for step in plan if step[3].startswith("SCAN")]
            read_whole = [step for step in scans if "model_call" in step or "rollout" in step or "tip" in step]
            assert not read_whole, view


@pytest.mark.postgres
def test_one_rollout_of_a_view_is_found_by_index_in_every_partition(postgres_database):
    with read(postgres_database) as connection:
        connection.execute(text("set local enable_seqscan = off"))  # of a small table all is read, whatever is asked
        for view in schema.VIEWS:
            plan = connection.scalars(text(f"explain (format json) select * from {view} where rollout_id = 'r1'")).one()
            read_whole = [
                node["Relation Name"]
                for node in nodes_of(plan[0]["Plan"])
                if "Relation Name" in node and "Index Cond" not in node and "Recheck Cond" not in node
            ]
            assert not read_whole, view


def nodes_of(plan):
    """A plan's steps, its own first."""
    yield plan
    for each in plan.get("Plans", ()):
        yield from nodes_of(each)
