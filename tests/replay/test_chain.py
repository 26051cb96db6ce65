"""Each reason of refusal, by tampering with what was read: the log itself refuses to hold most of this."""

import itertools
from collections.abc import Callable
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from replay import walk
from replay.chain import Chains, Refusal, Refusals, check
from store.hashing import canonical_json


def checked(recorded: Any, without: tuple[int, ...] = ()) -> tuple[Chains, list[Refusal]]:
    """Walk and check, with every call selected but those named."""
    counts = ~np.isin(np.arange(len(recorded.piece.calls)), without)
    return check(recorded.piece, counts, walk.paths(recorded.piece, counts))


def numbered(chains: Chains) -> list[list[int]]:
    edges = chains.start.tolist()
    numbers = chains.piece.number[chains.call].tolist()
    return [numbers[low:high] for low, high in itertools.pairwise(edges)]


def reason(answer: tuple[Chains, list[Refusal]]) -> tuple[str, int]:
    chains, (refusal,) = answer
    assert len(chains.call) == 0
    number = refusal.detail.split()[1]
    assert str(refusal.call_id) in refusal.detail
    return refusal.reason, int(number)


@pytest.fixture
def branched(grow: Callable[..., Any], chain_maker: Any, recorded: Callable[..., Any]) -> Any:
    """Call 1, continued by 2 and by 3; 3 continued by 4. Their places are 0 to 3."""
    return recorded(grow(chain_maker, [None, 0, 0, 2]))


def test_a_shared_call_trains_in_the_first_chain(branched: Any) -> None:
    chains, refused = checked(branched)
    assert refused == []
    assert numbered(chains) == [[1, 2], [1, 3, 4]]
    assert chains.carried.tolist() == [0, 1]
    assert chains.trains.tolist() == [True, True, False, True, True]


def test_a_parent_that_is_not_selected_refuses(branched: Any) -> None:
    assert reason(checked(branched, without=(2,))) == ("parent_not_selected", 3)


def test_a_parent_that_is_missing_refuses(branched: Any) -> None:
    assert reason(checked(branched.without(0))) == ("parent_missing", 1)


def test_a_parent_in_another_rollout_is_missing(branched: Any, grow: Any, make_chain_maker: Any, recorded: Any) -> None:
    both = recorded(
        [
            *grow(make_chain_maker(0), [None, 0], rollout_id="r1"),
            *grow(make_chain_maker(1), [None], rollout_id="r2"),
        ]
    )
    chains, (refusal,) = checked(both.tampered(1, parent_id=both.id_of(2)))
    assert (refusal.rollout_id, refusal.reason) == ("r1", "parent_missing")
    assert chains.rollout.tolist() == [1], "the other rollout goes on"


def test_links_in_a_circle_refuse(branched: Any) -> None:
    circle = branched.tampered(0, parent_id=branched.id_of(3))
    _, (refusal,) = checked(circle)
    assert refusal.reason == "parent_cycle"
    closed = branched.tampered(2, parent_id=branched.id_of(3))
    assert reason(checked(closed)) == ("parent_cycle", 3)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"depth": 2}, "it says depth 2 of root {root}, its links say depth 1 of {root}"),
        ({"root_id": bytes(16)}, f"it says depth 1 of root {UUID(int=0)}, its links say depth 1 of {{root}}"),
    ],
)
def test_a_depth_or_root_that_the_links_deny_refuses(branched: Any, changes: dict[str, Any], detail: str) -> None:
    answer = checked(branched.tampered(2, **changes))
    assert reason(answer) == ("root_mismatch", 3)
    assert answer[1][0].detail.endswith(detail.format(root=UUID(bytes=branched.id_of(0))))


@pytest.mark.parametrize("change", [{"prev_len": 1}, {"prompt_len": 1}])
def test_a_prefix_of_the_wrong_length_refuses(branched: Any, change: dict[str, int]) -> None:
    assert reason(checked(branched.tampered(2, **change))) == ("length_mismatch", 3)


def test_a_root_without_a_prompt_refuses(grow: Any, chain_maker: Any, recorded: Any) -> None:
    assert reason(checked(recorded(grow(chain_maker, [None], lengths=[(0, 4)])))) == ("empty_prompt", 1)


def test_media_that_the_log_does_not_hold_refuse(branched: Any) -> None:
    assert reason(checked(branched.tampered(3, media_count=1))) == ("media_not_captured", 4)


@pytest.mark.parametrize(
    "spans",
    [(), ((0, 3),), ((0, 2), (3, 4)), ((0, 3), (2, 4)), ((1, 4),), ((0, 5),)],
    ids=["none", "short", "hole", "overlap", "late", "long"],
)
def test_policy_spans_that_do_not_cover_refuse(branched: Any, spans: tuple[tuple[int, int], ...]) -> None:
    assert branched.piece.ints("sampled_len")[1] == 4
    changed = [{"start": start, "end": end, "policy_version": 1} for start, end in spans]
    answer = checked(branched.tampered(1, policy_spans=canonical_json(changed).decode()))
    assert reason(answer) == ("policy_spans", 2)


def test_hashes_of_another_version_refuse(branched: Any) -> None:
    assert reason(checked(branched.tampered(0, hash_version=99))) == ("hash_version", 1)


def test_a_chain_that_trains_nothing_refuses(grow: Any, chain_maker: Any, recorded: Any) -> None:
    lengths = [(5, 3), (4, 2), (4, 0)]
    assert reason(checked(recorded(grow(chain_maker, [None, 0, 0], lengths=lengths)))) == ("nothing_trained", 3)
    chains, refused = checked(recorded(grow(chain_maker, [None, 0, 1], lengths=lengths)))
    assert (numbered(chains), refused) == ([[1, 2, 3]], [])


def test_the_first_of_several_faults_is_told_and_other_rollouts_go_on(
    grow: Any, make_chain_maker: Any, recorded: Any
) -> None:
    calls = [call for n in range(3) for call in grow(make_chain_maker(n), [None, 0, None], rollout_id=f"r{n}")]
    both = recorded(calls).tampered(4, depth=5).tampered(5, media_count=1)
    chains, (refusal,) = checked(both)
    assert (refusal.rollout_id, refusal.reason, refusal.call_id) == ("r1", "root_mismatch", calls[4].call_id)
    assert numbered(chains) == [[1, 2], [3], [1, 2], [3]]
    assert chains.rollout.tolist() == [0, 0, 2, 2]


def test_refusals_are_counted_by_reason() -> None:
    reasons = ["chain_hash_mismatch", "parent_missing", "chain_hash_mismatch"]
    refusals = Refusals(tuple(Refusal(rollout_id="r", call_id=None, reason=each, detail="") for each in reasons))
    assert refusals.by_reason() == {"chain_hash_mismatch": 2, "parent_missing": 1}
