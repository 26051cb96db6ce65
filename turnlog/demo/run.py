"""`turnlog demo`: the whole path on this machine, from an agent's messages to an optimizer step.

Knows the order of the path and what each joint must show; holds no rule of a log, a row or a loss. Law: it shows what
really happened. Each promise is checked on the log that the run left, and a broken one fails the demo by name.
"""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from openai import AsyncOpenAI, OpenAIError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from sqlalchemy import Engine

from replay.advantage import advantages
from replay.row import Row
from replay.rowset import build
from replay.selection import Selection
from store import log, migrate
from store.database import open_database, read, shown_url, write
from store.events import RowTrained
from turnlog.demo import report
from turnlog.demo.agent import Finished, run_rollout
from turnlog.demo.model import build_model
from turnlog.demo.server import NAME, model_server, post
from turnlog.errors import DemoFailed
from turnlog.show import ShownRollout, load

if TYPE_CHECKING:
    from replay.megatron import StepReport

TASK = "Write letters."
CLOSE = 1e-3
"""Largest difference allowed between a stored log-probability and the trainer's own; both compute in float32."""


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


def run_demo(*, url: str, folder: Path, console: Console) -> None:
    """Run the whole path, writing to the log at `url` and keeping the model and the server's log in `folder`.

    Raises DemoFailed when something that turnlog promises does not hold.
    """
    started = time.monotonic()
    database = open_database(url)
    try:
        migrate.upgrade(database)
        with read(database) as connection:
            taken = {opened.group_id for opened in log.rollouts(connection)}
        rollouts = plan(next(name for number in count(1) if (name := f"demo{number}") not in taken))
        model = folder / "model"
        with Progress(*_COLUMNS, console=console) as progress:
            finished = _sample(model, rollouts, url=url, log_file=folder / "server.log", progress=progress)
        shown = _show_calls(database, rollouts, console)
        rows, advantage = _replay(database, rollouts, console)
        _show_drift(model, rows, shown, finished, console)
        with Progress(*_COLUMNS, console=console) as progress:
            training = progress.add_task("One GRPO step with Megatron on the CPU", total=1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron's, about libraries that only a GPU needs
                from turnlog.demo.train import grpo_step  # takes seconds, so it is done under the progress bar

                step = grpo_step(model, rows, advantage)
            _log_trained(database, rows, advantage, run=rollouts[0].group_id)
            progress.update(training, completed=1)
        _show_step(step, rows, console)
    finally:
        database.dispose()
    console.print(
        f"\nThe whole path took {time.monotonic() - started:.0f} seconds. It left the log in {shown_url(url)}; next:"
    )
    console.print(f"  turnlog show {rollouts[0].rollout_id}      # this rollout as a tree: where rows begin, and why")
    console.print("  turnlog rows --out rows.parquet   # the training rows as a file")
    console.print(f"  turnlog serve {model} --port 8000   # the server, for an agent of yours", highlight=False)


_COLUMNS = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def _sample(
    model: Path, rollouts: Sequence[Planned], *, url: str, log_file: Path, progress: Progress
) -> Sequence[Finished]:
    """Build the model, start the server, run every rollout at once and score it."""
    building = progress.add_task("Building a tiny random chat model", total=1)
    build_model(model)
    progress.update(building, completed=1)
    starting = progress.add_task("Starting the model server with turnlog on", total=1)

    def on_wait(line: str) -> None:
        progress.update(starting, description=f"Starting the model server [dim]{line[-60:]}[/]")

    with model_server(model, url=url, log=log_file, on_wait=on_wait) as address:
        progress.update(starting, completed=1, description="Started the model server with turnlog on")
        try:
            finished = asyncio.run(_run_rollouts(address, rollouts, progress))
        except* OpenAIError as errors:
            raise DemoFailed(f"a call failed: {errors.exceptions[0]}: read {log_file}") from errors
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


def _show_calls(database: Engine, rollouts: Sequence[Planned], console: Console) -> Sequence[ShownRollout]:
    """Print the log, and check that each rollout has as many completed calls as it had turns."""
    with read(database) as connection:
        shown = [load(connection, rollout.rollout_id) for rollout in rollouts]
    console.print(report.calls_table(shown))
    for rollout, found in zip(rollouts, shown, strict=True):
        completed = sum(call.state == "completed" for call in found.calls)
        if completed != len(found.calls) or completed != rollout.turns:
            raise DemoFailed(
                f"rollout {rollout.rollout_id} has {completed} completed calls of {len(found.calls)} in the log, "
                f"the agent made {rollout.turns}: see `turnlog show {rollout.rollout_id}`"
            )
    return shown


def _replay(database: Engine, rollouts: Sequence[Planned], console: Console) -> tuple[Sequence[Row], dict[str, float]]:
    """Turn the log into rows, print them, and check that rows begin where the agent rewrote its context."""
    found = build(database, rollouts=[rollout.rollout_id for rollout in rollouts])
    advantage = advantages(found.scores, divide_by_std=True)
    console.print(report.rows_table(found.rows, advantage))
    if found.refusals.rollouts:
        raise DemoFailed(f"a rollout gives no rows: {found.refusals.rollouts[0].detail}")
    for rollout in rollouts:
        calls = tuple(row.call_numbers for row in found.rows if row.rollout_id == rollout.rollout_id)
        if calls != rollout.rows:
            raise DemoFailed(
                f"rollout {rollout.rollout_id} became rows of calls {calls}, the agent's contexts were {rollout.rows}: "
                f"see `turnlog show {rollout.rollout_id}`"
            )
    return found.rows, advantage


def _show_drift(
    model: Path,
    rows: Sequence[Row],
    shown: Sequence[ShownRollout],
    finished: Sequence[Finished],
    console: Console,
) -> None:
    """Print how many continuations would have other tokens if their messages were rendered afresh, as without a log."""
    from turnlog.demo.render import Renderer  # loads transformers

    renderer = Renderer(model)
    chains = {row.rollout_id + str(number): row.token_ids for row in rows for number in row.call_numbers}
    continuations = drifted = 0
    for rollout, run, planned in zip(shown, finished, plan("demo"), strict=True):
        for call, messages in zip(rollout.calls, run.requests, strict=True):
            prompt = chains[f"{rollout.opened.rollout_id}{call.number}"][: call.prompt_tokens].tolist()
            same = renderer.prompt(messages, thinking=planned.thinking) == prompt
            if call.decision == "root" and not same:
                raise DemoFailed(
                    f"call {call.number} of {rollout.opened.rollout_id} is a root whose prompt is not its messages'"
                )
            continuations += call.decision == "continuation"
            drifted += not same
    console.print(
        f"Every continuation's prompt starts with its parent's tokens, exactly. Rendered afresh from the same messages, "
        f"{drifted} of {continuations} would have had other tokens."
    )


def _log_trained(database: Engine, rows: Sequence[Row], advantage: Mapping[str, float], *, run: str) -> None:
    """Record in the log which rows the step trained."""
    selection = Selection()
    trained = [
        RowTrained(
            run=run,
            step=0,
            row_id=row.row_id,
            rollout_id=row.rollout_id,
            tip_call_id=row.tip,
            selection=selection.rule,
            selection_version=selection.version,
            advantage=advantage[row.rollout_id],
            trainer_policy_version=0,
            at=time.time_ns() // 1000,
        )
        for row in rows
    ]
    with write(database) as connection:
        log.append(connection, trained)


def _show_step(step: StepReport, rows: Sequence[Row], console: Console) -> None:
    """Print what the step did, and check it against the rows."""
    console.print(
        f"One optimizer step over {len(rows)} rows in {step.micro_batches} packs: {step.tokens} tokens trained, "
        f"loss {step.loss:+.6f}, gradient norm {step.grad_norm:.6f}"
    )
    console.print(
        f"Largest |stored - Megatron's own| log-probability of a trained token: {step.max_logprob_difference:.2e}"
    )
    sampled = sum(row.trained for row in rows)
    if step.tokens != sampled:
        raise DemoFailed(f"the step trained {step.tokens} tokens, the rows hold {sampled}")
    if not step.updated or not 0 < step.grad_norm < math.inf:
        raise DemoFailed(f"the optimizer did not step: gradient norm {step.grad_norm}")
    if not step.max_logprob_difference < CLOSE:
        raise DemoFailed(
            f"a stored log-probability is {step.max_logprob_difference:.2e} off the trainer's own, {CLOSE:g} is allowed: "
            "the server and the trainer do not see the same tokens, weights or sampling"
        )
