"""The Messages wire: what becomes which item, that a stream is its plain answer, and errors in Anthropic's shape."""

from __future__ import annotations

import asyncio
import json
import random
import typing
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.dialects import messages
from engine.dialects.messages import StreamedResponse, answers, error_body, request_items, response_id
from engine.errors import (
    BadRequest,
    BadRolloutId,
    EngineError,
    LogDown,
    PromptTooLong,
    UnknownItem,
    UnknownRollout,
    UnreadableAnswer,
)
from engine.items import Item, Media

RECORDINGS = Path(__file__).parents[2] / "../shared/recordings"
EPHEMERAL = {"type": "ephemeral"}


def items_of(*sent: Any, **more: Any) -> tuple[Item, ...]:
    return request_items({"messages": list(sent), **more})


def digests(*sent: Any) -> list[bytes]:
    return [item.digest for item in items_of(*sent)]


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if content and isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def thinking(said: str, signature: str | None = "s") -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, **({} if signature is None else {"signature": signature})}


def tool_use(call_id: str = "c1", name: str = "ls", value: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {} if value is None else value, **more}


def result(call_id: str = "c1", content: Any = "a.txt", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def image(data: str = "AAAA") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_a_request_becomes_its_items_in_order() -> None:
    found = items_of(
        user("Count."),
        assistant(thinking("Files first."), text("I look."), tool_use("c1"), tool_use("c2")),
        user(result("c1"), text("Go on."), result("c2", [text("b.txt")]), text(" Please.")),
        {"role": "system", "content": "Be quick."},
        system=[text("Be "), text("brief.", cache_control=EPHEMERAL)],
    )
    assert found == (
        Item.message("system", ["Be brief."]),
        Item.message("user", ["Count."]),
        Item.reasoning("Files first."),
        Item.message("assistant", ["I look."]),
        Item.tool_call("c1", "ls", "{}"),
        Item.tool_call("c2", "ls", "{}"),
        Item.tool_result("c1", ["a.txt"]),
        Item.tool_result("c2", ["b.txt"]),
        Item.message("user", ["Go on. Please."]),
        Item.message("system", ["Be quick."]),
    )


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_a_system_prompt_of_nothing_is_no_item(system: Any) -> None:
    assert items_of(user("x"), system=system) == (Item.message("user", ["x"]),)


def test_the_line_about_billing_is_no_part_of_the_system_prompt() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=cli; cch=00fa1;")
    plain = items_of(user("x"), system=[text("You are Claude Code.")])
    assert items_of(user("x"), system=[billing, text("You are Claude Code.")]) == plain
    assert items_of(user("x"), system="x-anthropic-billing-header: a string is shown")[0].text.endswith("is shown")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("x"), user(text("x"))),
        (user("xy"), user(text("x"), text(""), text("y", cache_control=EPHEMERAL, citations=[]))),
        (user(result()), user(result(content=[text("a.txt")], is_error=False, cache_control=EPHEMERAL))),
        (user(result()), user(result(), text(""))),
        (user(result(content=None)), user(result(content=""), text(""))),
        (user(result("c1"), text("x"), result("c2")), user(result("c1"), result("c2"), text("x"))),
        (assistant("x"), assistant(text("x"))),
        (assistant(text("x"), tool_use(), text("y")), assistant(text("x"), text("y"), tool_use())),
        (assistant(thinking("a"), text("x"), thinking("b")), assistant(thinking("ab", "t"), text("x"))),
        (assistant(thinking("a"), text("x")), assistant(thinking("a", None), text("x"))),
        (
            assistant(tool_use(value={"a": 1})),
            assistant(tool_use(value={"a": 1.0}, cache_control=EPHEMERAL, caller={})),
        ),
        (assistant(text(""), tool_use()), assistant(tool_use())),
        (assistant(), assistant("")),
        (assistant(thinking("", None), text("x")), assistant("x")),
    ],
)
def test_wire_forms_of_one_thing_are_the_same_items(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digests(one) == digests(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("x"), user("x ")),
        (user("x"), assistant("x")),
        (user(text("x"), image()), user(image(), text("x"))),
        (user(image()), user(image("AAAB"))),
        (user(result("c1")), user(result("c2"))),
        (user(result()), user(result(is_error=True))),
        (user(result("c1"), result("c2")), user(result("c2"), result("c1"))),
        (user(result(content=[text("x")])), user(result(content=[text("x"), image()]))),
        (
            user(result(content=[])),
            user(result(content=[{"type": "tool_reference", "tool_name": "ls"}])),
        ),
        (assistant(tool_use("c1")), assistant(tool_use("c2"))),
        (assistant(tool_use(value={"a": 1})), assistant(tool_use(value={"a": 2}))),
        (assistant(tool_use("c1"), tool_use("c2")), assistant(tool_use("c2"), tool_use("c1"))),
        (assistant(thinking("a"), text("x")), assistant(thinking("b"), text("x"))),
        (assistant(thinking("", "s")), assistant(thinking("", "t"))),
        (assistant(thinking("a"), text("x")), assistant("x")),
        (
            {"role": "system", "content": [text("x")]},
            {"role": "system", "content": [text("x"), {"type": "tool_removal", "tool": {"name": "ls"}}]},
        ),
    ],
)
def test_what_differs_on_the_wire_and_in_the_prompt_differs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digests(one) != digests(other)


