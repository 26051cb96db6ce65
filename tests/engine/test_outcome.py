"""Outcomes: what a caller may say, how each form of an output is read and kept, and what the real server answers."""

import asyncio
import json
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from openai import OpenAI

from engine.errors import BadRequest, EngineError, OutcomeTaken
from engine.items import Item, answer_key
from engine.outcome import Outcome, is_known, receipt, scored
from engine.output import read_output
from replay.output import Answered, Matched, Unmatched, match
from store import log
from store.database import read
from store.events import CallCompleted, RolloutScored
from store.output import HarnessOutput

ONE, TWO = UUID(int=1), UUID(int=2)
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}


def said(words: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **fields}


def user(words: str = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": words}


def message(words: str, item_id: str | None = None) -> dict[str, Any]:
    part = {"type": "output_text", "text": words}
    return {"type": "message", "role": "assistant", "id": item_id, "content": [part]}


def kept(output: Any) -> HarnessOutput:
    found = read_output(output).output
    assert found is not None
    assert HarnessOutput.model_validate(json.loads(json.dumps(found.as_json()))) == found
    return found


def event(**fields: Any) -> RolloutScored:
    return scored("r1", Outcome.model_validate({"reward": 1.0, **fields}), new_id=ONE, at=5)


# What is kept of an output


def test_a_passage_has_the_digests_and_the_key_that_the_log_has_of_such_an_answer() -> None:
    call = Item.tool_call("c1", "look", {"at": 1})
    spoken = Item.message("assistant", ["Well. "])
    asked = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1.0}'}}
    (passage,) = kept([user(), said("Well. ", tool_calls=[asked])]).passages
    assert passage.roles == ("assistant", "tool_call")
    assert passage.digests == (spoken.digest.hex(), call.digest.hex())
    assert passage.keys == (answer_key([spoken, call]).hex(),)
    assert passage.tool_call_ids == ("c1",)
    assert [between.role for between in passage.before] == ["user"]


def test_passages_that_follow_one_another_have_the_keys_of_all_they_may_make_together() -> None:
    texts = [Item.message("assistant", [words]) for words in ("a", "b", "c")]
    output = kept([message("a"), message("b"), user(), message("c")])
    assert [passage.keys for passage in output.passages] == [
        (answer_key(texts[:1]).hex(), answer_key(texts[:2]).hex()),
        (answer_key(texts[1:2]).hex(),),
        (answer_key(texts[2:]).hex(),),
    ]


def test_what_stands_behind_the_last_passage_is_kept_too() -> None:
    output = kept([said("a"), user("b")])
    assert [between.digest for between in output.after] == [Item.message("user", ["b"]).digest.hex()]


@pytest.mark.parametrize(
    ("output", "form", "places"),
    [
        ("a", "text", ["output"]),
        ([user(), said("a")], "chat", ["output[1]"]),
        ({"messages": [user(), said("a")]}, "chat", ["output.messages[1]"]),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}], "messages", ["output[0]"]),
        ([{"role": "user", "content": "x"}, message("a")], "items", ["output[1]"]),
        (
            [[message("a", "m1")], [message("a", "m1"), message("b", "m2")]],
            "snapshots",
            ["output[0][0]", "output[1][1]"],
        ),
        ([{"id": "r1", "output": [message("a")]}], "responses", ["output[0]"]),
        ({"response": {"output": [message("a")]}, "reward": 1}, "items", ["output.response.output[0]"]),
        ({"choices": [{"index": 0, "message": said("a")}]}, "responses", ["output"]),
        ([], "chat", []),
    ],
)
def test_each_form_is_known_by_its_looks(output: Any, form: str, places: list[str]) -> None:
    found = kept(output)
    assert (found.form, [passage.at for passage in found.passages]) == (form, places)


def test_a_function_call_output_with_parts_is_no_response() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "fine"}]}
    assert kept([result, message("a")]).form == "items"


def test_reasoning_that_says_nothing_is_no_passage_unless_it_is_all_there_is() -> None:
    blank = {"type": "reasoning", "summary": []}
    assert [passage.roles for passage in kept([blank, message("a")]).passages] == [("assistant",)]
    (passage,) = kept([user(), blank]).passages
    assert (passage.roles, passage.keys) == (("assistant",), (answer_key([]).hex(),))


