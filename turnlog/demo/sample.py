"""The demo's rollouts: which ones, and how they are run against the real server, all at once.

Knows the agent, the server and the rollout API; does not know the log behind it, rows or training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI, OpenAIError
from rich.markup import escape
from rich.progress import Progress

from turnlog.demo.agent import Finished, run_rollout
from turnlog.demo.model import build_model
from turnlog.demo.server import NAME, model_server, post
from turnlog.errors import DemoFailed

TASK = "Write letters."


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One rollout that the demo runs, and the rows it must become."""

    rollout_id: str
    group_id: str
    slot: int
    turns: int
    rewrite_every: int | None
    thinking: bool
    rows: tuple[tuple[int, ...], ...]
    """Numbers of the calls in each row."""


def plan(name: str) -> tuple[Planned, ...]:
    """A group of four short rollouts that rewrite their context, and a long one that never does.

    >>> short, *_, long = plan("demo")
    >>> short.rows, long.rollout_id, long.rows == (tuple(range(1, 21)),)
    (((1, 2), (3, 4), (5,)), 'demo-long', True)
    """
    group = [
        Planned(
            rollout_id=f"{name}-{slot}",
            group_id=name,
            slot=slot,
            turns=5,
            rewrite_every=2,
            thinking=False,
            rows=((1, 2), (3, 4), (5,)),
        )
        for slot in range(1, 5)
    ]
    long = Planned(
        rollout_id=f"{name}-long",
        group_id=f"{name}-long",
        slot=1,
        turns=20,
        rewrite_every=None,
        thinking=True,
        rows=(tuple(range(1, 21)),),
    )
    return (*group, long)


def sample(
    model: Path, rollouts: Sequence[Planned], *, url: str, log_file: Path, progress: Progress
) -> Sequence[Finished]:
    """Build the model, start the server, run every rollout at once and score it."""
    building = progress.add_task("Building a tiny random chat model", total=1)
    build_model(model)
    progress.update(building, completed=1)
    starting = progress.add_task("Starting the model server with turnlog on", total=1)

    def on_wait(line: str) -> None:
        progress.update(starting, description=f"Starting the model server [dim]{escape(line[-60:])}[/]")

    with model_server(model, url=url, log=log_file, on_wait=on_wait) as address:
        progress.update(starting, completed=1, description="Started the model server with turnlog on")
        try:
            finished = asyncio.run(_run_rollouts(address, rollouts, progress))
        except* (OpenAIError, DemoFailed) as errors:
            raise DemoFailed(f"a rollout failed: {errors.exceptions[0]}: read {log_file}") from errors
        stopping = progress.add_task("Stopping the model server", total=1)
    progress.update(stopping, completed=1)
    return finished


async def _run_rollouts(address: str, rollouts: Sequence[Planned], progress: Progress) -> Sequence[Finished]:
    """Open the rollouts in their order, then run them all at once."""
    base_urls = [_open(address, rollout) for rollout in rollouts]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(_run_rollout(address, base_url, rollout, 1000 * number, progress))
            for number, (rollout, base_url) in enumerate(zip(rollouts, base_urls, strict=True))
        ]
    return [task.result() for task in running]


def _open(address: str, rollout: Planned) -> str:
    """Open a rollout; returns the base URL that its agent is pointed at."""
    opening = {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "slot": rollout.slot,
        "task": TASK,
        "harness": "turnlog demo",
    }
    return str(post(f"{address}/rollouts", opening)["base_url"])


async def _run_rollout(address: str, base_url: str, rollout: Planned, seed: int, progress: Progress) -> Finished:
    """Run the agent against its base URL, and post what the rollout was worth."""
    task = progress.add_task(f"Rollout {rollout.rollout_id}", total=rollout.turns)
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        finished = await run_rollout(
            client,
            model=NAME,
            task=TASK,
            turns=rollout.turns,
            rewrite_every=rollout.rewrite_every,
            thinking=rollout.thinking,
            seed=seed,
            on_turn=lambda: progress.advance(task),
        )
    outcome = {"reward": finished.reward, "accepted": list(finished.response_ids)}
    await asyncio.to_thread(post, f"{address}/rollouts/{rollout.rollout_id}/outcome", outcome)
    return finished
