"""Anthropic's Messages wire: requests and answers as items, a stream as the answer it amounts to, errors in its shape.

Knows the JSON of `/v1/messages` as vLLM serves it; does not know HTTP, vLLM's classes, or what items are used for. Law:
nothing is skipped silently. What has no canonical form is an error that names it, and a streamed answer gives the same
items as the plain one.

`system` is a system message in front. A user message is its tool results, then what remains of it, each in the order
sent. An assistant message is one turn, as vLLM shows it to the model: its thinking joined, then its text joined, then
its tool calls; one with none of these is an empty message. Thinking without text is its signature, and redacted
thinking its data, as an opaque payload; otherwise a signature is only kept, as an id is. `cache_control` and
`citations` do not count, nor does the line about billing that Claude Code puts among its system blocks and changes at
will: vLLM takes it out of the prompt.

>>> [item.role for item in request_items({"system": "Be brief.", "messages": [
...     {"role": "user", "content": "Sum up 1 and 2."},
...     {"role": "assistant", "content": [
...         {"type": "thinking", "thinking": "Use the tool.", "signature": "s"},
...         {"type": "tool_use", "id": "c1", "name": "add", "input": {}}]},
...     {"role": "user", "content": [
...         {"type": "tool_result", "tool_use_id": "c1", "content": "3"}, {"type": "text", "text": "Go on."}]}]})]
['system', 'user', 'reasoning', 'tool_call', 'tool_result', 'user']
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import JsonValue, ValidationError

from engine.dialects import wire
from engine.dialects.wire import DialectName, Fields, index_of, object_of, objects_of, text_of
from engine.errors import BadRequest, EngineError, PromptTooLong, UnknownItem, UnreadableAnswer
from engine.items import Answer, Item, Media

if TYPE_CHECKING:
    from anthropic import BaseModel

NAME: DialectName = "messages"
PATH = "/v1/messages"
REFUSES_IN_STREAM = False

HOSTED = frozenset({
    "advisor_tool_result", "bash_code_execution_tool_result", "code_execution_tool_result", "container_upload",
    "mcp_tool_listing", "mcp_tool_result", "mcp_tool_use", "server_tool_use",
    "text_editor_code_execution_tool_result", "tool_search_tool_result", "web_fetch_tool_result",
    "web_search_tool_result",
})  # fmt: skip
"""Blocks of tools that the server runs itself: what of them a prompt shows is its own affair."""

_BLOCKS = "blocks of type text, image, document, thinking, redacted_thinking, tool_use, tool_result or of a hosted tool"
_BILLING = "x-anthropic-billing-header"
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    422: "invalid_request_error",
}


def request_items(body: Fields) -> tuple[Item, ...]:
    """The request's items in wire order.

    Raises BadRequest for what is malformed, UnknownItem for a role or block that has no canonical form.
    """
    items = _system_items(body.get("system"), "system")
    for position, message in enumerate(objects_of(body.get("messages"), "messages")):
        items += message_items(message, f"messages[{position}]")
    return tuple(items)


def servable(body: Fields) -> Fields:
    """The request as vLLM takes it: as it is."""
    return body


def choices(body: Fields) -> int:  # noqa: ARG001  # one: this dialect knows no `n`
    """How many answers the request asks for."""
    return 1


def answers(response: Fields) -> tuple[Answer, ...]:
    """The one answer of a plain response, or of `StreamedResponse.response()`. Raises UnreadableAnswer."""
    try:
        content = response.get("content")
        if not isinstance(content, list):
            raise wire.malformed(content, "content", "a list of blocks")
        items = tuple(_assistant_items(content, "content"))
        reason = text_of(response, "stop_reason", "") or None
    except BadRequest as error:
        raise UnreadableAnswer(f"the server's answer cannot be captured: {error}") from error
    return (Answer(index=0, items=items, finish_reason=reason),)


def response_id(response: Fields) -> str | None:
    """The id that the harness sees; None when there is none."""
    return text_of(response, "id", "") or None


def error_body(error: EngineError) -> dict[str, JsonValue]:
    """The error in Anthropic's shape; a prompt that is too long is told in its words, which Claude Code looks for.

    >>> error_body(PromptTooLong(limit=8192, prompt_tokens=9000))["error"]["message"]
    'prompt is too long: 9000 tokens > 8192 maximum'
    """
    message = str(error)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(error.status, "api_error"), "message": message}}


class StreamedResponse(wire.Stream):
    """Events, and the plain answer that they amount to; it is complete when it says why it stopped.

    >>> stream = StreamedResponse()
    >>> stream.feed({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    >>> stream.feed({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}})
    >>> stream.completed
    False
    >>> stream.feed({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})
    >>> stream.completed, answers(stream.response())[0].items[0].text
    (True, 'Hello')
    """

    def __init__(self) -> None:
        # The official client's own classes say what a delta holds. Imported here: it takes a second, and whoever only
        # reads requests does without.
        from anthropic import types

        super().__init__()
        self._deltas: dict[str, tuple[type[BaseModel], str, str]] = {
            "text_delta": (types.TextDelta, "text", "text"),
            "thinking_delta": (types.ThinkingDelta, "thinking", "thinking"),
            "signature_delta": (types.SignatureDelta, "signature", "signature"),
            "input_json_delta": (types.InputJSONDelta, "partial_json", "input"),
        }
        """Type of a delta: its class, its field, and the field of its block that it adds to."""
        self._head: dict[str, JsonValue] = {}
        self._blocks: dict[int, dict[str, JsonValue]] = {}
        self._pieces: dict[int, dict[str, list[str]]] = {}
        self._stopped = False

    @property
    def completed(self) -> bool:
        """Whether the answer has said why it stopped, or that it did."""
        return self._stopped

    def feed(self, event: Fields) -> None:
        """Take the next event."""
        try:
            match event.get("type"):
                case "content_block_delta":
                    self._extend(index_of(event, ""), object_of(event.get("delta"), "delta"))
                case "content_block_start":
                    at = index_of(event, "")
                    self._blocks[at] = object_of(event.get("content_block"), "content_block")
                    self._pieces[at] = {}
                case "message_start":
                    self._head = object_of(event.get("message"), "message")
                case "message_delta":
                    changed = object_of(event.get("delta"), "delta")
                    self._head |= {name: value for name, value in changed.items() if value is not None}
                    self._stopped = self._stopped or changed.get("stop_reason") is not None
                case "message_stop":
                    self._stopped = self.ended = True
                case "error":
                    error = object_of(event.get("error"), "error")
                    self.failed = text_of(error, "message", "error") or "the server says that the message failed"
                case _:  # a ping, the end of a block, or a kind of event that later servers may send: it adds nothing
                    pass
        except BadRequest as unreadable:
            self._cannot_read(unreadable)

    def response(self) -> dict[str, JsonValue]:
        """The plain answer's shape, without usage."""
        head = {name: value for name, value in self._head.items() if name != "usage"}
        return {**head, "content": [self._block(at) for at in sorted(self._blocks)]}

    def error_event(self, error: EngineError) -> bytes:
        """The event `error`."""
        return wire.sse(error_body(error), name="error")

    def _extend(self, at: int, delta: Fields) -> None:
        if at not in self._blocks:
            raise BadRequest(f"index is {at}, no block has started there: start it first", param="index")
        kind = delta.get("type")
        if kind == "citations_delta":  # where a text comes from is no part of it
            return
        known = self._deltas.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise UnknownItem(str(kind), known=f"deltas of type {', '.join(self._deltas)}", param="delta.type")
        model, source, target = known
        try:
            piece = getattr(model.model_validate(delta), source)
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise BadRequest(f"delta.{source} cannot be read ({why}): send a string", param=f"delta.{source}") from None
        self._pieces[at].setdefault(target, []).append(piece)

    def _block(self, at: int) -> dict[str, JsonValue]:
        """The block with its deltas; arguments stay the text that they are."""
        block = dict(self._blocks[at])
        for name, pieces in self._pieces[at].items():
            start = block.get(name)
            block[name] = (start if isinstance(start, str) else "") + "".join(pieces)
        return block


def message_items(message: Fields, where: str) -> list[Item]:
    """One message as items; `where` names its place. Raises BadRequest, UnknownItem."""
    match message.get("role"):
        case "user":
            return _user_items(message.get("content"), f"{where}.content")
        case "assistant":
            return _assistant_items(message.get("content"), f"{where}.content")
        case "system":
            return _system_items(message.get("content"), f"{where}.content")
        case str() as other if other:
            raise UnknownItem(other, known="a message of role user, assistant or system", param=f"{where}.role")
        case other:
            raise wire.malformed(other, f"{where}.role", "user, assistant or system")


def _system_items(content: JsonValue, where: str) -> list[Item]:
    """A system message, if there is anything in it: vLLM shows none that is empty."""
    parts: list[str | Media] = []
    changes: list[JsonValue] = []
    for at, block in _blocks(content, where):
        match block.get("type"):
            case "text":
                text = text_of(block, "text", at)
                if not (text.startswith(_BILLING) and isinstance(content, list)):
                    parts.append(text)
            case "tool_addition" | "tool_removal":
                changes.append(wire.without_cache_control({**block}))
            case other:
                raise UnknownItem(str(other), known="text in a system prompt", param=f"{at}.type")
    return [Item.message("system", parts, attributes={"tool_changes": changes})] if any(parts) or changes else []


def _user_items(content: JsonValue, where: str) -> list[Item]:
    first: list[Item] = []
    rest: list[str | Media] = []
    for at, block in _blocks(content, where):
        kind = block.get("type")
        if kind == "tool_result":
            first.append(_tool_result(block, at))
        elif isinstance(kind, str) and kind in HOSTED:
            first.append(Item.hosted(kind, block))
        else:
            rest += _parts(block, at)
    return first + ([Item.message("user", rest)] if any(rest) or not first else [])


def _assistant_items(content: JsonValue, where: str) -> list[Item]:
    thoughts: list[Item] = []
    parts: list[str | Media] = []
    acts: list[Item] = []
    for at, block in _blocks(content, where):
        match block.get("type"):
            case "thinking" | "redacted_thinking":
                thoughts = _with_thought(thoughts, block, at)
            case "tool_use":
                acts.append(_tool_call(block, at))
            case str() as kind if kind in HOSTED:
                acts.append(Item.hosted(kind, block, item_id=text_of(block, "id", at) or None))
            case _:
                parts += _parts(block, at)
    spoken = any(parts) or not (thoughts or acts)
    return [*thoughts, *([Item.message("assistant", parts)] if spoken else []), *acts]


def _with_thought(thoughts: Sequence[Item], block: Fields, where: str) -> list[Item]:
    """The thoughts and one more: its text goes on where the last one ends, an opaque payload stands by itself."""
    text, signature, data = (text_of(block, name, where) for name in ("thinking", "signature", "data"))
    if not text:
        payload = data or signature
        return [*thoughts, Item.reasoning(payload, opaque=True, item_id=payload)] if payload else [*thoughts]
    if thoughts and not thoughts[-1].opaque:
        return [*thoughts[:-1], Item.reasoning(thoughts[-1].text + text, item_id=thoughts[-1].item_id)]
    return [*thoughts, Item.reasoning(text, item_id=signature or None)]


def _tool_call(block: Fields, where: str) -> Item:
    name = text_of(block, "name", where)
    if not name:
        raise BadRequest(f"{where} has no name, every call needs one: send the tool's name", param=where)
    return Item.tool_call(text_of(block, "id", where), name, block.get("input"))


def _tool_result(block: Fields, where: str) -> Item:
    parts: list[str | Media] = []
    references: list[JsonValue] = []
    for at, inner in _blocks(block.get("content"), f"{where}.content"):
        if inner.get("type") == "tool_reference":  # a tool that was found and may be called from here on
            references.append(text_of(inner, "tool_name", at) or text_of(inner, "name", at))
        else:
            parts += _parts(inner, at)
    return Item.tool_result(
        text_of(block, "tool_use_id", where),
        parts,
        is_error=block.get("is_error") is True,
        attributes={"tool_references": references},
    )


def _parts(block: Fields, where: str) -> list[str | Media]:
    match block.get("type"):
        case "text":
            return [text_of(block, "text", where)]
        case "image":
            return [_media(block, "image", where)]
        case "document":
            said: list[str | Media] = [text_of(block, name, where) for name in ("title", "context")]
            return [*said, _media(block, "file", where)]
        case None:
            raise BadRequest(f"{where} has no type, every block needs one: send {_BLOCKS}", param=where)
        case other:
            raise UnknownItem(str(other), known=_BLOCKS, param=f"{where}.type")


def _media(block: Fields, kind: Literal["image", "file"], where: str) -> Media:
    source = object_of(block.get("source"), f"{where}.source")
    inner = f"{where}.source"
    match source.get("type"):
        case "url":
            return Media.from_url(kind, text_of(source, "url", inner))
        case "file":
            return Media(kind=kind, address=f"id:{text_of(source, 'file_id', inner)}")
        case "base64" | None:
            return Media.from_base64(kind, text_of(source, "data", inner))
        case "text" | "content" if kind == "file":
            said = json.dumps(wire.without_cache_control({**source}), sort_keys=True)
            return Media(kind=kind, address=f"sha256:{hashlib.sha256(said.encode()).hexdigest()}")
        case other:
            raise UnknownItem(str(other), known="sources of type base64, url, file, text or content", param=inner)


def _blocks(content: JsonValue, where: str) -> list[tuple[str, dict[str, JsonValue]]]:
    """Each block with its place; a string is one text block, null is none."""
    if content is None or isinstance(content, str):
        return [(where, {"type": "text", "text": content or ""})]
    if not isinstance(content, list):
        raise wire.malformed(content, where, "a string or a list of blocks")
    return [(f"{where}[{at}]", object_of(block, f"{where}[{at}]")) for at, block in enumerate(content)]
