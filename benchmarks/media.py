"""What do images cost? Bytes stored per image, and the time that a call with k kept images takes beside vLLM's own.

Two questions, on the tiny Qwen2.5-VL of the tests, with vLLM's real renderer, processor and caches and an engine that
answers at once:

1. *bytes*: rollouts of 5, 20 and 100 turns that show a new image each turn and keep the newest 1 or 10 of them, by
   rewriting their context. What the media store holds, against what storing each call's images with each call would
   take; and a rollout of 50 calls that shows one image throughout, played eight times.
2. *time*: a continuation whose history holds k images of 256 by 256 pixels and that adds none. Wall milliseconds of the
   whole call, of the same messages rendered by stock vLLM, and of what is left; of that, reading and hashing the
   request itself, which grows with what the harness sends.

Run it with `make bench` or `python benchmarks/media.py`; the figures go into the file beside this script.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pictured" / "site"), str(Path(sys.prefix) / "vision")]

import sitecustomize as torchvision_beside_cpu  # noqa: E402
from figures import keep, kept, options  # noqa: E402

from store import migrate  # noqa: E402
from store.database import open_database  # noqa: E402
from store.media import open_media  # noqa: E402
from tests.pictured.model import build_vision_model  # noqa: E402
from tests.pictured.pictures import data_uri, pixels, png  # noqa: E402
from turnlog.demo.server import ENVIRONMENT  # noqa: E402

TURNS = (5, 20, 100)
KEPT = (1, 10)
IMAGES = (1, 10, 50)
REPEATS = 15
SIDE = 256


class AnEngine:
    """vLLM's real renderer, and answers at once."""

    def __init__(self, renderer: Any, model_config: Any) -> None:
        self.renderer = renderer
        self.model_config = model_config
        self.sampling = SimpleNamespace(logprobs=None, output_kind="FINAL_ONLY")
        self.limits = renderer.default_chat_tok_params

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:  # noqa: ARG002
        """Sample the same text, one end of turn at its end."""
        tokenizer = self.renderer.tokenizer
        token_ids = [*tokenizer.encode("I see."), tokenizer.eos_token_id]
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in token_ids]
        choice = SimpleNamespace(index=0, text="I see.", token_ids=token_ids, logprobs=logprobs, finish_reason="stop")
        yield SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[choice])


class Bench:
    """A worker with its log and its media, without a server."""

    def __init__(self, folder: Path, model: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.renderers.registry import renderer_from_config

        from engine.journal import Journal

        config = AsyncEngineArgs(
            model=str(model), max_model_len=32768, logprobs_mode="processed_logprobs", enforce_eager=True,
            dtype="float32",
        ).create_engine_config()  # fmt: skip
        self.engine = AnEngine(renderer_from_config(config), config.model_config)
        self.stock = self.engine.renderer.render_chat_async
        self.database = open_database(f"sqlite:///{folder}/media.db")
        migrate.upgrade(self.database)
        self.journal = Journal(self.database, worker="bench")
        self.media = open_media(f"{folder}/media", "")
        self.reading = 0.0
        """Seconds that the last call's request took to be read and hashed."""

    def timed(self, function: Any) -> Any:
        """The function, its time counted as reading."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.reading += time.perf_counter() - began

        return inner

    async def install(self) -> None:
        """Wrap the engine."""
        from engine import decide
        from engine import gateway as front
        from engine.worker import Worker

        front._request_of = self.timed(front._request_of)
        decide.candidate_keys = self.timed(decide.candidate_keys)
        await Worker(self.engine, self.journal, self.media, reasoning="strict").install()

    async def ask(self, rollout: str, messages: list[dict[str, Any]]) -> float:
        """One captured call; its wall seconds."""
        from vllm.renderers.params import ChatParams

        from engine.call import CURRENT
        from engine.gateway import Gateway

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            assert CURRENT.get() is not None
            params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
            _, (prompt,) = await self.engine.renderer.render_chat_async([messages], params, self.engine.limits)
            text = [output async for output in self.engine.generate(prompt, self.engine.sampling, "r")][-1]
            choice = {"index": 0, "finish_reason": "stop", "message": {"content": text.outputs[0].text}}
            head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
            await send(head)
            body = json.dumps({"id": "a", "choices": [choice]}).encode()
            await send({"type": "http.response.body", "body": body})

        sent: list[dict[str, Any]] = []
        body = json.dumps({"model": "m", "messages": messages}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        path = f"/rollouts/{rollout}/v1/chat/completions"
        gateway = Gateway(app, journal=self.journal)
        gateway._call = self.timed(gateway._call)  # type: ignore[method-assign]
        self.reading = 0.0
        began = time.perf_counter()
        await gateway({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        spent = time.perf_counter() - began
        assert sent[0]["status"] == 200, sent[-1]["body"]
        return spent

    async def rendered(self, messages: list[dict[str, Any]]) -> float:
        """The same messages by stock vLLM; wall seconds."""
        from vllm.renderers.params import ChatParams

        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        began = time.perf_counter()
        await self.stock([messages], params, self.engine.limits)
        return time.perf_counter() - began

    def stored(self) -> tuple[int, int]:
        """Objects and bytes in the media store."""
        found = [each.size for each in self.media.objects()]
        return len(found), sum(found)


def shown(seed: int, text: str = "Look.") -> dict[str, Any]:
    """A user's message with an image."""
    uri = data_uri(png(pixels(seed, height=SIDE, width=SIDE)))
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": text}]
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "I see."}


