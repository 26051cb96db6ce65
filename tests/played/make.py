"""Make the fixture log `played.db.gz`: `python -m tests.played.make`, about three minutes.

Every recording of `../shared/recordings` is played once, as it was recorded, through the scripted real server
(tests/scripted), with what a training set-up adds: openings, outcomes, some of which declare rewrites, new weights
while rollouts run, a client that asks again, a server that dies in the midst of a call, and two training steps. Made
again only when events say more than they did; it lies at revision 0002, and whoever opens it upgrades it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Engine

from replay.history import Policy
from replay.provenance import record
from replay.run import Run, Steps
from store import log, migrate
from store.database import open_database, read
from tests.scripted import player
from turnlog.demo.model import build_model
from turnlog.demo.server import RunningServer, start_server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDINGS = ROOT / "../shared/recordings"
REVISION = "0002"
SIDE_BY_SIDE = 4
MODELS = ("demo", "stub-model", "claude-sonnet-4-5", "gpt-5.1-codex")
DECLARE = ("claude-code", "pi", "aider", "nemo-gym-aviary", "openhands-sdk-chat")
"""Recordings whose outcome declares every rewrite; Codex counts its windows, the others say nothing."""


def serve(model: Path, url: str, folder: Path) -> RunningServer:
    return start_server(
        model,
        url=url,
        log=folder / "server.log",
        flags=("--reasoning", "restore", "--served-model-name", *MODELS),
        environment={
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "scripted"), os.environ.get("PYTHONPATH", "")]),
            "VLLM_PLUGINS": "scripted",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        },
    )


async def play_all(address: str, names: list[str]) -> dict[str, dict[int, str]]:
    """Each recording once; returns by rollout the call id of each recorded call."""
    turns = asyncio.Semaphore(SIDE_BY_SIDE)
    ids: dict[str, dict[int, str]] = {}
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:

        async def play(number: int, name: str) -> None:
            async with turns:
                harness = json.loads((RECORDINGS / name / "expected.json").read_text())["harness"]
                opening = {"rollout_id": name, "group_id": f"g{number // 4}", "slot": number % 4, "harness": harness}
                (await client.post("/rollouts", json={**opening, "task": "recorded"})).raise_for_status()
                played = await player.play(player.read(RECORDINGS / name), address, name)
                seen = {call["answer"]: call for call in (await client.get(f"/scripted/{name}")).json()["calls"]}
                ids[name] = {each.call.seq: seen[each.number]["call_ids"][0] for each in played}
            if len(ids) in (len(names) // 3, 2 * len(names) // 3):
                version = 1 + len(ids) // (len(names) // 3)
                (await client.post("/policy_version", json={"policy_version": version})).raise_for_status()

        await asyncio.gather(*(play(number, name) for number, name in enumerate(names)))
    return ids


def rewrites(database: Engine, name: str) -> list[dict[str, Any]]:
    """What a harness declares: the call that each rewrite was followed by."""
    if name not in DECLARE:
        return []
    with read(database) as connection:
        calls = log.calls(connection, name)
    rewritten = [
        call
        for call in calls
        if call.decision == "root"
        and call.reason not in ("first_call", "fresh_context")
        and call.hints.get("role") not in ("title", "summary")
    ]
    return [{"call": call.response_id or str(call.call_id)} for call in rewritten]


def score(database: Engine, address: str, names: list[str]) -> None:
    for number, name in enumerate(names):
        body = {"reward": round(0.1 * (number % 11), 1), "declared_rewrites": rewrites(database, name)}
        httpx.post(f"{address}/rollouts/{name}/outcome", json=body, timeout=60).raise_for_status()


def ask_again(address: str) -> None:
    """A client that did not like the answer asks the same once more."""
    httpx.post(f"{address}/scripted/retried", json={"answers": [{"text": "One."}, {"text": "Two."}]}).raise_for_status()
    for _ in range(2):
        body = {"model": "demo", "messages": [{"role": "user", "content": "Count."}]}
        httpx.post(f"{address}/rollouts/retried/v1/chat/completions", json=body, timeout=60).raise_for_status()


def leave_one_open(server: RunningServer, database: Engine) -> None:
    """A call that its server does not survive."""
    answers = [{"text": "Too late.", "hold": True}]
    httpx.post(f"{server.address}/scripted/open", json={"answers": answers}).raise_for_status()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with httpx.stream("POST", f"{server.address}/rollouts/open/v1/chat/completions", json=body, timeout=60):
        while True:
            with read(database) as connection:
                if log.pending(connection):
                    break
            time.sleep(0.1)
        server.kill()


def train(database: Engine) -> None:
    """Two steps of a run, recorded as they would be."""
    from replay.reader import open_reader
    from replay.source import reached

    with open_reader(database) as reader:
        position = reached(reader)
    run = Run(
        name="played",
        position=position,
        steps=2,
        policy=Policy(),
        rollouts_per_step=8,
        token_budget=65536,
        trainer_version=4,
    )
    steps = Steps.of(database, run)
    for number in range(run.steps):
        record(database, steps.trained(number, steps.rows(database, number), at=time.time_ns() // 1000))


def main() -> None:
    names = sorted(path.parent.name for path in RECORDINGS.glob("*/requests.jsonl"))
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        url = f"sqlite:///{folder / 'played.db'}"
        database = open_database(url)
        migrate.upgrade(database)
        server = serve(build_model(folder / "model"), url, folder)
        try:
            asyncio.run(play_all(server.address, names))
            ask_again(server.address)
            score(database, server.address, names)
            leave_one_open(server, database)
        finally:
            server.kill()
        train(database)
        database.dispose()
        (HERE / "played.db.gz").write_bytes(
            gzip.compress(at_revision(folder / "played.db", folder / "old.db"), 9, mtime=0)
        )


def at_revision(played: Path, old: Path) -> bytes:
    """The same events in tables of `REVISION`, which later ones must upgrade for ever."""
    database = open_database(f"sqlite:///{old}")
    migrate.upgrade(database, REVISION)
    database.dispose()
    with closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute("attach database ? as played", (str(played),))
        for table in ("rollout", "call_intent", "model_call", "call_end", "rollout_outcome", "trained_row"):
            names = ", ".join(row[1] for row in connection.execute(f"pragma table_info({table})"))
            connection.execute(f"insert into {table} ({names}) select {names} from played.{table} order by sequence")
        connection.execute("detach database played")
        connection.execute("pragma journal_mode = delete")
        connection.execute("vacuum")
    return old.read_bytes()


if __name__ == "__main__":
    main()