def test_an_output_is_kept_by_digest_only_and_small() -> None:
    words = "Some words that the model wrote, at length. " * 100
    turns = [
        [message(f"{words}{turn}", f"msg_{turn}"), {"type": "function_call", "call_id": f"c{turn}", "name": "look"}]
        for turn in range(20)
    ]
    results = [{"type": "function_call_output", "call_id": f"c{turn}", "output": words} for turn in range(20)]
    flat = [item for turn, result in zip(turns, results, strict=True) for item in (*turn, result)]
    found = json.dumps(kept(flat).as_json())
    assert "words" not in found
    assert len(found) < 1_000 * len(turns) < len(json.dumps(flat)) / 8


@pytest.mark.parametrize(
    ("output", "references"),
    [
        (["chatcmpl-1", "chatcmpl-2"], ("chatcmpl-1", "chatcmpl-2")),
        ([{"response_id": "r1"}, {"call_id": "c2"}], ("r1", "c2")),
        ({"calls": ["a", {"response_id": "b"}]}, ("a", "b")),
        ({"calls": []}, ()),
        ({"turns": [{"model_calls": [{"response_id": "a"}, {"model_call_id": "b"}]}]}, ("a", "b")),
        ({"ng_trajectory": {"turns": [{"model_calls": [{"response_id": "a", "model_call_id": "x"}]}]}}, ("a",)),
    ],
)
def test_an_output_that_only_refers_to_calls_accepts_them(output: Any, references: tuple[str, ...]) -> None:
    found = event(output=output)
    assert (found.accepted, found.output) == (references, None)


def test_references_beside_an_output_are_kept_with_it() -> None:
    turns = {"turns": [{"model_calls": [{"response_id": "r1"}]}]}
    found = event(output={"response": {"output": [message("a")]}, "ng_trajectory": turns})
    assert found.accepted is None
    assert HarnessOutput.model_validate(found.output).references == ("r1",)


# What is refused


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (7, "output is 7, not a text, a list"),
        (True, "output is True, not"),
        ({"answer": "a"}, "output is an object with ['answer'], one form is read: send"),
        ({"messages": [], "output": []}, "output has messages and output, one form is read: send"),
        ([said("a"), 7], "output[1] is 7, not an object: send an object"),
        ([[message("a")], message("b")], "output[0] is [{"),
        ([[[message("a")]]], "output[0][0] is [{"),
        ([said("a"), {"role": "robot"}], "output[1].role is 'robot', which turnlog cannot compare: send"),
        ([message("a"), {"type": "ai", "content": "b"}], "output[1].type is 'ai', which turnlog cannot compare: send"),
        ([{"role": "assistant", "content": 7}], "output[0].content is 7, not a string"),
        ([[message("a", "m")], [message("b", "m")]], "output[1][0] has id 'm' of an item with other content"),
        ([{"output": [message("a")], "status": "failed"}], "output[0] is no response that was answered in full"),
        ([{"output": [message("a")]}, said("b")], "output[1] is no response that was answered in full"),
        (
            {"choices": [{"index": at, "message": said("a")} for at in (0, 1)]},
            "output holds 2 choices, one of them was used: send that one",
        ),
        ([{"call_id": "a", "response_id": "b"}], "output[0] has call_id and response_id, which may differ"),
        (["a", ""], "output[1] is empty, a reference names a call"),
        ({"calls": "a"}, "output.calls is 'a', not a list of call or response ids"),
        (
            {"turns": [{"model_calls": ["a"]}, {"model_calls": []}]},
            "output.turns[1] has no model_calls, other turns have",
        ),
        ([said("a", score=float("nan"))], "output holds NaN or Infinity"),
        ([{"type": "item_reference", "id": "m1"}], "output[0] refers to item 'm1'"),
    ],
)
def test_a_bad_output_is_refused_with_its_place_the_rule_and_a_remedy(output: Any, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        event(output=output)
    assert str(refused.value).startswith(words)
    assert ": " in str(refused.value)


@pytest.mark.parametrize(
    ("depth", "around", "words"),
    [(900, "list", "not an object"), (100_000, "list", "nests too deep"), (100_000, "response", "nests too deep")],
)
def test_an_output_that_nests_too_deep_is_refused(depth: int, around: str, words: str) -> None:
    deep: Any = ["a"]
    for _ in range(depth):
        deep = [deep] if around == "list" else {"response": deep}
    with pytest.raises(BadRequest, match=words):
        read_output(deep)


@pytest.mark.parametrize("kind", ["computer_call", "mcp_call", "image_generation_call", "shell_call"])
def test_what_a_servers_own_tool_did_is_a_passage_that_only_its_equal_matches(kind: str) -> None:
    (passage,) = kept([{"type": kind, "id": "h1"}]).passages
    assert (passage.roles, passage.item_ids) == (("hosted",), ("h1",))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": float("-inf")}, "reward is -inf"),
        ({"status": "done"}, "status is 'done', not one that has a meaning: send completed, truncated, failed"),
        ({"accepted": ["a"], "output": "b"}, "accepted and output both say which calls count"),
        ({"accepted": ["a\0"]}, "accepted.0 is 'a\\x00', which the log cannot hold"),
        ({"declared_rewrites": [float("inf")]}, "declared_rewrites.0 is inf, which the log cannot hold"),
    ],
)
def test_a_bad_outcome_is_refused_with_the_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError) as refused:
        event(**fields)
    assert str(refused.value).startswith(words)
    assert 400 <= refused.value.status < 500


