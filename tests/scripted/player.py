"""Recorded harness traffic, sent again to a real server that is scripted to give the recorded answers.

Knows the recordings' format, the wire of the three dialects and what a harness sends back of an answer; does not know
turnlog. Law: each request is what the unmodified harness would have sent had this server answered it. So what the
server mints or spells its own way (ids, argument spacing, a text cut at a stop string) is put in place of what the stub
had served, wherever a request repeats it letter for letter; everything else is sent as it was recorded, except:

- An image becomes a text with its digest where the model at hand reads none; `pictured` says that it does.
- A token limit above `CONTEXT` is lowered to it, as vLLM refuses what no prompt could leave room for; a limit of one
  token is raised to it, because the recorded answer, which later requests repeat, is longer. A thinking budget is
  kept below it.
- An assistant message in `/v1/responses` gets the type that OpenCode leaves out, as the gateway would add it: the
  script knows a request by the body that reaches the engine. What a recording blanked out of a tool of Codex becomes a
  value of its type again, which stock vLLM insists on.
- In the second pass `stream` is flipped, Chat asks for token ids, and `stream_options` and stop strings go. vLLM's
  streaming parsers lose their place behind stop strings, because text is held back while its token ids arrive:
  `<tool_call>` then comes twice.

Calls start in order of arrival and overlap as they did: one starts when those that had ended by then have ended. A call
that was recorded as failed fails: the server is scripted to answer 400 or 500, or never to end the answer that the
client leaves.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CONTEXT = 4096
"""The highest token limit that is sent."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
IMAGES = ("image_url", "input_image", "image")
"""Types of image parts in the three dialects."""

Fields = dict[str, Any]
_LEFT_OUT = object()


@dataclass(frozen=True, kw_only=True)
class Called:
    """A tool call as it was served."""

    call_id: str
    name: str
    """As the model writes it: Responses put `namespace__` before the name of a tool that has one."""
    arguments: str
    item_id: str = ""
    """Responses: the id of the item, beside the id of the call."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """An answer of any dialect, streamed or plain."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[Called, ...] = ()
    finish: str = ""
    response_id: str = ""
    marks: tuple[str, ...] = ()
    """Ids and signatures of the answer's other items, in a fixed order."""
    thoughts: Fields | None = None
    """Responses: the reasoning item."""
    token_ids: tuple[int, ...] = ()
    """Chat: the prompt's and the answer's, where the request asked for them."""

    @property
    def content(self) -> tuple[str, str, tuple[tuple[str, str], ...], str]:
        """What of it does not depend on who served it."""
        return self.reasoning, self.text, tuple((call.name, call.arguments) for call in self.calls), self.finish


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One call of a recording."""

    seq: int
    endpoint: str
    request: Fields
    response: Fields
    stream: bool
    started: int
    ended: int

    @property
    def failed(self) -> bool:
        """Whether the call gave no usable answer."""
        return any(name in self.response for name in ("error", "stream_cut", "client_gone"))

    @property
    def said(self) -> Said:
        """The recorded answer."""
        return said(self.endpoint, self.response)

    @property
    def script(self) -> Fields:
        """The recorded answer as `POST /scripted` takes it."""
        if "error" in self.response:
            error = self.response["error"]
            return {"fail": {"status": self.response["status"], "message": error["error"]["message"]}}
        if self.failed:
            return {"text": "Too late.", "hold": True}
        answer = self.said
        calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
        return {"reasoning": answer.reasoning, "text": answer.text, "tool_calls": calls}


@dataclass(kw_only=True)
class Played:
    """A recorded call as it was sent to the server, and what came back."""

    call: Recorded
    body: Fields
    number: int
    """Of its answer in the rollout's script."""
    status: int | None = None
    """None when the client left."""
    said: Said | None = None
    raw: str = ""


