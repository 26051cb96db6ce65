"""The Responses wire: requests and answers as items, a stream as the answer it amounts to, errors in its shape.

Knows the JSON of `/v1/responses` as vLLM serves it; does not know HTTP, vLLM's classes, or what items are used for.
Law: nothing is skipped silently. What has no canonical form is an error that names it, and a streamed answer gives the
same items as the plain one.

`instructions` are a system message in front, and an input that is a string is one user message. A function call has the
name that the model sees, `namespace__name`; a custom tool's free text is its argument `input`, which is how the model
is shown it. Reasoning is its `content`, else its `summary`, else its `encrypted_content` as an opaque payload; one with
none of these says nothing. Item ids are kept but do not count, nor do `status`, `phase`, `annotations` and `logprobs`.

A request is whole in itself. One that leans on what a server remembers (`previous_response_id`, `conversation`, an item
reference) or is answered behind its back (`background`) is refused, for its items are not all there to see.

>>> [item.role for item in request_items({"instructions": "Be brief.", "input": [
...     {"role": "user", "content": "Sum up 1 and 2."},
...     {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Use the tool."}]},
...     {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"},
...     {"type": "function_call_output", "call_id": "c1", "output": "3"}]})]
['system', 'user', 'reasoning', 'tool_call', 'tool_result']
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from engine.dialects import wire
from engine.dialects.wire import DialectName, Fields, index_of, object_of, objects_of, parts_of, text_of
from engine.errors import BadRequest, EngineError, UnknownItem, UnreadableAnswer
from engine.items import Answer, Item, MessageRole

if TYPE_CHECKING:
    from openai import BaseModel

NAME: DialectName = "responses"
PATH = "/v1/responses"
REFUSES_IN_STREAM = True  # Codex reads `context_length_exceeded` only there

HOSTED = frozenset({
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call", "computer_call_output",
    "file_search_call", "image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_approval_request",
    "mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output", "shell_call",
    "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call",
})  # fmt: skip
"""Items of tools that the server defines: what of them a prompt shows is its own affair."""

_ROLES: dict[str, MessageRole] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}
_ITEMS = (
    "items of type message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output "
    "or of a hosted tool"
)
_REMEMBERED = ("previous_response_id", "conversation", "prompt", "previous_input_messages")
"""Fields by which a server adds to the request what it remembers."""


def request_items(body: Fields) -> tuple[Item, ...]:
    """The request's items in wire order.

    Raises BadRequest for what is malformed or not whole, UnknownItem for an item, role or part without canonical form.
    """
    for name in _REMEMBERED:
        if body.get(name) is not None:
            found = f"{name} is {wire.shown(body[name])}, a rollout keeps no state between calls"
            raise BadRequest(f"{found}: leave it out and send the whole conversation as input", param=name)
    if body.get("background"):
        why = "background is true, an answer is captured with the response it is in: leave it out"
        raise BadRequest(why, param="background")
    instructions = text_of(body, "instructions", "")
    head = [Item.message("system", [instructions])] if instructions else []
    sent = body.get("input")
    if isinstance(sent, str):
        return (*head, Item.message("user", [sent]))
    if not isinstance(sent, list):
        raise wire.malformed(sent, "input", "a string or a list of objects")
    items = (item_of(item, f"input[{position}]") for position, item in enumerate(objects_of(sent, "input")))
    return (*head, *_said(items))


def servable(body: Fields) -> Fields:
    """The request as vLLM takes it.

    It asks for the type of an answer in parts, which OpenCode leaves out, and refuses reasoning with an encrypted
    payload, also where the text stands beside it, as Codex sends it.

    >>> servable({"input": [{"role": "assistant", "content": []}]})
    {'input': [{'role': 'assistant', 'content': [], 'type': 'message'}]}
    """
    sent = body.get("input")
    if not isinstance(sent, list):
        return body
    served = [_servable_item(item) if isinstance(item, dict) else item for item in sent]
    return body if served == sent else {**body, "input": served}


def _servable_item(item: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if item.get("role") == "assistant" and item.get("type") is None and isinstance(item.get("content"), list):
        return {**item, "type": "message"}
    if (
        item.get("type") == "reasoning"
        and item.get("encrypted_content")
        and (item.get("summary") or item.get("content"))
    ):
        return {**item, "encrypted_content": None}
    return item


def choices(body: Fields) -> int:  # noqa: ARG001
    """One: this dialect knows no `n`."""
    return 1


def answers(response: Fields) -> tuple[Answer, ...]:
    """The one answer of a plain response, or of `StreamedResponse.response()`. Raises UnreadableAnswer."""
    try:
        status = text_of(response, "status", "")
        if status not in ("", "completed", "incomplete"):
            raise UnreadableAnswer(f"the server's answer has status {status!r}, only a completed one can be captured")
        output = objects_of(response.get("output"), "output")
        items = tuple(_said(item_of(item, f"output[{position}]") for position, item in enumerate(output)))
        details = object_of(response.get("incomplete_details") or {}, "incomplete_details")
        reason = text_of(details, "reason", "incomplete_details") or status or None
    except BadRequest as error:
        raise UnreadableAnswer(f"the server's answer cannot be captured: {error}") from error
    return (Answer(index=0, items=items, finish_reason=reason),)


def response_id(response: Fields) -> str | None:
    """The id that the harness sees; None when there is none."""
    return text_of(response, "id", "") or None


def error_body(error: EngineError) -> dict[str, JsonValue]:
    """The error in OpenAI's shape.

    >>> from engine.errors import PromptTooLong
    >>> error_body(PromptTooLong(limit=8192, prompt_tokens=9000))["error"]["param"]
    'input'
    """
    return wire.openai_error(error, messages="input")


class StreamedResponse(wire.Stream):
    """Events, and the plain answer that they amount to; it is complete with the event that holds it whole.

    >>> stream = StreamedResponse()
    >>> message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
    >>> stream.feed({"type": "response.output_item.done", "output_index": 0, "item": message})
    >>> stream.completed
    False
    >>> stream.feed({"type": "response.completed", "response": {"status": "completed", "output": []}})
    >>> stream.completed, answers(stream.response())[0].items[0].text
    (True, 'Hello')
    """

    def __init__(self) -> None:
        # The official client's own classes say what an event holds. Imported here: it takes a second, and whoever only
        # reads requests does without.
        from openai.types import responses

        super().__init__()
        self._events: dict[str, type[BaseModel]] = {
            "response.created": responses.ResponseCreatedEvent,
            "response.output_item.done": responses.ResponseOutputItemDoneEvent,
            "response.completed": responses.ResponseCompletedEvent,
            "response.incomplete": responses.ResponseIncompleteEvent,
            "response.failed": responses.ResponseFailedEvent,
            "error": responses.ResponseErrorEvent,
        }
        self._head: dict[str, JsonValue] = {}
        self._items: dict[int, JsonValue] = {}
        self._final: dict[str, JsonValue] | None = None
        self._sequence = 0

    @property
    def completed(self) -> bool:
        """Whether the whole response is here."""
        return self._final is not None

    def feed(self, event: Fields) -> None:
        """Take the next event; those that tell of an item's making add nothing to the item when it is done."""
        kind = event.get("type")
        try:
            if isinstance(number := event.get("sequence_number"), int):
                self._sequence = number + 1
            known = self._events.get(kind) if isinstance(kind, str) else None
            if known is not None:
                self._take(str(kind), _read(known, event))
            elif event.get("error") is not None:  # the shape in which vLLM tells of an error inside any stream
                self._fail(object_of(event["error"], "error"))
        except BadRequest as unreadable:
            self._cannot_read(unreadable)

    def response(self) -> dict[str, JsonValue]:
        """The plain answer's shape, without usage."""
        final = {name: value for name, value in (self._final or self._head).items() if name != "usage"}
        # Some servers leave the items out of the last event, for they have all been sent.
        return {**final, "output": final.get("output") or [item for _, item in sorted(self._items.items())]}

    def error_event(self, error: EngineError) -> bytes:
        """As OpenAI sends it: an `error`, at which most clients raise, then `response.failed`, which Codex reads."""
        shown = object_of(error_body(error)["error"], "error")
        code = shown["code"] if isinstance(shown["code"], str) else "server_error"
        told: dict[str, JsonValue] = {"code": code, "message": shown["message"], "param": shown["param"]}
        told_alone: JsonValue = {"type": shown["type"], **told}
        response: JsonValue = {**self._head, "status": "failed", "output": [], "error": told}
        first: dict[str, JsonValue] = {"type": "error", "sequence_number": self._sequence, **told, "error": told_alone}
        last: dict[str, JsonValue] = {
            "type": "response.failed",
            "sequence_number": self._sequence + 1,
            "response": response,
        }
        return wire.sse(first, name="error") + wire.sse(last, name="response.failed")

    def _take(self, kind: str, event: dict[str, JsonValue]) -> None:
        match kind:
            case "response.output_item.done":
                self._items[index_of(event, "", "output_index")] = object_of(event.get("item"), "item")
            case "error":
                self._fail(object_of(event.get("error") or event, "error"))
            case "response.created":
                self._head = object_of(event.get("response"), "response")
            case _:
                response = object_of(event.get("response"), "response")
                self.ended = True
                if kind == "response.failed":
                    self._fail(object_of(response.get("error") or {}, "response.error"))
                else:
                    self._final = response

    def _fail(self, error: Fields) -> None:
        self.failed = text_of(error, "message", "error") or "the server says that the response failed"


