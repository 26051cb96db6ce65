"""The door, in process around the real rollout API, and the real server with --require-open: who may reach what."""

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from openai import OpenAI
from sqlalchemy import Engine, event
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from engine.access import Access, hide_secrets
from engine.errors import EngineMismatch
from engine.gateway import Gateway
from engine.journal import Journal
from engine.rollouts import Service, router
from engine.settings import Settings
from store import log
from store.database import read
from store.events import RolloutOpened
from turnlog.demo.server import RunningServer, start_server

PAGE = (Path(__file__).parents[2] / "docs" / "access.md").read_text()
TOKEN = "the-token-of-the-operator"
KEY = {"authorization": f"Bearer {TOKEN}"}
ALIEN = "s" * 43
HELLO = {
    "model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4,
    "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip


class Door:
    """The rollout API and stand-ins for the rest of the server, behind the gateway."""

    def __init__(self, database: Engine, *, patience: float = 10, **keys: Any) -> None:
        self.journal = Journal(database, worker="w", patience=patience)
        access = Access(self.journal, **keys)
        app = FastAPI()
        app.include_router(router)
        app.state.turnlog = Service(journal=self.journal, worker=None, access=access)  # type: ignore[arg-type]

        @app.websocket("/v1/realtime")
        async def realtime(socket: WebSocket) -> None:
            await socket.accept()
            await socket.close()

        @app.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS"])
        async def served(path: str, request: Request) -> dict[str, str]:
            return {"served": f"/{path}"}

        self.app = Gateway(app, journal=self.journal, access=access)
        self.scope: dict[str, Any] = {}

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def seen(scope: Any, receive: Any, send: Any) -> None:
            self.scope = scope
            await self.app(scope, receive, send)

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=seen, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def open(self, **fields: Any) -> str:
        answer = self.ask("POST", "/rollouts", json=fields, headers=KEY)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["base_url"].removeprefix("http://test").removesuffix("/v1"))


@pytest.fixture
def guarded(database: Engine) -> Iterator[Door]:
    door = Door(database, token=TOKEN, require_open=True)
    yield door
    door.journal.close()


@pytest.fixture
def doors(sqlite_database: Engine) -> Iterator[Any]:
    made: list[Door] = []

    def make(**keys: Any) -> Door:
        made.append(Door(sqlite_database, **keys))
        return made[-1]

    yield make
    for door in made:
        door.journal.close()


def test_the_log_keeps_the_hash_of_a_secret_and_never_the_secret(guarded: Door) -> None:
    base = guarded.open(rollout_id="r1", task="t")
    secret = base.partition("~")[2]
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", secret)
    with read(guarded.journal.database) as connection:
        opened = log.rollout(connection, "r1")
    assert opened is not None
    assert opened.secret_hash == hashlib.sha256(secret.encode()).digest()
    assert secret not in repr(opened)
    state = guarded.ask("GET", "/rollouts/r1", headers=KEY)
    assert state.json()["rollout"]["task"] == "t"
    assert secret not in state.text
    assert opened.secret_hash.hex() not in state.text


def test_two_rollouts_have_two_secrets_and_each_opens_its_own(guarded: Door) -> None:
    first, second = guarded.open(rollout_id="r1"), guarded.open(rollout_id="r2")
    for base in (first, second):
        answer = guarded.ask("GET", f"{base}/v1/models")
        assert (answer.status_code, answer.json()) == (200, {"served": "/v1/models"})
    crossed = "/rollouts/r2~" + first.partition("~")[2]
    assert guarded.ask("GET", f"{crossed}/v1/models").status_code == 404


def test_a_wrong_secret_and_an_unknown_rollout_have_one_answer(guarded: Door) -> None:
    guarded.open(rollout_id="r1")
    asyncio.run(guarded.journal.append([RolloutOpened(rollout_id="none", opened_at=1)]))
    answers = [guarded.ask("GET", f"/rollouts/{name}~{ALIEN}/v1/models") for name in ("r1", "nobody", "none", "ä b")]
    assert [answer.status_code for answer in answers] == [404] * 4
    words = [answer.text.replace(name, "X") for answer, name in zip(answers[:3], ("r1", "nobody", "none"), strict=True)]
    assert len(set(words)) == 1
    assert all(ALIEN not in answer.text for answer in answers)