def test_every_assistant_message_is_at_least_one_item() -> None:
    for content in ("", [], None, [text("")]):
        assert items_of({"role": "assistant", "content": content}) == (Item.message("assistant"),)
    assert items_of(assistant(thinking("r"))) == (Item.reasoning("r"),)


def test_opaque_thinking_is_its_payload_and_keeps_its_place() -> None:
    redacted = {"type": "redacted_thinking", "data": "payload"}
    found = items_of(assistant(thinking("a", "s1"), redacted, thinking("b", "s2"), thinking("", "s3"), text("x")))
    assert found == (
        Item.reasoning("a"),
        Item.reasoning("payload", opaque=True),
        Item.reasoning("b"),
        Item.reasoning("s3", opaque=True),
        Item.message("assistant", ["x"]),
    )
    assert [item.item_id for item in found] == ["s1", "payload", "s2", "s3", None]


def test_media_blocks_become_addresses() -> None:
    (found,) = items_of(
        user(
            image(),
            {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
            {"type": "image", "source": {"type": "file", "file_id": "f1"}},
            {
                "type": "document",
                "title": "A",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
            },
            {"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}},
        )
    )
    assert found.media == (
        Media.from_base64("image", "AAAA"),
        Media.from_url("image", "https://a/b.png"),
        Media(kind="image", address="id:f1"),
        Media.from_base64("file", "AAAA"),
        Media.from_url("file", "https://a/b.pdf"),
    )
    assert found.text == "A"


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "plain words"},
        {"type": "content", "content": [text("some"), text("words")]},
    ],
)
def test_a_document_of_text_counts_by_all_that_it_says(source: dict[str, Any]) -> None:
    (one,) = items_of(user({"type": "document", "source": source}))
    (same,) = items_of(user({"type": "document", "source": {**source, "cache_control": EPHEMERAL}}))
    (other,) = items_of(user({"type": "document", "source": {**source, "more": 1}}))
    assert one == same
    assert one.digest != other.digest
    assert one.media[0].kind == "file"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages is null, not a list of objects"),
        ({"messages": [7]}, "messages[0] is 7, not an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is null, not user, assistant or system"),
        ({"messages": [{"role": 7}]}, "messages[0].role is 7"),
        ({"messages": [user(7)]}, "messages[0].content[0] is 7, not an object"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content is 7, not a string or a list of blocks"),
        ({"messages": [], "system": 7}, "system is 7, not a string or a list of blocks"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content[0] has no type"),
        ({"messages": [user(text(7))]}, "messages[0].content[0].text is 7"),  # type: ignore[arg-type]
        ({"messages": [user({"type": "image"})]}, "messages[0].content[0].source is null"),
        ({"messages": [assistant({"type": "tool_use", "id": "c"})]}, "messages[0].content[0] has no name"),
        ({"messages": [assistant({"type": "thinking", "thinking": 7})]}, "messages[0].content[0].thinking is 7"),
        ({"messages": [user(result(content=[7]))]}, "messages[0].content[0].content[0] is 7"),
        ({"messages": [user(result(7))]}, "messages[0].content[0].tool_use_id is 7"),  # type: ignore[arg-type]
    ],
)
def test_a_malformed_request_is_named_with_rule_and_remedy(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        request_items(body)
    assert said in str(caught.value)
    assert ": send " in str(caught.value)
    assert caught.value.param is not None


@pytest.mark.parametrize(
    ("message", "kind", "param"),
    [
        ({"role": "tool", "content": "x"}, "tool", "messages[0].role"),
        (user({"type": "hologram"}), "hologram", "messages[0].content[0].type"),
        (user({"type": "search_result"}), "search_result", "messages[0].content[0].type"),
        (user(tool_use()), "tool_use", "messages[0].content[0].type"),
        (user({"type": "compaction"}), "compaction", "messages[0].content[0].type"),
        (assistant(result()), "tool_result", "messages[0].content[0].type"),
        (user(result(content=[{"type": "hologram"}])), "hologram", "messages[0].content[0].content[0].type"),
        (user({"type": "image", "source": {"type": "dream"}}), "dream", "messages[0].content[0].source"),
        ({"role": "system", "content": [image()]}, "image", "messages[0].content[0].type"),
    ],
)
def test_an_unknown_kind_is_named_and_never_skipped(message: dict[str, Any], kind: str, param: str) -> None:
    with pytest.raises(UnknownItem) as caught:
        items_of(message)
    assert (caught.value.kind, caught.value.param) == (kind, param)


@pytest.mark.parametrize("kind", sorted(messages.HOSTED))
def test_a_hosted_tools_block_is_read_and_names_its_kind(kind: str) -> None:
    block = {"type": kind, "id": "srv_1", "content": [{"any": None}]}
    for message in (user(block), assistant(block)):
        (item,) = items_of(message)
        assert (item.kind, item.role, item.text) == ("hosted", "hosted", kind)
    assert [item.role for item in items_of(assistant(thinking("r"), text("x"), block, tool_use()))] == [
        "reasoning",
        "assistant",
        "hosted",
        "tool_call",
    ]


def test_every_kind_of_block_that_the_official_client_knows_is_decided_on() -> None:
    from anthropic.types import ContentBlock, ContentBlockParam
    from anthropic.types.beta import BetaContentBlock, BetaContentBlockParam

    unions = (ContentBlock, ContentBlockParam, BetaContentBlock, BetaContentBlockParam)
    known = {name for union in unions for name in types_of(union)}
    mapped = {"text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"}
    in_system = {"tool_addition", "tool_removal"}
    refused = {"search_result", "compaction", "fallback"}
    assert known == mapped | in_system | refused | messages.HOSTED


def types_of(known: Any) -> set[str]:
    """The `type` of each member of a union of the official client's models and typed dicts."""
    if typing.get_origin(known) is Annotated:
        return types_of(typing.get_args(known)[0])
    if typing.get_origin(known) is not None:
        return {name for member in typing.get_args(known) for name in types_of(member)}
    fields = getattr(known, "model_fields", None)
    literal = typing.get_type_hints(known)["type"] if fields is None else fields["type"].annotation
    return set(typing.get_args(literal))


def test_what_a_server_would_edit_or_remember_is_left_alone() -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    plain = items_of(user("x"))
    assert items_of(user("x"), context_management=edits, metadata={"user_id": "u"}, thinking={"type": "x"}) == plain


def test_an_answer_gives_the_items_of_its_echo() -> None:
    content = [thinking("Hm.", "sig"), text("I look.\n"), tool_use(value={"path": "."})]
    response = {"id": "msg_1", "type": "message", "content": content, "stop_reason": "tool_use"}
    (answer,) = answers(response)
    assert answer.items == items_of(assistant(*content))
    assert [item.item_id for item in answer.items] == ["sig", None, None]
    assert (answer.index, answer.finish_reason) == (0, "tool_use")
    assert response_id(response) == "msg_1"
    assert response_id({}) is None


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"content": "x"},
        {"content": [{"type": "hologram"}]},
        {"content": [text(7)]},  # type: ignore[arg-type]
        {"type": "error", "error": {"type": "api_error", "message": "x"}},
    ],
)
def test_an_answer_of_unknown_shape_is_the_servers_fault(response: dict[str, Any]) -> None:
    with pytest.raises(UnreadableAnswer, match="the server's answer cannot be captured"):
        answers(response)