def read(folder: Path) -> list[Recorded]:
    """The calls of a recording in order of arrival."""
    lines = (json.loads(line) for line in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        Recorded(
            seq=line["seq"],
            endpoint=line["endpoint"],
            request=line["request"],
            response=line["response"],
            stream=bool(line["stream"]),
            started=line["t_start_ms"],
            ended=line["t_end_ms"],
        )
        for line in lines
    ]


async def play(
    calls: list[Recorded], address: str, rollout: str, *, flip: bool = False, pictured: bool = False
) -> list[Played]:
    """Send a recording's calls to `address` as rollout `rollout`; `flip` sends streamed ones plain and vice versa."""
    echo = Echo()
    played: list[Played] = []
    running: dict[int, asyncio.Task[None]] = {}
    # A connection a request: the server closes one behind a 500, and the next request on it would find it gone.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        for call in calls:
            before = [running.pop(other.seq) for other in calls if other.ended <= call.started and other.seq in running]
            await asyncio.gather(*before)
            body = adapted(echo.repeated(call.request), call.endpoint, flip=flip, pictured=pictured)
            script = {**call.script, "when": {"body": digest(body)}}
            queued = await client.post(f"/scripted/{rollout}", json={"answers": [script]})
            assert queued.status_code == 200, queued.text
            played.append(Played(call=call, body=body, number=queued.json()["queued"][0]))
            running[call.seq] = asyncio.create_task(_send(client, rollout, played[-1], echo))
        await asyncio.gather(*running.values())
    return played


@dataclass
class Echo:
    """What of the recorded answers the harness must have read otherwise from this server."""

    spelled: dict[str, str] = field(default_factory=dict)
    """A string of a recorded answer to the one that was served in its place."""
    thoughts: dict[str, Fields] = field(default_factory=dict)
    """Responses: what identifies a recorded reasoning item to the one that was served."""

    def learn(self, recorded: Said, served: Said) -> None:
        """Take in what was served for a recorded answer."""
        pairs = [(recorded.text, served.text), (recorded.reasoning, served.reasoning)]
        pairs += zip(recorded.marks, served.marks, strict=False)
        for one, other in zip(recorded.calls, served.calls, strict=False):
            pairs += [(one.call_id, other.call_id), (one.item_id, other.item_id), (one.arguments, other.arguments)]
        for one_text, other_text in pairs:
            if one_text and one_text != other_text:
                self.spelled[one_text] = other_text
                self.spelled.setdefault(one_text.strip(), other_text.strip())
        if recorded.thoughts and served.thoughts:
            for name in ("id", "encrypted_content"):
                if recorded.thoughts.get(name):
                    self.thoughts[recorded.thoughts[name]] = served.thoughts
            self.thoughts[recorded.reasoning] = served.thoughts

    def repeated(self, value: Any) -> Any:
        """A request, or a piece of one, as the harness would have sent it."""
        if isinstance(value, str):
            return self.spelled.get(value, value)
        if isinstance(value, list):
            return [repeated for inner in value if (repeated := self.repeated(inner)) is not _LEFT_OUT]
        if not isinstance(value, dict):
            return value
        repeated = {name: self.repeated(inner) for name, inner in value.items()}
        if value.get("type") == "reasoning":
            keys = (value.get("id"), value.get("encrypted_content"), _reasoning_text(value))
            served = next((self.thoughts[key] for key in keys if key in self.thoughts), None)
            if served is not None and "id" not in value and not served.get("encrypted_content"):
                return _LEFT_OUT  # without ids, a harness repeats only what the server has sealed for it
            if served is not None:
                names = ("summary", "content", *(name for name in ("encrypted_content",) if name in value))
                repeated |= {name: served.get(name) for name in names}
        return repeated


