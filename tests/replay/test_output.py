"""Rule `output` 1: outputs as harnesses return them, read as a server reads them, against calls as a log has them."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from engine.items import Item, answer_key, reasoning_digest
from engine.output import read_output
from replay import readings
from replay.output import Answered, Matched, Unmatched, match
from replay.readings import Reading


def call(
    number: int, *items: Item, parent: int | None = None, response_id: str | None = None, item_ids: Sequence[str] = ()
) -> Answered:
    """A completed call, digested as capture digests it."""
    return Answered(
        number=number,
        call_id=UUID(int=number),
        parent_id=None if parent is None else UUID(int=parent),
        response_id=f"chatcmpl-{number}" if response_id is None else response_id,
        answer_item_ids=tuple(item_ids),
        answer_roles=tuple(item.role for item in items),
        answer_digests=b"".join(item.digest for item in items),
        answer_key=answer_key(items),
        reasoning_digest=reasoning_digest(items),
    )


def text(words: str) -> Item:
    return Item.message("assistant", [words])


def tool(call_id: str, arguments: str = "{}") -> Item:
    return Item.tool_call(call_id, "look", arguments)


def said(words: str | None, *tool_ids: str, **fields: Any) -> dict[str, Any]:
    """An assistant message of Chat."""
    calls = [{"id": each, "type": "function", "function": {"name": "look", "arguments": "{}"}} for each in tool_ids]
    return {"role": "assistant", "content": words, **({"tool_calls": calls} if calls else {}), **fields}


def result(call_id: str, words: str = "fine") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": words}


def user(words: str = "Go on.") -> dict[str, Any]:
    return {"role": "user", "content": words}


def message(words: str, item_id: str | None = None) -> dict[str, Any]:
    """An assistant message of Responses."""
    part = {"type": "output_text", "text": words, "annotations": []}
    return {"type": "message", "role": "assistant", "id": item_id, "status": "completed", "content": [part]}


def function(call_id: str, item_id: str | None = None) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{ }", "id": item_id}


def function_result(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "fine"}


def thought(words: str, item_id: str | None = None) -> dict[str, Any]:
    return {"type": "reasoning", "id": item_id, "summary": [{"type": "summary_text", "text": words}]}


def matched(output: Any, calls: Sequence[Answered], given: Iterable[bytes] = ()) -> Matched:
    found = match(kept(output), calls, given=given)
    assert isinstance(found, Matched), found
    assert [each.call_id for each in calls if each.number in found.numbers] == [*found.call_ids]
    return found


def refused(output: Any, calls: Sequence[Answered], reason: str) -> str:
    found = match(kept(output), calls)
    assert isinstance(found, Unmatched), found
    assert found.reason == reason, found
    return found.detail


def kept(output: Any) -> Any:
    """The output as an outcome in the log has it."""
    read = read_output(output).output
    assert read is not None
    return json.loads(json.dumps(read.as_json()))


@pytest.fixture
def agent() -> list[Answered]:
    """Three calls in one chain, each but the last with a tool call."""
    return [
        call(1, text("Looking."), tool("c1")),
        call(2, tool("c2"), tool("c3"), parent=1),
        call(3, text("Done.\n"), parent=2),
    ]


CHAT = [
    {"role": "system", "content": "Be brief."},
    user("Look."),
    said("Looking.", "c1"),
    result("c1"),
    said(None, "c2", "c3"),
    result("c2"),
    result("c3"),
    said("Done."),
]
ITEMS = [
    message("Looking.", "msg_1"),
    function("c1", "fc_1"),
    function_result("c1"),
    function("c2"),
    function("c3"),
    function_result("c2"),
    function_result("c3"),
    message("Done."),
]
ANTHROPIC = [
    user("Look."),
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "fine"}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": each, "name": "look", "input": {}} for each in ("c2", "c3")],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": each} for each in ("c2", "c3")]},
    {"role": "assistant", "content": "Done."},
]
RESPONSES = [
    {"id": "chatcmpl-1", "object": "response", "output": ITEMS[:2]},
    {"id": "chatcmpl-2", "choices": [{"index": 0, "message": CHAT[4]}]},
    {
        "id": "chatcmpl-3",
        "type": "message",
        "role": "assistant",
        "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "Done."}],
    },
]
FORMS = {
    "chat": CHAT,
    "last part of a chat": CHAT[2:],
    "messages": {"messages": ANTHROPIC, "system": "Be brief."},
    "items": ITEMS,
    "a response around items": {"object": "response", "id": "chatcmpl-3", "output": ITEMS},
    "a result around a response": {"response": {"output": ITEMS}, "reward": 1.0},
    "snapshots": [ITEMS[:3], ITEMS[:7], ITEMS],
    "snapshots of chat": [CHAT[:4], CHAT[:7], CHAT],
    "responses": RESPONSES,
    "responses by name": {"responses": RESPONSES},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_output_selects_the_calls_that_wrote_it(agent: list[Answered], form: str) -> None:
    assert matched(FORMS[form], agent).numbers == (1, 2, 3)


def test_a_match_says_where_each_answer_begins(agent: list[Answered]) -> None:
    assert matched(ITEMS, agent).places == ("output[0]", "output[3]", "output[7]")
    assert matched(FORMS["snapshots"], agent).places == ("output[0][0]", "output[1][3]", "output[2][7]")


# Rejected answers


def resampled() -> tuple[list[Answered], list[int]]:
    """20 turns; the first and the eleventh answer were rejected once and sampled again: 22 calls, 20 accepted."""
    calls: list[Answered] = []
    accepted: list[int] = []
    for turn in range(20):
        parent = accepted[-1] if accepted else None
        if turn in (0, 10):
            calls.append(call(len(calls) + 1, text(f"No {turn}."), tool(f"x{turn}"), parent=parent))
        calls.append(call(len(calls) + 1, text(f"Turn {turn}."), tool(f"c{turn}"), parent=parent))
        accepted.append(len(calls))
    return calls, accepted


@pytest.mark.parametrize("form", ["chat", "items", "snapshots", "responses"])
def test_answers_that_were_sampled_again_do_not_count(form: str) -> None:
    calls, accepted = resampled()
    turns = [[message(f"Turn {turn}."), function(f"c{turn}"), function_result(f"c{turn}")] for turn in range(20)]
    flat = [item for turn in turns for item in turn]
    output: dict[str, Any] = {
        "chat": [each for turn in range(20) for each in (said(f"Turn {turn}.", f"c{turn}"), result(f"c{turn}"))],
        "items": flat,
        "snapshots": [flat[: 3 * count] for count in range(1, 21)],
        "responses": [
            {"id": f"chatcmpl-{number}", "object": "response", "output": turn[:2]}
            for number, turn in zip(accepted, turns, strict=True)
        ],
    }
    assert len(calls) == 22
    assert matched(output[form], calls).numbers == tuple(accepted)
    assert len(accepted) == 20


# What no call answered


def test_an_edited_text_is_refused_with_the_call_that_was_expected(agent: list[Answered]) -> None:
    detail = refused([*CHAT[:-1], said("Done, and well.")], agent, "output_unknown")
    assert "output[7] (assistant) is the answer of no completed call" in detail
    assert f"expected call 3 ({UUID(int=3)})" in detail


def test_an_edited_text_is_named_by_the_id_of_its_item() -> None:
    calls = [call(1, text("One."), item_ids=["msg_1"]), call(2, text("Two."), parent=1, item_ids=["msg_2"])]
    detail = refused([message("One.", "msg_1"), user(), message("2.", "msg_2")], calls, "output_edited")
    assert f"output[2] (assistant, msg_2) is not what call 2 ({UUID(int=2)}) answered" in detail


def test_changed_arguments_are_an_edited_answer(agent: list[Answered]) -> None:
    changed = json.loads(json.dumps(CHAT))
    changed[2]["tool_calls"][0]["function"]["arguments"] = '{"at": "home"}'
    detail = refused(changed, agent, "output_edited")
    assert "output[2] (assistant+tool_call, c1) is not what call 1" in detail


def test_an_answer_without_one_of_its_tool_calls_is_an_edited_answer(agent: list[Answered]) -> None:
    assert "output[4]" in refused([*CHAT[:4], said(None, "c2"), result("c2"), said("Done.")], agent, "output_edited")


@pytest.mark.parametrize("form", ["chat", "items"])
def test_a_board_that_a_harness_recovered_was_never_written_by_the_model(agent: list[Answered], form: str) -> None:
    board = "[Recovered from progress board] 42"
    if form == "chat":
        detail = refused([*CHAT, user("Answer?"), said(board)], agent, "output_unknown")
        assert "output[9] (assistant) is the answer of no completed call (no call is left to expect)" in detail
    else:
        detail = refused([*ITEMS, message(board, "msg_recovery")], agent, "output_unknown")
        assert "output[8] (assistant, msg_recovery)" in detail


def test_an_answer_inserted_in_the_middle_was_never_written_by_the_model(agent: list[Answered]) -> None:
    detail = refused([*CHAT[:4], said("I carry on."), user(), *CHAT[4:]], agent, "output_unknown")
    assert f"output[4] (assistant) is the answer of no completed call (expected call 2 ({UUID(int=2)}))" in detail


def test_a_missing_call_inside_a_chain_is_refused_by_name(agent: list[Answered]) -> None:
    detail = refused([*CHAT[:4], *CHAT[7:]], agent, "output_gap")
    assert f"output[4] (assistant) is the answer of call 3 ({UUID(int=3)})" in detail
    assert f"continues call 2 ({UUID(int=2)})" in detail


def test_a_missing_grandparent_is_refused(agent: list[Answered]) -> None:
    assert "continues call 1" in refused(CHAT[4:], agent, "output_gap")


def test_only_the_final_answer_does_not_stand_for_what_led_to_it(agent: list[Answered]) -> None:
    assert "continues call 2" in refused("Done.", agent, "output_gap")


def test_only_the_final_answer_counts_where_it_continues_nothing(agent: list[Answered]) -> None:
    assert matched("Forty-two.", [*agent, call(4, text("Forty-two."))]).numbers == (4,)
    assert matched([said("Forty-two.")], [*agent, call(4, text("Forty-two."))]).numbers == (4,)


def test_an_independent_chain_that_was_left_out_is_not_selected() -> None:
    calls = [call(1, text("A")), call(2, text("sub")), call(3, text("B"), parent=1), call(4, text("sub 2"), parent=2)]
    assert matched([said("A"), user(), said("B")], calls).numbers == (1, 3)


@pytest.mark.parametrize("output", [[], [user()], {"messages": []}, {"output": []}])
def test_an_output_without_an_answer_is_refused(agent: list[Answered], output: Any) -> None:
    refused(output, agent, "output_empty")


def test_a_rollout_without_calls_wrote_nothing() -> None:
    assert "no call is left to expect" in refused(CHAT, [], "output_unknown")


# Equal answers


def test_equal_answers_that_all_are_there_are_told_by_their_order() -> None:
    calls = [call(1, text("ok")), call(2, text("ok"), parent=1), call(3, text("ok"), parent=2)]
    assert matched([said("ok"), user(), said("ok"), user(), said("ok")], calls).numbers == (1, 2, 3)


def test_the_answers_around_an_equal_one_tell_it() -> None:
    calls = [call(n, text(words)) for n, words in enumerate(["ok", "one", "ok", "two", "ok"], start=1)]
    assert matched([said("one"), user(), said("ok"), user(), said("two")], calls).numbers == (2, 3, 4)


def test_equal_answers_are_told_by_their_item_ids() -> None:
    calls = [call(1, text("ok"), item_ids=["msg_a"]), call(2, text("ok"), item_ids=["msg_b"])]
    assert matched([message("ok", "msg_b")], calls).numbers == (2,)
    assert matched([message("ok", "msg_a")], calls).numbers == (1,)


def test_equal_answers_are_told_by_their_response_ids() -> None:
    calls = [call(1, text("ok")), call(2, text("ok"))]
    assert matched([{"id": "chatcmpl-2", "output": [message("ok")]}], calls).numbers == (2,)
    assert matched({"id": "chatcmpl-1", "object": "response", "output": [message("ok")]}, calls).numbers == (1,)


def test_equal_answers_are_told_by_what_continues_one_of_them() -> None:
    calls = [call(1, text("ok")), call(2, text("ok")), call(3, text("Done."), parent=2)]
    assert matched([said("ok"), user(), said("Done.")], calls).numbers == (2, 3)
    calls[2] = replace(calls[2], parent_id=UUID(int=1))
    assert matched([said("ok"), user(), said("Done.")], calls).numbers == (1, 3)


def test_what_is_told_by_its_descendant_tells_its_own_ancestors() -> None:
    """Each of three turns was sampled twice with the same words; one chain leads to the last, certain answer."""
    twins = [(1, None), (2, None), (3, 2), (4, 2), (5, 3), (6, 3)]
    calls = [*(call(n, text("ok"), parent=parent) for n, parent in twins), call(7, text("Done."), parent=6)]
    output = [said("ok"), user(), said("ok"), user(), said("ok"), user(), said("Done.")]
    assert matched(output, calls).numbers == (2, 3, 6, 7)


def test_equal_answers_that_nothing_tells_apart_are_refused() -> None:
    calls = [call(1, text("Hi.")), call(2, text("ok"), parent=1), call(3, text("ok"), parent=1)]
    detail = refused([said("Hi."), user(), said("ok")], calls, "output_ambiguous")
    assert f"output[2] (assistant) is the answer of calls 2 ({UUID(int=2)}), 3 ({UUID(int=3)}) alike" in detail


def test_a_twin_that_continues_the_other_is_not_taken_for_want_of_room() -> None:
    """Call 2 needs call 1, and there is one place: that its answer is call 1's would be a guess all the same."""
    calls = [call(1, text("ok")), call(2, text("ok"), parent=1)]
    refused([said("ok")], calls, "output_ambiguous")