texts = st.text(max_size=12)
names = st.text("abc", min_size=1, max_size=4)
values = st.dictionaries(names, st.integers() | texts | st.lists(st.booleans(), max_size=2), max_size=3)
contents = st.lists(
    st.one_of(
        texts.map(text),
        st.builds(thinking, texts, names),
        st.builds(tool_use, names, names, values),
        st.just({"type": "redacted_thinking", "data": "payload"}),
        st.just({"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"q": "x"}}),
    ),
    max_size=5,
)
FIELDS = {"text": ("text", "text_delta", "text"), "thinking": ("thinking", "thinking_delta", "thinking")}


def cut(dice: random.Random, whole: str) -> list[str]:
    places = sorted(dice.randrange(len(whole) + 1) for _ in range(dice.randrange(4)))
    return [whole[i:j] for i, j in zip([0, *places], [*places, len(whole)], strict=True)]


def events_of(dice: random.Random, response: dict[str, Any]) -> list[dict[str, Any]]:
    """A plain answer as the events that a server might send for it."""
    head = {**response, "content": [], "stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": head}]
    for index, block in enumerate(response["content"]):
        start, deltas = dict(block), []
        if block["type"] in FIELDS:
            name, kind, field = FIELDS[block["type"]]
            start[name] = ""
            deltas = [{"type": kind, field: piece, "new": 1} for piece in cut(dice, block[name])]
        if block["type"] == "thinking":
            start.pop("signature", None)
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        if block["type"] == "tool_use":
            start["input"] = {}
            deltas = [{"type": "input_json_delta", "partial_json": p} for p in cut(dice, json.dumps(block["input"]))]
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
        events += [{"type": "ping"}] * dice.randrange(2)
    stopped = {"stop_reason": response["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": stopped, "usage": {"output_tokens": 3}})
    return events


@settings(max_examples=80, deadline=None)
@given(contents, st.sampled_from(["end_turn", "tool_use", "max_tokens", "stop_sequence"]), st.integers())
def test_a_streamed_answer_is_its_plain_answer(content: list[Any], stop_reason: str, seed: int) -> None:
    response = {"id": "msg_1", "type": "message", "role": "assistant", "content": content, "stop_reason": stop_reason}
    stream = StreamedResponse()
    for event in events_of(random.Random(seed), response):
        assert not stream.completed
        stream.take(json.dumps(event).encode())
    assert stream.completed
    assert not stream.ended
    stream.take(b'{"type": "message_stop"}')
    assert stream.failed is None
    assert stream.ended
    assert answers(stream.response()) == answers(response)
    assert [item.item_id for item in answers(stream.response())[0].items] == [
        item.item_id for item in answers(response)[0].items
    ]
    assert response_id(stream.response()) == "msg_1"


def test_recorded_answers_cut_into_events_are_the_same_answers() -> None:
    dice = random.Random(0)
    found = 0
    for file in sorted(RECORDINGS.glob("*/requests.jsonl")):
        for call in map(json.loads, file.read_text().splitlines()):
            if call["endpoint"] == messages.PATH and "content" in call["response"]:
                stream = StreamedResponse()
                for event in events_of(dice, call["response"]):
                    stream.take(json.dumps(event).encode())
                assert answers(stream.response()) == answers(call["response"])
                found += 1
    assert found == 92


@settings(max_examples=40, deadline=None)
@given(contents, st.integers())
def test_a_stream_is_put_together_as_the_official_client_does(content: list[Any], seed: int) -> None:
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    response = {"id": "msg_1", "type": "message", "role": "assistant", "content": content, "stop_reason": "end_turn"}
    event_type: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    stream, message, buffers = StreamedResponse(), None, {}
    for event in events_of(random.Random(seed), {**response, "model": "m"}):
        stream.feed(event)
        if event["type"] != "ping":
            if event.get("content_block", {}).get("type") == "thinking":  # which it asks for, and vLLM does not send
                event["content_block"]["signature"] = ""
            typed = event_type.validate_python(event)
            message = accumulate_event(event=typed, json_bufs=buffers, current_snapshot=message)
    assert message is not None
    theirs = message.to_dict(mode="json")
    assert answers(stream.response()) == answers(typing.cast("Any", theirs))


def test_arguments_that_are_no_json_stay_the_text_that_was_streamed() -> None:
    stream = StreamedResponse()
    stream.feed({"type": "content_block_start", "index": 0, "content_block": tool_use()})
    for piece in ('{"pa', 'th": '):
        delta = {"type": "input_json_delta", "partial_json": piece}
        stream.feed({"type": "content_block_delta", "index": 0, "delta": delta})
    stream.feed({"type": "message_stop"})
    assert answers(stream.response())[0].items == (Item.tool_call("c1", "ls", '{"path": '),)


def test_a_stream_that_does_not_say_why_it_stopped_is_complete_when_it_stops() -> None:
    stream = StreamedResponse()
    stream.feed({"type": "message_delta", "delta": {"stop_reason": None}})
    assert not stream.completed
    stream.feed({"type": "message_stop"})
    assert stream.completed


START = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"type": "error", "error": {"type": "overloaded_error", "message": "engine died"}}, "engine died"),
        ({"type": "error", "error": {}}, "the message failed"),
        ({"type": "error"}, "error is null, not an object"),
        ({"type": "message_start"}, "message is null, not an object"),
        ({"type": "message_delta"}, "delta is null, not an object"),
        ({"type": "content_block_start", "index": 1}, "content_block is null"),
        ({"type": "content_block_start", "content_block": {}}, "index is null"),
        ({"type": "content_block_delta", "index": 0}, "delta is null"),
        ({"type": "content_block_delta", "index": 7, "delta": {"type": "text_delta", "text": "x"}}, "index is 7, no"),
        ({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": 7}}, "delta.text cannot"),
        ({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta"}}, "delta.text cannot be read"),
        ({"type": "content_block_delta", "index": 0, "delta": {"type": "hologram_delta"}}, "hologram_delta"),
        ({"type": "content_block_delta", "index": 0, "delta": {"type": ["x"]}}, "['x']"),
    ],
)
def test_an_error_or_an_unreadable_event_fails_the_stream(event: dict[str, Any], said: str) -> None:
    stream = StreamedResponse()
    stream.feed(START)
    stream.feed(event)
    assert stream.failed is not None
    assert said in stream.failed
    assert not stream.completed


def test_events_that_add_nothing_are_let_through() -> None:
    stream = StreamedResponse()
    stream.feed(START)
    for event in (
        {"type": "ping"},
        {"type": "new_event_of_2030"},
        {},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": {}}},
    ):
        stream.feed(event)
    assert (stream.failed, stream.completed, stream.ended) == (None, False, False)


def test_the_kinds_of_events_and_deltas_are_the_official_ones() -> None:
    from anthropic.types import RawContentBlockDelta, RawMessageStreamEvent

    assert types_of(RawMessageStreamEvent) == {
        "message_start",
        "message_delta",
        "message_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    }
    assert types_of(RawContentBlockDelta) == {*StreamedResponse()._deltas, "citations_delta"}


def test_a_prompt_that_is_too_long_says_so_in_anthropics_words() -> None:
    for error in (
        PromptTooLong(limit=8192, prompt_tokens=9000),
        PromptTooLong(limit=8192, prompt_tokens=9000, at_least=True),
    ):
        assert error_body(error) == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "prompt is too long: 9000 tokens > 8192 maximum"},
        }


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("x is 1: send 2", param="x"), "invalid_request_error"),
        (BadRolloutId("a/b"), "invalid_request_error"),
        (UnknownRollout("r1"), "not_found_error"),
        (LogDown("disk full"), "api_error"),
        (EngineError("no reason: see the log"), "api_error"),
    ],
)
def test_errors_take_anthropics_shape(error: EngineError, kind: str) -> None:
    body = error_body(error)
    assert body == {"type": "error", "error": {"type": kind, "message": str(error)}}
    assert StreamedResponse().error_event(error) == b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"


