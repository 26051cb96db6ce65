"""What does serving through the log cost? Stock vLLM against captured calls, and our own CPU time by length of history.

Two questions, each with a run of its own, on the demo's tiny model:

1. *wall*: rollouts at once, each of 5, 50 or 200 turns, on the stock path and captured into SQLite or PostgreSQL, in
   turn on one server. An *agent* answers 32 tokens and is told some 200 tokens of what its tool did; *short* answers 8
   tokens and is told 20, so that nothing hides what a call costs. Only ratios of one row are to be read; the machine is
   noisy. The tiny model answers in milliseconds, so what is added to a call weighs as much here as it ever can. Beside
   the time stands the CPU time of the server's processes per call, which other work on the machine disturbs less. The
   engine has a core of its own, as it has an accelerator elsewhere, and all else shares the others: where they share
   every core, how its waiting (which spins) falls in with theirs decides a run more than what is measured. At 5 turns
   *asked* is the stock path whose client asks for log-probabilities, without which nothing can be trained.
2. *own*: the CPU time (all threads) of one call at turn 5, 50, 200 and 500, with vLLM's real renderer and tokenizer and
   an engine that answers at once. Reading and hashing the request itself, which grows with what the harness sends, is
   told apart from all the rest: decision, splice, event and both commits.

    python benchmarks/serving.py                         # everything: an hour and more
    python benchmarks/serving.py own                     # a part
    python benchmarks/serving.py wall agent 50 sqlite    # some rows of a part
    python benchmarks/serving.py own --quick             # two turns: does it run?

What is measured replaces those figures in the file beside this script and leaves the others.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import psutil
from figures import keep, kept, options
from servers import postgres

from store import migrate
from store.database import open_database
from store.media import open_media
from turnlog.demo.model import build_model
from turnlog.demo.server import ENVIRONMENT, NAME, RunningServer, start_server

TURNS = (5, 50, 200)
REPEATED = {5: 7}
"""Runs whose median counts, where one is short enough for chance to matter."""
WARM_TURNS = 4
"""Before any clock starts, on both paths: a captured call proves its template's shape once, and stock vLLM also has
things that only its first requests pay for."""
LOGS = ("sqlite", "postgresql")
CORES = sorted(os.sched_getaffinity(0))
"""Where this may run; the engine's processes get the first one for themselves."""
OTHERS = CORES[1:] or CORES
POINTS, QUICK = (5, 50, 200, 500), (1, 2)
REPEATS = 40
CONTEXT = 131072
"""Tokens; eight times what the demo's model says of itself, which is as good at it as at any other length."""
SAID = "Go on, and say what comes next in this story of ours, please."


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one turn is."""

    sampled: int
    said: int
    """Lines of what the agent is told, about 20 tokens each."""
    rollouts: int = 16
    rollouts_of_200: int = 16
    """Fewer at 200 turns, where attending to so long a history makes one run take many minutes."""


Way = Literal["stock", "captured", "asked"]
PATHS: tuple[Way, ...] = ("stock", "captured", "asked")
CASES = {"short": Case(sampled=8, said=1, rollouts_of_200=8), "agent": Case(sampled=32, said=10, rollouts_of_200=2)}


def main() -> None:
    """Measure, print and keep the figures beside this script."""
    parser = options(__doc__)
    rows_of_wall = (*CASES, *map(str, TURNS), *LOGS)
    parser.add_argument(
        "words", nargs="*", help=f"own or wall, and for wall of {', '.join(rows_of_wall)}; default: all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="own at two turns; nothing is kept unless --out says where"
    )
    parser.add_argument("--out", type=Path, help="where the figures go; default: beside this script")
    asked = parser.parse_args()
    words: set[str] = {*asked.words}
    if unknown := words - {"own", "wall", *rows_of_wall}:
        parser.error(
            f"nothing is called {', '.join(sorted(unknown))}: name some of own, wall, {', '.join(rows_of_wall)}"
        )
    if asked.quick and words != {"own"}:
        parser.error("--quick is for `own` alone")
    wanted = words & {"own", "wall"} or {"own", "wall"}
    file = asked.out or (None if asked.quick else Path(__file__).with_suffix(".json"))
    found = kept(file)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = build_model(folder / "model")
        if "own" in wanted:
            import uvloop  # as vLLM's own server runs

            found["own"] = uvloop.run(own(model, folder, QUICK if asked.quick else POINTS))
        if "wall" in wanted:
            rows = {(row["case"], row["log"], row["turns"]): row for row in found.get("wall", [])}
            for row in wall(model, folder, words):
                rows[row["case"], row["log"], row["turns"]] = row
                found["wall"] = [rows[key] for key in sorted(rows)]
                keep(file, found)
    keep(file, found)


def wall(model: Path, folder: Path, words: set[str]) -> Iterator[dict[str, Any]]:
    """Seconds for all turns of all rollouts, stock and captured, by case, turns and database."""
    for log in LOGS if words.isdisjoint(LOGS) else words.intersection(LOGS):
        with serving(model, folder, log) as server:
            for case in CASES.values():
                for path in PATHS:
                    everyone(server, case, WARM_TURNS, path, name="warm")
            for name in CASES if words.isdisjoint(CASES) else words.intersection(CASES):
                for turns in (each for each in TURNS if words.isdisjoint(map(str, TURNS)) or str(each) in words):
                    row = {"case": name, "log": log, "turns": turns, **compare(server, CASES[name], turns)}
                    print(row, flush=True)
                    yield row


def compare(server: RunningServer, case: Case, turns: int) -> dict[str, Any]:
    """The paths in turn, which one goes first changing; medians of time and CPU time."""
    paths = PATHS if turns in REPEATED else PATHS[:2]
    times: dict[Way, list[float]] = {path: [] for path in paths}
    work: dict[Way, list[float]] = {path: [] for path in paths}
    steps: dict[Way, list[float]] = {path: [] for path in paths}
    calls = turns * (case.rollouts if turns < 200 else case.rollouts_of_200)
    for repeat in range(REPEATED.get(turns, 1)):
        for path in paths if repeat % 2 == 0 else paths[::-1]:
            worked, stepped, began = cpu_seconds(server), engine_steps(server), time.monotonic()
            everyone(server, case, turns, path, name=f"{turns}-{repeat}")
            times[path].append(time.monotonic() - began)
            work[path].append(1000 * (cpu_seconds(server) - worked) / calls)
            steps[path].append((engine_steps(server) - stepped) / calls)
    seconds = {path: statistics.median(each) for path, each in times.items()}
    return {
        "rollouts": calls // turns,
        "repeats": len(times["captured"]),
        **{f"{path}_s": round(each, 2) for path, each in seconds.items()},
        "ratio": round(seconds["captured"] / seconds["stock"], 3),
        **({"ratio_to_asked": round(seconds["captured"] / seconds["asked"], 3)} if "asked" in seconds else {}),
        "spread": {path: [round(min(each), 2), round(max(each), 2)] for path, each in times.items()},
        **{f"{path}_cpu_ms": round(statistics.median(each), 1) for path, each in work.items()},
        **{f"{path}_steps": round(statistics.median(each), 2) for path, each in steps.items()},
    }


def cpu_seconds(server: RunningServer) -> float:
    """CPU time that the server's processes have taken since they started."""
    first = psutil.Process(server.process.pid)
    return sum(sum(each.cpu_times()[:2]) for each in (first, *first.children(recursive=True)))


