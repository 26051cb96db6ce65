"""Two model servers on one PostgreSQL log: a call finds its parent wherever that was served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from sqlalchemy import Engine

from store import log
from store.database import read
from store.lineage import chain_tokens
from turnlog.demo.model import build_model
from turnlog.demo.server import NAME, start_server

ROLLOUTS, TURNS = 32, 4


@pytest.fixture
def addresses(postgres_url: str, tmp_path: Path) -> Iterator[list[str]]:
    """Two servers, each with a worker's name of its own."""
    model = build_model(tmp_path / "model")
    with ExitStack() as running:
        found: list[str] = []
        for worker in ("one", "two"):
            server = start_server(
                model,
                url=postgres_url,
                log=tmp_path / f"{worker}.log",
                worker=worker,
                environment={"TURNLOG_MEDIA": str(tmp_path / "media")},
            )
            running.callback(server.stop)
            found.append(server.address)
        yield found


@pytest.mark.postgres
def test_overlapping_rollouts_on_two_servers_lose_nothing_and_find_every_parent(
    addresses: list[str], postgres_database: Engine
) -> None:
    async def rollout(name: str, first: int) -> None:
        messages: list[dict[str, str]] = [{"role": "user", "content": f"I am {name}."}]
        for turn in range(TURNS):
            address = addresses[(first + turn) % 2]  # each turn on the other server
            async with AsyncOpenAI(base_url=f"{address}/rollouts/{name}/v1", api_key="none") as client:
                answer = await client.chat.completions.create(
                    model=NAME,
                    messages=messages,  # type: ignore[arg-type]
                    max_tokens=16,
                    seed=turn,
                    extra_body={"chat_template_kwargs": {"enable_thinking": False}},
                )
            content = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]

    async def everyone() -> None:
        await asyncio.gather(*(rollout(f"r{i}", i) for i in range(ROLLOUTS)))

    asyncio.run(everyone())
    with read(postgres_database) as connection:
        assert log.pending(connection) == []
        for i in range(ROLLOUTS):
            calls = log.calls(connection, f"r{i}")
            assert [call.parent_id for call in calls] == [None, *(call.call_id for call in calls[:-1])]
            assert len({call.writer_id for call in calls}) == 2
            chains = [chain_tokens(connection, call.call_id).tolist() for call in calls]
            assert len(chains) == TURNS
            assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(chains))
