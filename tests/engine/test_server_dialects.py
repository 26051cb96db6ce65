"""Responses and Messages on the real model server, driven by the official clients, plain and streamed."""

import json
import time
from itertools import groupby, pairwise
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from anthropic import BadRequestError as AnthropicBadRequest
from openai import BadRequestError, OpenAI

from store import log
from store.database import read
from store.events import CallCompleted
from store.lineage import chain_tokens

MODEL = "demo"


def calls_of(server: Any, rollout: str) -> list[CallCompleted]:
    with read(server.database) as connection:
        return log.calls(connection, rollout)


def assert_one_exact_chain(server: Any, rollout: str, turns: int) -> None:
    """For greedy calls: a sampled answer may be empty, and then the next call rightly goes on from the one before."""
    calls = calls_of(server, rollout)
    assert [call.decision for call in calls] == ["root", *["continuation"] * (turns - 1)], [c.reason for c in calls]
    with read(server.database) as connection:
        chains = [chain_tokens(connection, call.call_id).tolist() for call in calls]
    for earlier, later in pairwise(chains):
        assert later[: len(earlier)] == earlier


@pytest.mark.parametrize("stream", [False, True])
def test_responses_of_several_turns_are_one_exact_chain(server: Any, stream: bool) -> None:
    rollout = f"responses-{stream}"
    client = OpenAI(base_url=f"{server.address}/rollouts/{rollout}/v1", api_key="none", max_retries=0)
    items: list[Any] = [{"role": "user", "content": "Talk to me."}]
    for turn in range(4):
        asked: dict[str, Any] = {
            "model": MODEL, "input": items, "instructions": "Be brief.", "max_output_tokens": 24, "store": False,
            "temperature": 0,
        }  # fmt: skip
        if stream:
            with client.responses.stream(**asked) as events:
                events.until_done()
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**asked)
        echoed = [item.model_dump(exclude_none=True) for item in answer.output]
        items = [*items, *echoed, {"role": "user", "content": f"And then, {turn}?"}]
        assert answer.usage is not None
        assert answer.usage.output_tokens <= 24
    assert_one_exact_chain(server, rollout, 4)
    assert {call.dialect for call in calls_of(server, rollout)} == {"responses"}


@pytest.mark.parametrize("stream", [False, True])
def test_messages_of_several_turns_are_one_exact_chain(server: Any, stream: bool) -> None:
    rollout = f"messages-{stream}"
    client = Anthropic(base_url=f"{server.address}/rollouts/{rollout}", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Talk to me."}]
    for turn in range(4):
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "system": "Be brief.", "max_tokens": 24}
        asked["extra_body"] = {"temperature": 0}  # which the client no longer has a name for
        if stream:
            with client.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        messages = [*messages, {"role": "assistant", "content": blocks}]
        messages.append({"role": "user", "content": f"And then, {turn}?"})
        assert answer.usage.output_tokens <= 24
    assert_one_exact_chain(server, rollout, 4)
    assert {call.dialect for call in calls_of(server, rollout)} == {"messages"}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_the_one_that_stock_vllm_gives(server: Any, path: str, stream: bool) -> None:
    """But for ids and times, which differ between any two answers."""
    body: dict[str, Any] = {"model": MODEL, "stream": stream, "temperature": 0}
    if path == "/v1/responses":
        body |= {"input": "Hello", "max_output_tokens": 12}
    else:
        body |= {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
    rollout = f"stock{path.replace('/', '-')}-{stream}"
    stock = httpx.post(f"{server.address}{path}", json=body, timeout=60)
    ours = httpx.post(f"{server.address}/rollouts/{rollout}{path}", json=body, timeout=60)
    assert stock.status_code == ours.status_code == 200
    assert shape(ours.text, stream) == shape(stock.text, stream)
    assert len(calls_of(server, rollout)) == 1


def shape(text: str, stream: bool) -> Any:
    """What an answer says, without what is new in each."""
    if not stream:
        return anonymous(json.loads(text))
    events = [anonymous(json.loads(line[6:])) for line in text.splitlines() if line.startswith("data: {")]
    # How many tokens one event carries depends on the moment: runs of one kind are taken together.
    runs = [(kind, list(run)) for kind, run in groupby(events, key=lambda event: event["type"])]
    said = [(kind, "".join(text_of(event) for event in run)) for kind, run in runs]
    return said, {**events[-1], "sequence_number": None}


def text_of(event: dict[str, Any]) -> str:
    delta = event.get("delta") or ""
    return delta if isinstance(delta, str) else "".join(str(delta.get(key, "")) for key in ("text", "thinking"))


def anonymous(value: Any) -> Any:
    if isinstance(value, dict):
        new = ("id", "item_id", "created_at", "completed_at", "request_id", "signature")
        return {key: anonymous(inner) for key, inner in value.items() if key not in new}
    return [anonymous(inner) for inner in value] if isinstance(value, list) else value


def test_a_prompt_too_long_is_said_in_each_dialects_own_words(server: Any) -> None:
    long = "word " * 20_000
    client = OpenAI(base_url=f"{server.address}/rollouts/too-long/v1", api_key="none", max_retries=0)
    with pytest.raises(BadRequestError) as refused:
        client.responses.create(model=MODEL, input=long)
    assert refused.value.code == "context_length_exceeded"
    anthropic = Anthropic(base_url=f"{server.address}/rollouts/too-long", api_key="none", max_retries=0)
    with pytest.raises(AnthropicBadRequest, match="prompt is too long") as too_long:
        anthropic.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": long}])
    assert too_long.value.body["type"] == "error"  # type: ignore[index]


def test_tokens_are_counted_without_a_trace_in_the_log(server: Any) -> None:
    client = Anthropic(base_url=f"{server.address}/rollouts/counted", api_key="none", max_retries=0)
    counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
    assert counted.input_tokens > 3
    assert calls_of(server, "counted") == []


def test_one_rollout_may_speak_several_dialects(server: Any) -> None:
    """The same conversation goes on in another dialect: the items are the same, so it is one chain."""
    base = f"{server.address}/rollouts/polyglot"
    chat = OpenAI(base_url=f"{base}/v1", api_key="none")
    first = chat.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0
    ).choices[0].message  # fmt: skip
    thought = first.model_dump().get("reasoning")
    blocks: list[Any] = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    blocks += [{"type": "text", "text": first.content}] if first.content else []
    Anthropic(base_url=base, api_key="none").messages.create(
        model=MODEL,
        max_tokens=12,
        messages=[
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": "Go on."},
        ],
    )
    assert [call.dialect for call in calls_of(server, "polyglot")] == ["chat", "messages"]
    assert_one_exact_chain(server, "polyglot", 2)