def engine_steps(server: RunningServer) -> float:
    """Steps of the engine since it started: how many calls happen to share a step explains much of the wall time."""
    lines = httpx.get(f"{server.address}/metrics").text.splitlines()
    (count,) = (line.split()[-1] for line in lines if line.startswith("vllm:iteration_tokens_total_count"))
    return float(count)


def everyone(server: RunningServer, case: Case, turns: int, path: Way, *, name: str) -> None:
    """All rollouts at once, each on a connection of its own."""
    rollouts = case.rollouts if turns < 200 else case.rollouts_of_200

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.address, timeout=300) as client:
            # The text differs by rollout, so that no two share a cached prefix.
            told = [f"{name}-{case.sampled}-{path}-{number}" for number in range(rollouts)]
            await asyncio.gather(*(rollout(client, case, turns, each, path) for each in told))

    asyncio.run(run())


async def rollout(client: httpx.AsyncClient, case: Case, turns: int, name: str, path: Way) -> None:
    """One agent's turns."""
    base = f"/rollouts/{name}" if path == "captured" else ""
    messages: list[dict[str, str]] = [{"role": "user", "content": f"This is story {name}. {SAID}"}]
    for turn in range(turns):
        body = {
            "model": NAME,
            "messages": messages,
            "max_tokens": case.sampled,
            "ignore_eos": True,
            "chat_template_kwargs": {"enable_thinking": False},
            **({"logprobs": True, "top_logprobs": 0} if path == "asked" else {}),
        }
        answer = await client.post(f"{base}/v1/chat/completions", json=body)
        answer.raise_for_status()
        content = answer.json()["choices"][0]["message"]["content"] or ""
        lines = [f"src/module_{turn}.py:{10 * line}: in step {line}, {SAID}" for line in range(case.said)]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "\n".join(lines)}]


