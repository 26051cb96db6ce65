"""An engine that makes words up: a core in a process of its own, and what vLLM's front asks of an engine.

Knows requests and random tokens; does not know servers or the log. Law: the core can be killed like a real one, and
the front then says of every request that its engine is dead.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

TASKS = ("generate",)
TICK = 0.004
"""Seconds between two pieces of an answer."""


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

    def __init__(self, config: Any, renderer: Any) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer
        self.input_processor = None
        self.errored = False
        self.dead_error = EngineDeadError()
        tokenizer = renderer.tokenizer
        words = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
        self._words = [token for token, word in words.items() if word.isascii() and word.strip().isalpha()]
        self._link: socket.socket | None = None
        self._told: dict[str, asyncio.Queue[dict[str, Any] | None]] = {}
        self._listening: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Fork the core. Before the first request."""
        self._link, theirs = socket.socketpair()
        if os.fork() == 0:
            self._link.close()
            with suppress(OSError):  # the server is gone
                sample_for_ever(theirs, self._words, self.renderer.tokenizer.eos_token_id)
            os._exit(0)
        theirs.close()
        self._link.setblocking(False)

    @property
    def is_running(self) -> bool:
        return not self.errored

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None:
        assert self._link is not None
        self._link.close()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

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
        assert self._link is not None
        self._link.setblocking(True)
        try:
            self._link.sendall(json.dumps(asked).encode() + b"\n")
        except OSError:
            self._die()
        self._link.setblocking(False)

    async def _listen(self) -> None:
        assert self._link is not None
        loop = asyncio.get_running_loop()
        heard = b""
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
