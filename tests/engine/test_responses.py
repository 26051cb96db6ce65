"""The Responses wire: what becomes which item, that a stream is its plain answer, and errors in its shape."""

from __future__ import annotations

import json
import random
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.dialects import responses
from engine.dialects.responses import StreamedResponse, answers, error_body, request_items, response_id
from engine.errors import BadRequest, LogDown, PromptTooLong, UnknownItem, UnreadableAnswer
from engine.items import Item, Media


def items_of(*sent: Any, **more: Any) -> tuple[Item, ...]:
    return request_items({"input": list(sent), **more})


def digests(*sent: Any) -> list[bytes]:
    return [item.digest for item in items_of(*sent)]


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def calls(call_id: str = "c1", name: str = "ls", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def gives(call_id: str = "c1", output: Any = "a.txt", **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output, **more}


def thinks(text: str = "", summary: str = "", encrypted: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": "rs_1",
        "content": [{"type": "reasoning_text", "text": text}] if text else None,
        "summary": [{"type": "summary_text", "text": summary}] if summary else [],
        "encrypted_content": encrypted,
        **more,
    }


USER = {"role": "user", "content": "Count."}


def test_a_request_becomes_its_items_in_order() -> None:
    found = items_of(
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Count."}]},
        thinks("Files first."),
        says("I look."),
        calls("c1"),
        calls("c2"),
        gives("c1"),
        gives("c2", [{"type": "input_text", "text": "b.txt"}]),
        instructions="Be brief.",
    )
    assert found == (
        Item.message("system", ["Be brief."]),
        Item.message("developer", ["Use tools."]),
        Item.message("user", ["Count."]),
        Item.reasoning("Files first."),
        Item.message("assistant", ["I look."]),
        Item.tool_call("c1", "ls", "{}"),
        Item.tool_call("c2", "ls", "{}"),
        Item.tool_result("c1", ["a.txt"]),
        Item.tool_result("c2", ["b.txt"]),
    )


def test_a_string_is_one_user_message() -> None:
    assert request_items({"input": "Count.", "instructions": None}) == (Item.message("user", ["Count."]),)
    assert request_items({"input": "", "instructions": ""}) == (Item.message("user", [""]),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (USER, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Count."}]}),
        (says("x"), {"role": "assistant", "content": "x"}),
        (says("x"), says("x", id="msg_1", status="completed", phase="final_answer")),
        (
            says("x"),
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "x", "annotations": [{}], "logprobs": []}],
            },
        ),
        (says("No."), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}),
        (calls(), calls(id="fc_1", status="completed", namespace=None, caller=None, async_=None)),
        (calls(arguments='{"a": 1}'), calls(arguments='{ "a":1.0 }')),
        (calls(arguments=""), calls(arguments="{}")),
        (calls(name="ns__ls"), calls(name="ls", namespace="ns")),
        (
            calls(name="patch", arguments='{"input": "*** Begin"}'),
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
        ),
        (gives(), gives(id="fco_1", status=None)),
        (gives(), {"type": "custom_tool_call_output", "call_id": "c1", "output": "a.txt"}),
        (thinks("r"), thinks("r", status="completed", id="rs_2")),
        (thinks("r"), thinks(summary="r")),
        (thinks("r"), thinks("r", summary="s", encrypted="e")),
        (thinks(summary="s"), thinks(summary="s", encrypted="e")),
    ],
)
def test_wire_forms_of_one_thing_are_the_same_items(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digests(one) == digests(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (USER, {**USER, "role": "developer"}),
        (USER, {**USER, "content": "Count. "}),
        (calls("c1"), calls("c2")),
        (calls(name="ls"), calls(name="ls", namespace="ns")),
        (gives("c1"), gives("c2")),
        (gives(output="a"), gives(output="b")),
        (thinks("r"), thinks("s")),
        (thinks("r"), thinks(encrypted="r")),
        (thinks(encrypted="r"), thinks(encrypted="s")),
    ],
)
def test_what_differs_on_the_wire_and_in_the_prompt_differs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digests(one) != digests(other)


def test_reasoning_that_says_nothing_is_no_item_of_its_own() -> None:
    assert items_of(USER, thinks(), says("x"), gives()) == items_of(USER, says("x"), gives())
    assert items_of(USER, calls(), thinks(), gives()) == items_of(USER, calls(), gives())


