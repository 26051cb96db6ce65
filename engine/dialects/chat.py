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
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from engine.errors import BadRequest, EngineError, PromptTooLong, UnknownItem, UnreadableAnswer
from engine.items import OUTER_SPACE, Answer, Item, Media, MessageRole

Fields = Mapping[str, JsonValue]

_ROLES = "role system, developer, user, assistant or tool"
_FROM_OUTSIDE: dict[str, MessageRole] = {"system": "system", "developer": "developer", "user": "user"}
"""Roles of messages that no model writes."""
_ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    503: "ServiceUnavailableError",
}
_PARTS = "parts of type text, refusal, image_url, input_audio, audio_url, video_url or file"


def request_items(body: Fields) -> tuple[Item, ...]:
    """The request's items in wire order.

    Raises BadRequest for what is malformed, UnknownItem for a role, part or call that has no canonical form.
    """
    items: list[Item] = []
    for position, message in enumerate(_objects(body.get("messages"), "messages")):
        items += _message_items(message, f"messages[{position}]")
    return tuple(items)


def answers(response: Fields) -> tuple[Answer, ...]:
    """The choices of a plain answer, or of `StreamedResponse.response()`. Raises UnreadableAnswer."""
    found: list[Answer] = []
    try:
        for position, choice in enumerate(_objects(response.get("choices"), "choices")):
            where = f"choices[{position}]"
            message = _object(choice.get("message"), f"{where}.message")
            found.append(
                Answer(
                    index=_index(choice, where),
                    items=tuple(_assistant_items(message, f"{where}.message")),
                    finish_reason=_text(choice, "finish_reason", where) or None,
                )
            )
    except BadRequest as error:
        raise UnreadableAnswer(f"the server's answer cannot be captured: {error}") from error
    return tuple(found)


def response_id(response: Fields) -> str | None:
    """The id that the harness sees; None when there is none."""
    found = response.get("id")
    return found if isinstance(found, str) and found else None


def error_body(error: EngineError) -> dict[str, JsonValue]:
    """The error in this dialect's shape, with vLLM's names for its kinds.

    A prompt that is too long has OpenAI's own type and code: harnesses compact when they read it.

    >>> error_body(PromptTooLong(limit=8192, prompt_tokens=9000))["error"]["code"]
    'context_length_exceeded'
    """
    fields: dict[str, JsonValue] = {"message": str(error)}
    if isinstance(error, PromptTooLong):
        fields |= {"type": "invalid_request_error", "param": error.param, "code": "context_length_exceeded"}
    else:
        fields |= {
            "type": _ERROR_TYPES.get(error.status, "InternalServerError"),
            "param": error.param,
            "code": error.status,
        }
    return {"error": fields}


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


class StreamedResponse:
    """A streamed answer as it arrives, and the plain answer that it amounts to.

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
        self.failed: str | None = None
        """Why the answer cannot be completed: the server's error, or a chunk that cannot be read."""
        self._head: dict[str, JsonValue] = {}
        self._choices: dict[int, _Choice] = {}

    @property
    def completed(self) -> bool:
        """Whether every choice has its finish reason."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())

    def feed(self, chunk: Fields) -> None:
        """Take the data of the next event; never raises, a chunk that cannot be read makes the answer `failed`."""
        error = chunk.get("error")
        if error is not None:
            message = error.get("message") if isinstance(error, dict) else error
            self.failed = message if isinstance(message, str) else json.dumps(message)
            return
        for name in ("id", "created", "model"):
            if chunk.get(name) is not None:
                self._head.setdefault(name, chunk[name])
        try:
            for position, choice in enumerate(_objects(chunk.get("choices") or [], "choices")):
                self._take(choice, f"choices[{position}]")
        except BadRequest as unreadable:
            self.failed = f"the server's stream cannot be captured: {unreadable}"

    def response(self) -> dict[str, JsonValue]:
        """The plain answer's shape, without usage."""
        choices: list[JsonValue] = [
            {"index": index, "message": _message(choice), "finish_reason": choice.finish_reason}
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._head, "object": "chat.completion", "choices": choices}

    def _take(self, fields: Fields, where: str) -> None:
        choice = self._choices.setdefault(_index(fields, where), _Choice())
        choice.finish_reason = _text(fields, "finish_reason", where) or choice.finish_reason
        delta = _object(fields.get("delta") or {}, f"{where}.delta")
        for name in ("content", "reasoning", "reasoning_content", "refusal"):
            if piece := _text(delta, name, f"{where}.delta"):
                choice.texts.setdefault(name, []).append(piece)
        for name in _UNKNOWN_OF_ASSISTANT:
            if delta.get(name) is not None:
                choice.other[name] = delta[name]
        calls = _objects(delta.get("tool_calls") or [], f"{where}.delta.tool_calls")
        for position, piece_of_call in enumerate(calls):
            inner = f"{where}.delta.tool_calls[{position}]"
            call = choice.calls.setdefault(_index(piece_of_call, inner), _Call())
            call.call_id = call.call_id or _text(piece_of_call, "id", inner)
            function = _object(piece_of_call.get("function") or {}, f"{inner}.function")
            call.name.append(_text(function, "name", f"{inner}.function"))
            call.arguments.append(_text(function, "arguments", f"{inner}.function"))


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


_UNKNOWN_OF_ASSISTANT = ("function_call", "audio")
"""Fields of an assistant message that say something and have no canonical form."""


