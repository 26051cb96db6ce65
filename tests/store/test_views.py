"""The views of auditors say the same on both databases, and no secret; a secret changes no older event's digest."""

from __future__ import annotations

from sqlalchemy import text

from store import hashing, log
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
    fields = {"rollout_id": "r1", "group_id": None, "slot": None, "task": None, "harness": None, "metadata": {}}
    assert opened.digest() == hashing.event_digest("rollout_opened", {**fields, "opened_at": 1})
    assert opened.model_copy(update={"secret_hash": SECRET}).digest() != opened.digest()
    assert opened.implicit
    assert not opened.model_copy(update={"secret_hash": SECRET}).implicit
    assert SECRET.hex() not in repr(opened.model_copy(update={"secret_hash": SECRET}))
