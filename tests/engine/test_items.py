"""What counts as the same item and what does not: each rule of the canonical form, and the digests built on it."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.dialects import chat, messages, responses
from engine.items import (
    OUTER_SPACE,
    Item,
    Media,
    answer_key,
    canonical_arguments,
    reasoning_digest,
    traces,
)
from store import hashing

PNG = b"\x89PNG\r\n\x1a\n\x00\x01\xfb\xff"
few = settings(max_examples=60, deadline=None)

any_text = st.text(st.characters(codec=None), max_size=12)
"""Any text that JSON can carry, lone surrogates too."""
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=4), json_values, max_size=4)


def user(*parts: str | Media) -> bytes:
    return Item.message("user", parts).digest


def call(arguments: Any) -> bytes:
    return Item.tool_call("c1", "bash", arguments).digest


def test_a_string_equals_one_text_part_and_adjacent_text_is_joined() -> None:
    assert user("Hello there") == user("Hello", " there") == user("", "Hello", "", " there", "")


def test_text_is_not_joined_across_an_image() -> None:
    image = Media.from_base64("image", "AAAA")
    assert user("a", image, "b") != user("a", "b", image)
    assert user("a", image, "", "b") == user("a", image, "b")


def test_an_empty_message_is_an_item_of_its_own() -> None:
    empty = Item.message("assistant")
    assert empty.digest == Item.message("assistant", [""]).digest
    assert empty.text == ""
    assert empty.model_authored


@pytest.mark.parametrize("other", ["hello", "Hello ", " Hello", "Hello\n", "He llo"])
def test_white_space_and_case_count(other: str) -> None:
    assert user("Hello") != user(other)


def test_roles_kinds_and_order_count() -> None:
    digests = {
        Item.message("system", ["x"]).digest,
        Item.message("developer", ["x"]).digest,
        Item.message("user", ["x"]).digest,
        Item.message("assistant", ["x"]).digest,
        Item.reasoning("x").digest,
        Item.reasoning("x", opaque=True).digest,
        Item.tool_result("x", ["x"]).digest,
        Item.tool_call("x", "x", "x").digest,
    }
    assert len(digests) == 8
    one, other = Item.message("user", ["1"]).digest, Item.message("user", ["2"]).digest
    assert hashing.request_hash(b"", [one, other]) != hashing.request_hash(b"", [other, one])


def test_a_tool_call_counts_by_id_name_and_arguments() -> None:
    digest = Item.tool_call("c1", "bash", "{}").digest
    assert digest != Item.tool_call("c2", "bash", "{}").digest
    assert digest != Item.tool_call("c1", "Bash", "{}").digest
    assert digest != Item.tool_call("c1", "bash", '{"a": 1}').digest


def test_a_tool_result_counts_by_id_content_and_error_mark() -> None:
    digest = Item.tool_result("c1", ["ok"]).digest
    assert digest == Item.tool_result("c1", ["o", "k"]).digest
    assert digest != Item.tool_result("c2", ["ok"]).digest
    assert digest != Item.tool_result("c1", ["ok "]).digest
    assert digest != Item.tool_result("c1", ["ok"], is_error=True).digest


def test_attributes_count_unless_they_are_empty() -> None:
    plain = Item.message("user", ["x"]).digest
    assert plain == Item.message("user", ["x"], attributes={"name": None, "task": "", "tools": []}).digest
    assert plain != Item.message("user", ["x"], attributes={"name": "ann"}).digest
    assert Item.tool_result("c", ["x"]).digest != Item.tool_result("c", ["x"], attributes={"name": "bash"}).digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}'),
        ('{"a": 1.0}', '{"a": 1}'),
        ('{"a": 1e2}', '{"a": 100}'),
        ('{"a": -0.0}', '{"a": 0}'),
        ('{"big": 12345678901234567890}', '{"big":12345678901234567000}'),
        ('{"n": 9007199254740993}', '{"n": 9007199254740992}'),
        (r'{"t": "caf\u00e9 \/"}', '{"t": "café /"}'),
        (r'{"t": "\ud83d\ude00"}', '{"t": "😀"}'),
        (' {"a": null}\n', '{"a":null}'),
        ("", "{}"),
        (None, ""),
        ({"a": 1}, '{"a": 1.0}'),
    ],
)
def test_arguments_compare_as_values(one: Any, other: Any) -> None:
    assert call(one) == call(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": "x"}', '{"a": "x "}'),
        ('{"a": 1', '{"a": 1}'),
        ('{"a": 1', '{"a":1'),
        ('{"a": NaN}', '{"a": null}'),
        ("1e999", "1e998"),
        ('"text:x"', "text:x"),
        ("[]", "{}"),
        (" ", ""),
    ],
)
def test_arguments_of_other_value_or_text_differ(one: str, other: str) -> None:
    assert call(one) != call(other)


@pytest.mark.parametrize("broken", ["{", "nul", '{"a": 1e999}', '{"a": NaN}', "1" * 5000, "[" * 100_000, "\ud800"])
def test_what_is_no_json_value_is_kept_as_exact_text(broken: str) -> None:
    assert canonical_arguments(broken) == "text:" + broken


@few
@given(arguments)
def test_reserialised_arguments_keep_their_digest(value: dict[str, Any]) -> None:
    expected = call(json.dumps(value))
    assert call(json.dumps(value, indent=2, ensure_ascii=False)) == expected
    assert call(json.dumps(dict(reversed(value.items())), separators=(",", ":"))) == expected
    assert call(value) == expected


@few
@given(st.lists(any_text, max_size=6), any_text)
def test_splitting_text_into_parts_changes_nothing_and_other_text_does(parts: list[str], more: str) -> None:
    whole = "".join(parts)
    assert user(*parts) == user(whole)
    assert (user(whole + more) == user(whole)) == (more == "")


@few
@example("\ud800", "\udc00")
@given(any_text, any_text)
def test_lone_surrogates_have_digests_everywhere(one: str, other: str) -> None:
    items = [
        Item.message("assistant", [one]),
        Item.reasoning(one),
        Item.tool_call(one, other, one),
        Item.tool_result(one, [other, Media.from_url("image", one), Media.from_base64("audio", other)]),
        Item.message("user", [Media.from_url("file", "data:," + one), Media.from_url("file", "data:;base64," + one)]),
    ]
    assert all(len(trace.digest) == 32 for trace in traces(items))
    assert len(answer_key(items)) == 32


@few
@given(st.binary(max_size=40), st.data())
def test_media_counts_by_its_bytes_however_they_are_spelled(raw: bytes, data: st.DataObject) -> None:
    plain = base64.b64encode(raw).decode()
    cut = data.draw(st.integers(0, len(plain)))
    expected = Media.from_base64("image", plain)
    for spelling in (
        plain.rstrip("="),
        plain[:cut] + "\r\n " + plain[cut:],
        base64.urlsafe_b64encode(raw).decode(),
    ):
        assert Media.from_base64("image", spelling) == expected
        assert Media.from_url("image", f"data:image/png;base64,{spelling}") == expected
    percent = plain.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    assert Media.from_url("image", f"DATA:;BASE64,{percent}") == expected
    assert Media.from_url("image", "data:," + "".join(f"%{byte:02x}" for byte in raw)) == expected


def test_media_of_other_bytes_kind_or_url_differs() -> None:
    image = Media.from_base64("image", base64.b64encode(PNG).decode())
    assert image != Media.from_base64("image", base64.b64encode(PNG + b"\x00").decode())
    assert image != Media.from_base64("audio", base64.b64encode(PNG).decode())
    assert Media.from_url("image", "https://a/1.png") != Media.from_url("image", "https://a/2.png")
    assert Media.from_url("image", "https://a/1.png") == Media.from_url("image", "https://a/1.png")


def test_a_data_uri_that_cannot_be_decoded_counts_by_its_text() -> None:
    assert Media.from_url("image", "data:image/png;base64,A") == Media.from_url("image", "data:image/png;base64,A")
    assert Media.from_url("image", "data:image/png;base64,A") != Media.from_url("image", "data:image/png;base64,B")
    assert Media.from_base64("image", "AA!!!!") != Media.from_base64("image", "AA")
    assert Media.from_url("image", "data:nothing") != Media.from_url("image", "data:other")


def test_media_is_counted() -> None:
    image = Media.from_base64("image", "AAAA")
    assert Item.message("user", [image, "and", image]).media_count == 2
    assert Item.message("user", ["none"]).media_count == 0


def test_outer_space_is_the_white_space_of_python_and_javascript() -> None:
    spaces = {character for character in map(chr, range(sys.maxunicode + 1)) if character.isspace()}
    assert set(OUTER_SPACE) == spaces | {"\ufeff"}


@pytest.mark.parametrize("echo", ["Done.", " Done.\n", "\ufeffDone.\u00a0", "\n\nDone."])
def test_an_answer_is_known_by_its_trimmed_text(echo: str) -> None:
    served = [Item.reasoning("Hm."), Item.message("assistant", ["Done.\n"])]
    assert answer_key([Item.message("assistant", [echo])]) == answer_key(served)


def test_an_answer_without_text_is_known_by_an_empty_echo() -> None:
    assert answer_key([Item.reasoning("only thoughts")]) == answer_key([Item.message("assistant")])


def test_an_answer_with_other_text_or_calls_has_another_key() -> None:
    text = Item.message("assistant", ["Done."])
    one, two = Item.tool_call("c1", "ls", '{"p": 1}'), Item.tool_call("c2", "ls", '{"p": 1}')
    answers = [
        [text],
        [Item.message("assistant", ["Do ne."])],
        [text, one],
        [text, one, two],
        [text, two, one],
        [one],
        [Item.tool_call("c1", "ls", '{"p": 2}')],
        [Item.tool_call("c1", "cat", '{"p": 1}')],
        [Item.message("assistant", ["Done.", Media.from_base64("image", "AAAA")])],
    ]
    assert len({answer_key(items) for items in answers}) == len(answers)
    assert answer_key([text, one]) == answer_key([text, Item.tool_call("c1", "ls", '{ "p":1.0 }')])


def test_reasoning_is_compared_trimmed_and_missing_is_none() -> None:
    assert reasoning_digest([Item.reasoning("Hm.\n")]) == reasoning_digest([Item.reasoning("  Hm.")])
    assert reasoning_digest([Item.reasoning("Hm.")]) != reasoning_digest([Item.reasoning("Hm")])
    assert reasoning_digest([Item.reasoning("Hm.")]) != reasoning_digest([Item.reasoning("Hm.", opaque=True)])
    assert reasoning_digest([Item.reasoning("a"), Item.reasoning("b")]) != reasoning_digest([Item.reasoning("ab")])
    assert reasoning_digest([Item.message("assistant", ["Hm."]), Item.reasoning(" ")]) is None


def test_traces_keep_role_and_digest_in_order() -> None:
    items = [
        Item.message("developer", ["x"]),
        Item.reasoning("y"),
        Item.tool_call("c", "t", None),
        Item.tool_result("c"),
    ]
    assert [trace.role for trace in traces(items)] == ["developer", "reasoning", "tool_call", "tool_result"]
    assert [trace.digest for trace in traces(items)] == [item.digest for item in items]


def test_only_what_a_model_writes_is_model_authored() -> None:
    assert [
        item.model_authored
        for item in (
            Item.message("system", ["x"]),
            Item.message("developer", ["x"]),
            Item.message("user", ["x"]),
            Item.tool_result("c", ["x"]),
            Item.message("assistant", ["x"]),
            Item.reasoning("x"),
            Item.tool_call("c", "t", "{}"),
            Item.hosted("web_search_call", {}),
        )
    ] == [False, False, False, False, True, True, True, True]


def test_what_the_wire_calls_an_item_does_not_count() -> None:
    assert Item.message("assistant", ["x"], item_id="msg_1") == Item.message("assistant", ["x"])
    assert Item.tool_call("c", "t", "{}", item_id="fc_1").digest == Item.tool_call("c", "t", "{}").digest
    assert Item.reasoning("x", item_id="rs_1").item_id == "rs_1"


def test_hosted_items_differ_by_all_that_they_say() -> None:
    item = Item.hosted("mcp_call", {"a": 1.5, "b": [float("nan")]})
    assert item.digest == Item.hosted("mcp_call", {"b": [float("nan")], "a": 1.5}).digest
    assert item.digest != Item.hosted("mcp_call", {"a": 1.5}).digest
    assert item.digest != Item.hosted("web_search_call", {"a": 1.5, "b": [float("nan")]}).digest
    assert item.text == "mcp_call"
    assert traces([item])[0].role == "hosted"


words = st.text(max_size=6)
images = st.binary(min_size=1, max_size=6).map(lambda raw: {"image": base64.b64encode(raw).decode()})
spoken = st.lists(words | images, max_size=3)
thoughts = st.text(min_size=1, max_size=6)
turns = st.builds(
    lambda thought, said, calls, results, more: {
        "thought": thought, "said": said, "calls": calls, "results": results[: len(calls)], "more": more
    },
    st.none() | thoughts, words, st.lists(st.tuples(st.sampled_from("ab"), arguments), max_size=2),
    st.lists(spoken, min_size=2, max_size=2), spoken.filter(any),
)  # fmt: skip
conversations = st.fixed_dictionaries(
    {"system": words, "task": spoken.filter(any), "turns": st.lists(turns, max_size=3)}
)


@few
@given(conversations)
def test_one_conversation_is_the_same_items_in_every_dialect(told: dict[str, Any]) -> None:
    found = chat.request_items(in_chat(told))
    assert responses.request_items(in_responses(told)) == found
    assert messages.request_items(in_messages(told)) == found


@few
@given(turns)
def test_one_answer_is_the_same_items_in_every_dialect(turn: dict[str, Any]) -> None:
    in_choice = {"index": 0, "message": assistant_in_chat(0, turn), "finish_reason": "stop"}
    (in_one,) = chat.answers({"choices": [in_choice]})
    (in_other,) = responses.answers({"output": output_in_responses(0, turn)})
    (in_third,) = messages.answers({"content": content_in_messages(0, turn)})
    assert in_one.items == in_other.items == in_third.items
    assert answer_key(in_one.items) == answer_key(in_third.items)


def in_chat(told: dict[str, Any]) -> dict[str, Any]:
    def parts(content: list[Any]) -> list[Any]:
        return [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{part['image']}"}}
            for part in content
        ]

    sent: list[Any] = [{"role": "system", "content": told["system"]}] if told["system"] else []
    sent.append({"role": "user", "content": parts(told["task"])})
    for n, turn in enumerate(told["turns"]):
        sent.append(assistant_in_chat(n, turn))
        for at, result in enumerate(turn["results"]):
            sent.append({"role": "tool", "tool_call_id": f"c{n}{at}", "content": parts(result)})
        sent.append({"role": "user", "content": parts(turn["more"])})
    return {"messages": sent}


def assistant_in_chat(n: int, turn: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": f"c{n}{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(value)}}
        for at, (name, value) in enumerate(turn["calls"])
    ]
    return {"role": "assistant", "reasoning": turn["thought"], "content": turn["said"] or None, "tool_calls": calls}


def in_responses(told: dict[str, Any]) -> dict[str, Any]:
    def parts(content: list[Any]) -> list[Any]:
        return [
            {"type": "input_text", "text": part}
            if isinstance(part, str)
            else {"type": "input_image", "image_url": f"data:image/png;base64,{part['image']}"}
            for part in content
        ]

    sent: list[Any] = [{"role": "user", "content": parts(told["task"])}]
    for n, turn in enumerate(told["turns"]):
        sent += output_in_responses(n, turn)
        for at, result in enumerate(turn["results"]):
            sent.append({"type": "function_call_output", "call_id": f"c{n}{at}", "output": parts(result)})
        sent.append({"type": "message", "role": "user", "content": parts(turn["more"])})
    return {"instructions": told["system"] or None, "input": sent}


def output_in_responses(n: int, turn: dict[str, Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn["thought"] is not None:
        block = {"type": "reasoning_text", "text": turn["thought"]}
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [block]})
    if turn["said"] or not (items or turn["calls"]):
        items.append(
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": turn["said"]}]}
        )
    return items + [
        {"type": "function_call", "call_id": f"c{n}{at}", "name": name, "arguments": json.dumps(value)}
        for at, (name, value) in enumerate(turn["calls"])
    ]


def in_messages(told: dict[str, Any]) -> dict[str, Any]:
    def blocks(content: list[Any]) -> list[Any]:
        return [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": part["image"]}}
            for part in content
        ]

    sent: list[Any] = [{"role": "user", "content": blocks(told["task"])}]
    for n, turn in enumerate(told["turns"]):
        sent.append({"role": "assistant", "content": content_in_messages(n, turn)})
        results = [
            {"type": "tool_result", "tool_use_id": f"c{n}{at}", "content": blocks(result)}
            for at, result in enumerate(turn["results"])
        ]
        sent.append({"role": "user", "content": [*results, *blocks(turn["more"])]})
    return {"system": told["system"], "messages": sent}


def content_in_messages(n: int, turn: dict[str, Any]) -> list[dict[str, Any]]:
    thought = [] if turn["thought"] is None else [{"type": "thinking", "thinking": turn["thought"], "signature": "s"}]
    said = [{"type": "text", "text": turn["said"]}] if turn["said"] else []
    calls = [
        {"type": "tool_use", "id": f"c{n}{at}", "name": name, "input": value}
        for at, (name, value) in enumerate(turn["calls"])
    ]
    return [*thought, *said, *calls]


def test_the_canonical_form_does_not_change_without_a_new_version() -> None:
    items = [
        Item.message("system", ["Be brief."], attributes={"name": "ann"}),
        Item.message("user", ["Look: ", Media.from_base64("image", "AAAA"), Media.from_url("image", "https://a/b")]),
        Item.reasoning("Hm."),
        Item.tool_call("c1", "ls", '{"n": 1, "s": "é"}'),
        Item.tool_call("c2", "ls", "{broken"),
        Item.tool_result("c1", ["ok"], is_error=True),
    ]
    digests = [item.digest for item in items]
    assert {1, 2} == hashing.DERIVED  # their keys are the same
    assert (
        hashing.request_hash(b"", digests).hex() == "255cf7a5e0374ccfca9671c70ae7a8e1f334b779f8676da34bc81bae8d34a05f"
    )
    assert answer_key(items[2:5]).hex() == "438abfbd0d43d39ca74ca53a22a5050661e4c7d78ea73793a183d077a1cb191c"


def test_what_is_remembered_of_an_item_is_the_item_that_would_be_made_anew() -> None:
    short, long = "x" * 2000, "x" * 2001
    for text in (short, long):
        message = Item.message("user", [text])
        assert message.digest == hashing.item_digest(
            hashing.canonical_json({"kind": "message", "role": "user", "parts": [{"text": text}]})
        )
        assert Item.message("user", [text], item_id="msg_1").item_id == "msg_1"
        assert Item.message("user", [text]).item_id is None
        assert Item.message("user", [text], attributes={"name": "ann"}).digest != message.digest
        result, failed = (Item.tool_result("c1", [text], is_error=failed) for failed in (False, True))
        assert len({message.digest, result.digest, failed.digest, Item.tool_result("c2", [text]).digest}) == 4
        arguments = f'{{"b": 1, "a": "{text}"}}'
        call = Item.tool_call("c1", "add", arguments, item_id="fc_1")
        assert (call.digest, call.item_id) == (Item.tool_call("c1", "add", {"a": text, "b": 1}).digest, "fc_1")