def test_choices_of_one_request_are_told_by_content_or_by_what_continues_them() -> None:
    choices = [call(n, text(words), response_id="r") for n, words in enumerate(["A", "B", "B"], start=1)]
    assert matched([said("A")], choices).numbers == (1,)
    refused([said("B")], choices, "output_ambiguous")
    calls = [*choices, call(4, text("C"), parent=3)]
    assert matched([said("B"), user(), said("C")], calls).numbers == (3, 4)


# Ids


def test_ids_of_another_call_are_refused() -> None:
    calls = [call(1, text("A"), item_ids=["msg_1"]), call(2, text("B"), parent=1, item_ids=["msg_2"])]
    detail = refused([message("A", "msg_1"), user(), message("B", "msg_1")], calls, "output_id_elsewhere")
    assert f"output[2] (assistant, msg_1) is the answer of call 2 ({UUID(int=2)}), but has ids of call 1" in detail


def test_ids_that_a_proxy_gave_out_say_nothing(agent: list[Answered]) -> None:
    output = [
        {**item, "id": f"proxy_{at}"} if item.get("type") in ("message", "function_call") else item
        for at, item in enumerate(ITEMS)
    ]
    assert matched({"id": "resp_of_the_proxy", "object": "response", "output": output}, agent).numbers == (1, 2, 3)