# Posting again


def test_the_same_outcome_id_is_one_outcome() -> None:
    first = event(outcome_id=TWO, output=[said("a")])
    assert first.outcome_id == TWO
    again = first.model_copy(update={"at": 9})
    assert is_known(again, [event(), first])
    assert not is_known(again, [event()])
    with pytest.raises(OutcomeTaken, match=str(TWO)):
        is_known(again.model_copy(update={"reward": 2.0}), [first])


def test_a_receipt_says_what_was_read() -> None:
    told = receipt(event(output=[user(), said("a")]))
    assert told == {
        "outcome_id": str(ONE),
        "rollout_id": "r1",
        "accepted": None,
        "output": {"form": "chat", "passages": 1},
    }
    assert receipt(event(output=["a"]))["accepted"] == ["a"]


# The real server


def talk(server: Any, rollout: str, *, turns: int = 3) -> list[dict[str, Any]]:
    """A conversation of a chat harness, which keeps no thoughts."""
    client = OpenAI(base_url=f"{server.address}/rollouts/{rollout}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "Talk."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Turn {turn}?"})
        answer = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=12, seed=turn, extra_body=SILENT
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return messages


def post(server: Any, rollout: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.address}/rollouts/{rollout}/outcome", json={"reward": 1.0, **fields}, timeout=30)


def in_log(server: Any, rollout: str) -> tuple[list[CallCompleted], list[RolloutScored]]:
    with read(server.database) as connection:
        return log.calls(connection, rollout), log.outcomes(connection, rollout)


def answered(number: int, call: CallCompleted) -> Answered:
    return Answered(
        number=number,
        call_id=call.call_id,
        parent_id=call.parent_id,
        response_id=call.response_id,
        answer_item_ids=call.answer_item_ids,
        answer_roles=[item.role for item in call.answer_items],
        answer_digests=b"".join(item.digest for item in call.answer_items),
        answer_key=call.answer_key,
        reasoning_digest=call.reasoning_digest,
        hash_version=call.hash_version,
    )