def test_a_turn_of_reasoning_that_says_nothing_is_an_empty_message() -> None:
    assert items_of(USER, thinks(), thinks(), USER)[1:2] == (Item.message("assistant"),)
    assert answers({"output": [thinks()]})[0].items == (Item.message("assistant"),)


def test_item_ids_are_kept_and_do_not_count() -> None:
    found = items_of(says("x", id="msg_1"), calls(id="fc_1"), thinks("r", id="rs_9"), says("x", id=None))
    assert [item.item_id for item in found] == ["msg_1", "fc_1", "rs_9", None]
    assert found[0] == found[3]


def test_media_parts_become_addresses() -> None:
    (user, result) = items_of(
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
                {"type": "input_image", "image_url": "https://a/b.png"},
                {"type": "input_image", "file_id": "f1"},
                {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"},
                {"type": "input_file", "file_url": "https://a/b.pdf"},
                {"type": "input_file", "file_id": "f2"},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            ],
        },
        gives(output=[{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]),
    )
    assert user.media == (
        Media.from_base64("image", "AAAA"),
        Media.from_url("image", "https://a/b.png"),
        Media(kind="image", address="id:f1"),
        Media.from_base64("file", "AAAA"),
        Media.from_url("file", "https://a/b.pdf"),
        Media(kind="file", address="id:f2"),
        Media.from_base64("audio", "AAAA"),
    )
    assert result.media == (Media.from_base64("image", "AAAA"),)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "input is null, not a string or a list of objects"),
        ({"input": 7}, "input is 7"),
        ({"input": [7]}, "input[0] is 7, not an object"),
        ({"input": [], "instructions": ["x"]}, "instructions is ['x'], not a string or null"),
        ({"input": [{}]}, "input[0] has neither type nor role"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content is 7"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0] has no type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image_url is null"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "neither file_data nor file_id"),
        ({"input": [{"type": "function_call", "call_id": "c1"}]}, "input[0] has no name"),
        ({"input": [{"type": "function_call", "call_id": 7, "name": "ls"}]}, "input[0].call_id is 7"),
        ({"input": [{"type": "custom_tool_call", "name": "p", "input": {}}]}, "input[0].input is {}"),
        ({"input": [{"type": "reasoning", "summary": "s"}]}, "input[0].summary is 's', not a list of objects"),
        ({"input": [{"type": "reasoning", "content": [{"text": 7}]}]}, "input[0].content[0].text is 7"),
    ],
)
def test_a_malformed_request_is_named_with_rule_and_remedy(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        request_items(body)
    assert said in str(caught.value)
    assert ": send " in str(caught.value)
    assert caught.value.param is not None


@pytest.mark.parametrize(
    ("sent", "kind", "param"),
    [
        ({"type": "hologram"}, "hologram", "input[0].type"),
        ({"type": ["message"]}, "['message']", "input[0].type"),
        ({"type": "compaction", "encrypted_content": "x"}, "compaction", "input[0].type"),
        ({"type": "additional_tools", "tools": []}, "additional_tools", "input[0].type"),
        ({"role": "critic", "content": "x"}, "critic", "input[0].role"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "hologram", "input[0].content[0].type"),
    ],
)
def test_an_unknown_kind_is_named_and_never_skipped(sent: dict[str, Any], kind: str, param: str) -> None:
    with pytest.raises(UnknownItem) as caught:
        items_of(sent)
    assert (caught.value.kind, caught.value.param) == (kind, param)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", {"id": "conv_1"}),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("previous_input_messages", [{}]),
        ("background", True),
    ],
)
def test_a_request_that_leans_on_the_servers_memory_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=rf"^{name} is .*: leave it out") as caught:
        request_items({"input": "x", name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
def test_a_reference_to_an_item_is_refused_by_its_id(reference: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"input\[0\] refers to item 'msg_1'.*: send the item itself"):
        items_of(reference)


def test_what_only_tunes_a_server_is_accepted() -> None:
    plain = request_items({"input": "x"})
    assert plain == request_items(
        {
            "input": "x",
            "store": True,
            "background": False,
            "previous_response_id": None,
            "include": ["reasoning.encrypted_content"],
            "truncation": "disabled",
            "context_management": [{"type": "compaction", "compact_threshold": 1000}],
            "prompt_cache_key": "k",
            "client_metadata": {"turn_id": "t"},
        }
    )


@pytest.mark.parametrize("kind", sorted(responses.HOSTED))
def test_a_hosted_tools_item_is_read_and_names_its_kind(kind: str) -> None:
    (item,) = items_of({"type": kind, "id": "h_1", "call_id": "c1", "anything": [1, {"a": None}]})
    assert (item.kind, item.role, item.text, item.item_id) == ("hosted", "hosted", kind, "h_1")


def test_every_kind_of_item_that_the_official_client_knows_is_decided_on() -> None:
    from openai.types.responses import ResponseOutputItem
    from openai.types.responses.response_input_item import ResponseInputItem

    known = {name for union in (ResponseInputItem, ResponseOutputItem) for name in types_of(union)}
    mapped = {
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
        "custom_tool_call_output",
    }  # fmt: skip
    refused = {"item_reference", "compaction", "compaction_trigger", "additional_tools", "configuration_update"}
    assert known == mapped | refused | responses.HOSTED


def types_of(union: Any) -> set[str]:
    """The `type` of each member of a union of the official client's models."""
    members = typing.get_args(typing.get_args(union)[0])
    return {
        name
        for member in members
        for literal in (member.model_fields["type"].annotation,)
        for choice in (literal, *typing.get_args(literal))
        for name in typing.get_args(choice)
        if isinstance(name, str)
    }


def test_an_answer_gives_the_items_of_its_echo() -> None:
    output = [thinks("Hm."), says("I look.\n"), calls()]
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": output, "error": None}
    (answer,) = answers(response)
    assert answer.items == items_of(*output)
    assert (answer.index, answer.finish_reason) == (0, "completed")
    assert response_id(response) == "resp_1"
    assert response_id({}) is None


def test_an_answer_that_was_cut_short_says_why() -> None:
    response = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [says("I")]}
    assert answers(response)[0].finish_reason == "max_output_tokens"
    assert answers({"output": []})[0].finish_reason is None


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"output": 7},
        {"output": [{"type": "hologram"}]},
        {"output": [says(7)]},  # type: ignore[arg-type]
        {"status": "failed", "output": []},
        {"status": "queued", "output": []},
        {"status": "cancelled", "output": [says("x")]},
    ],
)
def test_an_answer_of_unknown_shape_is_the_servers_fault(response: dict[str, Any]) -> None:
    with pytest.raises(UnreadableAnswer, match="the server's answer"):
        answers(response)