def test_the_id_around_an_output_is_that_of_its_last_call(agent: list[Answered]) -> None:
    detail = refused({"id": "chatcmpl-2", "object": "response", "output": ITEMS}, agent, "output_id_elsewhere")
    assert "output.output[7] (assistant, chatcmpl-2) is the answer of call 3" in detail


def test_a_response_is_one_answer_and_no_more(agent: list[Answered]) -> None:
    joined = {"id": "chatcmpl-2", "output": [*ITEMS[:2], *ITEMS[3:5]]}
    assert "output[0]" in refused([joined, RESPONSES[2]], agent, "output_edited")


def test_an_empty_response_is_the_answer_of_a_call_that_answered_nothing() -> None:
    calls = [call(1), call(2, text("Done."))]
    output = [{"id": "chatcmpl-1", "output": []}, {"id": "chatcmpl-2", "output": [message("Done.")]}]
    assert matched(output, calls).numbers == (1, 2)
    assert "output[0] (empty, chatcmpl-2)" in refused(
        [{"id": "chatcmpl-2", "output": []}], calls, "output_id_elsewhere"
    )
    assert "output[0] (empty)" in refused([{"output": []}], calls[1:], "output_unknown")


def test_references_beside_an_output_must_name_its_calls(agent: list[Answered]) -> None:
    def output(*ids: str) -> dict[str, Any]:
        turns = [{"model_calls": [{"response_id": each, "model_call_id": f"theirs-{each}"}]} for each in ids]
        return {"response": {"output": ITEMS}, "ng_trajectory": {"turns": turns}}

    ids = [f"chatcmpl-{number}" for number in (1, 2, 3)]
    assert matched(output(*ids), agent).numbers == (1, 2, 3)
    assert "call 3" in refused(output(*ids[:2]), agent, "reference_missing")
    more = [*agent, call(4, text("More."), parent=3)]
    assert "call 4" in refused(output(*ids, "chatcmpl-4"), more, "output_gap")
    assert "'gone'" in refused(output(*ids, "gone"), agent, "reference_unknown")
    assert "which came later" in refused(output(ids[1], ids[0], ids[2]), agent, "output_out_of_order")