def adapted(request: Fields, endpoint: str, *, flip: bool, pictured: bool = False) -> Fields:
    """The request as this server can take it; see the module's list."""
    body: Fields = request if pictured else _without_images(request, "input_text" if endpoint == RESPONSES else "text")
    for name in LIMITS:
        if name in body and not 1 < body[name] <= CONTEXT:
            body[name] = CONTEXT
    if endpoint == RESPONSES:
        for item in body["input"] if isinstance(body["input"], list) else ():
            if item.get("role") == "assistant" and isinstance(item["content"], list):
                item.setdefault("type", "message")
        for tool in body.get("tools") or ():
            if tool.get("external_web_access") == "[opaque]":
                tool["external_web_access"] = True
    if endpoint == MESSAGES and "budget_tokens" in body.get("thinking", {}):
        body["thinking"]["budget_tokens"] = min(body["thinking"]["budget_tokens"], CONTEXT - 1)
    if flip:
        body["stream"] = not body.get("stream", False)
        for name in ("stream_options", "stop"):
            body.pop(name, None)
        if endpoint == CHAT:
            body["return_token_ids"] = True
    return body


def as_served(call: Recorded, body: Fields) -> Said:
    """The recorded answer as vLLM's parsers serve it to a request of this body.

    A stop string ends the text. A stream gives the arguments of tool calls as they were written; the plain parser reads
    them and writes them anew, and when it cannot read one, the whole output is text.
    """
    answer = call.said
    stops = [at for stop in body.get("stop") or [] if (at := answer.text.find(stop)) >= 0]
    if stops:
        return replace(answer, text=answer.text[: min(stops)], calls=(), finish="stop")
    if body.get("stream"):
        return answer
    try:
        read_again = [json.dumps(json.loads(called.arguments), ensure_ascii=False) for called in answer.calls]
    except ValueError:
        written = "".join(
            f'<tool_call>\n{{"name": "{called.name}", "arguments": {called.arguments}\n</tool_call>'
            for called in answer.calls
        )
        return replace(answer, text=answer.text + written, calls=(), finish="stop")
    calls = (replace(called, arguments=text) for called, text in zip(answer.calls, read_again, strict=True))
    return replace(answer, calls=tuple(calls))