def test_the_secret_is_off_the_request_when_the_server_writes_its_access_log(guarded: Door) -> None:
    base = guarded.open(rollout_id="r1")
    secret = base.partition("~")[2]
    for method, path in (("GET", "/v1/models"), ("POST", "/outcome"), ("GET", ""), ("POST", "/v1/chat/completions")):
        guarded.ask(method, base + path)
        assert secret not in str(guarded.scope["path"]) + str(guarded.scope["raw_path"])
        assert guarded.scope["path"] == f"/rollouts/r1{path}"
    for mistyped in (
        f"/rollouts/r2~{secret}/v1/models",
        f"/api{base}/v1/models",
        f"/{base}",
        f"/rollouts/r1%257E{secret}",
    ):
        guarded.ask("GET", mistyped)
        assert secret not in str(guarded.scope["path"]) + str(guarded.scope["raw_path"])


def test_a_secret_is_looked_up_once(guarded: Door) -> None:
    asked: list[str] = []
    base = guarded.open(rollout_id="r1")
    other = Access(guarded.journal, token=TOKEN, require_open=True)  # another server on the same log

    @event.listens_for(guarded.journal.database, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)

    async def knock(access: Access, path: str) -> None:
        await access.admit({"type": "http", "path": path, "headers": []})

    for _ in range(5):
        assert guarded.ask("GET", f"{base}/v1/models").status_code == 200
    assert asked == []
    for _ in range(5):
        asyncio.run(knock(other, f"{base}/v1/models"))
    assert len([each for each in asked if "from rollout" in " ".join(each.lower().split())]) == 1