def _read(known: type[BaseModel], event: Fields) -> dict[str, JsonValue]:
    """The event as the official client reads it: what it does not know is kept, what is missing stays missing."""
    return cast("dict[str, JsonValue]", known.construct(None, **event).to_dict(mode="python", warnings=False))


def item_of(item: Fields, where: str) -> Item:
    """One item of an input or an output; `where` names its place. Raises BadRequest, UnknownItem."""
    kind = item.get("type") or ("message" if "role" in item else None)
    item_id = text_of(item, "id", where) or None
    match kind:
        case "message":
            return _message(item, where, item_id)
        case "reasoning":
            return _reasoning(item, where, item_id)
        case "function_call":
            name, namespace = _name(item, where), text_of(item, "namespace", where)
            shown = f"{namespace}__{name}" if namespace else name
            return Item.tool_call(text_of(item, "call_id", where), shown, item.get("arguments"), item_id=item_id)
        case "custom_tool_call":
            arguments: JsonValue = {"input": text_of(item, "input", where)}
            return Item.tool_call(text_of(item, "call_id", where), _name(item, where), arguments, item_id=item_id)
        case "function_call_output" | "custom_tool_call_output":
            return Item.tool_result(text_of(item, "call_id", where), parts_of(item.get("output"), f"{where}.output"))
        case "item_reference" | None if item_id is not None:
            why = f"{where} refers to item {item_id!r}, a rollout keeps no state between calls: send the item itself"
            raise BadRequest(why, param=where)
        case None:
            raise BadRequest(f"{where} has neither type nor role, every item needs one: send {_ITEMS}", param=where)
        case str() if kind in HOSTED:
            return Item.hosted(kind, item, item_id=item_id)
        case other:
            raise UnknownItem(str(other), known=_ITEMS, param=f"{where}.type")


