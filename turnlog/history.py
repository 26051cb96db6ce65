"""The command `turnlog replay`: its options and its output.

Knows arguments and tables; what a step is lives in `turnlog.steps`, what a policy means in `replay.history`. Law:
without `--record` the log stays as it is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from pydantic import JsonValue
from rich.console import Console

from turnlog.console import (
    Archived,
    AsJson,
    AsOf,
    Db,
    ExcludeRole,
    Processes,
    Rule,
    opened,
    pool_of,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from replay.objective import CorrectionKind


def replay_history(
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON", help="Which rollouts train, and how they are drawn. Default: all, in epochs."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 10,
    first_step: Annotated[int, typer.Option(min=0, help="Number of the first one.")] = 0,
    rollouts_per_step: Annotated[int, typer.Option(min=1, help="Rollouts of a step; groups stay whole.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the run: another seed, another order.")] = 0,
    world: Annotated[int, typer.Option(min=1, help="Data-parallel ranks of the trainer.")] = 1,
    token_budget: Annotated[int, typer.Option(min=1, help="Most tokens of a micro-batch.")] = 16_384,
    trainer_version: Annotated[
        int | None,
        typer.Option(min=0, help="Policy version of the trainer's weights, from which staleness is counted."),
    ] = None,
    correction: Annotated[
        str, typer.Option(help="How a trainer weighs what older weights sampled: none, token or sequence.")
    ] = "none",
    cap: Annotated[float, typer.Option(help="The largest weight that a correction gives.")] = 2.0,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder to write. Without it: count only.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record in the log that these steps trained, when a trainer does not.")
    ] = False,
    run: Annotated[str, typer.Option(help="Name of the run.")] = "history",
    rule: Rule = "completed",
    exclude_role: ExcludeRole = None,
    as_of: AsOf = None,
    archive: Archived = None,
    processes: Processes = None,
    url: Db = None,
    as_json: AsJson = False,
) -> None:
    """Draw training steps from what the log holds, by a policy; say what is in them, and write them to files.

    The same position, policy and seed give the same steps again, whatever the log has got since.
    """
    from replay import provenance
    from replay.chain import Refusal
    from replay.objective import Correction
    from replay.rowset import outlined
    from replay.run import Run, Steps
    from replay.selection import Selection
    from replay.source import Position
    from turnlog.steps import Folder, Numbers, policy_of, steps_table

    if record and trainer_version is None:
        raise typer.BadParameter("the log keeps it with each row: give --trainer-version", param_hint="--record")
    if not run.strip():
        raise typer.BadParameter("a run has a name: leave the option out for 'history'", param_hint="--run")
    try:
        weighed = Correction(kind=cast("CorrectionKind", correction), cap=cap)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--correction") from None
    wanted = policy_of(policy)
    selection = Selection(rule=rule, excluded_roles=frozenset(exclude_role or ()))
    position = None if as_of is None else Position.parse(as_of)
    with (
        opened(url) as database,
        pool_of(processes, database, archive) as pool,
        progress_bar("Reading the log") as progress,
    ):
        (task,) = progress.task_ids
        found = outlined(
            database,
            selection,
            position=position,
            archive=archive,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            pool=pool,
        )
        asked = Run(
            name=run,
            position=found.position,
            selection=selection,
            policy=wanted,
            trainer_version=trainer_version,
            seed=seed,
            steps=first_step + steps,
            rollouts_per_step=rollouts_per_step,
            world=world,
            token_budget=token_budget,
            correction=weighed,
        )
        drawn = Steps(asked, found, provenance.trained(database, found.position.trained, archive=archive))
        numbers = Numbers(found, drawn)
        folder = None if out is None else Folder(out, drawn)
        recorded = there = 0
        facts: list[dict[str, JsonValue]] = []
        damaged: dict[str, Refusal] = {}
        progress.update(task, description="Drawing steps", completed=0, total=steps)
        for step in range(first_step, first_step + steps):
            facts.append(numbers.of(step))
            if folder is not None or record:
                filled = drawn.rows(database, step, archive=archive)
                damaged |= {each.rollout_id: each for each in filled.refusals.rollouts}
                if folder is not None:
                    folder.write(step, filled)
                if record:
                    trained = drawn.trained(step, filled, at=time.time_ns() // 1000)
                    if provenance.record(database, trained):
                        recorded += len(trained)
                    else:
                        there += len(trained)
            progress.advance(task)
        if folder is not None:
            folder.close()
    left_out: dict[str, JsonValue] = {**drawn.eligible.left_out, **found.refusals.by_reason()}
    if as_json:
        print_json(
            {
                "run": asked.as_json(),
                "eligible_rollouts": len(drawn.eligible),
                "left_out_rollouts": left_out,
                "steps": [*facts],
                "refused": {rollout_id: refusal.detail for rollout_id, refusal in damaged.items()},
                "recorded_rows": recorded,
                "rows_recorded_before": there,
                "out": None if out is None else str(out),
            }
        )
        return
    Console().print(steps_table(facts))
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    said = Console(soft_wrap=True, highlight=False)
    said.print(f"drawn from {len(drawn.eligible)} rollouts as of {found.position}" + (why and f"; left out: {why}"))
    for rollout_id, refusal in damaged.items():
        said.print(f"rollout {rollout_id} is refused, its rows are in no step: {refusal.reason}, {refusal.detail}")
    if record:
        before = f"; {there} were there before" if there else ""
        said.print(f"recorded {recorded} rows as trained by run {run}{before}")
    if out is not None:
        said.print(f"wrote {len(facts)} steps and plan.json to {out}")