def _message_items(message: Fields, where: str) -> list[Item]:
    role = message.get("role")
    if role == "assistant":
        return _assistant_items(message, where)
    attributes: dict[str, JsonValue] = {name: message.get(name) for name in ("name", "task")}
    if role == "tool":
        call_id = _text(message, "tool_call_id", where)
        return [Item.tool_result(call_id, _parts(message.get("content"), f"{where}.content"), attributes=attributes)]
    if role == "developer":
        attributes["tools"] = message.get("tools")
    known = _FROM_OUTSIDE.get(role) if isinstance(role, str) else None
    if known is not None:
        return [Item.message(known, _parts(message.get("content"), f"{where}.content"), attributes=attributes)]
    if not isinstance(role, str) or not role:
        raise BadRequest(
            f"{where}.role is {_shown(role)}, every message needs one: send {_ROLES}", param=f"{where}.role"
        )
    raise UnknownItem(role, known=f"a message of {_ROLES}", param=f"{where}.role")


def _assistant_items(message: Fields, where: str) -> list[Item]:
    for name in _UNKNOWN_OF_ASSISTANT:
        if message.get(name) is not None:
            raise UnknownItem(name, known="content, reasoning and tool_calls", param=f"{where}.{name}")
    items = [Item.reasoning(text) for text in _reasoning(message, where)]
    parts = [*_parts(message.get("content"), f"{where}.content"), _text(message, "refusal", where)]
    named = any(message.get(name) for name in ("name", "task"))
    calls = _objects(message.get("tool_calls") or [], f"{where}.tool_calls")
    if any(parts) or named or not (items or calls):
        attributes = {name: message.get(name) for name in ("name", "task")}
        items.append(Item.message("assistant", parts, attributes=attributes))
    return items + [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _reasoning(message: Fields, where: str) -> list[str]:
    """The reasoning under both of its names: once when they agree, both when they do not, for neither is a guess."""
    first, second = (_text(message, name, where) for name in ("reasoning", "reasoning_content"))
    if first.strip(OUTER_SPACE) == second.strip(OUTER_SPACE):
        second = "" if first else second
    return [text for text in (first, second) if text]


def _tool_call(call: Fields, where: str) -> Item:
    kind = call.get("type")
    if kind is not None and kind != "function":
        raise UnknownItem(str(kind), known="tool calls of type function", param=f"{where}.type")
    function = _object(call.get("function"), f"{where}.function")
    name = _text(function, "name", f"{where}.function")
    if not name:
        raise BadRequest(f"{where}.function has no name, every call needs one: send the tool's name", param=where)
    return Item.tool_call(_text(call, "id", where), name, function.get("arguments"))


def _parts(content: JsonValue, where: str) -> list[str | Media]:
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise _malformed(content, where, "a string, a list of parts or null")
    return [
        part if isinstance(part, str) else _part(_object(part, f"{where}[{position}]"), f"{where}[{position}]")
        for position, part in enumerate(content)
    ]


def _part(part: Fields, where: str) -> str | Media:
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return _text(part, "text", where)
        case "refusal":
            return _text(part, "refusal", where)
        case "image_url":
            return Media.from_url("image", _url(part, "image_url", where))
        case "audio_url":
            return Media.from_url("audio", _url(part, "audio_url", where))
        case "video_url":
            return Media.from_url("video", _url(part, "video_url", where))
        case "input_audio":
            audio = _object(part.get("input_audio"), f"{where}.input_audio")
            return Media.from_base64("audio", _text(audio, "data", f"{where}.input_audio"))
        case "file":
            return _file(_object(part.get("file"), f"{where}.file"), f"{where}.file")
        case None:
            raise BadRequest(f"{where} has no type, every part needs one: send {_PARTS}", param=where)
        case other:
            raise UnknownItem(str(other), known=_PARTS, param=f"{where}.type")


def _url(part: Fields, name: str, where: str) -> str:
    """The URL of a media part, given as a string or as an object with `url`."""
    found = part.get(name)
    url = found if isinstance(found, str) else _text(_object(found, f"{where}.{name}"), "url", f"{where}.{name}")
    if not url:
        raise BadRequest(f"{where}.{name} has no url, its content is unknown: send a URL or a data URI", param=where)
    return url


def _file(file: Fields, where: str) -> Media:
    data, file_id = _text(file, "file_data", where), _text(file, "file_id", where)
    if data:
        return Media.from_url("file", data) if data[:5].lower() == "data:" else Media.from_base64("file", data)
    if not file_id:
        raise BadRequest(f"{where} has neither file_data nor file_id, its content is unknown: send one", param=where)
    return Media(kind="file", address=f"id:{file_id}")


def _objects(value: JsonValue, where: str) -> list[dict[str, JsonValue]]:
    if not isinstance(value, list):
        raise _malformed(value, where, "a list of objects")
    return [_object(entry, f"{where}[{position}]") for position, entry in enumerate(value)]


def _object(value: JsonValue, where: str) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise _malformed(value, where, "an object")
    return value


def _text(fields: Fields, name: str, where: str) -> str:
    """A field that is a string, null or absent; the last two are the empty string."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _malformed(value, f"{where}.{name}", "a string or null")
    return value


def _index(fields: Fields, where: str) -> int:
    value = fields.get("index")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _malformed(value, f"{where}.index", "a number from 0 on")
    return value


def _malformed(value: JsonValue, where: str, rule: str) -> BadRequest:
    return BadRequest(f"{where} is {_shown(value)}, not {rule}: send {rule}", param=where)


def _shown(value: JsonValue) -> str:
    """A value short enough for a message; content of a request does not belong there at length."""
    return "null" if value is None else reprlib.repr(value)
