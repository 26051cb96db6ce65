import dataclasses
from typing import Any

import pytest

from replay.call import Rollout
from replay.errors import UnknownRule
from replay.selection import NotSelectable, Selected, Selection, select

DECLARED = Selection(rule="declared")


def numbers(rollout: Rollout, selected: Selected | NotSelectable) -> list[int]:
    assert isinstance(selected, Selected)
    return [call.number for call in rollout.calls if call.call_id in selected.call_ids]


@pytest.fixture
def three_of_one_parent(grow: Any, chain_maker: Any, recorded: Any) -> Rollout:
    rollout, _ = recorded(grow(chain_maker, [None, 0, 0, 0]))
    return rollout


def again(rollout: Rollout, number: int, earlier: int) -> Rollout:
    """The rollout, with one call made a retry of an earlier one."""
    calls = list(rollout.calls)
    calls[number - 1] = dataclasses.replace(calls[number - 1], request_hash=calls[earlier - 1].request_hash)
    return dataclasses.replace(rollout, calls=tuple(calls))


def test_completed_selects_every_call(three_of_one_parent: Rollout) -> None:
    selected = select(Selection(), three_of_one_parent)
    assert numbers(three_of_one_parent, selected) == [1, 2, 3, 4]
    assert selected.left_out == {}


def test_a_retry_supersedes_the_earlier_sibling_of_the_same_request(three_of_one_parent: Rollout) -> None:
    rollout = again(again(three_of_one_parent, 3, 2), 4, 2)
    selected = select(Selection(), rollout)
    assert numbers(rollout, selected) == [1, 4]
    assert selected.left_out == {"superseded": 2}


def test_a_call_that_was_continued_is_not_superseded(grow: Any, chain_maker: Any, recorded: Any) -> None:
    rollout, _ = recorded(grow(chain_maker, [None, 0, 1, 0]))
    assert numbers(rollout, select(Selection(), again(rollout, 4, 2))) == [1, 2, 3, 4]


def test_a_repeated_root_is_superseded_too(grow: Any, chain_maker: Any, recorded: Any) -> None:
    rollout, _ = recorded(grow(chain_maker, [None, None, 1]))
    assert numbers(rollout, select(Selection(), again(rollout, 2, 1))) == [2, 3]


def test_choices_of_one_request_do_not_supersede_each_other(three_of_one_parent: Rollout) -> None:
    rollout = again(three_of_one_parent, 3, 2)
    calls = list(rollout.calls)
    calls[2] = dataclasses.replace(calls[2], choice=1)
    rollout = dataclasses.replace(rollout, calls=tuple(calls))
    assert numbers(rollout, select(Selection(), rollout)) == [1, 2, 3, 4]


def test_an_excluded_role_is_left_out_and_counted(three_of_one_parent: Rollout) -> None:
    calls = list(three_of_one_parent.calls)
    calls[3] = dataclasses.replace(calls[3], role="title")
    rollout = dataclasses.replace(three_of_one_parent, calls=tuple(calls))
    selected = select(Selection(excluded_roles=frozenset({"title"})), rollout)
    assert numbers(rollout, selected) == [1, 2, 3]
    assert selected.left_out == {"excluded_role": 1}
    assert numbers(rollout, select(Selection(), rollout)) == [1, 2, 3, 4]


def test_declared_takes_call_ids_and_response_ids(three_of_one_parent: Rollout) -> None:
    named = tuple(dataclasses.replace(call, response_id=f"resp-{call.number}") for call in three_of_one_parent.calls)
    accepted = (str(named[0].call_id), "resp-2")
    rollout = dataclasses.replace(three_of_one_parent, calls=named, accepted=accepted)
    selected = select(DECLARED, rollout)
    assert numbers(rollout, selected) == [1, 2]
    assert selected.left_out == {"not_accepted": 2}


def test_declared_refuses_an_id_that_names_no_call(three_of_one_parent: Rollout) -> None:
    answer = select(DECLARED, dataclasses.replace(three_of_one_parent, accepted=("chatcmpl-gone",)))
    assert isinstance(answer, NotSelectable)
    assert answer.reason == "accepted_unknown"
    assert "'chatcmpl-gone'" in answer.detail


def test_declared_refuses_a_response_id_of_several_choices(three_of_one_parent: Rollout) -> None:
    calls = [
        dataclasses.replace(call, response_id="both", choice=n) for n, call in enumerate(three_of_one_parent.calls)
    ]
    rollout = dataclasses.replace(three_of_one_parent, calls=tuple(calls), accepted=("both",))
    answer = select(DECLARED, rollout)
    assert isinstance(answer, NotSelectable)
    assert answer.reason == "accepted_ambiguous"


def test_declared_refuses_a_rollout_that_declares_nothing(three_of_one_parent: Rollout) -> None:
    answer = select(DECLARED, three_of_one_parent)
    assert isinstance(answer, NotSelectable)
    assert answer.reason == "nothing_declared"


def test_declared_may_accept_nothing(three_of_one_parent: Rollout) -> None:
    rollout = dataclasses.replace(three_of_one_parent, accepted=())
    assert numbers(rollout, select(DECLARED, rollout)) == []


def test_an_unknown_rule_or_version_is_refused_by_name() -> None:
    with pytest.raises(UnknownRule, match="'completed' version 7: use one of completed 1, declared 1"):
        Selection(version=7)