@contextmanager
def serving(model: Path, folder: Path, log: str) -> Iterator[RunningServer]:
    """The demo's server, writing to a fresh database of that kind."""
    with postgresql() if log == "postgresql" else sqlite(folder) as url:
        database = open_database(url)
        migrate.upgrade(database)
        database.dispose()
        server = start_server(
            model,
            url=url,
            log=folder / f"{log}.log",
            flags=(
                *("--max-model-len", str(CONTEXT)),
                *("--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT})),
                *("--kv-cache-memory-bytes", str(2**30)),
            ),
            environment={"TURNLOG_MEDIA": str(folder / "media")},
        )
        try:
            give_a_core(server)
            yield server
        finally:
            server.stop()
            os.sched_setaffinity(0, CORES)


def give_a_core(server: RunningServer) -> None:
    """The first core to the engine's processes alone; the API process and this one keep to the others."""
    first = psutil.Process(server.process.pid)
    for process in (psutil.Process(), first, *first.children(recursive=True)):
        engine = any("VLLM" in word for word in process.cmdline()[:1])
        for thread in process.threads():
            os.sched_setaffinity(thread.id, CORES[:1] if engine else OTHERS)


@contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    """URL of a SQLite file."""
    yield f"sqlite:///{folder}/wall.db"


@contextmanager
def postgresql() -> Iterator[str]:
    """URL of a PostgreSQL server for this run alone, which keeps off the engine's core."""
    os.sched_setaffinity(0, OTHERS)  # which its processes inherit
    with postgres(Path(tempfile.mkdtemp(prefix="turnlog-bench-")) / "data") as server:
        os.sched_setaffinity(0, CORES)
        yield server.url


async def own(model: Path, folder: Path, points: Sequence[int]) -> list[dict[str, Any]]:
    """CPU milliseconds of one captured call by turn, split into reading the request and all the rest."""
    os.environ |= ENVIRONMENT
    logging.disable(logging.WARNING)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers.params import ChatParams
    from vllm.renderers.registry import renderer_from_config

    from engine import decide
    from engine import gateway as front
    from engine.call import CURRENT
    from engine.journal import Journal
    from engine.worker import Worker

    config = AsyncEngineArgs(
        model=str(model), max_model_len=32768, logprobs_mode="processed_logprobs", enforce_eager=True
    ).create_engine_config()
    engine = AnEngine(renderer_from_config(config), config.model_config)
    database = open_database(f"sqlite:///{folder}/own.db")
    migrate.upgrade(database)
    journal = Journal(database, worker="bench")
    await Worker(engine, journal, open_media(f"{folder}/media", ""), reasoning="strict").install()
    gc.freeze()  # as vLLM's server does when it has started
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

    gateway = front.Gateway(app, journal=journal)
    gateway._call = reading.timed(gateway._call)  # type: ignore[method-assign]
    front._request_of = reading.timed(front._request_of)
    decide.candidate_keys = reading.timed(decide.candidate_keys)
    rows: list[dict[str, Any]] = []
    for turn in range(1, max(points) + 1):
        times: list[tuple[float, float]] = []
        for _ in range(REPEATS if turn in points else 1):
            body = json.dumps({"model": "m", "messages": messages}).encode()
            reading.spent = 0.0
            began = time.process_time()
            content = await ask(gateway, body)
            times.append((time.process_time() - began, reading.spent))
        if turn in points:
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

    path = "/rollouts/own/v1/chat/completions"
    await gateway({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    answer = json.loads(sent[-1]["body"])
    return str(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
