"""The real model server with the plug-in on, driven over HTTP: what it answers, and what the log then holds."""

import asyncio
import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from store import log
from store.database import read
from store.events import CallAdmitted, CallCompleted, CallEnded, logprob_array, token_array
from store.lineage import chain_tokens

MODEL = "demo"
LONG = {"max_tokens": 6000, "ignore_eos": True}
"""Seconds of sampling, on any machine."""
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "enum": ["ant", "bee"]}},
            "required": ["word"],
        },
    },
}


def hello(**fields: Any) -> dict[str, Any]:
    """A small request, without thinking."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **SILENT, **fields}


def client_of(server: Any, rollout: str) -> OpenAI:
    return OpenAI(base_url=f"{server.address}/rollouts/{rollout}/v1", api_key="none", max_retries=0)


def calls_of(server: Any, rollout: str) -> list[CallCompleted]:
    with read(server.database) as connection:
        return log.calls(connection, rollout)


def intents_of(server: Any, rollout: str) -> list[CallAdmitted]:
    with read(server.database) as connection:
        return log.intents(connection, rollout)


def ends_of(server: Any, rollout: str, *, count: int = 1) -> list[CallEnded]:
    """The calls that ended otherwise; waits a moment, for these events are not waited for by any client."""
    for _ in range(100):
        with read(server.database) as connection:
            found = log.ends(connection, rollout)
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise AssertionError(f"rollout {rollout} has {len(found)} ended calls, expected {count}")


def wait_until(it_is_so: Callable[[], bool]) -> None:
    """Wait a minute at most."""
    for _ in range(6000):
        if it_is_so():
            return
        time.sleep(0.01)
    raise AssertionError("waited for a minute in vain")


def begun(server: Any, rollout: str, body: dict[str, Any]) -> HTTPConnection:
    """A connection on which the engine has been sampling an answer for a moment; nothing of it was read yet.

    The log says when it began: a busy model server writes to its sockets late, at times a whole answer at once.
    """
    client = HTTPConnection(urlsplit(server.address).netloc, timeout=60)
    url = f"/rollouts/{rollout}/v1/chat/completions"
    client.request("POST", url, json.dumps(body), {"content-type": "application/json"})
    wait_until(lambda: bool(intents_of(server, rollout)))
    time.sleep(0.5)
    return client


def wait_until_idle(server: Any) -> None:
    """Wait until the engine works on no request."""
    for _ in range(600):
        metrics = httpx.get(f"{server.address}/metrics").text.splitlines()
        running = [line.rpartition(" ")[2] for line in metrics if line.startswith("vllm:num_requests_running{")]
        if running and not any(map(float, running)):
            return
        time.sleep(0.1)
    raise AssertionError("the engine still runs a request after a minute")


def without_identity(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def joined(raw: str) -> dict[str, Any]:
    """A stream taken together: how many tokens one chunk carries depends on the moment."""
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    events = [json.loads(entry) for entry in data]
    found: dict[str, Any] = {"usage": events[-1]["usage"], "keys": sorted({key for event in events for key in event})}
    for event in events:
        for choice in event["choices"]:
            kept = found.setdefault(choice["index"], {})
            for name, piece in (choice["delta"] | {"token_ids": choice.get("token_ids")}).items():
                kept[name] = kept[name] + piece if kept.get(name) and piece else kept.get(name) or piece
            kept.setdefault("logprobs", []).extend((choice.get("logprobs") or {}).get("content", []))
            kept["finish"] = choice.get("finish_reason"), choice.get("stop_reason")
    return found


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_every_continuation_of_20_turns_begins_with_its_parents_whole_chain(
    server: Any, record_property: Any, thinking: bool, stream: bool
) -> None:
    rollout = f"exact-{thinking}-{stream}"
    client = client_of(server, rollout)
    messages: list[Any] = [{"role": "user", "content": "Talk to me."}]
    chain: list[int] = []
    redrawn = 0
    for turn in range(20):
        extra = {"chat_template_kwargs": {"enable_thinking": thinking}, "return_token_ids": True}
        asked: dict[str, Any] = {
            "model": MODEL, "messages": messages, "max_tokens": 24, "seed": turn, "extra_body": extra,
        }  # fmt: skip
        if stream:
            prompt, sampled, message = [], [], {"role": "assistant"}
            for chunk in client.chat.completions.create(**asked, stream=True):
                fields = chunk.model_dump()
                prompt = prompt or fields.get("prompt_token_ids") or []
                for choice in fields["choices"]:
                    sampled += choice.get("token_ids") or []
                    for name in ("content", "reasoning"):
                        if piece := choice["delta"].get(name):
                            message[name] = message.get(name, "") + piece
        else:
            answer = client.chat.completions.create(**asked).model_dump()
            prompt, sampled = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
            message = {k: v for k, v in answer["choices"][0]["message"].items() if v}
        assert prompt[: len(chain)] == chain, f"turn {turn} does not begin with its parent's tokens"
        fresh = httpx.post(
            f"{server.address}/tokenize",
            json={"model": MODEL, "messages": messages, "chat_template_kwargs": {"enable_thinking": thinking}},
        ).json()["tokens"]
        redrawn += fresh != prompt
        chain = [*prompt, *sampled]
        messages = [*messages, message, {"role": "user", "content": f"And then, {turn}?"}]
    calls = calls_of(server, rollout)
    assert [call.decision for call in calls] == ["root", *["continuation"] * 19]
    assert {call.evidence.get("path") for call in calls[1:]} == {"marker"}
    with read(server.database) as connection:
        assert chain_tokens(connection, calls[-1].call_id).tolist() == chain
    assert redrawn > 0, "a random model's text should not survive a fresh render for 20 turns"
    record_property("turns a fresh render would have tokenised differently", redrawn)
    print(f"\nthinking={thinking} stream={stream}: a fresh render differs in {redrawn} of 20 turns")


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"tools": [TOOL]},
        {"n": 2},
        {"stop": ["e"]},
        {"return_token_ids": True},
    ],
    ids=["plain", "logprobs", "tools", "two choices", "stop", "token ids"],
)
def test_the_answer_is_the_one_that_stock_vllm_gives(server: Any, extra: dict[str, Any]) -> None:
    body = hello(max_tokens=16, seed=7, **extra)
    stock = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)
    name = f"same-{'-'.join(extra) or 'plain'}"
    ours = httpx.post(f"{server.address}/rollouts/{name}/v1/chat/completions", json=body, timeout=60)
    assert stock.status_code == ours.status_code == 200
    assert without_identity(ours.json()) == without_identity(stock.json())
    assert len(calls_of(server, name)) == extra.get("n", 1)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    stock = httpx.post(f"{server.address}/v1/chat/completions", json=streamed, timeout=60)
    ours = httpx.post(f"{server.address}/rollouts/{name}-s/v1/chat/completions", json=streamed, timeout=60)
    assert joined(ours.text) == joined(stock.text)
    for plain, stream in zip(calls_of(server, name), calls_of(server, f"{name}-s"), strict=True):
        assert stream.token_ids == plain.token_ids
        assert stream.answer_key == plain.answer_key
        assert stream.summary_hash == plain.summary_hash


def test_log_probabilities_are_stored_whatever_the_client_asked_for(server: Any) -> None:
    client = client_of(server, "logprobs")
    for asked in ({}, {"logprobs": True, "top_logprobs": 1}):
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=12, seed=3, extra_body=SILENT, **asked
        )
        assert (answer.choices[0].logprobs is not None) == bool(asked)
    silent, asked_for = calls_of(server, "logprobs")
    served = [entry.logprob for entry in answer.choices[0].logprobs.content]  # type: ignore[union-attr]
    assert np.allclose(logprob_array(asked_for.logprobs), served, atol=1e-6)
    assert silent.token_ids == asked_for.token_ids
    assert np.allclose(logprob_array(silent.logprobs), logprob_array(asked_for.logprobs), atol=1e-5)


def test_a_log_probability_is_the_one_under_which_its_token_was_sampled(server: Any) -> None:
    """At top_k 1 every token is certain: the processed probability is 1, the raw one is not."""
    client = client_of(server, "processed")
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=8, extra_body={**SILENT, "top_k": 1}
    )
    (call,) = calls_of(server, "processed")
    assert np.allclose(logprob_array(call.logprobs), 0.0)


def test_a_tool_call_and_its_results_continue_exactly(server: Any) -> None:
    client = client_of(server, "tools")
    messages: list[Any] = [{"role": "user", "content": "Look up a word."}]
    chain: list[int] = []
    for turn in range(3):
        choice = {"type": "function", "function": {"name": "look_up"}}
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=200, seed=turn,  # type: ignore[arg-type,list-item]
            extra_body={**SILENT, "return_token_ids": True},
        ).model_dump()  # fmt: skip
        assert answer["prompt_token_ids"][: len(chain)] == chain
        chain = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
        message = {k: v for k, v in answer["choices"][0]["message"].items() if v}
        assert "tool_calls" in message, message
        for call in message["tool_calls"]:
            function = call["function"]
            function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=1)  # a harness's own spacing
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "a word"} for call in message["tool_calls"]]
        messages = [*messages, message, *results]
    assert [call.decision for call in calls_of(server, "tools")] == ["root", "continuation", "continuation"]


def test_a_rewritten_context_begins_a_new_row_and_says_where_it_differs(server: Any) -> None:
    client = client_of(server, "rewrite")
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "One."}]
    for turn in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=8, seed=turn, extra_body=SILENT
        )
        messages = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]
        messages.append({"role": "user", "content": "More."})
        if turn == 1:
            messages[1] = {"role": "user", "content": "(left out)"}
    first, second, third = calls_of(server, "rewrite")
    assert (first.reason, second.parent_id) == ("first_call", first.call_id)
    assert (third.decision, third.reason) == ("root", "item_edited")
    assert third.evidence["first_difference"] == 1


def test_a_stream_does_not_finish_before_its_event_is_durable(server: Any) -> None:
    """While another process holds the write lock the text flows, but what would complete the answer does not."""
    body = hello(**LONG, stream=True)
    url = f"{server.address}/rollouts/durable/v1/chat/completions"
    released = 0.0
    lines: list[tuple[float, str]] = []
    locked = threading.Event()

    def lock_when_the_call_is_admitted() -> None:
        wait_until(lambda: intents_of(server, "durable") != [])
        holder.execute("begin immediate")
        locked.set()

    def release_when_the_engine_has_finished() -> None:
        nonlocal released
        wait_until_idle(server)
        time.sleep(1)
        released = time.monotonic()
        holder.execute("rollback")

    locking = threading.Thread(target=lock_when_the_call_is_admitted)
    releasing = threading.Thread(target=release_when_the_engine_has_finished)
    with closing(
        sqlite3.connect(server.database.url.database, isolation_level=None, check_same_thread=False)
    ) as holder:
        locking.start()
        # On a busy machine a model server writes nothing to its sockets until it has nothing else to do, at the end.
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if not lines:
                    assert locked.wait(60)
                    assert calls_of(server, "durable") == []
                    releasing.start()
                lines.append((time.monotonic(), line))
        locking.join()
        releasing.join()
    finishing = [at for at, line in lines if '"finish_reason":"' in line or line == "data: [DONE]"]
    flowing = [at for at, line in lines if line.startswith("data: ") and at not in finishing]
    assert len(flowing) > 10
    assert max(flowing) < released
    assert len(finishing) == 2
    assert min(finishing) > released
    assert len(calls_of(server, "durable")) == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_while_tokens_are_sampled_leaves_an_abandoned_call_and_a_free_engine(
    streamed: bool, server: Any
) -> None:
    rollout = "left-stream" if streamed else "left-plain"
    with closing(begun(server, rollout, hello(**LONG, stream=streamed))):
        pass  # closed here: a task of httpx that is cancelled may leave its socket open
    (end,) = ends_of(server, rollout)
    assert end.state == "abandoned"
    sampled = len(token_array(end.token_ids))
    assert sampled == len(logprob_array(end.logprobs))
    assert sampled > 5 if streamed else sampled == 0  # what was sampled for a plain answer the engine keeps to itself
    assert calls_of(server, rollout) == []
    wait_until_idle(server)
    later = client_of(server, rollout).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4, extra_body=SILENT
    )
    assert later.choices


@pytest.mark.parametrize(
    "body", [b"{not json", b"[1]", b'{"messages": 3}', b'{"messages": [{"role": "judge"}]}', b"[" * 9999]
)
def test_a_request_that_cannot_be_read_is_400_in_the_dialects_shape(server: Any, body: bytes) -> None:
    url = f"{server.address}/rollouts/unreadable/v1/chat/completions"
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert {"message", "type", "param", "code"} == set(answer.json()["error"])
    with read(server.database) as connection:
        assert log.rollout(connection, "unreadable") is None


@pytest.mark.parametrize("rollout", ["a%20b", "x" * 129, "%C3%A4", "a:b"])
def test_a_bad_rollout_id_is_422(server: Any, rollout: str) -> None:
    url = f"{server.address}/rollouts/{rollout}/v1/chat/completions"
    answer = httpx.post(url, json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 422
    assert "letters, digits" in answer.json()["error"]["message"]


def test_an_unknown_model_is_the_servers_404_and_leaves_nothing(server: Any) -> None:
    with pytest.raises(NotFoundError, match="other"):
        client_of(server, "no-model").chat.completions.create(
            model="other", messages=[{"role": "user", "content": "Hi"}]
        )
    with read(server.database) as connection:
        assert log.rollout(connection, "no-model") is None


def test_an_unserved_path_of_a_rollout_says_what_is_served(server: Any) -> None:
    answer = httpx.post(f"{server.address}/rollouts/r/v1/embeddings", json={})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.address}/rollouts/r/v1/models").json()["data"][0]["id"] == MODEL


def test_a_prompt_too_long_is_the_dialects_own_error_and_is_logged_as_refused(server: Any) -> None:
    client = client_of(server, "long")
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 20_000}])
    assert refused.value.code == "context_length_exceeded"
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, extra_body=SILENT
    )
    messages: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "word " * 8_190},
    ]
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=messages, extra_body=SILENT)
    assert refused.value.code == "context_length_exceeded"
    assert [end.state for end in ends_of(server, "long", count=2)] == ["refused", "refused"]
    assert len(calls_of(server, "long")) == 1


def test_the_header_names_the_rollout_too_and_other_traffic_is_not_captured(server: Any) -> None:
    body = hello(max_tokens=4)
    url = f"{server.address}/v1/chat/completions"
    with read(server.database) as connection:
        before = len(log.rollouts(connection))
    assert httpx.post(url, json=body, timeout=60).status_code == 200
    assert httpx.post(url, json=body, headers={"x-turnlog-rollout": "by-header"}, timeout=60).status_code == 200
    with read(server.database) as connection:
        assert len(log.rollouts(connection)) == before + 1
    assert len(calls_of(server, "by-header")) == 1


def test_rollouts_at_once_each_keep_their_own_chain(server: Any) -> None:
    async def rollout(client: AsyncOpenAI, name: str) -> None:
        messages: list[Any] = [{"role": "user", "content": f"I am {name}."}]
        for turn in range(3):
            answer = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=12, seed=turn, extra_body=SILENT
            )
            messages = [
                *messages,
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Go on."},
            ]

    async def all_of_them() -> None:
        clients = [AsyncOpenAI(base_url=f"{server.address}/rollouts/many-{i}/v1", api_key="x") for i in range(16)]
        await asyncio.gather(*(rollout(client, f"many-{i}") for i, client in enumerate(clients)))
        for client in clients:
            await client.close()

    asyncio.run(all_of_them())
    for i in range(16):
        calls = calls_of(server, f"many-{i}")
        assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]


def test_the_rollout_api_opens_scores_and_shows_a_rollout(server: Any) -> None:
    opened = httpx.post(f"{server.address}/rollouts", json={"group_id": "g", "slot": 1, "task": "t"})
    assert opened.status_code == 201
    rollout, base = opened.json()["rollout_id"], opened.json()["base_url"]
    assert re.fullmatch(f"{server.address}/rollouts/{rollout}~[A-Za-z0-9_-]{{43}}/v1", base)
    client = OpenAI(base_url=base, api_key="none")
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, extra_body=SILENT
    )
    scored = httpx.post(f"{server.address}/rollouts/{rollout}/outcome", json={"reward": 0.5})
    assert scored.status_code == 201
    state = httpx.get(f"{server.address}/rollouts/{rollout}").json()
    assert state["rollout"]["group_id"] == "g"
    assert [call["reason"] for call in state["calls"]] == ["first_call"]
    assert (state["outcomes"][0]["reward"], state["pending"]) == (0.5, [])
    assert httpx.post(f"{server.address}/rollouts", json={"rollout_id": rollout}).status_code == 409
    assert httpx.post(f"{server.address}/rollouts/nobody/outcome", json={"reward": 1}).status_code == 404
    nan = httpx.post(f"{server.address}/rollouts/{rollout}/outcome", content=b'{"reward": NaN}')
    assert nan.status_code in (400, 422)


def test_tokens_carry_the_policy_version_that_sampled_them(server: Any) -> None:
    client = client_of(server, "versions")
    for version in (3, 4):
        set_to = httpx.post(f"{server.address}/policy_version", json={"policy_version": version})
        assert set_to.json() == {"policy_version": version}
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, extra_body=SILENT
        )
    httpx.post(f"{server.address}/policy_version", json={"policy_version": 0})
    assert [call.policy_spans[0].policy_version for call in calls_of(server, "versions")] == [3, 4]


def test_a_log_that_cannot_be_written_stops_a_call_before_it_costs_a_token(server: Any) -> None:
    """Another process holds the database's write lock for longer than the server waits for it."""
    holder = sqlite3.connect(server.database.url.database, isolation_level=None)
    holder.execute("begin immediate")
    try:
        answer = httpx.post(
            f"{server.address}/rollouts/locked/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **SILENT},
            timeout=120,
        )
    finally:
        holder.execute("rollback")
        holder.close()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert calls_of(server, "locked") == []
    wait_until_served(server)