texts = st.text(max_size=12)
names = st.text("abc", min_size=1, max_size=4)
outputs = st.lists(
    st.one_of(
        st.builds(thinks, texts, texts, st.none() | texts),
        texts.map(says),
        st.builds(calls, names, names, texts, namespace=st.none() | names),
        st.builds(
            lambda call_id, name, text: {"type": "custom_tool_call", "call_id": call_id, "name": name, "input": text},
            names,
            names,
            texts,
        ),
        st.just({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}),
    ),
    max_size=5,
)


def cut(dice: random.Random, text: str) -> list[str]:
    places = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(4)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


DELTAS = {
    "message": ("response.output_text.delta", lambda item: item["content"][0]["text"]),
    "reasoning": ("response.reasoning_text.delta", lambda item: (item.get("content") or [{"text": ""}])[0]["text"]),
    "function_call": ("response.function_call_arguments.delta", lambda item: item["arguments"]),
    "custom_tool_call": ("response.custom_tool_call_input.delta", lambda item: item["input"]),
}


def events_of(dice: random.Random, response: dict[str, Any], *, last: str, whole: bool) -> list[dict[str, Any]]:
    """A plain answer as the events that a server might send for it, with items that overlap."""
    tracks = []
    for index, item in enumerate(response["output"]):
        track = [{"type": "response.output_item.added", "item": {**item, "status": "in_progress", "content": []}}]
        if item["type"] in DELTAS:
            kind, text_of = DELTAS[item["type"]]
            track += [{"type": kind, "item_id": "x", "delta": piece} for piece in cut(dice, text_of(item))]
        track.append({"type": "response.output_item.done", "item": item})
        tracks.append([{**event, "output_index": index} for event in track])
    head = {key: value for key, value in response.items() if key != "output"}
    events = [{"type": "response.created", "response": {**head, "status": "in_progress", "output": []}}]
    while any(tracks):
        events.append(dice.choice([track for track in tracks if track]).pop(0))
    events.append({"type": last, "response": {**response, "output": response["output"] if whole else []}})
    return [{**event, "sequence_number": number, "new": {"field": 1}} for number, event in enumerate(events)]