def test_references_tell_equal_answers() -> None:
    calls = [call(1, text("ok")), call(2, text("ok"))]
    assert matched({"messages": [said("ok")], "calls": ["chatcmpl-2"]}, calls).numbers == (2,)
    assert matched({"messages": [said("ok")], "calls": [str(UUID(int=1))]}, calls).numbers == (1,)
    both = [replace(each, response_id="both") for each in calls]
    refused({"messages": [said("ok")], "calls": ["both"]}, both, "reference_ambiguous")


# Order


def test_answers_must_come_in_the_order_of_the_log() -> None:
    calls = [call(1, text("A")), call(2, text("B")), call(3, text("C"))]
    detail = refused([said("A"), user(), said("C"), user(), said("B")], calls, "output_out_of_order")
    assert f"output[4] (assistant) is the answer of call 2 ({UUID(int=2)}), which cannot count after call 3" in detail


def test_an_answer_counts_once() -> None:
    calls = [call(1, text("A")), call(2, text("B"), parent=1)]
    detail = refused([said("A"), user(), said("A"), user(), said("B")], calls, "output_out_of_order")
    assert "output[2]" in detail


# How an answer is written


def test_white_space_around_a_text_does_not_count() -> None:
    assert matched([said(" Done.")], [call(1, text("\n\nDone.\n"))]).numbers == (1,)
    refused([said("Do ne.")], [call(1, text("Done."))], "output_unknown")


