"""What stops a server from starting: each refusal names the value and the remedy. Real serving is in test_server.py."""

import asyncio
import itertools
import logging.handlers
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from sqlalchemy import Engine
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs

from engine.access import Access
from engine.capture import CaptureFailed
from engine.errors import EngineMismatch
from engine.gateway import Gateway
from engine.journal import Journal
from engine.plugin import Plugin, install
from engine.rollouts import Service, router
from engine.settings import Settings
from engine.worker import Worker, _logprobs_of, check
from store.database import write
from store.errors import MediaUnavailable, SchemaMismatch
from store.media import open_media


class Renderer:
    tokenizer = SimpleNamespace()

    async def render_chat_async(
        self, conversations: Any, chat_params: Any, tok_params: Any = None, *, prompt_extras: Any = None,
        skip_mm_cache: bool = False,
    ) -> None: ...  # fmt: skip


class AnEngine:
    """The two signatures that turnlog wraps, and the settings it looks at; nothing of it runs."""

    def __init__(self, **settings: Any) -> None:
        self.renderer = Renderer()
        self.model_config = SimpleNamespace(**({"logprobs_mode": "processed_logprobs"} | settings))

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0) -> None: ...


def test_an_engine_that_fits_is_accepted() -> None:
    check(AnEngine())


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
def test_log_probabilities_other_than_those_sampled_from_are_refused_with_the_flag(mode: str) -> None:
    with pytest.raises(EngineMismatch, match=rf"{mode}.*--logprobs-mode processed_logprobs"):
        check(AnEngine(logprobs_mode=mode))


def test_another_signature_is_refused_by_name() -> None:
    engine = AnEngine()
    engine.generate = lambda request: None  # type: ignore[assignment,method-assign]
    with pytest.raises(EngineMismatch, match=r"engine\.generate.*request.*vllm>=0\.28"):
        check(engine)
    engine = AnEngine()
    engine.renderer.render_chat_async = lambda messages: None  # type: ignore[assignment,method-assign]
    with pytest.raises(EngineMismatch, match=r"render_chat_async.*messages.*vllm>=0\.28"):
        check(engine)


def test_a_server_without_a_tokenizer_is_refused() -> None:
    engine = AnEngine()
    engine.renderer.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(EngineMismatch, match="--skip-tokenizer-init"):
        check(engine)


def test_the_installed_vllm_has_the_signatures_that_are_wrapped() -> None:
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AnEngine()
    engine.renderer.render_chat_async = BaseRenderer.render_chat_async.__get__(object())  # type: ignore[method-assign]
    engine.generate = AsyncLLM.generate.__get__(object())  # type: ignore[method-assign]
    check(engine)


def test_log_probabilities_of_other_tokens_than_were_sampled_are_no_true_event() -> None:
    found = FlatLogprobs()
    found.append_fast([5], [-0.5], itertools.chain([1]), ["a"])
    found.append_fast([6, 7], [-1.5, -0.1], itertools.chain([2, 1]), ["b", "c"])  # the sampled token, then the best one
    assert _logprobs_of([5, 6], found) == [-0.5, -1.5]
    assert _logprobs_of([5, 6], list(found)) == [-0.5, -1.5]
    with pytest.raises(CaptureFailed, match="other tokens than it sampled"):
        _logprobs_of([5, 7], found)
    with pytest.raises(CaptureFailed, match="other tokens than it sampled"):
        _logprobs_of([5], found)


def test_what_a_template_refuses_at_start_up_alarms_nobody(sqlite_database: Engine, tmp_path: Path) -> None:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.hf import HfRenderer
    from vllm.renderers.params import ChatParams

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = (Path(__file__).parent / "templates" / "gemma.jinja").read_text()
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(architectures=["LlamaForCausalLM"], hidden_size=32, num_attention_heads=1).save_pretrained(tmp_path)
    arguments = EngineArgs(model=str(tmp_path), logprobs_mode="processed_logprobs", dtype="float32")
    engine = AnEngine()
    engine.model_config = arguments.create_model_config()
    engine.renderer = HfRenderer(VllmConfig(model_config=engine.model_config), tokenizer)
    stock = engine.renderer.render_chat_async
    warned = logging.handlers.BufferingHandler(1000)
    logger = logging.getLogger("vllm.renderers.hf")
    logger.addHandler(warned)
    journal = Journal(sqlite_database, worker="w")
    try:
        paths = asyncio.run(Worker(engine, journal, open_media("memory://worker", ""), reasoning="strict").install())
        assert paths["system, then user"].startswith("cannot_splice:template:")
        assert warned.buffer == []
        with pytest.raises(VLLMValidationError):
            asyncio.run(stock([[{"role": "system", "content": "Hi"}]], ChatParams()))
        assert "rejected the request" in warned.buffer[0].getMessage()
    finally:
        logger.removeHandler(warned)
        journal.close()