@settings(max_examples=30, deadline=None)
@given(
    st.text("xyz \n", max_size=12),
    st.text("xyz \n", max_size=12),
    st.lists(st.tuples(names, names, values), max_size=3),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.integers(),
)
def test_what_vllm_streams_is_what_it_answers_plainly(
    reasoning: str, content: str, called: list[tuple[str, str, dict[str, Any]]], finish_reason: str, seed: int
) -> None:
    """The events and the blocks are made by vLLM's own code; its text comes before, between or after the calls."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    ours = typing.cast("Any", None)  # neither method asks the server for anything
    made = [
        {"id": f"call_{n}{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(value)}}
        for n, (i, name, value) in enumerate(called)
    ]
    message = {"role": "assistant", "reasoning": reasoning, "content": content, "tool_calls": made}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "chatcmpl-1", "created": 1, "model": "m"}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    plain = AnthropicServingMessages.messages_full_converter(
        ours, ChatCompletionResponse.model_validate({**head, "choices": choices, "usage": usage})
    )
    dice = random.Random(seed)
    deltas: list[dict[str, Any]] = [{"reasoning": piece} for piece in cut(dice, reasoning)]
    for n, call in enumerate(made):
        function = call["function"]
        assert isinstance(function, dict)
        first = {"index": n, "id": call["id"], "type": "function", "function": {"name": function["name"]}}
        deltas.append({"tool_calls": [first]})
        deltas += [
            {"tool_calls": [{"index": n, "function": {"arguments": p}}]} for p in cut(dice, function["arguments"])
        ]
    place = len(deltas)
    for piece in cut(dice, content):
        place = dice.randrange(len([d for d in deltas if "reasoning" in d]), len(deltas) + 1) if piece else place
        deltas.append({"content": piece})

    async def chunks() -> AsyncGenerator[str, None]:
        for choice in (
            {"delta": {"role": "assistant", "content": ""}},
            *({"delta": delta} for delta in deltas),
            {"delta": {}, "finish_reason": finish_reason},
        ):
            body = {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}], "usage": usage}
            yield f"data: {json.dumps(body)}\n\n"
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    async def events() -> list[str]:
        return [event async for event in AnthropicServingMessages.message_stream_converter(ours, chunks())]

    stream = StreamedResponse()
    for event in asyncio.run(events()):
        stream.take(event.split("data: ", 1)[1].encode())
    assert stream.failed is None
    assert stream.ended
    # An empty answer has one empty text block when it is plain, and none when it is streamed: the same empty message.
    assert answers(stream.response()) == answers(plain.model_dump(mode="json", exclude_none=True))
