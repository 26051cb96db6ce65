"""What the three wires share: the interface of a dialect, a stream as it arrives, and typed access to JSON.

Knows OpenAI's content parts and error shape, which two dialects have, and how to say what is wrong with a value; does
not know any one dialect, HTTP or vLLM. Law: a value of the wrong type is an error that names its place, what stands
there and what belongs there.

>>> parts_of(["Look: ", {"type": "input_text", "text": "here"}], "input[0].content")
['Look: ', 'here']
>>> text_of({"name": 7}, "name", "tools[0]")
Traceback (most recent call last):
engine.errors.BadRequest: tools[0].name is 7, not a string or null: send a string or null
"""

from __future__ import annotations

import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol, cast

from pydantic import JsonValue

from engine.errors import BadRequest, EngineError, PromptTooLong, RetainedMediaChanged, UnknownItem
from engine.items import Answer, Item, Media

Fields = Mapping[str, JsonValue]
DialectName = Literal["chat", "responses", "messages"]

_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    503: "ServiceUnavailableError",
}
_PARTS = (
    "parts of type text, input_text, output_text, refusal, image_url, input_image, audio_url, input_audio, video_url, "
    "file or input_file"
)


class Stream(ABC):
    """A streamed answer as it arrives, and the plain answer that it amounts to.

    Whoever passes the events on holds back each one after which `completed` is true or `failed` is set: it, and what
    follows, would let a client take the answer as whole.
    """

    def __init__(self) -> None:
        self.failed: str | None = None
        """Why the answer cannot be completed: the server's error, or an event that cannot be read."""
        self.unreadable = False
        """It is the latter: the server does not know that anything is wrong, and its client must be told."""
        self.ended = False
        """Whether nothing of the answer follows any more."""

    @property
    @abstractmethod
    def completed(self) -> bool:
        """Whether all that the answer says is here."""

    @abstractmethod
    def feed(self, event: Fields) -> None:
        """Take the next event; never raises, one that cannot be read makes the answer `failed`."""

    @abstractmethod
    def response(self) -> dict[str, JsonValue]:
        """The plain answer's shape, without usage."""

    @abstractmethod
    def error_event(self, error: EngineError) -> bytes:
        """The server-sent event that ends the stream with this error in place of what was held back."""

    def take(self, data: bytes) -> None:
        """Take the data of the next server-sent event: JSON, or the `[DONE]` that ends some streams."""
        if data.strip() == b"[DONE]":
            self.ended = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            self.feed(cast("Fields", event))
        else:
            self._cannot_read(f"{data[:80]!r} is no JSON object")

    def _cannot_read(self, why: object) -> None:
        self.failed = self.failed or f"the server's stream cannot be captured: {why}"
        self.unreadable = True


class Dialect(Protocol):
    """What a dialect's module offers; `engine.dialects.routes` names the modules."""

    @property
    def NAME(self) -> DialectName:  # noqa: N802  # a module's constant
        """What the log calls it."""
        ...

    @property
    def PATH(self) -> str:  # noqa: N802
        """Where the server serves it."""
        ...

    @property
    def StreamedResponse(self) -> Callable[[], Stream]:  # noqa: N802  # a module's class
        """Make a stream that has no events yet."""
        ...

    def request_items(self, body: Fields) -> tuple[Item, ...]:
        """The request's items in wire order. Raises BadRequest, UnknownItem."""
        ...

    def choices(self, body: Fields) -> int:
        """How many answers the request asks for."""
        ...

    def servable(self, body: Fields) -> Fields:
        """The request as vLLM takes it: what harnesses send and it refuses, said in its words; else the body itself."""
        ...

    @property
    def REFUSES_IN_STREAM(self) -> bool:  # noqa: N802
        """Whether a prompt that is too long is told in the stream that was asked for: harnesses read no other."""
        ...

    def answers(self, response: Fields) -> tuple[Answer, ...]:
        """The answers of a plain response, or of `StreamedResponse.response()`. Raises UnreadableAnswer."""
        ...

    def response_id(self, response: Fields) -> str | None:
        """The id that the harness sees; None when there is none."""
        ...

    def error_body(self, error: EngineError) -> dict[str, JsonValue]:
        """The error in the dialect's shape and words."""
        ...


def openai_error(error: EngineError, *, messages: str) -> dict[str, JsonValue]:
    """The error in OpenAI's shape, with vLLM's names for its kinds; `messages` is where the dialect has them.

    A prompt that is too long has OpenAI's own type and code: harnesses compact when they read it.
    """
    fields: dict[str, JsonValue] = {"message": str(error)}
    if isinstance(error, PromptTooLong):
        fields |= {"type": "invalid_request_error", "param": messages, "code": "context_length_exceeded"}
    elif isinstance(error, RetainedMediaChanged):
        fields |= {"type": "invalid_request_error", "param": messages, "code": error.code}
    else:
        kind = _ERROR_TYPES.get(error.status, "InternalServerError")
        fields |= {"type": kind, "param": error.param, "code": error.status}
    return {"error": fields}