def start(settings: Settings) -> None:
    asyncio.run(install(FastAPI(), AnEngine(), settings, worker="w"))


def test_a_missing_schema_stops_the_start_and_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch, match="turnlog db upgrade"):
        start(Settings(url=f"sqlite:///{tmp_path}/new.db"))


def test_a_newer_schema_stops_the_start(sqlite_database: Engine) -> None:
    with write(sqlite_database) as connection:
        connection.exec_driver_sql("update alembic_version set version_num = '9999'")
    with pytest.raises(SchemaMismatch, match="9999"):
        start(Settings(url=str(sqlite_database.url)))


def test_a_place_for_media_that_cannot_be_written_stops_the_start(sqlite_database: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MediaUnavailable, match="TURNLOG_MEDIA"):
        start(Settings(url=str(sqlite_database.url), media=f"{tmp_path}/file/media"))


def test_the_rust_frontend_is_refused(sqlite_database: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(EngineMismatch, match="VLLM_USE_RUST_FRONTEND"):
        start(Settings(url=str(sqlite_database.url)))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TURNLOG_REASONING", "sometimes"),
        ("TURNLOG_REQUIRE_OPEN", "perhaps"),
        ("TURNLOG_SPOOL_LIMIT", "plenty"),
        ("TURNLOG_SPOOL_LIMIT", "-1GiB"),
        ("TURNLOG_SPOOL_LIMIT", "4"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(variable: str, value: str) -> None:
    with pytest.raises(EngineMismatch, match=rf"{variable}.*{value}"):
        Settings.from_environment({variable: value})


def test_a_limit_is_a_size_as_people_write_it() -> None:
    sizes = {"500MB": 500_000_000, "1.5GiB": 3 << 29, "2097152": 2 << 20, "": 4 << 30}
    assert {size: Settings.from_environment({"TURNLOG_SPOOL_LIMIT": size}).spool_limit for size in sizes} == sizes


def test_an_unset_or_empty_variable_is_the_default() -> None:
    assert Settings.from_environment({"TURNLOG_REASONING": "", "OTHER": "x"}) == Settings()


def test_the_plug_in_has_the_shape_that_vllm_asks_for() -> None:
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    assert isinstance(Plugin(), EndpointPlugin)
    app = FastAPI()
    Plugin().attach_router(app)
    paths = set(app.openapi()["paths"])
    assert {"/rollouts", "/rollouts/{rollout_id}", "/rollouts/{rollout_id}/outcome", "/policy_version"} <= paths


def test_an_api_key_guards_rollouts_as_it_guards_the_stock_paths(sqlite_database: Engine) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    async def served(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("served")(scope, receive, send)

    async def ask(path: str, key: str) -> int:
        transport = httpx.ASGITransport(app=gateway)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get(path, headers={"authorization": f"Bearer {key}"})).status_code

    journal = Journal(sqlite_database, worker="w")
    gateway = Gateway(AuthenticationMiddleware(served, tokens=["right"]), journal=journal)
    assert [asyncio.run(ask("/rollouts/r/v1/models", key)) for key in ("wrong", "right")] == [401, 200]
    access = Access(journal, api_keys=["right"])
    app = FastAPI()
    app.include_router(router)
    app.state.turnlog = Service(journal=journal, worker=None, access=access)  # type: ignore[arg-type]
    gateway = Gateway(app, journal=journal, access=access)
    assert [asyncio.run(ask("/rollouts/r", key)) for key in ("wrong", "right")] == [401, 404]
    journal.close()
