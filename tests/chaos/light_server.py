"""A model server that starts in a second: vLLM's whole front with turnlog on, around an engine that makes words up.

Knows how to build vLLM's application once and to fork it; everything in it is the real thing (routes, renderer,
dialects, plug-in, gateway, worker, journal, writer), but for the engine's core: a child process that samples at random
and can be killed like a real one. Law: a server lives and dies alone, and a new one begins where the first one began,
with nothing in memory.

Run as a program it forks one server for each line on its standard input, `{"port": 1, "log": "FILE", "environment":
{...}}`, and answers with the server's process id.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
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

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import create_server_socket
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.registry import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

from engine.dialects.routes import DIALECTS

TICK = 0.004
"""Seconds between two pieces of an answer."""
BIND_SECONDS = 30


@dataclass(slots=True, kw_only=True)
class _Generation:
    """What one request still has to sample."""

    left: int
    stops: bool
    random: random.Random = field(default_factory=random.Random)


def sample_for_ever(link: socket.socket, words: list[int], stop: int) -> None:
    """The engine's core: a few random tokens for every request at each tick, until the server is gone."""
    link.setblocking(False)
    running: dict[str, _Generation] = {}
    heard = b""
    while True:
        time.sleep(TICK)
        try:
            while data := link.recv(65536):
                heard += data
            return
        except BlockingIOError:
            pass
        *lines, heard = heard.split(b"\n")
        for line in lines:
            asked = json.loads(line)
            if asked["tokens"] == 0:
                running.pop(asked["id"], None)
            else:
                running[asked["id"]] = _Generation(left=asked["tokens"], stops=random.random() < 0.8)
        for request_id, generation in [*running.items()]:
            many = min(generation.left, generation.random.randint(1, 4))
            generation.left -= many
            tokens = [generation.random.choice(words) for _ in range(many)]
            if generation.left == 0:
                del running[request_id]
                if generation.stops:
                    tokens[-1] = stop
            piece = {"id": request_id, "tokens": tokens, "done": generation.left == 0}
            link.setblocking(True)
            link.sendall(json.dumps(piece).encode() + b"\n")
            link.setblocking(False)


class LightEngine:
    """What vLLM's front asks of an engine."""

    def __init__(self, config: Any, renderer: Any, link: socket.socket) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer
        self.input_processor = None
        self.errored = False
        self.dead_error = EngineDeadError()
        self._link = link
        self._told: dict[str, asyncio.Queue[dict[str, Any] | None]] = {}
        self._listening: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return not self.errored

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None:
        self._link.close()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def do_log_stats(self) -> None: ...

    async def check_health(self) -> None:
        if self.errored:
            raise self.dead_error

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.errored:
            raise self.dead_error
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        told = self._told[request_id] = asyncio.Queue()
        asked = min(sampling_params.max_tokens or 16, 64)
        self._tell({"id": request_id, "tokens": asked})
        delta = sampling_params.output_kind == RequestOutputKind.DELTA
        tokens: list[int] = []
        try:
            while True:
                if (piece := await told.get()) is None:
                    raise self.dead_error
                new = piece["tokens"]
                tokens += new
                if delta or piece["done"]:
                    yield self._output(request_id, prompt, new if delta else tokens, done=piece["done"])
                if piece["done"]:
                    return
        finally:
            del self._told[request_id]
            if not self.errored:
                self._tell({"id": request_id, "tokens": 0})

    def _output(self, request_id: str, prompt: Any, tokens: list[int], *, done: bool) -> RequestOutput:
        tokenizer = self.renderer.tokenizer
        stopped = done and tokens[-1] == tokenizer.eos_token_id
        choice = CompletionOutput(
            index=0,
            text=tokenizer.decode(tokens[:-1] if stopped else tokens),
            token_ids=tokens,
            cumulative_logprob=None,
            logprobs=[{token: Logprob(logprob=-random.random(), rank=1)} for token in tokens],
            finish_reason=("stop" if stopped else "length") if done else None,
        )
        ids = list(prompt["prompt_token_ids"])
        return RequestOutput(request_id, None, ids, None, [choice], finished=done, num_cached_tokens=0)

    def _tell(self, asked: dict[str, Any]) -> None:
        self._link.setblocking(True)
        try:
            self._link.sendall(json.dumps(asked).encode() + b"\n")
        except OSError:
            self._die()
        self._link.setblocking(False)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        heard = b""
        self._link.setblocking(False)
        while True:
            try:
                data = await loop.sock_recv(self._link, 65536)
            except OSError:
                data = b""
            if not data:
                self._die()
                return
            *lines, heard = (heard + data).split(b"\n")
            for line in lines:
                piece = json.loads(line)
                if (told := self._told.get(piece["id"])) is not None:
                    told.put_nowait(piece)

    def _die(self) -> None:
        self.errored = True
        for told in self._told.values():
            told.put_nowait(None)


class Nursery:
    """Builds once what every server has."""

    def __init__(self, model: str) -> None:
        parser = make_arg_parser(FlexibleArgumentParser())
        flags = ("--served-model-name", "demo", "--max-model-len", "8192", "--logprobs-mode", "processed_logprobs")
        self._args = parser.parse_args(
            ["--model", model, *flags, "--enforce-eager", "--disable-log-stats", "--uvicorn-log-level", "warning"]
        )
        self._args.model = model
        self._config = AsyncEngineArgs.from_cli_args(self._args).create_engine_config()
        build_app(self._args, ("generate",), self._config.model_config)  # imports what a server imports
        for dialect in DIALECTS:
            dialect.StreamedResponse()
        tokenizer = renderer_from_config(self._config).tokenizer
        words = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
        self._words = [token for token, word in words.items() if word.isascii() and word.strip().isalpha()]
        self._stop = tokenizer.eos_token_id
        gc.collect()
        gc.freeze()  # what is here already is looked at no more in any server

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
        mine, theirs = socket.socketpair()
        if os.fork() == 0:
            mine.close()
            with suppress(OSError):  # the server is gone
                sample_for_ever(theirs, self._words, self._stop)
            os._exit(0)
        theirs.close()
        try:
            asyncio.run(self._serve(port, mine))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    async def _serve(self, port: int, link: socket.socket) -> None:
        self._args.host, self._args.port = "127.0.0.1", port
        give_up = time.monotonic() + BIND_SECONDS
        while True:
            try:
                listening = create_server_socket(("127.0.0.1", port), reuse_port=False)
                break
            except OSError:  # a client that knocked while nobody was there can hold the port for a moment
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(0.05)
        engine = LightEngine(self._config, renderer_from_config(self._config), link)
        try:
            await (await build_and_serve(engine, f"http://127.0.0.1:{port}", listening, self._args))  # type: ignore[arg-type]
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
