"""The gateway around a small ASGI application: the log is real, the model is not what these tests are about."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from engine.access import Access
from engine.call import CURRENT, Call
from engine.capture import Admission
from engine.decide import Root
from engine.errors import EngineError, PromptTooLong
from engine.gateway import Gateway
from engine.journal import Journal
from store import log
from store.database import read
from store.events import RolloutOpened

Send = Callable[[dict[str, Any]], Awaitable[None]]
ANSWER = {
    "id": "chatcmpl-1", "object": "chat.completion", "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
}  # fmt: skip
DELTAS = [
    {
        "id": "chatcmpl-1",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
    },
    {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}]},
    {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def journal(database: Engine) -> Iterator[Journal]:
    found = Journal(database, worker="w")
    yield found
    found.close()


def admission(call: Call) -> Admission:
    return Admission(
        rollout_id=call.rollout_id, call_ids=(call.journal.new_id(),), dialect="chat", model="m", items=call.items,
        decision=Root(reason="first_call"), policy="strict", request_hash=b"q" * 32,
        render_hash=b"r" * 32, tools_digest=b"t" * 32,
        parent_chain=None, prompt_ids=[1, 2, 3], worker="w", started_at=call.started_at,
    )  # fmt: skip


async def generate(call: Call) -> None:
    """What the worker does: the intent, then two sampled tokens."""
    await call.admit(admission(call))
    call.generation.prompt_ids = [1, 2, 3]
    call.generation.choice(0).extend([4, 5], [-0.5, -0.25])


async def start(send: Send, status: int = 200, kind: str = "application/json") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]})


async def body(send: Send, data: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def plain(scope: Any, receive: Any, send: Send) -> None:
    call = CURRENT.get()
    assert json.loads((await receive())["body"]) == BODY
    if call is not None:
        await generate(call)
    await start(send)
    await body(send, json.dumps(ANSWER).encode())


async def stream(scope: Any, receive: Any, send: Send) -> None:
    call = CURRENT.get()
    assert call is not None
    await receive()
    await generate(call)
    await start(send, kind="text/event-stream; charset=utf-8")
    for delta in DELTAS:
        await body(send, b"data: " + json.dumps(delta).encode() + b"\n\n", more=True)
    await body(send, b"data: [DONE]\n\n", more=True)
    await body(send, b"")


def ask(app: Any, path: str = "/rollouts/r/v1/chat/completions", **options: Any) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, **({"json": BODY} | options))

    return asyncio.run(post())


@pytest.mark.parametrize(("app", "text"), [(plain, '"Hello"'), (stream, "[DONE]")])
def test_an_answer_is_passed_on_once_its_event_is_in_the_log(journal: Journal, app: Any, text: str) -> None:
    answer = ask(Gateway(app, journal=journal))
    assert answer.status_code == 200
    assert text in answer.text
    with read(journal.database) as connection:
        (call,) = log.calls(connection, "r")
        assert log.pending(connection) == []
    assert (call.response_id, call.finish_reason, call.prompt_len, call.sampled_len) == ("chatcmpl-1", "stop", 3, 2)


def test_a_stream_passes_through_unchanged(journal: Journal) -> None:
    expected = b"".join(b"data: " + json.dumps(delta).encode() + b"\n\n" for delta in DELTAS) + b"data: [DONE]\n\n"
    assert ask(Gateway(stream, journal=journal)).content == expected


def test_a_stream_cut_into_odd_pieces_is_the_same_stream(journal: Journal) -> None:
    async def odd(scope: Any, receive: Any, send: Send) -> None:
        async def in_pieces(message: dict[str, Any]) -> None:
            data = message.get("body", b"")
            if len(data) > 7:
                await send({**message, "body": data[:7], "more_body": True})
                message = {**message, "body": data[7:]}
            await send(message)

        await stream(scope, receive, in_pieces)

    assert (
        ask(Gateway(odd, journal=journal)).content
        == ask(Gateway(stream, journal=journal), "/rollouts/s/v1/chat/completions").content
    )


@pytest.mark.parametrize("app", [plain, stream])
def test_an_answer_whose_event_cannot_be_written_is_not_given(sqlite_database: Engine, app: Any) -> None:
    """The database goes away between the intent and the commit."""

    async def losing_its_log(scope: Any, receive: Any, send: Send) -> None:
        async def after_the_intent(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                journal.close()
            await send(message)

        await app(scope, receive, after_the_intent)

    journal = Journal(sqlite_database, worker="w")
    answer = ask(Gateway(losing_its_log, journal=journal))
    assert "ServiceUnavailableError" in answer.text
    assert "[DONE]" not in answer.text
    if app is plain:
        assert (answer.status_code, "Hello" in answer.text) == (503, False)
        assert int(answer.headers["retry-after"]) > 0
    with read(sqlite_database) as connection:
        assert log.calls(connection, "r") == []
        assert len(log.pending(connection, worker="w")) == 1


def test_what_a_worker_left_open_is_lost_on_its_next_start(sqlite_database: Engine) -> None:
    test_an_answer_whose_event_cannot_be_written_is_not_given(sqlite_database, plain)
    other = Journal(sqlite_database, worker="other")
    assert other.mark_lost() == []
    again = Journal(sqlite_database, worker="w")
    (lost,) = again.mark_lost()
    assert (lost.state, lost.rollout_id, again.mark_lost()) == ("lost", "r", [])
    other.close()
    again.close()


@pytest.mark.parametrize(("status", "state"), [(400, "refused"), (500, "failed")])
def test_an_error_after_the_intent_ends_the_call(journal: Journal, status: int, state: str) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        call = CURRENT.get()
        assert call is not None
        await generate(call)
        await start(send, status)
        await body(send, b'{"error": {"message": "no luck"}}')

    answer = ask(Gateway(app, journal=journal))
    assert (answer.status_code, answer.json()) == (status, {"error": {"message": "no luck"}})
    journal.close()  # ends are written without the client waiting for them
    with read(journal.database) as connection:
        (end,) = log.ends(connection, "r")
    assert (end.state, end.reason) == (state, f"{status}: no luck")


def test_an_error_in_a_stream_ends_the_call_as_failed(journal: Journal) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        call = CURRENT.get()
        assert call is not None
        await generate(call)
        await start(send, kind="text/event-stream")
        await body(send, b'data: {"error": {"message": "the engine died"}}\n\ndata: [DONE]\n\n')

    assert "the engine died" in ask(Gateway(app, journal=journal)).text
    journal.close()  # ends are written without the client waiting for them
    with read(journal.database) as connection:
        (end,) = log.ends(connection, "r")
        assert log.calls(connection, "r") == []
    assert (end.state, end.reason) == ("failed", "the engine died")


@pytest.mark.parametrize("event", [b'{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": null}]}}]}', b"[1]"])
def test_a_stream_that_cannot_be_read_is_not_taken_for_a_whole_answer(journal: Journal, event: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        async def with_one_more(message: dict[str, Any]) -> None:
            if b"Hello" in message.get("body", b""):
                await send({**message, "body": b"data: " + event + b"\n\n" + message["body"]})
            else:
                await send(message)

        await stream(scope, receive, with_one_more)

    told = ask(Gateway(app, journal=journal)).text
    assert "the server's stream cannot be captured" in told
    assert "[DONE]" not in told
    assert "stop" not in told
    journal.close()
    with read(journal.database) as connection:
        assert log.calls(connection, "r") == []
        (end,) = log.ends(connection, "r")
    assert end.state == "failed"


@pytest.mark.parametrize("method", ["OPTIONS", "GET"])
def test_what_a_browser_asks_before_a_call_is_the_servers_to_answer(journal: Journal, method: str) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        assert (scope["path"], CURRENT.get()) == ("/v1/chat/completions", None)
        await start(send, 204)
        await body(send, b"")

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app=Gateway(app, journal=journal))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, "/rollouts/r/v1/chat/completions")

    assert asyncio.run(request()).status_code == 204


def test_a_page_of_another_origin_may_read_why_its_call_was_refused(journal: Journal) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        call = CURRENT.get()
        assert call is not None
        call.refuse(admission(call), PromptTooLong(limit=3, prompt_tokens=4))
        headers = [(b"access-control-allow-origin", b"*"), (b"vary", b"Origin"), (b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await body(send, b"{}")

    answer = ask(Gateway(app, journal=journal))
    assert (answer.status_code, answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (
        400, "*", "Origin",
    )  # fmt: skip
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_application_that_crashes_ends_the_call_as_failed(journal: Journal) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        call = CURRENT.get()
        assert call is not None
        await generate(call)
        raise RuntimeError("boom")

    ask(Gateway(app, journal=journal))
    journal.close()  # ends are written without the client waiting for them
    with read(journal.database) as connection:
        (end,) = log.ends(connection, "r")
    assert (end.state, end.reason) == ("failed", "RuntimeError: boom")


def test_an_answer_that_was_never_rendered_is_refused_rather_than_left_uncaptured(journal: Journal) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await start(send)
        await body(send, json.dumps(ANSWER).encode())

    answer = ask(Gateway(app, journal=journal))
    assert answer.status_code == 500
    assert "without rendering" in answer.json()["error"]["message"]


def test_a_prompt_that_is_not_the_one_decided_on_is_never_stored(journal: Journal) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        call = CURRENT.get()
        assert call is not None
        await generate(call)
        call.generation.prompt_ids = [1, 2, 4]
        await start(send)
        await body(send, json.dumps(ANSWER).encode())

    answer = ask(Gateway(app, journal=journal))
    assert answer.status_code == 500
    journal.close()  # ends are written without the client waiting for them
    with read(journal.database) as connection:
        (end,) = log.ends(connection, "r")
        assert (log.calls(connection, "r"), end.state) == ([], "failed")


def test_a_server_that_requires_it_refuses_rollouts_that_nobody_opened(journal: Journal) -> None:
    access = Access(journal, token="the-operators-token", require_open=True)
    gateway = Gateway(plain, journal=journal, access=access)
    key = {"authorization": "Bearer the-operators-token"}
    answer = ask(gateway, headers=key)
    assert answer.status_code == 404
    assert "POST /rollouts" in answer.json()["error"]["message"]
    asyncio.run(journal.append([RolloutOpened(rollout_id="r", opened_at=1)]))
    assert ask(gateway, headers=key).status_code == 200


def test_traffic_without_a_rollout_is_not_touched(journal: Journal) -> None:
    assert ask(Gateway(plain, journal=journal), "/v1/chat/completions").json() == ANSWER
    with read(journal.database) as connection:
        assert log.rollouts(connection) == []


def test_a_log_that_is_down_is_503_before_anything_runs(sqlite_database: Engine) -> None:
    journal = Journal(sqlite_database, worker="w")
    journal.close()  # takes nothing any more, as when the database is away
    ran: list[bool] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        call = CURRENT.get()
        assert call is not None
        try:
            await call.admit(admission(call))
            ran.append(True)
        except EngineError as error:
            call.error = error
            await start(send, 400)
            await body(send, b"{}")

    answer = ask(Gateway(app, journal=journal))
    assert (answer.status_code, ran) == (503, [])
    assert int(answer.headers["retry-after"]) > 0


def test_lifespan_passes_through_and_closes_the_journal(sqlite_database: Engine) -> None:
    journal = Journal(sqlite_database, worker="w")
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        seen.append(scope["type"])

    asyncio.run(Gateway(app, journal=journal)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
    with pytest.raises(Exception, match="closed"):
        asyncio.run(journal.append([RolloutOpened(rollout_id="r", opened_at=1)]))
