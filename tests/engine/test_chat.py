"""The Chat Completions wire: what becomes which item, that a stream is its plain answer, and errors in its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.dialects.chat import StreamedResponse, answers, choices, error_body, request_items, response_id
from engine.errors import (
    BadRequest,
    BadRolloutId,
    EngineError,
    EngineMismatch,
    LogDown,
    PromptTooLong,
    UnknownItem,
    UnknownRollout,
    UnknownRoute,
    UnreadableAnswer,
)
from engine.items import Item, Media


def items_of(*messages: Any) -> tuple[Item, ...]:
    return request_items({"messages": list(messages)})


def digests(*messages: Any) -> list[bytes]:
    return [item.digest for item in items_of(*messages)]


def tool_call(call_id: str = "c1", name: str = "ls", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def plain(*messages: dict[str, Any], finish_reason: str = "stop") -> dict[str, Any]:
    choices = [{"index": i, "message": message, "finish_reason": finish_reason} for i, message in enumerate(messages)]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": {},
    }


def test_a_request_becomes_its_items_in_order() -> None:
    found = items_of(
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "Count."},
        assistant(content="I look.", reasoning="Files first.", tool_calls=[tool_call("c1"), tool_call("c2")]),
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "b.txt"}]},
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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}),
        ({"role": "user", "content": "xy"}, {"role": "user", "content": ["x", {"type": "text", "text": "y"}]}),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "x"},
        ),
        (assistant(content=None, tool_calls=[tool_call()]), assistant(content="", tool_calls=[tool_call()])),
        (assistant(content=None, tool_calls=[tool_call()]), assistant(tool_calls=[tool_call()])),
        (assistant(content=[], tool_calls=[tool_call()]), assistant(tool_calls=[tool_call()])),
        (assistant(content="x", tool_calls=[]), assistant(content="x", tool_calls=None)),
        (assistant(content="x", reasoning="r"), assistant(content="x", reasoning_content="r")),
        (assistant(content="x", reasoning="r"), assistant(content="x", reasoning="r", reasoning_content="r")),
        (assistant(content="x", reasoning=None), assistant(content="x", reasoning_content="")),
        (assistant(content="x"), assistant(content="x", refusal=None, annotations=[], audio=None, function_call=None)),
        (assistant(content=None, refusal="No."), assistant(content=[{"type": "refusal", "refusal": "No."}])),
        (assistant(tool_calls=[tool_call(index=0)]), assistant(tool_calls=[tool_call()])),
        (
            assistant(tool_calls=[tool_call(arguments=None)]),
            assistant(tool_calls=[{"id": "c1", "function": {"name": "ls"}}]),
        ),
        (assistant(content=None), assistant(content="")),
        ({"role": "user", "content": "x", "name": None}, {"role": "user", "content": "x"}),
    ],
)
def test_wire_forms_of_one_thing_are_the_same_items(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digests(one) == digests(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "ann"}),
        ({"role": "user", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "tool", "tool_call_id": "c1"}, {"role": "tool", "tool_call_id": "c2"}),
        ({"role": "tool", "tool_call_id": "c1"}, {"role": "tool", "tool_call_id": "c1", "name": "ls"}),
        ({"role": "developer", "content": "x"}, {"role": "developer", "content": "x", "tools": [{"name": "ls"}]}),
        (assistant(content="x", reasoning="r"), assistant(content="x")),
        (assistant(content="x", reasoning="r"), assistant(content="x", reasoning="r", reasoning_content="s")),
        (assistant(content="", name="bot"), assistant(content="")),
        (assistant(tool_calls=[tool_call()], name="bot"), assistant(tool_calls=[tool_call()])),
        (assistant(content="x"), assistant(content="x ")),
        (assistant(tool_calls=[tool_call("c1")]), assistant(tool_calls=[tool_call("c2")])),
        (
            assistant(tool_calls=[tool_call("c1"), tool_call("c2")]),
            assistant(tool_calls=[tool_call("c2"), tool_call("c1")]),
        ),
    ],
)
def test_what_differs_on_the_wire_and_in_the_prompt_differs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digests(one) != digests(other)


def test_every_assistant_message_is_at_least_one_item() -> None:
    for message in (assistant(), assistant(content=""), assistant(content=None, tool_calls=[], reasoning="")):
        assert items_of(message) == (Item.message("assistant"),)
    assert items_of(assistant(content=None, reasoning="r")) == (Item.reasoning("r"),)


def test_media_parts_become_addresses() -> None:
    (item,) = items_of(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}},
                {"type": "image_url", "image_url": "https://a/b.png"},
                {"type": "audio_url", "audio_url": {"url": "https://a/b.wav"}},
                {"type": "video_url", "video_url": {"url": "https://a/b.mp4"}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}},
                {"type": "file", "file": {"file_id": "f1"}},
            ],
        }
    )
    assert item.media == (
        Media.from_base64("image", "AAAA"),
        Media.from_url("image", "https://a/b.png"),
        Media.from_url("audio", "https://a/b.wav"),
        Media.from_url("video", "https://a/b.mp4"),
        Media.from_base64("audio", "AAAA"),
        Media.from_base64("file", "AAAA"),
        Media(kind="file", address="id:f1"),
    )
    assert item.text == "Look: "


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages is null, not a list of objects"),
        ({"messages": [], "n": 0}, "n is 0, the number of answers: send a whole number from 1 to 16384"),
        ({"messages": [], "n": 100_000}, "n is 100000, the number of answers"),
        ({"messages": [], "n": 2.0}, "n is 2.0, the number of answers"),
        ({"messages": [], "n": "2"}, "n is '2', the number of answers"),
        ({"messages": "hi"}, "messages is 'hi', not a list of objects"),
        ({"messages": [1]}, "messages[0] is 1, not an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is null"),
        ({"messages": [{"role": 7}]}, "messages[0].role is 7"),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role is ['user']"),
        (
            {"messages": [{"role": "user", "content": 7}]},
            "messages[0].content is 7, not a string, a list of parts or null",
        ),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0] is 7, not an object"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0] has no type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "content[0].text is 7"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url is null, not an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url has no url"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "neither file_data nor file_id"),
        ({"messages": [{"role": "tool", "tool_call_id": 7}]}, "messages[0].tool_call_id is 7, not a string or null"),
        ({"messages": [{"role": "assistant", "reasoning": ["r"]}]}, "messages[0].reasoning is ['r']"),
        (
            {"messages": [{"role": "assistant", "tool_calls": "x"}]},
            "messages[0].tool_calls is 'x', not a list of objects",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0] is 1, not an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "tool_calls[0].function is null"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls[0].function has no name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}]}, "[0].id is 1"),
    ],
)
def test_a_malformed_request_is_named_with_rule_and_remedy(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        request_items(body)
    assert said in str(caught.value)
    assert ": send " in str(caught.value)
    assert caught.value.status == 400
    assert caught.value.param is not None


@pytest.mark.parametrize(
    ("message", "kind", "param"),
    [
        ({"role": "function", "name": "f", "content": "x"}, "function", "messages[0].role"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "hologram", "messages[0].content[0].type"),
        (assistant(function_call={"name": "f", "arguments": "{}"}), "function_call", "messages[0].function_call"),
        (assistant(audio={"id": "a"}), "audio", "messages[0].audio"),
        (
            assistant(tool_calls=[{"id": "c", "type": "custom", "custom": {}}]),
            "custom",
            "messages[0].tool_calls[0].type",
        ),
        ({"role": "r" * 10_000}, "r" * 10_000, "messages[0].role"),
    ],
)
def test_an_unknown_kind_is_named_and_never_skipped(message: dict[str, Any], kind: str, param: str) -> None:
    with pytest.raises(UnknownItem) as caught:
        items_of(message)
    assert caught.value.kind == kind
    assert caught.value.param == param
    assert kind[:80] in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_request_for_beams_is_refused() -> None:
    with pytest.raises(BadRequest, match="use_beam_search is true") as caught:
        request_items({"messages": [], "use_beam_search": True})
    assert caught.value.param == "use_beam_search"


@pytest.mark.parametrize(("n", "expected"), [(None, 1), (1, 1), (3, 3), (0, 1), (-1, 1), ("2", 1), (True, 1)])
def test_a_request_asks_for_n_answers(n: Any, expected: int) -> None:
    assert choices({"n": n}) == expected
    assert choices({}) == 1


def test_lone_surrogates_in_a_request_are_read() -> None:
    bad = "\ud800"
    found = items_of(
        {"role": "user", "content": [{"type": "text", "text": bad}, {"type": "image_url", "image_url": {"url": bad}}]},
        assistant(content=bad, reasoning=bad, tool_calls=[tool_call(bad, bad, bad)]),
        {"role": "tool", "tool_call_id": bad, "content": bad},
    )
    assert len({item.digest for item in found}) == 5
    with pytest.raises(UnknownItem) as caught:
        items_of({"role": bad})
    str(caught.value).encode()


def test_an_answer_gives_the_items_of_its_echo() -> None:
    message = assistant(content="I look.\n", reasoning="Hm.", tool_calls=[tool_call()])
    (answer,) = answers(plain(message, finish_reason="tool_calls"))
    assert answer.items == items_of(message)
    assert (answer.index, answer.finish_reason) == (0, "tool_calls")
    assert response_id(plain(message)) == "chatcmpl-1"
    assert response_id({}) is None


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"choices": [{"index": 0}]},
        {"choices": [{"message": assistant(content="x")}]},
        {"choices": [{"index": 0, "message": assistant(content=7)}]},
        plain(assistant(function_call={"name": "f"})),
    ],
)
def test_an_answer_of_unknown_shape_is_the_servers_fault(response: dict[str, Any]) -> None:
    with pytest.raises(UnreadableAnswer, match="the server's answer cannot be captured"):
        answers(response)
    assert UnreadableAnswer.status == 500


texts = st.text(max_size=12)
calls = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=4), st.text("xyz", min_size=1, max_size=4), texts), max_size=3
).map(lambda found: [tool_call(f"call_{i}{call_id}", name, text) for i, (call_id, name, text) in enumerate(found)])
messages = st.builds(
    lambda content, reasoning, calls: assistant(
        content=content, **reasoning, **({"tool_calls": calls} if calls else {})
    ),
    st.none() | texts,
    st.sampled_from(["reasoning", "reasoning_content"]).flatmap(
        lambda name: st.fixed_dictionaries({}, optional={name: texts})
    ),
    calls,
)


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


def chunks_of(data: st.DataObject, index: int, message: dict[str, Any], finish_reason: str) -> list[dict[str, Any]]:
    """One choice as the deltas that a server might send for it, tool calls one after the other or interleaved."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning", "reasoning_content", "content"):
        deltas += [{name: piece} for piece in cut(data, message.get(name) or "")]
    streams = []
    for position, call in enumerate(message.get("tool_calls", [])):
        head = {"index": position, "id": call["id"], "type": "function", "function": {"name": call["function"]["name"]}}
        pieces = cut(data, call["function"]["arguments"])
        streams.append([head, *({"index": position, "function": {"arguments": piece}} for piece in pieces)])
    while any(streams):
        stream = data.draw(st.sampled_from([stream for stream in streams if stream]))
        deltas.append({"tool_calls": [stream.pop(0)]})
    chunks = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    chunks[-1] = {**chunks[-1], "finish_reason": finish_reason}
    return chunks


