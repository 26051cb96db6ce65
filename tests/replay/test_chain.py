"""Each reason of refusal, by tampering with what was read: the log itself refuses to hold most of this."""

import dataclasses
from collections.abc import Callable
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from replay import walk
from replay.call import Call, Payload, Rollout
from replay.chain import Chain, Refusal, Refusals, check
from store.events import PolicySpan

Branched = tuple[Rollout, dict[UUID, Payload]]


def checked(
    rollout: Rollout, payloads: dict[UUID, Payload], without: tuple[int, ...] = ()
) -> tuple[Chain, ...] | Refusal:
    """Walk and check, with every call selected but those numbered."""
    selected = {call.call_id for call in rollout.calls if call.number not in without}
    return check(rollout, selected, walk.paths([rollout], selected).get(rollout.rollout_id, []), payloads)


def tampered(rollout: Rollout, number: int, **changes: Any) -> Rollout:
    calls = list(rollout.calls)
    calls[number - 1] = dataclasses.replace(calls[number - 1], **changes)
    return dataclasses.replace(rollout, calls=tuple(calls))


def reason(answer: tuple[Chain, ...] | Refusal) -> tuple[str, int]:
    assert isinstance(answer, Refusal)
    number = answer.detail.split()[1]
    assert str(answer.call_id) in answer.detail
    return answer.reason, int(number)


@pytest.fixture
def branched(grow: Callable[..., Any], chain_maker: Any, recorded: Callable[..., Any]) -> Branched:
    """Call 1, continued by 2 and by 3; 3 continued by 4."""
    rollout, payloads = recorded(grow(chain_maker, [None, 0, 0, 2]))
    return rollout, payloads


def test_a_shared_call_trains_in_the_first_chain(branched: Branched) -> None:
    chains = checked(*branched)
    assert not isinstance(chains, Refusal)
    assert [[call.number for call in chain.calls] for chain in chains] == [[1, 2], [1, 3, 4]]
    assert [chain.trained for chain in chains] == [(True, True), (False, True, True)]


def test_a_parent_that_is_not_selected_refuses(branched: Branched) -> None:
    assert reason(checked(*branched, without=(3,))) == ("parent_not_selected", 3)


def test_a_parent_that_is_missing_refuses(branched: Branched) -> None:
    rollout, payloads = branched
    assert reason(checked(dataclasses.replace(rollout, calls=rollout.calls[1:]), payloads)) == ("parent_missing", 2)


def test_a_parent_in_another_rollout_is_missing(
    branched: Branched, grow: Any, make_chain_maker: Any, recorded: Any
) -> None:
    rollout, payloads = branched
    other, other_payloads = recorded(grow(make_chain_maker(1), [None], rollout_id="r2"))
    rollout = tampered(rollout, 2, parent_id=other.calls[0].call_id)
    selected = {call.call_id for each in (rollout, other) for call in each.calls}
    paths = walk.paths([rollout, other], selected)
    answer = check(rollout, selected, paths["r1"], payloads | other_payloads)
    assert reason(answer) == ("parent_missing", 2)


def test_links_in_a_circle_refuse(branched: Branched) -> None:
    rollout, payloads = branched
    circle = tampered(rollout, 1, parent_id=rollout.calls[3].call_id)
    assert checked(circle, payloads).reason == "parent_cycle"
    closed = dataclasses.replace(rollout, calls=(rollout.calls[0], *circle.calls[2:]))
    closed = tampered(closed, 2, parent_id=closed.calls[2].call_id)
    assert reason(checked(closed, payloads)) == ("parent_cycle", 3)


@pytest.mark.parametrize("changes", [{"depth": 2}, {"root_id": UUID(int=1)}])
def test_a_depth_or_root_that_the_links_deny_refuses(branched: Branched, changes: dict[str, Any]) -> None:
    rollout, payloads = branched
    assert reason(checked(tampered(rollout, 3, **changes), payloads)) == ("root_mismatch", 3)