def test_an_answer_may_be_split_in_several_items() -> None:
    calls = [call(1, text("Look here and there."), tool("c1"), tool("c2")), call(2, text("Done."), parent=1)]
    rest = [function_result("c1"), function_result("c2"), message("Done.")]
    assert matched(
        [message("Look here "), message("and there."), function("c1"), function("c2"), *rest], calls
    ).numbers == (1, 2)
    assert matched(
        [said("Look here and there."), said(None, "c1", "c2"), result("c1"), result("c2"), said("Done.")], calls
    ).numbers == (1, 2)


def test_results_may_stand_between_the_tool_calls_of_an_answer() -> None:
    calls = [call(1, text("Look."), tool("c1"), tool("c2")), call(2, text("Done."), parent=1)]
    output = [message("Look."), function("c1"), function_result("c1"), function("c2"), function_result("c2")]
    assert matched([*output, message("Done.")], calls).numbers == (1, 2)
    refused([*output[:3], user(), *output[3:], message("Done.")], calls, "output_edited")


def test_an_answer_of_many_tool_calls_is_compared_item_by_item() -> None:
    ids = [f"c{at}" for at in range(40)]
    calls = [call(1, text("All."), *map(tool, ids)), call(2, text("Done."), parent=1)]
    output = [message("All."), *map(function, ids), *map(function_result, ids), message("Done.")]
    assert matched(output, calls).numbers == (1, 2)


def test_an_answer_that_begins_another_one_is_told_by_what_follows() -> None:
    calls = [call(1, text("Look.")), call(2, text("Look."), tool("c1")), call(3, text("Done."), parent=2)]
    assert matched([said("Look.", "c1"), result("c1"), said("Done.")], calls).numbers == (2, 3)
    assert matched([message("Look."), function("c1"), function_result("c1"), message("Done.")], calls).numbers == (2, 3)