@settings(max_examples=80, deadline=None)
@given(st.lists(messages, min_size=1, max_size=3), st.sampled_from(["stop", "length", "tool_calls"]), st.data())
def test_a_streamed_answer_is_its_plain_answer(
    found: Sequence[dict[str, Any]], finish_reason: str, data: st.DataObject
) -> None:
    waiting = [chunks_of(data, index, message, finish_reason) for index, message in enumerate(found)]
    stream = StreamedResponse()
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    while any(waiting):
        choice = data.draw(st.sampled_from([choices for choices in waiting if choices]))
        stream.feed({**head, "choices": [choice.pop(0)]})
        assert stream.completed == (not any(waiting)) or len(found) > 1
    stream.feed({**head, "choices": [], "usage": {"total_tokens": 3}})
    expected = plain(*found, finish_reason=finish_reason)
    assert stream.completed
    assert stream.failed is None
    assert answers(stream.response()) == answers(expected)
    assert response_id(stream.response()) == response_id(expected)


def test_a_stream_is_complete_when_every_choice_has_finished() -> None:
    stream = StreamedResponse()
    assert not stream.completed
    for index in (0, 1):
        stream.feed({"choices": [{"index": index, "delta": {"role": "assistant", "content": ""}}]})
    stream.feed({"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "stop"}]})
    assert not stream.completed
    stream.feed({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]})
    stream.feed({"choices": [{"index": 0, "delta": {}, "finish_reason": None}]})
    assert stream.completed
    assert [(answer.index, answer.finish_reason) for answer in answers(stream.response())] == [
        (0, "length"),
        (1, "stop"),
    ]


def test_two_different_reasonings_are_both_kept_streamed_as_plain() -> None:
    stream = StreamedResponse()
    stream.feed(
        {"choices": [{"index": 0, "delta": {"reasoning": "a", "reasoning_content": "b"}, "finish_reason": "stop"}]}
    )
    assert answers(stream.response())[0].items == (Item.reasoning("a"), Item.reasoning("b"))
    assert (
        answers(plain(assistant(reasoning="a", reasoning_content="b")))[0].items == answers(stream.response())[0].items
    )


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        ({"error": {"message": "engine died", "code": 500}}, "engine died"),
        ({"error": "engine died"}, "engine died"),
        ({"error": {"code": 500}}, "null"),
        ({"choices": 7}, "choices is 7, not a list of objects"),
        ({"choices": [{"delta": {}}]}, "choices[0].index is null"),
        ({"choices": [{"index": 0, "delta": {"content": 7}}]}, "choices[0].delta.content is 7"),
        ({"choices": [{"index": 0, "delta": {"tool_calls": [{"id": "c"}]}}]}, "tool_calls[0].index is null"),
    ],
)
def test_an_error_or_an_unreadable_chunk_fails_the_stream(chunk: dict[str, Any], said: str) -> None:
    stream = StreamedResponse()
    stream.feed({"choices": [{"index": 0, "delta": {"content": "a"}}]})
    assert stream.failed is None
    stream.feed(chunk)
    assert stream.failed is not None
    assert said in stream.failed