def said(endpoint: str, response: Mapping[str, Any]) -> Said:
    """The answer that a plain response holds."""
    if endpoint == CHAT:
        (choice,) = response["choices"]
        message = choice["message"]
        return Said(
            reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
            text=message.get("content") or "",
            calls=tuple(
                Called(call_id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
                for call in message.get("tool_calls") or []
            ),
            finish=choice["finish_reason"],
            response_id=response.get("id", ""),
            token_ids=(*(response.get("prompt_token_ids") or ()), *(choice.get("token_ids") or ())),
        )
    if endpoint == MESSAGES:
        blocks = response["content"]
        return Said(
            reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            text="".join(block["text"] for block in blocks if block["type"] == "text"),
            calls=tuple(
                Called(
                    call_id=block["id"],
                    name=block["name"],
                    arguments=json.dumps(block["input"], ensure_ascii=False),
                )
                for block in blocks
                if block["type"] == "tool_use"
            ),
            finish=response["stop_reason"],
            response_id=response.get("id", ""),
            marks=tuple(block.get("signature") or "" for block in blocks if block["type"] == "thinking"),
        )
    items = response["output"]
    thoughts = [item for item in items if item["type"] == "reasoning"]
    texts = [item for item in items if item["type"] == "message"]
    return Said(
        reasoning="".join(_reasoning_text(item) for item in thoughts),
        text="".join(part["text"] for item in texts for part in item["content"]),
        calls=tuple(
            Called(
                call_id=item["call_id"],
                name="__".join([item["namespace"], item["name"]] if item.get("namespace") else [item["name"]]),
                arguments=item["arguments"],
                item_id=item["id"] or "",
            )
            for item in items
            if item["type"] == "function_call"
        ),
        finish=response["status"],
        response_id=response.get("id", ""),
        marks=tuple(found[0]["id"] if found else "" for found in (thoughts, texts)),
        thoughts=thoughts[0] if thoughts else None,
    )


def assembled(endpoint: str, raw: str) -> Fields:
    """The plain response that a stream amounts to; the stream must have been complete."""
    lines = [line.removeprefix("data:").strip() for line in raw.splitlines() if line.startswith("data:")]
    if endpoint == CHAT:
        assert lines.pop() == "[DONE]", raw[-300:]
    events = [json.loads(line) for line in lines]
    return {CHAT: _chat, MESSAGES: _messages, RESPONSES: _responses}[endpoint](events)


def digest(body: Fields) -> str:
    """The name of a request body in a script's conditions."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


async def _send(client: httpx.AsyncClient, rollout: str, played: Played, echo: Echo) -> None:
    call = played.call
    sent = asyncio.create_task(client.post(f"/rollouts/{rollout}{call.endpoint}", json=played.body))
    if call.failed and "error" not in call.response:
        while played.number not in [seen["answer"] for seen in await _seen(client, rollout)]:
            assert not sent.done(), f"call {call.seq} was answered {sent.result().text} before its client could leave"
            await asyncio.sleep(0.05)
        sent.cancel()
        await asyncio.wait([sent])
        return
    answer = await sent
    played.status, played.raw = answer.status_code, answer.text
    if answer.status_code == 200:
        body = assembled(call.endpoint, answer.text) if played.body.get("stream") else answer.json()
        played.said = said(call.endpoint, body)
        echo.learn(call.said, played.said)


async def _seen(client: httpx.AsyncClient, rollout: str) -> list[Fields]:
    found: list[Fields] = (await client.get(f"/scripted/{rollout}")).json()["calls"]
    return found


def _without_images(value: Any, text: str) -> Any:
    if isinstance(value, list):
        return [_without_images(inner, text) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in IMAGES:
        address = json.dumps(value.get("image_url") or value.get("source"), sort_keys=True)
        return {"type": text, "text": f"[image {hashlib.sha256(address.encode()).hexdigest()[:16]}]"}
    return {name: _without_images(inner, text) for name, inner in value.items()}


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """The text of a Responses reasoning item, wherever it stands."""
    return "".join(part["text"] for part in item.get("content") or item.get("summary") or [])


def _chat(events: list[Fields]) -> Fields:
    message: Fields = {"content": "", "reasoning": "", "tool_calls": []}
    answer: Fields = {"message": message, "finish_reason": None, "token_ids": []}
    for choice in (choice for event in events for choice in event["choices"]):
        answer["finish_reason"] = choice["finish_reason"] or answer["finish_reason"]
        answer["token_ids"] += choice.get("token_ids") or []
        delta = choice["delta"]
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls") or []:
            if piece["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": piece["id"], "function": {"name": "", "arguments": ""}})
            function = message["tool_calls"][piece["index"]]["function"]
            for name in ("name", "arguments"):
                function[name] += piece["function"].get(name) or ""
    return {**events[0], "choices": [answer]}


def _messages(events: list[Fields]) -> Fields:
    assert events[-1]["type"] == "message_stop", events[-1]
    message: Fields = {}
    blocks: list[Fields] = []
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"partial": ""})
        elif event["type"] == "content_block_delta":
            name, piece = next((name, piece) for name, piece in event["delta"].items() if name != "type")
            kept = "partial" if name == "partial_json" else name
            blocks[event["index"]][kept] = (blocks[event["index"]].get(kept) or "") + piece
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["partial"] or "{}")
    return {**message, "content": blocks}


def _responses(events: list[Fields]) -> Fields:
    """The last event's response, whose texts must be what the deltas amounted to."""
    last: Fields = events[-1]
    assert last["type"] == "response.completed", last
    response: Fields = last["response"]
    whole = said(RESPONSES, response)
    for kind, text in (
        ("response.output_text.delta", whole.text),
        ("response.reasoning_text.delta", whole.reasoning),
        ("response.function_call_arguments.delta", "".join(call.arguments for call in whole.calls)),
    ):
        assert "".join(event["delta"] for event in events if event["type"] == kind) == text, kind
    return response