@pytest.mark.parametrize("change", [{"prev_len": 1}, {"prompt_len": 1}])
def test_a_prefix_of_the_wrong_length_refuses(branched: Branched, change: dict[str, int]) -> None:
    rollout, payloads = branched
    assert reason(checked(tampered(rollout, 3, **change), payloads)) == ("length_mismatch", 3)


def test_a_root_without_a_prompt_refuses(grow: Any, chain_maker: Any, recorded: Any) -> None:
    rollout, payloads = recorded(grow(chain_maker, [None], lengths=[(0, 4)]))
    assert reason(checked(rollout, payloads)) == ("empty_prompt", 1)


def test_media_that_the_log_does_not_hold_refuse(branched: Branched) -> None:
    rollout, payloads = branched
    assert reason(checked(tampered(rollout, 4, media_count=1), payloads)) == ("media_not_captured", 4)


def damage(payloads: dict[UUID, Payload], call: Call, **arrays: Any) -> dict[UUID, Payload]:
    return {**payloads, call.call_id: dataclasses.replace(payloads[call.call_id], **arrays)}


def test_one_changed_token_refuses(branched: Branched) -> None:
    rollout, payloads = branched
    tokens = payloads[rollout.calls[2].call_id].token_ids.copy()
    tokens[-1] += 1
    assert reason(checked(rollout, damage(payloads, rollout.calls[2], token_ids=tokens))) == ("chain_hash_mismatch", 3)


def test_a_changed_chain_hash_refuses(branched: Branched) -> None:
    rollout, payloads = branched
    assert reason(checked(tampered(rollout, 1, chain_hash=bytes(32)), payloads)) == ("chain_hash_mismatch", 1)


def test_arrays_of_the_wrong_length_refuse(branched: Branched) -> None:
    rollout, payloads = branched
    second = rollout.calls[1]
    short = payloads[second.call_id].logprobs[:-1]
    assert reason(checked(rollout, damage(payloads, second, logprobs=short))) == ("length_mismatch", 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_not_finite_refuses(branched: Branched, value: float) -> None:
    rollout, payloads = branched
    logprobs = payloads[rollout.calls[3].call_id].logprobs.copy()
    logprobs[1] = value
    assert reason(checked(rollout, damage(payloads, rollout.calls[3], logprobs=logprobs))) == ("logprob_not_finite", 4)


@pytest.mark.parametrize(
    "spans",
    [(), ((0, 3),), ((0, 2), (3, 4)), ((0, 3), (2, 4))],
    ids=["none", "short", "hole", "overlap"],
)
def test_policy_spans_that_do_not_cover_refuse(branched: Branched, spans: tuple[tuple[int, int], ...]) -> None:
    rollout, payloads = branched
    assert rollout.calls[1].sampled_len == 4
    changed = tuple(PolicySpan(start=start, end=end, policy_version=1) for start, end in spans)
    assert reason(checked(tampered(rollout, 2, policy_spans=changed), payloads)) == ("policy_spans", 2)


def test_hashes_of_another_version_refuse(branched: Branched) -> None:
    rollout, payloads = branched
    assert reason(checked(tampered(rollout, 1, hash_version=99), payloads)) == ("hash_version", 1)


def test_a_chain_that_trains_nothing_refuses(grow: Any, chain_maker: Any, recorded: Any) -> None:
    lengths = [(5, 3), (4, 2), (4, 0)]
    rollout, payloads = recorded(grow(chain_maker, [None, 0, 0], lengths=lengths))
    assert reason(checked(rollout, payloads)) == ("nothing_trained", 3)
    linear, payloads = recorded(grow(chain_maker, [None, 0, 1], lengths=lengths))
    assert not isinstance(checked(linear, payloads), Refusal)


def test_refusals_are_counted_by_reason() -> None:
    reasons = ["chain_hash_mismatch", "parent_missing", "chain_hash_mismatch"]
    refusals = Refusals(tuple(Refusal(rollout_id="r", call_id=None, reason=each, detail="") for each in reasons))
    assert refusals.by_reason() == {"chain_hash_mismatch": 2, "parent_missing": 1}