def test_two_answers_may_follow_one_another() -> None:
    calls = [call(1, text("One.")), call(2, text("Two."), parent=1)]
    assert matched([message("One."), message("Two.")], calls).numbers == (1, 2)
    assert matched([said("One."), said("Two.")], calls).numbers == (1, 2)


def test_what_a_servers_own_tool_did_counts() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "ants"}}
    hosted = Item.hosted("web_search_call", search, item_id="ws_1")
    calls = [call(1, text("Found.")), call(2, hosted, text("Found."))]
    assert matched([search, message("Found.")], calls).numbers == (2,)
    assert matched([search, message("Found. ")], calls).numbers == (2,)
    assert matched([message("Found.")], calls).numbers == (1,)
    refused([{**search, "action": {"query": "bees"}}, message("Found.")], calls, "output_edited")


# Reasoning


def test_reasoning_may_be_dropped_but_not_edited() -> None:
    calls = [call(1, Item.reasoning("Hm.\n"), text("A")), call(2, Item.reasoning("So."), tool("c1"), parent=1)]
    assert matched([said("A"), user(), said(None, "c1")], calls).numbers == (1, 2)
    assert matched([said("A", reasoning="Hm."), user(), said(None, "c1", reasoning="So.")], calls).numbers == (1, 2)
    assert matched([thought("Hm."), message("A"), user(), thought("So."), function("c1")], calls).numbers == (1, 2)
    assert "output[0] (reasoning)" in refused([thought("Hmm."), message("A")], calls, "output_edited")
    assert "output[0] (reasoning+assistant)" in refused([said("A", reasoning="Hmm.")], calls, "output_edited")


def test_reasoning_tells_equal_answers_apart() -> None:
    calls = [call(1, Item.reasoning("One way."), text("A")), call(2, Item.reasoning("Other way."), text("A"))]
    assert matched([said("A", reasoning="Other way.")], calls).numbers == (2,)
    refused([said("A")], calls, "output_ambiguous")


def test_an_answer_of_nothing_but_reasoning_is_an_answer() -> None:
    calls = [call(1, Item.reasoning("Hm.")), call(2, text("Done."), parent=1)]
    assert matched([thought("Hm."), user(), message("Done.")], calls).numbers == (1, 2)
    assert matched([said("", reasoning="Hm."), user(), said("Done.")], calls).numbers == (1, 2)
    assert matched([said(""), user(), said("Done.")], calls).numbers == (1, 2)
    refused([user(), said("Done.")], calls, "output_gap")


# Snapshots and context that was rewritten


def test_snapshots_whose_older_observations_were_hidden_give_each_answer_once() -> None:
    calls = [call(n, tool(f"c{n}")) for n in (1, 2, 3)]  # each a root, for the harness rewrites before each
    hidden = user("[hidden]")
    steps = [
        [hidden, function("c1"), function_result("c1"), user("state 1")],
        [hidden, function("c1"), function_result("c1"), hidden, function("c2"), function_result("c2"), user("state 2")],
    ]
    steps.append([*steps[1][:-1], hidden, function("c3"), function_result("c3"), user("state 3")])
    assert matched(steps, calls).numbers == (1, 2, 3)


@pytest.mark.parametrize("summary_is_an_answer", [True, False])
def test_snapshots_keep_what_a_compaction_dropped(summary_is_an_answer: bool) -> None:
    """Four answers; then the harness puts a summary for the first two. Whose words it is decides whether it counts."""
    words = ["A", "B", "C", "D"]
    calls = [call(n, text(each), parent=n - 1 or None) for n, each in enumerate(words, start=1)]
    if summary_is_an_answer:
        calls.append(call(5, text("Summary.")))
    calls.append(call(6, text("E")))
    summary = message("Summary.") if summary_is_an_answer else user("Summary.")
    before = [item for each in words for item in (message(each), user())]
    snapshots = [before[:2], before[:4], before[:6], before, [summary, *before[4:], message("E")]]
    assert matched(snapshots, calls).numbers == tuple(each.number for each in calls)


def test_snapshots_with_a_summary_that_no_call_wrote_are_refused() -> None:
    calls = [call(1, text("A")), call(2, text("B"))]
    refused([[message("A")], [message("Summary."), message("B")]], calls, "output_unknown")


