"""`turnlog demo`: the whole path on this machine, from an agent's messages to an optimizer step.

Knows the order of the path and what each joint must show; holds no rule of a log, a row or a loss. Law: it shows what
really happened. Each promise is checked on the log that the run left, and a broken one fails the demo by name.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from sqlalchemy import Engine

from replay.advantage import advantages
from replay.errors import FileUnwritable
from replay.row import Row
from replay.rowset import build
from replay.selection import Selection
from store import log, migrate
from store.database import database_url, open_database, read, shown_url, write
from store.events import RowTrained
from turnlog.demo import report
from turnlog.demo.agent import Finished
from turnlog.demo.sample import Planned, plan, sample
from turnlog.errors import DemoFailed
from turnlog.show import ShownRollout, load

if TYPE_CHECKING:
    from replay.megatron import StepReport

CLOSE = 1e-3
"""Largest difference allowed between a stored log-probability and the trainer's own; both compute in float32."""
COLUMNS = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def run_demo(*, url: str, folder: Path, console: Console) -> None:
    """Run the whole path, writing to the log at `url` and keeping the model and the server's log in `folder`.

    Raises DemoFailed when something that turnlog promises does not hold, and FileUnwritable for the folder.
    """
    started = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileUnwritable(str(folder), error.strerror or str(error)) from error
    model = folder / "model"
    database = open_database(url)
    try:
        migrate.upgrade(database)
        with read(database) as connection:
            taken = {opened.group_id for opened in log.rollouts(connection)}
        rollouts = plan(next(name for number in count(1) if (name := f"demo{number}") not in taken))
        with Progress(*COLUMNS, console=console) as progress:
            finished = sample(model, rollouts, url=url, log_file=folder / "server.log", progress=progress)
        shown = _show_calls(database, rollouts, console)
        rows, advantage = _replay(database, rollouts, console)
        with Progress(*COLUMNS, console=console) as progress:
            rendering = progress.add_task("Rendering every request afresh, to compare", total=1)
            continuations, drifted = _drift(model, rollouts, finished, shown, rows)
            progress.update(rendering, completed=1)
            training = progress.add_task("One GRPO step with Megatron", total=1)
            step = _train(model, rows, advantage)
            progress.update(training, completed=1)
        console.print(
            f"Each of the {continuations} continuations has its parent's tokens at the start of its prompt, exactly.\n"
            f"Rendered afresh from the same messages, {drifted} of them would have had other tokens."
        )
        _show_step(step, rows, console)
        _log_trained(database, rows, advantage, run=rollouts[0].group_id)
    finally:
        database.dispose()
    console.print(
        f"\nThe whole path took {time.monotonic() - started:.0f} seconds. It left the log in {shown_url(url)}."
    )
    console.print("What to type next:")
    _show_next(rollouts[0].rollout_id, model, "" if url == database_url() else f" --db {shown_url(url)}", console)


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


def _drift(
    model: Path,
    rollouts: Sequence[Planned],
    finished: Sequence[Finished],
    shown: Sequence[ShownRollout],
    rows: Sequence[Row],
) -> tuple[int, int]:
    """How many continuations there are, and how many would have other tokens if their messages were rendered afresh."""
    from turnlog.demo.render import Renderer  # loads transformers

    renderer = Renderer(model)
    chains = {(row.rollout_id, number): row.token_ids for row in rows for number in row.call_numbers}
    continuations = drifted = 0
    for rollout, done, found in zip(rollouts, finished, shown, strict=True):
        for number, (messages, call) in enumerate(zip(done.requests, found.calls, strict=True), start=1):
            prompt = chains[rollout.rollout_id, number][: call.prompt_tokens].tolist()
            same = renderer.prompt(messages, thinking=rollout.thinking) == prompt
            if call.decision == "root" and not same:
                raise DemoFailed(
                    f"call {number} of rollout {rollout.rollout_id} is a root whose prompt in the log is not what its "
                    f"messages render to: see `turnlog show {rollout.rollout_id}`"
                )
            continuations += call.decision == "continuation"
            drifted += not same
    return continuations, drifted


def _train(model: Path, rows: Sequence[Row], advantage: Mapping[str, float]) -> StepReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about libraries that only a GPU needs
        from turnlog.demo.train import grpo_step  # loads torch and Megatron

        return grpo_step(model, rows, advantage)


def _show_step(step: StepReport, rows: Sequence[Row], console: Console) -> None:
    """Print what the step did, and check it against the rows."""
    console.print(
        f"One optimizer step over {len(rows)} rows in {step.micro_batches} packs: {step.tokens} tokens trained, "
        f"loss {step.loss:+.6f}, gradient norm {step.grad_norm:.6f}.\n"
        "Largest difference between a stored log-probability and Megatron's own for the same token: "
        f"{step.max_logprob_difference:.2e}."
    )
    sampled = sum(row.trained for row in rows)
    if step.tokens != sampled:
        raise DemoFailed(f"the step trained {step.tokens} tokens, the rows hold {sampled}")
    if not step.updated or not 0 < step.grad_norm < math.inf:
        raise DemoFailed(f"the optimizer did not step: gradient norm {step.grad_norm}")
    if not step.max_logprob_difference < CLOSE:
        raise DemoFailed(
            f"a stored log-probability is {step.max_logprob_difference:.2e} off the trainer's own, {CLOSE:g} is "
            "allowed: the server and the trainer do not see the same tokens, weights or sampling"
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


def _show_next(rollout_id: str, model: Path, db: str, console: Console) -> None:
    """Print commands that work as they stand, also where the environment's scripts are not on the PATH."""
    script = Path(sys.executable).with_name("turnlog")
    near = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    turnlog = "turnlog" if shutil.which("turnlog") else str(near)
    for command, what in (
        (f"{turnlog} show {rollout_id}{db}", "one rollout as a tree: where rows begin, and why"),
        (f"{turnlog} rows --out rows.parquet{db}", "the training rows as a file"),
        (f"{turnlog} serve {model} --port 8000{db}", "the server, for an agent of yours"),
    ):
        console.print(f"  [bold]{command}[/]  [dim]# {what}[/]", soft_wrap=True)