def _message(item: Fields, where: str, item_id: str | None) -> Item:
    said = text_of(item, "role", where)
    role = _ROLES.get(said)
    if role is None:
        raise UnknownItem(said, known=f"a message of role {', '.join(_ROLES)}", param=f"{where}.role")
    return Item.message(role, parts_of(item.get("content"), f"{where}.content"), item_id=item_id)


def _reasoning(item: Fields, where: str, item_id: str | None) -> Item:
    for name in ("content", "summary"):
        blocks = objects_of(item.get(name) or [], f"{where}.{name}")
        text = "".join(text_of(block, "text", f"{where}.{name}[{at}]") for at, block in enumerate(blocks))
        if text:
            return Item.reasoning(text, item_id=item_id)
    payload = text_of(item, "encrypted_content", where)
    return Item.reasoning(payload, opaque=bool(payload), item_id=item_id)


def _name(item: Fields, where: str) -> str:
    name = text_of(item, "name", where)
    if not name:
        raise BadRequest(f"{where} has no name, every call needs one: send the tool's name", param=where)
    return name


def _said(items: Iterable[Item]) -> list[Item]:
    """Without reasoning that says nothing; a turn of the model that is nothing else is an empty message."""
    found: list[Item] = []
    for authored, run in groupby(items, key=lambda item: item.model_authored):
        turn = list(run)
        kept = [item for item in turn if item.kind != "reasoning" or item.text]
        found += kept or ([Item.message("assistant")] if authored else [])
    return found