def test_snapshots_tell_equal_answers_with_ids_of_their_own() -> None:
    calls = [call(1, text("ok"), item_ids=["m1"]), call(2, text("ok"), item_ids=["m2"])]
    assert matched([[message("ok", "m1")], [message("ok", "m2")]], calls).numbers == (1, 2)
    assert matched([[message("ok", "m1")], [message("ok", "m1"), user(), message("ok", "m2")]], calls).numbers == (1, 2)


def test_a_conversation_after_a_rewrite_does_not_stand_for_the_one_before(agent: list[Answered]) -> None:
    """The last state of a harness that compacts: it shows call 2's answer still, but no longer call 1's."""
    calls = [*agent, call(4, text("More."))]
    refused([user("Summary."), *CHAT[4:], user(), said("More.")], calls, "output_gap")


# What stood in the first prompt


def test_answers_in_the_first_prompt_are_not_the_models() -> None:
    calls = [call(1, text("Real."))]
    shots = [user("2 + 2"), said("4"), user("3 + 3"), said("6")]
    given = [text("4").digest, text("6").digest]
    found = matched([*shots, user("1 + 1"), said("Real.")], calls, given)
    assert (found.numbers, found.given) == ((1,), ("output[1]", "output[3]"))
    assert matched([user("1 + 1"), said("Real.")], calls, given).given == ()
    refused([*shots, user(), said("Real.")], calls, "output_unknown")
    assert isinstance(match(kept([said("Real."), user(), said("4")]), calls, given=given), Unmatched)
    only = match(kept(shots), calls, given=given)
    assert isinstance(only, Unmatched)
    assert only.reason == "output_empty"


# What is no output of this release


def test_an_outcome_without_an_output_is_refused(agent: list[Answered]) -> None:
    found = match(None, agent)
    assert isinstance(found, Unmatched)
    assert found.reason == "no_output"


@pytest.mark.parametrize("change", [{"version": 2}, {"hash_version": 99}, {"more": 1}, None])
def test_an_output_of_another_version_is_refused(agent: list[Answered], change: dict[str, int] | None) -> None:
    value = [said("Done.")] if change is None else {**kept(CHAT), **change}
    found = match(value, agent)
    assert isinstance(found, Unmatched)
    assert found.reason == "output_unreadable"


def test_a_call_that_was_digested_by_another_version_is_not_compared() -> None:
    old = [replace(call(1, text("Done.")), hash_version=0)]
    refused([said("Done.")], old, "output_unknown")


# The readings themselves


def brute_force(found: Sequence[Sequence[Reading]], start: int, required: Sequence[int]) -> list[tuple[Reading, ...]]:
    ways: list[tuple[Reading, ...]] = []

    def walk(place: int, way: tuple[Reading, ...]) -> None:
        if place == len(found):
            if {*required} <= {reading.call for reading in way}:
                ways.append(way)
            return
        for reading in found[place]:
            if not way or way[-1].call < reading.call:
                walk(reading.end, (*way, reading))

    walk(start, ())
    return ways


@settings(deadline=None, max_examples=300)
@drawn(st.integers(0, 2**32))
def test_possible_and_certain_readings_are_those_of_all_ways(seed: int) -> None:
    source = random.Random(seed)
    passages, calls = source.randint(1, 6), source.randint(1, 6)
    found = [
        sorted(
            {
                Reading(start, end, number)
                for start, end in combinations_with_replacement(range(passages + 1), 2)
                if start == place and start < end <= start + 2
                for number in range(calls)
                if source.random() < 0.5
            },
            key=lambda reading: (reading.end, reading.call),
        )
        for place in range(passages)
    ]
    start = source.randint(0, passages - 1)
    required = sorted(source.sample(range(calls), source.randint(0, min(2, calls))))
    ways = brute_force(found, start, required)
    kept_readings = readings.possible(found, start, required)
    assert {reading for here in kept_readings for reading in here} == {reading for way in ways for reading in way}
    if ways:
        in_all = set.intersection(*({reading.call for reading in way} for way in ways))
        assert readings.certain(kept_readings).keys() <= in_all
        if len(ways) == 1:
            assert readings.certain(kept_readings).keys() == in_all
