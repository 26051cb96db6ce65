"""What must hold for stored arrays, by tampering with what was read; and how chains are cut into runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replay import walk
from replay.chain import Chains, check
from replay.fill import Filled, cut, fill, sequences
from store.events import logprob_array, token_array, token_bytes


def chains_of(recorded: Any) -> Chains:
    counts = np.ones(len(recorded.piece.calls), np.bool_)
    chains, refused = check(recorded.piece, counts, walk.paths(recorded.piece, counts))
    assert refused == []
    return chains


def filled(recorded: Any) -> Filled:
    return fill(chains_of(recorded), recorded.payloads)


def reason(answer: Filled) -> tuple[str, int]:
    (refusal,) = answer.refused
    assert len(answer.token_ids) == len(answer.loss_mask) == len(answer.logprobs) == len(answer.chains.call) == 0
    assert str(refusal.call_id) in refusal.detail
    return refusal.reason, int(refusal.detail.split()[1])


@pytest.fixture
def branched(grow: Callable[..., Any], chain_maker: Any, recorded: Callable[..., Any]) -> Any:
    """Call 1, continued by 2 and by 3; 3 continued by 4. Their places are 0 to 3."""
    return recorded(grow(chain_maker, [None, 0, 0, 2]))


def test_one_changed_token_refuses(branched: Any) -> None:
    tokens = token_array(branched.lines[2][2]).copy()
    tokens[-1] += 1
    assert reason(filled(branched.damaged(2, token_ids=token_bytes(tokens)))) == ("chain_hash_mismatch", 3)


def test_a_changed_chain_hash_refuses(branched: Any) -> None:
    assert reason(filled(branched.tampered(0, chain_hash=bytes(32)))) == ("chain_hash_mismatch", 1)


@pytest.mark.parametrize(("name", "at"), [("token_ids", 2), ("logprobs", 3)])
def test_arrays_of_the_wrong_length_refuse(branched: Any, name: str, at: int) -> None:
    short = branched.lines[1][at][:-4]
    assert reason(filled(branched.damaged(1, **{name: short}))) == ("length_mismatch", 2)


@pytest.mark.parametrize("codec", [1, 99])
def test_arrays_that_cannot_be_decoded_refuse(branched: Any, codec: int) -> None:
    assert reason(filled(branched.damaged(1, codec=codec))) == ("array_unreadable", 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, -1])
def test_a_logprob_that_is_not_finite_refuses(branched: Any, value: float, at: int) -> None:
    logprobs = logprob_array(branched.lines[3][3]).copy()
    logprobs[at] = value
    assert reason(filled(branched.damaged(3, logprobs=logprobs.tobytes()))) == ("logprob_not_finite", 4)


def test_one_bad_call_refuses_its_rollout_and_the_others_go_on(grow: Any, make_chain_maker: Any, recorded: Any) -> None:
    calls = [call for n in range(3) for call in grow(make_chain_maker(n), [None, 0, None], rollout_id=f"r{n}")]
    whole = recorded(calls)
    answer = filled(whole.damaged(4, logprobs=b""))
    (refusal,) = answer.refused
    assert (refusal.rollout_id, refusal.call_id) == ("r1", calls[4].call_id)
    assert answer.chains.rollout.tolist() == [0, 0, 2, 2]
    kept = np.repeat([True, True, False, False, True, True], np.diff(filled(whole).offset))
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(answer, name), getattr(filled(whole), name)[kept])


def test_lines_of_other_calls_are_passed_over_and_a_missing_one_is_an_error(branched: Any) -> None:
    chains = chains_of(branched)
    first = chains.only(np.array([True, False]))
    assert sequences(first).tolist() == [1, 2]
    whole = filled(branched)
    assert np.array_equal(fill(first, branched.payloads).token_ids, whole.token_ids[: whole.offset[1]])
    with pytest.raises(ValueError, match="did not give the call at sequence 1 again"):
        fill(chains, branched.without(0).payloads)


def test_runs_hold_whole_rollouts_and_about_the_tokens_asked_for(
    grow: Any, make_chain_maker: Any, recorded: Any
) -> None:
    calls = [call for n in range(6) for call in grow(make_chain_maker(n), [None, 0, 0, None], rollout_id=f"r{n}")]
    chains = chains_of(recorded(calls))
    each = int(chains.length.sum()) // 6
    runs = [*cut(chains, tokens=2 * each)]
    assert [rollout for run in runs for rollout in run.rollout.tolist()] == chains.rollout.tolist()
    owners = [set(run.rollout.tolist()) for run in runs]
    assert sum(len(owner) for owner in owners) == 6, "no rollout is in two runs"
    assert len(runs) > 1
    assert all(run.length.sum() <= 3 * each for run in runs)
    assert len([*cut(chains, tokens=1)]) == 6