def wait_until_served(server: Any) -> None:
    """The server asks a log that was away once a second whether it is back."""
    for _ in range(50):
        if httpx.post(f"{server.address}/rollouts/again/v1/chat/completions", json=hello(max_tokens=1)).is_success:
            return
        time.sleep(0.1)
    raise AssertionError("the log is back, and calls are still refused after 5 seconds")


def test_kill_9_in_mid_stream_leaves_the_intent_and_no_half_event(server: Any) -> None:
    with closing(begun(server, "killed", hello(**LONG, stream=True))) as client:
        server.kill()
        with pytest.raises((ConnectionError, HTTPException)):
            client.getresponse().read()
    with read(server.database) as connection:
        (pending,) = log.pending(connection, worker=server.worker)
        assert pending.rollout_id == "killed"
        assert log.calls(connection, "killed") == log.ends(connection, "killed") == []
    server.reasoning = "strict"  # as the next test wants it
    assert server.address  # starts again
    (end,) = ends_of(server, "killed")
    assert (end.call_id, end.state) == (pending.call_id, "lost")
    assert f"call {pending.call_id} is lost" in server.log.read_text()
    client_of(server, "killed").chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, extra_body=SILENT
    )
    assert [call.decision for call in calls_of(server, "killed")] == ["root"]


def test_a_strict_server_begins_rows_where_reasoning_is_dropped_and_names_the_flag(server: Any) -> None:
    if server.reasoning != "strict":
        server.kill()
        server.reasoning = "strict"
    client = client_of(server, "forgetful")
    messages: list[Any] = [{"role": "user", "content": "Think."}]
    for turn in range(3):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, seed=turn)
        message = answer.choices[0].message
        messages = [*messages, {"role": "assistant", "content": message.content or ""}, messages[0]]
    assert [call.reason for call in calls_of(server, "forgetful")] == ["first_call", *["reasoning_dropped"] * 2]
    said = server.log.read_text()
    assert said.count("rollout forgetful: its harness does not send reasoning back") == 1
    assert "--reasoning restore" in said