def sse(data: Fields, *, name: str | None = None) -> bytes:
    r"""One server-sent event.

    >>> sse({"type": "ping"}, name="ping")
    b'event: ping\ndata: {"type": "ping"}\n\n'
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data).encode() + b"\n\n"


def parts_of(content: JsonValue, where: str) -> list[str | Media]:
    """OpenAI's content: null, a string, or a list of parts."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise malformed(content, where, "a string, a list of parts or null")
    return [
        part if isinstance(part, str) else _part(object_of(part, f"{where}[{position}]"), f"{where}[{position}]")
        for position, part in enumerate(content)
    ]


def _part(part: Fields, where: str) -> str | Media:
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return text_of(part, "text", where)
        case "refusal":
            return text_of(part, "refusal", where)
        case "image_url":
            return Media.from_url("image", _url(part, "image_url", where))
        case "audio_url":
            return Media.from_url("audio", _url(part, "audio_url", where))
        case "video_url":
            return Media.from_url("video", _url(part, "video_url", where))
        case "input_audio":
            audio = object_of(part.get("input_audio"), f"{where}.input_audio")
            return Media.from_base64("audio", text_of(audio, "data", f"{where}.input_audio"))
        case "input_image":
            file_id = text_of(part, "file_id", where)
            if part.get("image_url") is None and file_id:
                return Media(kind="image", address=f"id:{file_id}")
            return Media.from_url("image", _url(part, "image_url", where))
        case "file":
            return _file(object_of(part.get("file"), f"{where}.file"), f"{where}.file")
        case "input_file":
            return _file(part, where)
        case None:
            raise BadRequest(f"{where} has no type, every part needs one: send {_PARTS}", param=where)
        case other:
            raise UnknownItem(str(other), known=_PARTS, param=f"{where}.type")


def _url(part: Fields, name: str, where: str) -> str:
    """The URL of a media part, given as a string or as an object with `url`."""
    found = part.get(name)
    url = found if isinstance(found, str) else text_of(object_of(found, f"{where}.{name}"), "url", f"{where}.{name}")
    if not url:
        raise BadRequest(f"{where}.{name} has no url, its content is unknown: send a URL or a data URI", param=where)
    return url


def _file(file: Fields, where: str) -> Media:
    data, url, file_id = (text_of(file, name, where) for name in ("file_data", "file_url", "file_id"))
    if data:
        return Media.from_url("file", data) if data[:5].lower() == "data:" else Media.from_base64("file", data)
    if url:
        return Media.from_url("file", url)
    if not file_id:
        raise BadRequest(f"{where} has neither file_data nor file_id, its content is unknown: send one", param=where)
    return Media(kind="file", address=f"id:{file_id}")


def objects_of(value: JsonValue, where: str) -> list[dict[str, JsonValue]]:
    """A list of objects."""
    if not isinstance(value, list):
        raise malformed(value, where, "a list of objects")
    return [entry if isinstance(entry, dict) else object_of(entry, f"{where}[{i}]") for i, entry in enumerate(value)]


def object_of(value: JsonValue, where: str) -> dict[str, JsonValue]:
    """An object."""
    if not isinstance(value, dict):
        raise malformed(value, where, "an object")
    return value


def text_of(owner: Fields, name: str, where: str) -> str:
    """A field that is a string, null or absent; the last two are the empty string."""
    value = owner.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise malformed(value, f"{where}.{name}" if where else name, "a string or null")
    return value


def index_of(owner: Fields, where: str, name: str = "index") -> int:
    """A field that counts from 0."""
    value = owner.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise malformed(value, f"{where}.{name}" if where else name, "a number from 0 on")
    return value


def malformed(value: JsonValue, where: str, rule: str) -> BadRequest:
    """The error for a value that breaks a rule."""
    return BadRequest(f"{where} is {shown(value)}, not {rule}: send {rule}", param=where)


def shown(value: JsonValue) -> str:
    """A value short enough for a message; content of a request does not belong there at length."""
    return "null" if value is None else reprlib.repr(value)


@contextmanager
def followed() -> Generator[None]:
    """Refuse a request that nests deeper than the walks over it can follow: some hundred levels."""
    try:
        yield
    except RecursionError:
        raise BadRequest("the request nests too deep to be read: send it flatter") from None


def without_cache_control(value: JsonValue) -> JsonValue:
    """A value without its notes to a cache, which shape no prompt.

    >>> without_cache_control([{"name": "ls", "cache_control": {"type": "ephemeral"}}])
    [{'name': 'ls'}]
    """
    if isinstance(value, dict):
        return {name: without_cache_control(inner) for name, inner in value.items() if name != "cache_control"}
    return [without_cache_control(inner) for inner in value] if isinstance(value, list) else value