def test_a_posted_conversation_is_matched_to_the_calls_that_wrote_it(server: Any) -> None:
    rollout = f"outcome-{uuid4()}"
    messages = talk(server, rollout)
    posted = post(server, rollout, output=messages)
    assert posted.status_code == 201
    assert posted.json()["output"] == {"form": "chat", "passages": 3}
    calls, outcomes = in_log(server, rollout)
    known = [answered(number, call) for number, call in enumerate(calls, start=1)]
    found = match(outcomes[-1].output, known)
    assert isinstance(found, Matched), found
    assert found.call_ids == tuple(call.call_id for call in calls)
    post(server, rollout, output=[*messages[:-1], said("Not what it said.")])
    _, outcomes = in_log(server, rollout)
    found = match(outcomes[-1].output, known)
    assert isinstance(found, Unmatched)
    assert found.reason == "output_unknown"
    assert (
        f"output[6] (assistant) is the answer of no completed call (expected call 3 ({calls[2].call_id}))"
        in found.detail
    )


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_thoughts_and_ids_of_other_dialects_are_those_of_the_log(server: Any, dialect: str) -> None:
    """What the server answered goes back as it came: flat under the id of the last call, and each response whole."""
    rollout = f"outcome-{uuid4()}"
    sent: list[Any] = []
    whole: list[Any] = []
    for turn in range(2):
        sent.append(user(f"Turn {turn}?"))
        body = {"model": "demo", "seed": turn}
        body |= {"input": sent, "max_output_tokens": 24} if dialect == "responses" else {"messages": sent}
        body |= {"max_tokens": 24} if dialect == "messages" else {}
        answer = httpx.post(f"{server.address}/rollouts/{rollout}/v1/{dialect}", json=body, timeout=60).json()
        whole.append(answer)
        sent += answer["output"] if dialect == "responses" else [said(answer["content"])]
    flat = {"id": whole[-1]["id"], "output": sent} if dialect == "responses" else {"messages": sent}
    for output, form in ((flat, "items" if dialect == "responses" else "messages"), (whole, "responses")):
        posted = post(server, rollout, output=output)
        assert posted.json()["output"]["form"] == form, posted.text
        calls, outcomes = in_log(server, rollout)
        found = match(outcomes[-1].output, [answered(number, call) for number, call in enumerate(calls, start=1)])
        assert isinstance(found, Matched), found
        assert found.numbers == (1, 2)
        passages = HarnessOutput.model_validate(outcomes[-1].output).passages
        known = {item_id for call in calls for item_id in call.answer_item_ids} | {call.response_id for call in calls}
        assert {item_id for passage in passages for item_id in (*passage.item_ids, passage.response_id)} <= known | {
            None
        }


def test_a_bad_outcome_is_answered_in_the_servers_error_shape_and_leaves_nothing(server: Any) -> None:
    rollout = f"outcome-{uuid4()}"
    assert httpx.post(f"{server.address}/rollouts", json={"rollout_id": rollout}).status_code == 201
    bad = {
        "status is 'done'": {"status": "done"},
        "output[0].role is 'robot'": {"output": [{"role": "robot"}]},
        "accepted and output both": {"accepted": ["a"], "output": "b"},
        "reward": {"reward": True},
        "rewards": {"rewards": 1},
        "outcome_id": {"outcome_id": "one"},
    }
    for words, fields in bad.items():
        answer = post(server, rollout, **fields)
        assert answer.status_code in (400, 422), (words, answer.text)
        assert words in answer.json()["error"]["message"], answer.text
    unknown = post(server, "outcome-of-nobody")
    assert unknown.status_code == 404
    assert "rollout 'outcome-of-nobody' is not in the log" in unknown.json()["error"]["message"]
    for rollout_id in (rollout, "outcome-of-nobody"):
        assert in_log(server, rollout_id)[1] == []


def test_a_client_that_posts_again_makes_one_outcome(server: Any) -> None:
    rollout, outcome_id = f"outcome-{uuid4()}", str(uuid4())
    httpx.post(f"{server.address}/rollouts", json={"rollout_id": rollout})

    async def post_at_once(count: int) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"reward": 0.5, "output": [said("a")], "outcome_id": outcome_id}
            url = f"{server.address}/rollouts/{rollout}/outcome"
            return await asyncio.gather(*(client.post(url, json=body) for _ in range(count)))

    answers = [
        *asyncio.run(post_at_once(8)),
        post(server, rollout, reward=0.5, output=[said("a")], outcome_id=outcome_id),
    ]
    assert {(answer.status_code, answer.text) for answer in answers} == {(201, answers[0].text)}
    other = post(server, rollout, reward=0.75, outcome_id=outcome_id)
    assert other.status_code == 409
    assert outcome_id in other.json()["error"]["message"]
    elsewhere = f"outcome-{uuid4()}"
    httpx.post(f"{server.address}/rollouts", json={"rollout_id": elsewhere})
    assert post(server, elsewhere, outcome_id=outcome_id).status_code == 409
    assert [outcome.reward for outcome in in_log(server, rollout)[1]] == [0.5]
    assert in_log(server, elsewhere)[1] == []
