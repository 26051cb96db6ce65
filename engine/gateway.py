"""The front of the server: what may come in is captured, and its answer held until its event is durable.

Knows ASGI and the two ways an answer travels (one body, or a stream of events); does not know who may come in
(`engine.access`), vLLM, the decision or the database. Law: the last byte of an answer leaves after the commit. A plain
answer is held whole; a stream flows until every choice has finished, and what follows (the finishing chunk, usage,
`[DONE]`) is held.

`/rollouts/ID/v1/chat/completions` is served as `/v1/chat/completions` and captured for rollout ID, as is a request to
`/v1/chat/completions` with the header `x-turnlog-rollout: ID`; so are `/v1/responses` and `/v1/messages`. Paths that
generate nothing (`engine.dialects.routes.PASSED`) are served too. Everything else passes untouched.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

from pydantic import JsonValue

from engine import tracing
from engine.access import Access, of_request
from engine.call import CURRENT, Call
from engine.dialects import chat
from engine.dialects.routes import dialect_at
from engine.dialects.wire import Dialect, Stream, followed
from engine.errors import BadRequest, EngineError, LogDown, NoToken, PromptTooLong, UnreadableAnswer
from engine.hints import hints
from engine.journal import Journal

Message = MutableMapping[str, Any]  # ASGI's own shape, as are the next three
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Fields = dict[str, JsonValue]

logger = logging.getLogger("turnlog")

CLIENT_LEFT = "the client left before its answer was complete"


class Gateway:
    """ASGI middleware around the model server's whole application."""

    def __init__(self, app: App, *, journal: Journal, access: Access | None = None) -> None:
        self._app = app
        self._journal = journal
        self._access = Access(journal) if access is None else access

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request; capture it when it belongs to a rollout."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            self._journal.close()
            return
        try:
            wanted = await self._access.admit(scope)
        except EngineError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": type(error).__name__})
            else:
                await _answer_error(send, error, dialect_at(of_request(scope).path) or chat)
            return
        dialect = dialect_at(wanted.path)
        if wanted.rollout_id is None:
            with tracing.request(scope["headers"]):
                await self._app(scope, receive, send)
        elif dialect is None or scope["type"] == "websocket" or scope["method"] != "POST":
            await self._app(_moved(scope, wanted.path), receive, send)
        else:
            await self._capture(_moved(scope, wanted.path), receive, send, wanted.rollout_id, dialect)

    async def _capture(self, scope: Message, receive: Receive, send: Send, rollout_id: str, dialect: Dialect) -> None:
        body = await _read(receive)
        if body is None:
            return  # the client left while it was sending
        try:
            with followed():
                request = _request_of(body)
                call = self._call(rollout_id, dialect, request, scope)
                served = dialect.servable(request)
        except EngineError as error:
            await _answer_error(send, error, dialect)
            return
        client = _Client(receive, body if served is request else json.dumps(served).encode())
        answer = _Answer(send, call, dialect, client, streamed=bool(request.get("stream")))
        token = CURRENT.set(call)
        try:
            with tracing.call(scope["headers"], rollout_id) as headers:
                await self._app({**scope, "headers": headers}, client.receive, answer.send)
        except Exception as error:
            if not client.gone:
                call.end("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            CURRENT.reset(token)
            if client.gone:
                call.end("abandoned", CLIENT_LEFT)
            else:
                call.end("failed", "the server stopped before the answer was complete")

    def _call(self, rollout_id: str, dialect: Dialect, request: Fields, scope: Message) -> Call:
        items = dialect.request_items(request)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return Call(
            journal=self._journal,
            rollout_id=rollout_id,
            dialect=dialect.NAME,
            model=request.get("model"),
            choices=dialect.choices(request),
            items=items,
            hints=hints(headers, request, items),
            started_at=self._journal.now(),
        )


class _Client:
    """The client's side of a request: its body, read already, then whether it is still there."""

    def __init__(self, receive: Receive, body: bytes) -> None:
        self._receive = receive
        self._body: bytes | None = body
        self.gone = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
        return message


class _Answer:
    """The server's side: holds back what would complete the answer until the log has it."""

    def __init__(self, send: Send, call: Call, dialect: Dialect, client: _Client, *, streamed: bool) -> None:
        self._streamed = streamed
        self._send = send
        self._call = call
        self._dialect = dialect
        self._client = client
        self._start: Message = {}
        self._held = bytearray()
        self._stream: Stream | None = None
        self._pending = bytearray()
        self._closed = False

    async def send(self, message: Message) -> None:
        if self._closed:
            return
        if message["type"] == "http.response.start":
            self._start = message
            if _is_stream(message):
                self._stream = self._dialect.StreamedResponse()
                await self._send(message)
        elif message["type"] == "http.response.body":
            last = not message.get("more_body", False)
            if self._stream is None:
                self._held += message.get("body", b"")
                if last:
                    await self._finish_plain()
            else:
                await self._flow(self._stream, message.get("body", b""), last=last)
        else:
            await self._send(message)

    async def _finish_plain(self) -> None:
        self._closed = True
        call, status, body = self._call, int(self._start["status"]), bytes(self._held)
        try:
            if call.error is not None:
                raise call.error
            if status >= 400:
                self._end(status, f"{status}: {_message_of(body)}")
            else:
                await self._complete(_response_of(body))
        except EngineError as error:
            self._end(error.status, str(error))
            shared = _sharing(self._start)
            if isinstance(error, PromptTooLong) and self._streamed and self._dialect.REFUSES_IN_STREAM:
                told = self._dialect.StreamedResponse().error_event(error)
                await _answer(self._send, 200, b"text/event-stream", told, *shared)
            else:
                await _answer_error(self._send, error, self._dialect, *shared)
            return
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _end(self, status: int, reason: str) -> None:
        """End a call that has no answer; what the server says to a client that has left is no failure of its own."""
        if self._client.gone:
            self._call.end("abandoned", CLIENT_LEFT)
        else:
            self._call.end("refused" if status < 500 else "failed", reason)

    async def _complete(self, response: Fields) -> None:
        answers = self._dialect.answers(response)
        await self._call.complete(answers, response_id=self._dialect.response_id(response))

    async def _flow(self, stream: Stream, data: bytes, *, last: bool) -> None:
        self._pending += data
        while (end := self._pending.find(b"\n\n")) >= 0:
            event = bytes(self._pending[: end + 2])
            del self._pending[: end + 2]
            if payload := _data_of(event):
                stream.take(payload)
            if stream.ended:
                self._held += event
                await self._finish_stream(stream)
                return
            if stream.completed or stream.failed is not None:
                self._held += event
            else:
                await self._send({"type": "http.response.body", "body": event, "more_body": True})
        if last:
            await self._finish_stream(stream)

    async def _finish_stream(self, stream: Stream) -> None:
        self._closed = True
        try:
            if stream.unreadable:
                raise UnreadableAnswer(str(stream.failed))
            if stream.failed is not None:
                self._end(500, stream.failed)
            elif not stream.completed:
                self._end(500, "the stream ended before every choice had finished")
            else:
                await self._complete(stream.response())
        except EngineError as error:
            self._end(500, str(error))
            self._held[:] = stream.error_event(error)
        await self._send({"type": "http.response.body", "body": bytes(self._held), "more_body": False})


def _moved(scope: Message, path: str) -> Message:
    served = scope.get("root_path", "") + path
    return {**scope, "path": served, "raw_path": served.encode()}


async def _read(receive: Receive) -> bytes | None:
    """The whole request body; None when the client left before its end."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _request_of(body: bytes) -> Fields:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the request body is not JSON ({error}): send a JSON object") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"the request body is a JSON {type(fields).__name__}, not an object: send a JSON object")
    return cast("Fields", fields)


def _is_stream(start: Message) -> bool:
    kind = next((value for name, value in start["headers"] if name.lower() == b"content-type"), b"")
    return int(start["status"]) < 400 and kind.startswith(b"text/event-stream")


def _data_of(event: bytes) -> bytes:
    """The data of one server-sent event; empty for a comment or keep-alive."""
    lines = (line for line in event.splitlines() if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def _response_of(body: bytes) -> Fields:
    fields = json.loads(body) if body else None
    if not isinstance(fields, dict):
        raise UnreadableAnswer(f"the server answered {body[:80]!r}, which is no chat completion: see the server's log")
    return cast("Fields", fields)


def _message_of(body: bytes) -> str:
    """The message of an error body, shortened, for the log's reason."""
    text = body.decode("utf-8", "replace")
    try:
        fields = json.loads(text)
        text = str(fields["error"]["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return text[:500]


def _sharing(start: Message) -> list[tuple[bytes, bytes]]:
    """The headers by which a browser lets a page of another origin read the answer."""
    return [(name, value) for name, value in start["headers"] if name.lower().startswith((b"access-control-", b"vary"))]


async def _answer_error(send: Send, error: EngineError, dialect: Dialect, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps(dialect.error_body(error)).encode()
    more = [*headers]
    if isinstance(error, LogDown):
        more.append((b"retry-after", str(error.retry_after).encode()))
    elif isinstance(error, NoToken):
        more.append((b"www-authenticate", b"Bearer"))
    await _answer(send, error.status, b"application/json", body, *more)


async def _answer(send: Send, status: int, kind: bytes, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
