from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine

from replay.advantage import advantages
from replay.errors import PlanMismatch
from replay.feed import Feed
from replay.pack import Pack, packs
from replay.plan import plan
from replay.rowset import build
from store.events import RolloutOpened, RolloutScored, uuid7

STEPS = 4


def digest(packed: Pack) -> str:
    fields = [getattr(packed, name) for name in Pack.__slots__]
    return hashlib.sha256(b"".join(np.asarray(field).tobytes() for field in fields)).hexdigest()


def feed_of(database: Engine) -> Feed[Pack]:
    """A run over the log, each step over all rows in a pack order of its own: built anew, as after a crash."""
    found = build(database)
    by_rollout = advantages(found.scores)

    def micro_batches(step: int) -> list[Pack]:
        return packs(plan(found.rows, seed=5, step=step, token_budget=40), found.rows, by_rollout)

    return Feed(micro_batches, steps=STEPS)


@pytest.fixture
def recorded(sqlite_database: Engine, remember: Any, grow: Any, chain_maker: Any) -> Engine:
    for number in range(4):
        name = f"r{number}"
        calls = grow(chain_maker, [None, 0, None, 2, 2], lengths=[(3, 2)] * 5, rollout_id=name)
        opened = RolloutOpened(rollout_id=name, group_id="g", opened_at=number)
        outcome_id = uuid7(0, name.encode().ljust(10))
        scored = RolloutScored(outcome_id=outcome_id, rollout_id=name, reward=float(number), at=0)
        remember(sqlite_database, [opened, *calls, scored])
    return sqlite_database


def test_a_run_killed_anywhere_goes_on_byte_for_byte(recorded: Engine) -> None:
    whole = [digest(each) for each in feed_of(recorded)]
    assert len(whole) > 2 * STEPS, "steps of several micro-batches"
    assert len(set(whole[: len(whole) // STEPS])) == len(whole) // STEPS
    killed = feed_of(recorded)
    resumed = feed_of(recorded)
    for place in range(len(whole) + 1):
        resumed.load_state_dict(json.loads(json.dumps(killed.state_dict())))
        assert [digest(each) for each in resumed] == whole[place:]
        next(killed, None)


def test_steps_taken_whole_are_the_micro_batches_in_their_order(recorded: Engine) -> None:
    whole = [digest(each) for each in feed_of(recorded)]
    feed = feed_of(recorded)
    taken = [digest(next(feed))]
    while feed.step < STEPS:
        taken += [digest(each) for each in feed.take_step()]
    assert taken == whole
    assert feed.state_dict() == {"step": STEPS, "micro_batch": 0}
    assert feed.take_step() == []


def test_steps_without_micro_batches_are_passed_over() -> None:
    assert list(Feed(lambda step: ["a", "b"] if step == 1 else [], steps=3)) == ["a", "b"]


def test_a_state_of_another_run_is_refused() -> None:
    feed = Feed(lambda step: ["a", "b"], steps=3)
    for state in ({"step": 4, "micro_batch": 0}, {"step": -1, "micro_batch": 0}, {"step": 0, "micro_batch": -1}):
        with pytest.raises(PlanMismatch, match="is not of 3 steps"):
            feed.load_state_dict(state)
    feed.load_state_dict({"step": 1, "micro_batch": 2})
    with pytest.raises(PlanMismatch, match=r"micro-batch 2 of step 1 was next when the state was saved, .* has 2 now"):
        next(feed)