def test_what_is_remembered_of_secrets_is_bounded(guarded: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.access._KEPT", 2)
    bases = [guarded.open() for _ in range(5)]
    for base in bases:
        assert guarded.ask("GET", f"{base}/v1/models").status_code == 200
    assert len(guarded.app._access._openings) <= 2


def test_who_brings_a_secret_may_open_the_same_rollout_again(guarded: Door) -> None:
    fields = {"rollout_id": "r1", "task": "t", "secret": "x9_-" * 8}
    assert guarded.open(**fields) == guarded.open(**fields) == f"/rollouts/r1~{fields['secret']}"
    for other in ({**fields, "secret": "y" * 32}, {**fields, "task": "u"}, {"rollout_id": "r1", "task": "t"}):
        answer = guarded.ask("POST", "/rollouts", json=other, headers=KEY)
        assert answer.status_code == 409
        assert fields["secret"] not in answer.text


@pytest.mark.parametrize("secret", ["short", "a b" * 20, "s" * 129, "s" * 31 + "~", 5, ["s" * 40]])
def test_a_secret_that_can_be_guessed_or_fits_no_url_is_refused_unseen(guarded: Door, secret: Any) -> None:
    answer = guarded.ask("POST", "/rollouts", json={"rollout_id": "r1", "secret": secret}, headers=KEY)
    assert answer.status_code == 422
    assert json.dumps(secret) not in answer.text.replace("32", "").replace("128", "")


def test_without_keys_all_is_open_but_a_secret_that_is_shown_must_be_right(doors: Any) -> None:
    door = doors()
    base = door.open(rollout_id="r1")
    for path in (f"{base}/v1/models", "/rollouts/r1/v1/models", "/rollouts/unopened/v1/models", "/rollouts/r1"):
        assert door.ask("GET", path).status_code == 200
    assert door.ask("GET", f"/rollouts/r1~{ALIEN}/v1/models").status_code == 404
    assert door.ask("POST", f"{base}/outcome", json={"reward": 1}).status_code == 404
    assert door.ask("POST", "/rollouts/r1/outcome", json={"reward": 1}).status_code == 201


STEERS = [
    "/rollouts", "/rollouts/", "/rollouts/r1", "/rollouts/r1/outcome", "/rollouts/r1/measure", "/policy_version",
    "/update_weights", "/init_weight_transfer_engine", "/update_weight_version", "/pause", "/sleep", "/collective_rpc",
    "/abort_requests", "/inference/v1/abort_requests", "/reset_prefix_cache", "/start_profile", "/scale_elastic_ep",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/fault_tolerance/apply", "/server_info", "/not-yet-invented",
]  # fmt: skip
ASKS = [
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/metrics", "/health", "/ping", "/version",
    "/rollouts/r1/v1/models", "/inference/v1/generate", "/openapi.json",
]  # fmt: skip


def test_a_token_guards_what_steers_and_leaves_the_rest_as_it_was(doors: Any) -> None:
    door = doors(token=TOKEN)
    statuses = {path: door.ask("POST", path).status_code for path in STEERS}
    assert statuses == dict.fromkeys(STEERS, 401)
    assert 401 not in {door.ask("POST", path, headers=KEY).status_code for path in STEERS}
    assert 401 not in {door.ask("POST", path).status_code for path in ASKS}


def test_api_keys_alone_guard_the_rollout_api_as_ever(doors: Any) -> None:
    door = doors(api_keys=["one", "two"])
    for key, status in (("one", 404), ("two", 404), ("three", 401)):
        answer = door.ask("GET", "/rollouts/r9", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
    assert door.ask("GET", "/rollouts/r9").status_code == 401
    assert door.ask("POST", "/policy_version", json={"policy_version": 1}).status_code == 401
    assert door.ask("POST", "/update_weights").status_code == 200  # vLLM guards it or not


def test_with_require_open_nothing_but_health_is_open_without_a_key(guarded: Door) -> None:
    paths = {*STEERS, *ASKS, "/", "/docs", "/v1/chat/completions/", "/HEALTH", "/health/", "/v1/models/health"}
    statuses = {path: guarded.ask("GET", path).status_code for path in paths - {"/health", "/ping"}}
    assert set(statuses.values()) == {401}
    assert [guarded.ask("GET", path).status_code for path in ("/health", "/ping")] == [200, 200]
    assert 401 not in {guarded.ask("GET", path, headers=KEY).status_code for path in paths}


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer  {TOKEN}", f"Bearer {TOKEN[:-1]}"],
)
def test_what_is_not_the_token_is_401_and_is_not_repeated(guarded: Door, header: str) -> None:
    answer = guarded.ask("GET", "/rollouts/r1", headers={"authorization": header})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert TOKEN[:-1] not in answer.text
    assert guarded.ask("GET", "/rollouts/r1", headers={"authorization": f"bEARER {TOKEN}"}).status_code == 404


@pytest.mark.parametrize(("path", "shape"), [("chat/completions", "code"), ("responses", "code"), ("messages", "type")])
def test_a_refusal_speaks_the_dialect_of_its_path(guarded: Door, path: str, shape: str) -> None:
    for url, status, kind in (
        (f"/rollouts/r1/v1/{path}", 401, "auth"),
        (f"/rollouts/r1~{ALIEN}/v1/{path}", 404, "not"),
        (f"/v1/{path}", 401, "auth"),
    ):
        answer = guarded.ask("POST", url, json={})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert shape in error
        assert kind in error["type"].lower()
        assert "POST /rollouts" in error["message"]


def test_the_token_opens_any_opened_rollout(guarded: Door) -> None:
    assert guarded.ask("GET", "/rollouts/r1/v1/models", headers=KEY).status_code == 404
    guarded.open(rollout_id="r1")
    assert guarded.ask("GET", "/rollouts/r1/v1/models", headers=KEY).status_code == 200


def test_a_secret_works_under_a_root_path(guarded: Door) -> None:
    base = guarded.open(rollout_id="r1")

    async def knock(path: str) -> tuple[str, str]:
        scope = {"type": "http", "path": path, "root_path": "/api", "headers": []}
        wanted = await guarded.app._access.admit(scope)
        return wanted.path, str(scope["path"])

    assert asyncio.run(knock(f"/api{base}/v1/models")) == ("/v1/models", "/api/rollouts/r1/v1/models")
    assert asyncio.run(knock(f"{base}/v1/models"))[0] == "/v1/models"
    assert asyncio.run(knock("/api/health"))[0] == "/health"
    for path in ("/api/policy_version", "/apihealth", "/health/api", "/api/api/metrics"):
        with pytest.raises(Exception, match="operator"):
            asyncio.run(knock(path))


def test_a_web_socket_needs_the_token_too(guarded: Door) -> None:
    base = guarded.open(rollout_id="r1")
    client = TestClient(guarded.app)
    for path in ("/v1/realtime", f"{base}/v1/realtime", f"/rollouts/r1~{ALIEN}/v1/realtime", f"{base}/v1/models"):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
            pass
    with client.websocket_connect("/v1/realtime", headers=KEY):
        pass


def test_a_log_that_is_down_lets_nobody_in(sqlite_database: Engine) -> None:
    door = Door(sqlite_database, token=TOKEN, require_open=True)
    base = door.open(rollout_id="r1")
    door.journal.close()
    path = Path(str(sqlite_database.url.database))
    sqlite_database.dispose()
    away = path.rename(path.with_suffix(".away"))
    path.mkdir()  # no file can be opened in its place
    other = Door(sqlite_database, patience=0.1, token=TOKEN, require_open=True)
    try:
        assert other.ask("GET", f"{base}/v1/models").status_code == 503
    finally:
        other.journal.close()
        path.rmdir()
        away.rename(path)


def test_uvicorns_most_talkative_log_hides_secrets_too() -> None:
    record = logging.LogRecord("uvicorn.asgi", 5, "", 1, "scope=%s", ({"path": f"/rollouts/r1~{ALIEN}/v1"},), None)
    assert hide_secrets(record)
    assert record.getMessage() == "scope={'path': '/rollouts/r1~***/v1'}"


def test_a_door_without_a_key_is_refused_at_start_up() -> None:
    with pytest.raises(EngineMismatch, match=r"TURNLOG_TOKEN is not set.*openssl"):
        Settings.from_environment({"TURNLOG_REQUIRE_OPEN": "1"})
    for weak in ("short", "a token with spaces", "tökens-are-not-latin"):
        with pytest.raises(EngineMismatch) as refused:
            Settings.from_environment({"TURNLOG_TOKEN": weak})
        assert weak not in str(refused.value)
    found = Settings.from_environment({"TURNLOG_REQUIRE_OPEN": "1", "TURNLOG_TOKEN": TOKEN})
    assert TOKEN not in repr(found)


@pytest.fixture(scope="module")
def real(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A real server with --require-open, at the level at which it logs most."""
    output = tmp_path_factory.mktemp("guarded") / "server.log"
    running = start_server(
        server.model,
        url=server.database.url.render_as_string(),
        log=output,
        worker="guarded",
        flags=("--require-open", "--uvicorn-log-level", "trace"),
        environment={"TURNLOG_TOKEN": TOKEN},
    )
    yield running, output
    running.kill()


def test_the_page_says_what_a_secret_cannot_do_and_no_secret_is_in_logs_or_metrics(
    real: tuple[RunningServer, Path], record_property: Any
) -> None:
    running, output = real
    lines = re.findall(r"^\| `([A-Z]+) (\S+)`(?: `([\w-]+): (.+?)`)? \| (\d+)", PAGE, re.MULTILINE)
    assert len(lines) > 30
    with httpx.Client(base_url=running.address, timeout=60) as client:
        bases = [
            client.post("/rollouts", json={"rollout_id": name}, headers=KEY).json()["base_url"] for name in ("r1", "r2")
        ]
        secrets = [base.partition("~")[2].removesuffix("/v1") for base in bases]
        assert [len(each) for each in secrets] == [43, 43]
        for method, path, header, value, status in lines:
            headers = {header: value.replace("SECRET", secrets[0])} if header else {}
            url = httpx.URL(running.address + path.replace("SECRET", secrets[0]))
            body = HELLO if method == "POST" else None
            answer = client.request(method, url, json=body, headers=headers)
            assert answer.status_code == int(status), f"{method} {path} {header}: {answer.status_code} {answer.text}"
            assert secrets[0] not in answer.text
            assert TOKEN not in answer.text
        for base in bases:
            streamed = client.post(f"{base}/chat/completions", json={**HELLO, "stream": True})
            assert "[DONE]" in streamed.text
            agent = OpenAI(base_url=base, api_key="none", max_retries=0)
            agent.responses.create(model="demo", input="Hello", max_output_tokens=4)
            message = {**HELLO, "chat_template_kwargs": None}
            assert client.post(f"{base}/messages", json=message).status_code == 200
            assert client.post(f"{base}/chat/completions", content=b"{no").status_code == 400
        metrics = client.get("/metrics", headers=KEY).text
        state = client.get("/rollouts/r1", headers=KEY).text
        assert json.loads(state)["calls"]
    written = output.read_text()
    assert "/rollouts/r1/v1/chat/completions" in written  # the access log is on
    assert "/rollouts/r1~***/v1" in written  # and uvicorn's trace
    for hidden in (*secrets, TOKEN):
        for place in (written, metrics, state):
            assert hidden not in place
    record_property("lines of the page", len(lines))