@settings(max_examples=80, deadline=None)
@given(outputs, st.sampled_from(["response.completed", "response.incomplete"]), st.booleans(), st.integers())
def test_a_streamed_answer_is_its_plain_answer(output: list[Any], last: str, whole: bool, seed: int) -> None:
    response = {"id": "resp_1", "object": "response", "status": last.removeprefix("response."), "output": output}
    stream = StreamedResponse()
    for event in events_of(random.Random(seed), response, last=last, whole=whole):
        assert not stream.completed
        stream.take(json.dumps(event).encode())
    assert stream.failed is None
    assert stream.completed
    assert stream.ended
    assert answers(stream.response()) == answers(response)
    assert [item.item_id for item in answers(stream.response())[0].items] == [
        item.item_id for item in answers(response)[0].items
    ]
    assert response_id(stream.response()) == "resp_1"


def test_recorded_answers_cut_into_events_are_the_same_answers() -> None:
    dice = random.Random(0)
    found = 0
    for file in sorted((Path(__file__).parents[2] / "../shared/recordings").glob("*/requests.jsonl")):
        for call in map(json.loads, file.read_text().splitlines()):
            if call["endpoint"] == responses.PATH and "output" in call["response"]:
                stream = StreamedResponse()
                for event in events_of(dice, call["response"], last="response.completed", whole=dice.random() < 0.5):
                    stream.take(json.dumps(event).encode())
                assert answers(stream.response()) == answers(call["response"])
                found += 1
    assert found == 115


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "engine died"}}},
            "engine died",
        ),
        ({"type": "response.failed", "response": {"status": "failed"}}, "the response failed"),
        ({"type": "error", "code": "server_error", "message": "engine died", "param": None}, "engine died"),
        ({"error": {"message": "engine died", "code": 500}}, "engine died"),
        ({"type": "response.completed"}, "response is null, not an object"),
        ({"type": "response.output_item.done", "output_index": 0}, "item is null, not an object"),
        ({"type": "response.output_item.done", "item": {}}, "output_index is null"),
    ],
)
def test_an_error_or_an_unreadable_event_fails_the_stream(event: dict[str, Any], said: str) -> None:
    stream = StreamedResponse()
    stream.feed(event)
    assert stream.failed is not None
    assert said in stream.failed
    assert not stream.completed


@pytest.mark.parametrize("data", [b"7", b"", b"{", b'"x"', b"[" * 100_000])
def test_data_that_is_no_event_fails_the_stream(data: bytes) -> None:
    stream = StreamedResponse()
    stream.take(data)
    assert stream.failed is not None
    assert "is no JSON object" in stream.failed


def test_events_of_kinds_that_add_nothing_are_let_through() -> None:
    stream = StreamedResponse()
    for kind in ("response.in_progress", "response.output_text.delta", "response.new_kind_of.2030", None, ["x"]):
        stream.feed({"type": kind})
    assert (stream.failed, stream.completed, stream.ended) == (None, False, False)


def test_the_events_that_end_a_response_are_the_official_ones() -> None:
    from openai.types.responses import ResponseStreamEvent

    known = types_of(ResponseStreamEvent)
    assert set(StreamedResponse()._events) <= known
    ends = {name for name in known if name.count(".") == 1 and name.startswith("response.")}
    assert ends - {"response.created", "response.in_progress", "response.queued"} == {
        "response.completed",
        "response.incomplete",
        "response.failed",
    }


