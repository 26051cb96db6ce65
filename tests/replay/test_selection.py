from typing import Any

import numpy as np
import pytest

from replay.errors import UnknownRule
from replay.selection import Selection, select

DECLARED = Selection(rule="declared")


def numbers(recorded: Any, selection: Selection | None = None) -> list[int]:
    answer = select(selection or Selection(), recorded.piece)
    assert answer.not_selectable == {}
    found: list[int] = recorded.piece.number[answer.counts].tolist()
    return found


def left_out(recorded: Any, selection: Selection | None = None) -> dict[str, int]:
    return dict(select(selection or Selection(), recorded.piece).left_out)


def refusal(recorded: Any) -> tuple[str, str]:
    answer = select(DECLARED, recorded.piece)
    assert not answer.counts.any()
    (why,) = answer.not_selectable.values()
    return why.reason, why.detail


@pytest.fixture
def siblings(grow: Any, chain_maker: Any, recorded: Any) -> Any:
    """Call 1, continued by 2, 3 and 4."""
    return recorded(grow(chain_maker, [None, 0, 0, 0]))


def again(recorded: Any, call: int, earlier: int) -> Any:
    """One call made a retry of an earlier one."""
    return recorded.tampered(call, request_hash=recorded.piece.column("request_hash")[earlier].as_py())


def test_completed_selects_every_call(siblings: Any) -> None:
    assert numbers(siblings) == [1, 2, 3, 4]
    assert left_out(siblings) == {}


def test_a_retry_supersedes_the_earlier_sibling_of_the_same_request(siblings: Any) -> None:
    retried = again(again(siblings, 2, 1), 3, 1)
    assert numbers(retried) == [1, 4]
    assert left_out(retried) == {"superseded": 2}


def test_a_call_that_was_continued_is_not_superseded(grow: Any, chain_maker: Any, recorded: Any) -> None:
    assert numbers(again(recorded(grow(chain_maker, [None, 0, 1, 0])), 3, 1)) == [1, 2, 3, 4]


def test_a_repeated_root_is_superseded_too(grow: Any, chain_maker: Any, recorded: Any) -> None:
    assert numbers(again(recorded(grow(chain_maker, [None, None, 1])), 1, 0)) == [2, 3]


def test_the_same_request_in_another_rollout_is_no_retry(grow: Any, make_chain_maker: Any, recorded: Any) -> None:
    both = recorded([call for n in range(2) for call in grow(make_chain_maker(n), [None], rollout_id=f"r{n}")])
    assert numbers(again(both, 1, 0)) == [1, 1]


def test_choices_of_one_request_do_not_supersede_each_other(siblings: Any) -> None:
    assert numbers(again(siblings, 2, 1).tampered(2, choice=1)) == [1, 2, 3, 4]


def test_an_excluded_role_is_left_out_and_counted(siblings: Any) -> None:
    titled = siblings.tampered(3, hints='{"role":"title"}')
    without = Selection(excluded_roles=frozenset({"title"}))
    assert numbers(titled, without) == [1, 2, 3]
    assert left_out(titled, without) == {"excluded_role": 1}
    assert numbers(titled) == [1, 2, 3, 4]


def test_declared_takes_call_ids_and_response_ids(siblings: Any) -> None:
    first = str(siblings.piece.call_id(0))
    named = siblings.tampered(1, response_id="resp-2").facts(accepted=(first, "resp-2"))
    assert numbers(named, DECLARED) == [1, 2]
    assert left_out(named, DECLARED) == {"not_accepted": 2}


def test_declared_refuses_an_id_that_names_no_call(siblings: Any) -> None:
    reason, detail = refusal(siblings.facts(accepted=("chatcmpl-gone",)))
    assert reason == "accepted_unknown"
    assert "'chatcmpl-gone'" in detail


def test_declared_refuses_a_response_id_of_several_choices(siblings: Any) -> None:
    both = siblings.tampered(1, response_id="both").tampered(2, response_id="both", choice=1)
    reason, detail = refusal(both.facts(accepted=("both",)))
    assert reason == "accepted_ambiguous"
    assert "'both', which names 2 calls" in detail


def test_declared_refuses_a_rollout_that_declares_nothing_and_others_go_on(
    siblings: Any, grow: Any, make_chain_maker: Any, recorded: Any
) -> None:
    assert refusal(siblings)[0] == "nothing_declared"
    calls = [call for n in range(2) for call in grow(make_chain_maker(n), [None, 0], rollout_id=f"r{n}")]
    answer = select(DECLARED, recorded(calls).facts(accepted=(str(calls[0].call_id),)).piece)
    assert answer.counts.tolist() == [True, False, False, False]
    assert answer.left_out == {"not_accepted": 1}
    assert [(place, why.reason) for place, why in answer.not_selectable.items()] == [(1, "nothing_declared")]


def test_declared_may_accept_nothing(siblings: Any) -> None:
    assert numbers(siblings.facts(accepted=()), DECLARED) == []


def test_an_unknown_rule_or_version_is_refused_by_name() -> None:
    with pytest.raises(UnknownRule, match=r"'completed' version 7: use one of completed 1, declared 1, output 1"):
        Selection(version=7)


def test_a_piece_without_calls_selects_nothing(recorded: Any) -> None:
    assert np.array_equal(select(Selection(), recorded([]).piece).counts, [])