async def stored_bytes(bench: Bench) -> list[dict[str, Any]]:
    """Bytes stored by rollouts that keep their newest images, and what storing them per call would take."""
    rows: list[dict[str, Any]] = []
    seed = 0
    for newest in KEPT:
        for turns in TURNS:
            before = bench.stored()
            images: list[dict[str, Any]] = []
            per_call = 0
            for _ in range(turns):
                seed += 1
                if len(images) == newest:
                    images.pop(0)  # the context is rewritten
                images.append(shown(seed))
                messages = [each for image in images for each in (image, ANSWER)][:-1]
                await bench.ask(f"bytes-{newest}-{turns}", messages)
                per_call += len(images)
            objects, size = (after - then for after, then in zip(bench.stored(), before, strict=True))
            assert objects == turns
            rows.append(
                {
                    "turns": turns,
                    "kept": newest,
                    "shown": per_call,
                    "objects": objects,
                    "mb": round(size / 1e6, 2),
                    "mb_per_call": round(size / objects * per_call / 1e6, 2),
                    "ratio": round(per_call / objects, 1),
                }
            )
            print(rows[-1], flush=True)
    before = bench.stored()
    image = shown(10_000)
    for rollout in range(8):
        messages = [image]
        for _ in range(50):
            await bench.ask(f"one-{rollout}", messages)
            messages = [*messages, ANSWER, {"role": "user", "content": "Go on."}]
    objects, size = (after - then for after, then in zip(bench.stored(), before, strict=True))
    rows.append({"rollouts": 8, "calls": 400, "objects": objects, "mb": round(size / 1e6, 2)})
    print(rows[-1], flush=True)
    return rows


async def added_time(bench: Bench) -> list[dict[str, Any]]:
    """Milliseconds of a call whose history holds k images, and of stock vLLM's render of the same messages."""
    rows: list[dict[str, Any]] = []
    for count in IMAGES:
        messages: list[dict[str, Any]] = []
        for at in range(count):
            messages += [shown(20_000 + at), ANSWER]
        messages = messages[:-1]
        await bench.ask(f"time-{count}", messages)
        whole: list[float] = []
        reading: list[float] = []
        stock: list[float] = []
        for _ in range(REPEATS + 2):
            messages = [*messages, ANSWER, {"role": "user", "content": "Go on."}]
            gc.collect()
            whole.append(await bench.ask(f"time-{count}", messages))
            reading.append(bench.reading)
            stock.append(await bench.rendered(messages))
        took, alone, read = (1000 * statistics.median(times[2:]) for times in (whole, stock, reading))
        size = len(json.dumps(messages))
        rows.append(
            {
                "kept_images": count,
                "request_mb": round(size / 1e6, 2),
                "call_ms": round(took, 1),
                "stock_render_ms": round(alone, 1),
                "beside_ms": round(took - alone, 1),
                "of_that_reading_ms": round(read, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


async def run(folder: Path) -> dict[str, Any]:
    """Both questions."""
    model = build_vision_model(folder / "model", "qwen2_5_vl")
    bench = Bench(folder, model)
    await bench.install()
    gc.freeze()
    try:
        return {"bytes": await stored_bytes(bench), "time": await added_time(bench)}
    finally:
        bench.journal.close()
        bench.database.dispose()


def main() -> None:
    """Measure, and write the file beside this script."""
    options(__doc__).parse_args()
    assert torchvision_beside_cpu is not None
    os.environ |= ENVIRONMENT
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(run(Path(name)))
    file = Path(__file__).with_suffix(".json")
    keep(file, kept(file) | {"python": platform.python_version()} | found)


if __name__ == "__main__":
    main()
