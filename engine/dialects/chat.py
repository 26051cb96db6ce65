"""The Chat Completions wire: requests and answers as items, a stream as the answer it amounts to, errors in its shape.

Knows the JSON of `/v1/chat/completions` as vLLM serves it; does not know HTTP, vLLM's classes, or what items are used
for. Law: nothing is skipped silently. What has no canonical form is an error that names it, and a streamed answer gives
the same items as the plain one.

An assistant message is its reasoning (`reasoning` or `reasoning_content`; both when they differ), then a message if it
has text, then one item per tool call. One with none of these is an empty message, so every assistant message is at
least one item. `refusal` is text the model wrote, after the content. Fields that the server does not render
(`cache_control`, `annotations`, `logprobs`, `index`, a part's `detail`) do not count; `name` does.

>>> [item.role for item in request_items({"messages": [
...     {"role": "user", "content": "Sum up 1 and 2."},
...     {"role": "assistant", "content": None, "reasoning": "Use the tool.", "tool_calls": [
...         {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
...     {"role": "tool", "tool_call_id": "c1", "content": "3"}]})]
['user', 'reasoning', 'tool_call', 'tool_result']
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from pydantic import JsonValue

from engine.dialects import wire
from engine.dialects.wire import DialectName, Fields, index_of, object_of, objects_of, parts_of, text_of
from engine.errors import BadRequest, EngineError, UnknownItem, UnreadableAnswer
from engine.items import OUTER_SPACE, Answer, Item, MessageRole

NAME: DialectName = "chat"
PATH = "/v1/chat/completions"
REFUSES_IN_STREAM = False

_ROLES = "role system, developer, user, assistant or tool"
_MOST_CHOICES = 16_384
"""Answers that vLLM gives to one request, unless told otherwise; it says so only when all of them are in the log."""
_FROM_OUTSIDE: dict[str, MessageRole] = {"system": "system", "developer": "developer", "user": "user"}
"""Roles of messages that no model writes."""


def request_items(body: Fields) -> tuple[Item, ...]:
    """The request's items in wire order.

    Raises BadRequest for what is malformed, UnknownItem for a role, part or call that has no canonical form.
    """
    if body.get("use_beam_search"):
        why = "use_beam_search is true, beams are not sampled: leave it out in a rollout"
        raise BadRequest(why, param="use_beam_search")
    n = body.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= _MOST_CHOICES):
        why = f"n is {wire.shown(n)}, the number of answers: send a whole number from 1 to {_MOST_CHOICES}"
        raise BadRequest(why, param="n")
    items: list[Item] = []
    for position, message in enumerate(objects_of(body.get("messages"), "messages")):
        items += message_items(message, f"messages[{position}]")
    return tuple(items)


def servable(body: Fields) -> Fields:
    """The request as vLLM takes it: as it is."""
    return body


def choices(body: Fields) -> int:
    """How many answers the request asks for (`n`)."""
    n = body.get("n")
    return n if isinstance(n, int) and n > 0 else 1


def answers(response: Fields) -> tuple[Answer, ...]:
    """The choices of a plain answer, or of `StreamedResponse.response()`. Raises UnreadableAnswer."""
    found: list[Answer] = []
    try:
        for position, choice in enumerate(objects_of(response.get("choices"), "choices")):
            where = f"choices[{position}]"
            message = object_of(choice.get("message"), f"{where}.message")
            found.append(
                Answer(
                    index=index_of(choice, where),
                    items=tuple(_assistant_items(message, f"{where}.message")),
                    finish_reason=text_of(choice, "finish_reason", where) or None,
                )
            )
    except BadRequest as error:
        raise UnreadableAnswer(f"the server's answer cannot be captured: {error}") from error
    return tuple(found)


def response_id(response: Fields) -> str | None:
    """The id that the harness sees; None when there is none."""
    return text_of(response, "id", "") or None


def error_body(error: EngineError) -> dict[str, JsonValue]:
    """The error in this dialect's shape, with vLLM's names for its kinds.

    >>> from engine.errors import PromptTooLong
    >>> error_body(PromptTooLong(limit=8192, prompt_tokens=9000))["error"]["code"]
    'context_length_exceeded'
    """
    return wire.openai_error(error, messages="messages")


@dataclass(slots=True)
class _Call:
    call_id: str = ""
    name: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    texts: dict[str, list[str]] = field(default_factory=dict)
    """The pieces of `content`, `reasoning`, `reasoning_content` and `refusal`, those that came."""
    calls: dict[int, _Call] = field(default_factory=dict)
    other: dict[str, JsonValue] = field(default_factory=dict)
    finish_reason: str | None = None


class StreamedResponse(wire.Stream):
    """Chunks, and the plain answer that they amount to; it is complete when every choice has its finish reason.

    >>> stream = StreamedResponse()
    >>> for delta in ({"role": "assistant"}, {"content": "Hel"}, {"content": "lo"}):
    ...     stream.feed({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    >>> stream.completed
    False
    >>> stream.feed({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    >>> stream.completed, answers(stream.response())[0].items[0].text
    (True, 'Hello')
    """

    def __init__(self) -> None:
        super().__init__()
        self._head: dict[str, JsonValue] = {}
        self._choices: dict[int, _Choice] = {}

    @property
    def completed(self) -> bool:
        """Whether every choice has its finish reason."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())

    def feed(self, event: Fields) -> None:
        """Take the next chunk."""
        error = event.get("error")
        if error is not None:
            message = error.get("message") if isinstance(error, dict) else error
            self.failed = message if isinstance(message, str) else json.dumps(message)
            return
        for name in ("id", "created", "model"):
            if event.get(name) is not None:
                self._head.setdefault(name, event[name])
        try:
            for position, choice in enumerate(objects_of(event.get("choices") or [], "choices")):
                self._take(choice, f"choices[{position}]")
        except BadRequest as unreadable:
            self._cannot_read(unreadable)

    def response(self) -> dict[str, JsonValue]:
        """The plain answer's shape, without usage."""
        choices: list[JsonValue] = [
            {"index": index, "message": _message(choice), "finish_reason": choice.finish_reason}
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._head, "object": "chat.completion", "choices": choices}

    def error_event(self, error: EngineError) -> bytes:
        """The error as a chunk of its own."""
        return wire.sse(error_body(error))

    def _take(self, fields: Fields, where: str) -> None:
        choice = self._choices.setdefault(index_of(fields, where), _Choice())
        choice.finish_reason = text_of(fields, "finish_reason", where) or choice.finish_reason
        delta = object_of(fields.get("delta") or {}, f"{where}.delta")
        for name in ("content", "reasoning", "reasoning_content", "refusal"):
            if piece := text_of(delta, name, f"{where}.delta"):
                choice.texts.setdefault(name, []).append(piece)
        for name in _UNKNOWN_OF_ASSISTANT:
            if delta.get(name) is not None:
                choice.other[name] = delta[name]
        calls = objects_of(delta.get("tool_calls") or [], f"{where}.delta.tool_calls")
        for position, piece_of_call in enumerate(calls):
            inner = f"{where}.delta.tool_calls[{position}]"
            call = choice.calls.setdefault(index_of(piece_of_call, inner), _Call())
            call.call_id = call.call_id or text_of(piece_of_call, "id", inner)
            function = object_of(piece_of_call.get("function") or {}, f"{inner}.function")
            call.name.append(text_of(function, "name", f"{inner}.function"))
            call.arguments.append(text_of(function, "arguments", f"{inner}.function"))


def _message(choice: _Choice) -> dict[str, JsonValue]:
    message: dict[str, JsonValue] = {"role": "assistant", "content": None, **choice.other}
    message |= {name: "".join(pieces) for name, pieces in choice.texts.items()}
    calls: list[JsonValue] = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": "".join(call.name), "arguments": "".join(call.arguments)},
        }
        for _, call in sorted(choice.calls.items())
    ]
    return {**message, "tool_calls": calls} if calls else message


_ATTRIBUTES = ("name", "task")
"""Fields of a message that a template may show beside what it says."""
_UNKNOWN_OF_ASSISTANT = ("function_call", "audio")
"""Fields of an assistant message that say something and have no canonical form."""


def message_items(message: Fields, where: str) -> list[Item]:
    """One message as items; `where` names its place. Raises BadRequest, UnknownItem."""
    role = message.get("role")
    if role == "assistant":
        return _assistant_items(message, where)
    attributes = _attributes(message)
    if role == "tool":
        call_id = text_of(message, "tool_call_id", where)
        return [Item.tool_result(call_id, parts_of(message.get("content"), f"{where}.content"), attributes=attributes)]
    if role == "developer":
        attributes["tools"] = message.get("tools")
    known = _FROM_OUTSIDE.get(role) if isinstance(role, str) else None
    if known is not None:
        return [Item.message(known, parts_of(message.get("content"), f"{where}.content"), attributes=attributes)]
    if not isinstance(role, str) or not role:
        raise BadRequest(
            f"{where}.role is {wire.shown(role)}, every message needs one: send {_ROLES}", param=f"{where}.role"
        )
    raise UnknownItem(role, known=f"a message of {_ROLES}", param=f"{where}.role")


def _assistant_items(message: Fields, where: str) -> list[Item]:
    for name in _UNKNOWN_OF_ASSISTANT:
        if message.get(name) is not None:
            raise UnknownItem(name, known="content, reasoning and tool_calls", param=f"{where}.{name}")
    thought = "reasoning" in message or "reasoning_content" in message
    items = [Item.reasoning(text) for text in _reasoning(message, where)] if thought else []
    parts = parts_of(message.get("content"), f"{where}.content")
    if refusal := text_of(message, "refusal", where):
        parts.append(refusal)
    attributes = _attributes(message)
    calls = objects_of(message.get("tool_calls") or [], f"{where}.tool_calls")
    if any(parts) or any(attributes.values()) or not (items or calls):
        items.append(Item.message("assistant", parts, attributes=attributes))
    return items + [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _attributes(message: Fields) -> dict[str, JsonValue]:
    return {name: message[name] for name in _ATTRIBUTES if name in message}


def _reasoning(message: Fields, where: str) -> list[str]:
    """The reasoning under both of its names: once when they agree, both when they do not, for neither is a guess."""
    first, second = (text_of(message, name, where) for name in ("reasoning", "reasoning_content"))
    if first.strip(OUTER_SPACE) == second.strip(OUTER_SPACE):
        second = "" if first else second
    return [text for text in (first, second) if text]


def _tool_call(call: Fields, where: str) -> Item:
    kind = call.get("type")
    if kind is not None and kind != "function":
        raise UnknownItem(str(kind), known="tool calls of type function", param=f"{where}.type")
    function = object_of(call.get("function"), f"{where}.function")
    name = text_of(function, "name", f"{where}.function")
    if not name:
        raise BadRequest(f"{where}.function has no name, every call needs one: send the tool's name", param=where)
    return Item.tool_call(text_of(call, "id", where), name, function.get("arguments"))