def test_a_stream_takes_the_data_of_its_events_and_ends_with_done() -> None:
    stream = StreamedResponse()
    stream.take(b'{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}')
    assert (stream.completed, stream.ended, stream.failed) == (True, False, None)
    stream.take(b" [DONE]\r")
    assert stream.ended
    stream.take(b"{")
    assert stream.failed == "the server's stream cannot be captured: b'{' is no JSON object"


def test_a_stream_whose_commit_fails_ends_with_the_error() -> None:
    event = StreamedResponse().error_event(LogDown("disk full"))
    assert event.startswith(b'data: {"error": {"message": "the log is down')
    assert event.endswith(b"\n\n")


def test_an_unknown_delta_is_not_lost() -> None:
    stream = StreamedResponse()
    stream.feed({"choices": [{"index": 0, "delta": {"function_call": {"name": "f"}}, "finish_reason": "stop"}]})
    with pytest.raises(UnreadableAnswer, match="function_call"):
        answers(stream.response())


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (BadRequest("x is 1: send 2", param="x"), "BadRequestError", 400),
        (UnknownItem("hologram", known="text", param="messages[0]"), "BadRequestError", 400),
        (UnknownRollout("r1"), "NotFoundError", 404),
        (UnknownRoute("/v1/x is not served: use /v1/models"), "NotFoundError", 404),
        (BadRolloutId("a/b"), "UnprocessableEntityError", 422),
        (LogDown("disk full"), "ServiceUnavailableError", 503),
        (EngineError("no reason: see the log"), "InternalServerError", 500),
        (UnreadableAnswer("no choices: see the log"), "InternalServerError", 500),
        (
            EngineMismatch("--logprobs-mode", "raw_logprobs", remedy="set processed_logprobs"),
            "InternalServerError",
            500,
        ),
    ],
)
def test_errors_take_the_shape_that_vllm_gives_them(error: EngineError, kind: str, code: int) -> None:
    body = error_body(error)
    assert body == {"error": {"message": str(error), "type": kind, "param": error.param, "code": code}}
    assert error.status == code
    assert ": " in str(error)


def test_a_prompt_that_is_too_long_says_so_in_openais_words() -> None:
    assert error_body(PromptTooLong(limit=8192, prompt_tokens=9000)) == {
        "error": {
            "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 "
            "tokens. Please reduce the length of the messages.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    assert "at least 8193 tokens" in str(PromptTooLong(limit=8192, prompt_tokens=8193, at_least=True))