def events_in(raw: bytes) -> list[dict[str, Any]]:
    """The events of a piece of a stream; each must be named for its type."""
    found = []
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_stream_whose_commit_fails_ends_with_an_error_and_a_failed_response() -> None:
    stream = StreamedResponse()
    stream.feed({"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1", "model": "m"}})
    stream.feed({"type": "response.in_progress", "sequence_number": 1, "response": {}})
    error = LogDown("disk full")
    first, last = events_in(stream.error_event(error))
    assert (first["type"], first["sequence_number"], first["code"]) == ("error", 2, "server_error")
    assert first["error"]["code"] == "server_error"
    assert first["message"] == first["error"]["message"] == str(error)
    assert (last["type"], last["sequence_number"]) == ("response.failed", 3)
    assert (last["response"]["id"], last["response"]["status"]) == ("resp_1", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["error"]["message"] == str(error)
    for event in (first, last):
        again = StreamedResponse()
        again.feed(event)
        assert again.failed == str(error)


def test_the_official_client_raises_at_a_failed_stream() -> None:
    from httpx import Client, MockTransport, Response
    from openai import APIError, OpenAI

    raw = StreamedResponse().error_event(LogDown("disk full"))
    answer = Response(200, content=raw, headers={"content-type": "text/event-stream"})
    with (
        Client(transport=MockTransport(lambda request: answer)) as http,
        OpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0) as client,
        pytest.raises(APIError, match="the log is down"),
    ):
        [*client.responses.create(model="m", input="x", stream=True)]


def test_a_prompt_that_is_too_long_says_so_in_openais_words() -> None:
    error = PromptTooLong(limit=8192, prompt_tokens=9000)
    assert error_body(error) == {
        "error": {
            "message": str(error),
            "type": "invalid_request_error",
            "param": "input",
            "code": "context_length_exceeded",
        }
    }
    first, last = events_in(StreamedResponse().error_event(error))
    assert first["error"] == error_body(error)["error"]
    assert last["response"]["error"]["code"] == "context_length_exceeded"


def test_other_errors_take_the_shape_that_vllm_gives_them() -> None:
    error = BadRequest("input is 7: send 8", param="input")
    assert error_body(error) == {
        "error": {"message": str(error), "type": "BadRequestError", "param": "input", "code": 400}
    }


@settings(max_examples=30, deadline=None)
@given(
    texts,
    st.text("xyz \n", max_size=12),
    st.lists(st.tuples(names, st.sampled_from(["ls", "ns__ls", "patch"]), texts), max_size=3),
    st.integers(),
)
def test_what_vllm_streams_is_what_it_answers_plainly(
    reasoning: str, content: str, called: list[tuple[str, str, str]], seed: int
) -> None:
    """The events and the items are made by vLLM's own code, for function tools, namespaced ones and custom ones."""
    from openai.types.responses import CustomTool, FunctionTool, NamespaceTool
    from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall
    from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta
    from vllm.entrypoints.openai.responses.utils import build_response_output_items, encode_custom_tool_input

    function = {"type": "function", "name": "ls", "parameters": {}, "strict": False}
    tools: list[Any] = [
        FunctionTool.model_validate(function),
        NamespaceTool.model_validate({"type": "namespace", "name": "ns", "description": "", "tools": [function]}),
        CustomTool(type="custom", name="patch"),
    ]
    made = [
        (f"call_{number}{call_id}", name, encode_custom_tool_input(text) if name == "patch" else text)
        for number, (call_id, name, text) in enumerate(called)
    ]
    plain = build_response_output_items(
        reasoning, content, [FunctionCall(id=i, name=name, arguments=text) for i, name, text in made], tools=tools
    )
    dice = random.Random(seed)
    deltas = [DeltaMessage(reasoning=piece) for piece in cut(dice, reasoning) if piece]
    deltas += [DeltaMessage(content=piece) for piece in cut(dice, content) if piece]
    for index, (call_id, name, text) in enumerate(made):
        head = DeltaToolCall(id=call_id, type="function", index=index, function=DeltaFunctionCall(name=name))
        deltas.append(DeltaMessage(tool_calls=[head]))
        deltas += [
            DeltaMessage(tool_calls=[DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=piece))])
            for piece in cut(dice, text)
        ]
    processor = SimpleStreamingEventProcessor(tools=tools)
    events = []
    for delta in [part for whole in deltas for part in split_delta(whole)]:
        target, call = processor.resolve_target_state(delta)
        if processor.needs_transition(target, call):
            events += [*processor.close_current(), *processor.open(target, call)]
        events += processor.emit_delta(delta, typing.cast("Any", None))
    events += processor.close_current()
    stream = StreamedResponse()
    for event in events:
        stream.take(event.model_dump_json(by_alias=True).encode())
    stream.feed({"type": "response.completed", "response": {"status": "completed", "output": []}})
    assert stream.failed is None
    expected = {"status": "completed", "output": [item.model_dump(mode="json", by_alias=True) for item in plain]}
    assert answers(stream.response()) == answers(expected)