def test_a_streamed_response_tells_of_a_prompt_too_long_where_codex_reads_it(server: Any) -> None:
    body = {"model": MODEL, "input": "word " * 20_000, "stream": True}
    answer = httpx.post(f"{server.address}/rollouts/too-long-stream/v1/responses", json=body, timeout=60)
    assert answer.headers["content-type"] == "text/event-stream"
    failed = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")][-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    ends: list[str] = []
    for _ in range(100):  # no client waits for this event
        with read(server.database) as connection:
            ends = [end.state for end in log.ends(connection, "too-long-stream")]
        if ends:
            break
        time.sleep(0.1)
    assert ends == ["refused"]


def test_messages_with_thinking_switched_off_are_captured_from_the_first_on(server: Any) -> None:
    client = Anthropic(base_url=f"{server.address}/rollouts/thoughtless", api_key="none", max_retries=0)
    for text in ("Hi", "Hello"):
        client.messages.create(
            model=MODEL,
            max_tokens=8,
            thinking={"type": "disabled"},
            messages=[{"role": "user", "content": text}],
        )
    assert len(calls_of(server, "thoughtless")) == 2


def test_instructions_that_the_server_moves_to_the_front_begin_a_row(server: Any) -> None:
    """vLLM puts a late system message in front of the others, so no suffix could show it."""
    client = Anthropic(base_url=f"{server.address}/rollouts/late-system", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=messages)
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    messages += [{"role": "user", "content": "Go on."}, {"role": "system", "content": "Be brief."}]
    client.messages.create(model=MODEL, max_tokens=8, messages=messages)
    later = calls_of(server, "late-system")[1]
    shown = later.decision == "continuation" or later.reason == "cannot_splice:instructions_moved"
    assert shown, later.reason


def test_a_message_without_its_type_is_served_as_opencode_sends_it(server: Any) -> None:
    client = OpenAI(base_url=f"{server.address}/rollouts/untyped/v1", api_key="none", max_retries=0)
    answer = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},  # type: ignore[list-item]
            {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
        ],
        max_output_tokens=8,
    )
    assert answer.status in ("completed", "incomplete")
    assert len(calls_of(server, "untyped")) == 1


def nested(levels: int) -> Any:
    """An object in an object and so on."""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"in": value}
    return value


def asking(dialect: str, tool: Any, arguments: Any) -> dict[str, Any]:
    """A request with a tool of these parameters, and a call of it with these arguments."""
    described = {"name": "put", "description": "Put.", "parameters": tool}
    said, text = {"role": "user", "content": "Hello"}, json.dumps(arguments)
    match dialect:
        case "chat/completions":
            call = {"id": "c1", "type": "function", "function": {"name": "put", "arguments": text}}
            messages = [said, {"role": "assistant", "content": None, "tool_calls": [call]}]
            messages.append({"role": "tool", "tool_call_id": "c1", "content": "done"})
            tools: list[Any] = [{"type": "function", "function": described}]
            return {"messages": messages, "tools": tools, "max_tokens": 2, "tool_choice": "none"}
        case "responses":
            called = {"type": "function_call", "call_id": "c1", "name": "put", "arguments": text}
            done = {"type": "function_call_output", "call_id": "c1", "output": "done"}
            tools = [{"type": "function", "strict": False, **described}]
            return {"input": [said, called, done], "tools": tools, "max_output_tokens": 2, "tool_choice": "none"}
        case _:
            use = {"type": "tool_use", "id": "c1", "name": "put", "input": arguments}
            result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
            messages = [said, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
            tools = [{"name": "put", "description": "Put.", "input_schema": {"type": "object", **tool}}]
            return {"messages": messages, "tools": tools, "max_tokens": 2, "tool_choice": {"type": "none"}}


@pytest.mark.parametrize("dialect", ["chat/completions", "responses", "messages"])
def test_what_nests_too_deep_is_refused_in_the_dialects_words_and_less_is_served(server: Any, dialect: str) -> None:
    def ask(tool: Any, arguments: Any) -> httpx.Response:
        body = {"model": MODEL, **asking(dialect, tool, arguments)}
        url = f"{server.address}/rollouts/deep-{dialect[:4]}/v1/{dialect}"
        return httpx.post(url, content=json.dumps(body), headers={"content-type": "application/json"}, timeout=60)

    deepest = 200 if dialect == "responses" else 450  # as the server itself serves
    served = ask(nested(deepest), nested(900))
    assert served.status_code == 200, served.text
    assert len(calls_of(server, f"deep-{dialect[:4]}")) == 1
    refused = ask(nested(900), {})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"] == "the request nests too deep to be read: send it flatter"
    assert error["type"] == ("invalid_request_error" if dialect == "messages" else "BadRequestError")
