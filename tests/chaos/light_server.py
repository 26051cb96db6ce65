"""A model server that starts in 0.2 seconds: vLLM's front with turnlog on, around an engine that makes words up.

Knows how to build vLLM's application once and to fork it; everything in it is the real thing (routes, renderer,
dialects, plug-in, gateway, worker, journal, writer), but for the engine (`light_engine`). Law: a server lives and dies
alone, and a new one begins where the first one began, with no call in memory.

Run as a program it forks one server for each line on its standard input, `{"port": 1, "log": "FILE", "environment":
{...}}`, and answers with the server's process id.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before vLLM reads them
    os.environ |= {
        "VLLM_PLUGINS": "turnlog",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",  # it is forked
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }

import httpx
from fastapi import FastAPI
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import create_server_socket, serve_http
from vllm.plugins.endpoint_plugins.interface import init_endpoint_plugins_state
from vllm.renderers.registry import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser

from store import migrate
from store.database import open_database
from tests.chaos.clients import Agent, Told
from tests.chaos.light_engine import TASKS, LightEngine

BIND_SECONDS = 30
REHEARSING = 8
"""Agents of the rehearsal: enough that each dialect is spoken, streamed and not."""
TOKEN = "the-operator-of-a-rehearsal"


class Rehearsed:
    """Renders chats as the renderer does, and knows by heart what it rendered in the rehearsal.

    Each start proves the same template with the same five hundred conversations. Nothing that an agent says is one of
    them.
    """

    def __init__(self, renderer: Any) -> None:
        self._render = renderer.render_chat_async
        self._known: dict[str, Any] = {}
        self.rehearsing = True

    async def render_chat_async(
        self,
        conversations: Any,
        chat_params: Any,
        tok_params: Any = None,
        prompt_extras: Any = None,
        skip_mm_cache: bool = False,
    ) -> Any:
        options = {"prompt_extras": prompt_extras, "skip_mm_cache": skip_mm_cache}
        asked = repr((conversations, chat_params, tok_params, options))
        if (found := self._known.get(asked)) is None:
            found = await self._render(conversations, chat_params, tok_params, **options)
            if self.rehearsing:
                self._known[asked] = found
        rendered, prompts = found
        return rendered, [dict(prompt) for prompt in prompts]


class Nursery:
    """Builds once what every server has."""

    def __init__(self, model: str) -> None:
        parser = make_arg_parser(FlexibleArgumentParser())
        flags = ("--served-model-name", "demo", "--max-model-len", "8192", "--logprobs-mode", "processed_logprobs")
        self._args = parser.parse_args(
            ["--model", model, *flags, "--enforce-eager", "--disable-log-stats", "--uvicorn-log-level", "warning"]
        )
        self._args.model, self._args.host, self._args.port = model, "127.0.0.1", 0
        config = AsyncEngineArgs.from_cli_args(self._args).create_engine_config()
        renderer = renderer_from_config(config)
        rehearsed = Rehearsed(renderer)
        renderer.render_chat_async = rehearsed.render_chat_async
        asyncio.run(self._rehearse(LightEngine(config, renderer)))
        rehearsed.rehearsing = False
        renderer.render_chat_async = rehearsed.render_chat_async  # where the plug-in has put its own
        renderer._executor.shutdown(wait=True)
        renderer._executor.replace_inner()
        self._engine = LightEngine(config, renderer)
        self._app = asyncio.run(self._build(self._engine))
        for thread in {*threading.enumerate()} - {threading.main_thread()}:
            thread.join(timeout=BIND_SECONDS)  # those of the rehearsal, which have been told to end
        assert threading.active_count() == 1, f"no thread lives on in a fork: {threading.enumerate()}"
        gc.collect()
        gc.freeze()  # what is here already is looked at no more in any server

    async def _build(self, engine: LightEngine) -> FastAPI:
        """vLLM's application, ready but for its plug-in, whose state is each server's own."""
        app = build_app(self._args, TASKS, engine.model_config)
        plugins, app.state.endpoint_plugins = app.state.endpoint_plugins, []
        await init_app_state(engine, app.state, self._args, TASKS)  # type: ignore[arg-type]
        app.state.endpoint_plugins = plugins
        return app

    async def _rehearse(self, engine: LightEngine) -> None:
        """Serve a few agents on a log of its own: what first use imports, compiles and proves is then there already."""
        app = await self._build(engine)
        engine.start()
        with tempfile.TemporaryDirectory() as folder, Path(folder, "notes").open("w") as notes:
            environment = {
                "TURNLOG_URL": f"sqlite:///{folder}/turnlog.db", "TURNLOG_TOKEN": TOKEN, "TURNLOG_REQUIRE_OPEN": "1",
            }  # fmt: skip
            os.environ |= environment
            migrate.upgrade(database := open_database())
            await init_endpoint_plugins_state(engine, app.state, self._args)  # type: ignore[arg-type]
            setup = {"address": "http://rehearsal", "token": TOKEN, "seed": "rehearsal", "model": "demo"}
            told = Told(notes=notes, in_flight=bytearray(1))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
                agents = [Agent(number, setup, told) for number in range(REHEARSING)]
                await asyncio.gather(*(agent.rollout(client, f"rehearsal-{at}") for at, agent in enumerate(agents)))
            journal = app.state.turnlog.journal
            journal.close()
            journal.database.dispose()
            database.dispose()
            for name in environment:
                del os.environ[name]
        engine.shutdown()

    def bear(self, port: int, log: str, environment: dict[str, str]) -> int:
        """A new server's process id."""
        if (born := os.fork()) != 0:
            return born
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= environment
        self._engine.start()
        try:
            asyncio.run(self._serve(port))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    async def _serve(self, port: int) -> None:
        """What vLLM does with an application that is built."""
        give_up = time.monotonic() + BIND_SECONDS
        while True:
            try:
                listening = create_server_socket(("127.0.0.1", port), reuse_port=False)
                break
            except OSError:  # a client that knocked while nobody was there can hold the port for a moment
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(0.05)
        self._args.port = port
        await init_endpoint_plugins_state(self._engine, self._app.state, self._args)  # type: ignore[arg-type]
        serving = await serve_http(
            self._app, listening, host="127.0.0.1", port=port, log_level=self._args.uvicorn_log_level,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            h11_max_incomplete_event_size=self._args.h11_max_incomplete_event_size,
            h11_max_header_count=self._args.h11_max_header_count,
        )  # fmt: skip
        try:
            await serving
        finally:
            listening.close()


def main() -> None:
    """Fork servers for as long as somebody asks for them."""
    nursery = Nursery(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(json.dumps({"ready": envs.VLLM_PLUGINS}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"pid": nursery.bear(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
