"""Reinforcement learning through the log, on a machine without a GPU: play, replay, train, new weights, and again.

    python -W ignore examples/grpo.py
    python -W ignore examples/grpo.py --from-log grpo/turnlog.db --folder again

The first teaches a random model to write capital letters; the second teaches the same model again, from nothing but
what the first recorded.

A tiny random chat model plays against the real vLLM server with turnlog on. A rollout is four turns of a toy task, and
after two of them the agent forgets what it was told so far: it rewrites its context, so a rollout is two training rows.
Its reward is the share of capital letters in its answers. Each step plays every group once, reads the rollouts back
from the log, takes one Megatron step of GRPO, and puts the new weights into the running server under the next policy
version. examples/README.md shows what comes out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, cast

import matplotlib.pyplot as plt
import torch
import typer
from openai import AsyncOpenAI
from sqlalchemy import Engine

from replay.advantage import advantages
from replay.history import Policy, draw, eligible
from replay.objective import Correction
from replay.pack import Pack, packs
from replay.plan import plan
from replay.provenance import events, record, trained
from replay.row import Row
from replay.rowset import build, outlined
from replay.selection import Selection
from store import migrate
from store.database import open_database
from turnlog.demo.agent import as_served, forget_older_observations
from turnlog.demo.model import build_model
from turnlog.demo.server import NAME, model_server, post
from turnlog.demo.train import Trainer, trainer

TASKS = [
    f"Write a {what} in capital letters."
    for what in ("poem", "letter", "recipe", "song", "speech", "headline", "story", "list")
]
SELECTION = Selection()
VOCABULARY = 512
"""Of the model: so few that a reward of a whole rollout soon finds out which tokens earn it."""
BUDGET = 4096
"""Positions of a pack."""
FLAGS = (
    *("--max-num-seqs", "64"),
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"),  # vLLM on a CPU cannot cut a seeded request
)
SERVING = {"VLLM_SERVER_DEV_MODE": "1"}  # opens vLLM's calls that change weights


async def play(address: str, rollout_id: str, *, group_id: str, task: str, seed: int) -> float:
    """One rollout: open it, work on the task for four turns, and post what it was worth."""
    opening = {"rollout_id": rollout_id, "group_id": group_id, "task": task, "harness": "grpo example"}
    base_url = (await asyncio.to_thread(post, f"{address}/rollouts", opening))["base_url"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    written = ""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        for turn in range(4):
            if turn == 2:
                messages = forget_older_observations(messages)  # what follows is a new row
            answer = await client.chat.completions.create(
                model=NAME,
                messages=cast("Any", messages),
                max_tokens=16,
                temperature=1.0,  # with no top-p or top-k, so that the log has the policy's own log-probabilities
                seed=seed + turn,
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )
            message = as_served(answer.choices[0].message)
            text = f"{message.get('reasoning', '')}{message.get('content', '')}"
            written += text
            said = f"{sum(map(str.isupper, text))} capital letters. Go on."
            messages = [*messages, message, {"role": "user", "content": said}]
    reward = sum(map(str.isupper, written)) / max(len(written), 1)
    await asyncio.to_thread(post, f"{address}/rollouts/{rollout_id}/outcome", {"reward": reward})
    return reward


async def play_all(address: str, step: int, *, groups: int, size: int, seed: int) -> dict[str, float]:
    """Every rollout of a step at once; their rewards by rollout id."""
    playing: dict[str, asyncio.Task[float]] = {}
    async with asyncio.TaskGroup() as running:
        for group in range(groups):
            for slot in range(size):
                name, lot = f"step{step}-{group}-{slot}", 4 * (size * (groups * (1000 * seed + step) + group) + slot)
                task = TASKS[group % len(TASKS)]
                playing[name] = running.create_task(
                    play(address, name, group_id=f"step{step}-{group}", task=task, seed=lot)
                )
    return {name: task.result() for name, task in playing.items()}


def publish(address: str, training: Trainer, folder: Path, version: int) -> None:
    """Put the trainer's weights into the running server, and number what they sample from now on."""
    training.save(folder)
    post(f"{address}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}})
    if not post(f"{address}/reset_prefix_cache", {})["success"]:  # it holds what the old weights made of the prompts
        raise SystemExit(
            "the server still answers a request, so its cache cannot be reset: wait for the rollouts first"
        )
    post(f"{address}/policy_version", {"policy_version": version})


def train(
    database: Engine,
    training: Trainer,
    rows: Sequence[Row],
    worth: Mapping[str, float],
    *,
    run: str,
    step: int,
    correction: Correction | None = None,
) -> str:
    """One optimizer step, recorded in the log row by row; returns what to say of it."""
    planned = plan(rows, seed=0, step=step, token_budget=BUDGET)
    done = training.step(packs(planned, rows, worth), correction=correction)
    at = time.time_ns() // 1000
    record(database, events(planned, rows, worth, run=run, selection=SELECTION, trainer_version=step, at=at))
    oldest, newest = min(row.policy_range[0] for row in rows), max(row.policy_range[1] for row in rows)
    return (
        f"{len(rows):4} rows of policy {oldest} to {newest}  {done.tokens:6} tokens  loss {done.loss:+.4f}  "
        f"largest difference {done.max_logprob_difference:.1e}  limited {done.clipped / done.tokens:.2f}"
    )


def from_rollouts(folder: Path, *, steps: int, groups: int, size: int, seed: int, learning_rate: float) -> None:
    """The first run: each step plays with the weights that the step before made."""
    log = folder / "turnlog.db"
    if log.exists():
        raise SystemExit(
            f"{log} is the log of an earlier run: give another --folder, or train on it with --from-log {log}"
        )
    model, url = build_model(folder / "model", seed=seed, vocabulary=VOCABULARY), f"sqlite:///{log}"
    database = open_database(url)
    migrate.upgrade(database)
    rewards: list[float] = []
    with (
        model_server(model, url=url, log=folder / "server.log", flags=FLAGS, environment=SERVING) as at,
        trainer(model, learning_rate=learning_rate) as training,
    ):
        for step in range(steps):
            played = asyncio.run(play_all(at, step, groups=groups, size=size, seed=seed))
            found = build(database, SELECTION, rollouts=[*played])
            worth = advantages(found.scores, divide_by_std=True)
            said = train(database, training, found.rows, worth, run="grpo", step=step)
            publish(at, training, folder / "trained", step + 1)
            rewards.append(mean(played.values()))
            print(f"step {step:3}  reward {rewards[-1]:.3f}  {said}", flush=True)
    draw_lines(folder / "reward.svg", {"mean reward": rewards}, "share of capital letters")


def from_log(folder: Path, log: Path, *, steps: int, rollouts: int, seed: int, learning_rate: float) -> None:
    """The second run: no server, no rollouts. It begins where the first began, and one of the tasks is held out."""
    database = open_database(f"sqlite:///{log}")
    found = outlined(database, SELECTION)  # the log as it is now: what this run adds to it is not seen
    before = trained(database, found.position.trained)
    *tasks, unseen = sorted(set(found.table.column("task").to_pylist()))
    last = max(found.table.column("newest").to_pylist())
    worth = advantages(found.scores, divide_by_std=True)
    by_reward = eligible(found.table, before, Policy(tasks=(unseen,))).table.sort_by("reward").column("rollout_id")
    quarter = max(1, len(by_reward) // 4)
    held_out = {"best": by_reward[-quarter:].to_pylist(), "worst": by_reward[:quarter].to_pylist()}
    watched = {name: watch(database, rollouts) for name, rollouts in held_out.items()}
    seen: dict[str, list[float]] = {f"{name} quarter": [] for name in held_out}
    model = build_model(folder / "model", seed=seed, vocabulary=VOCABULARY)
    with trainer(model, learning_rate=learning_rate) as training:
        for step in range(steps + 1):
            for values, these in zip(seen.values(), watched.values(), strict=True):
                values.append(training.mean_logprob(these))
            said = "  ".join(f"{name} {values[-1]:.3f}" for name, values in seen.items())
            if step < steps:
                version = step * (last + 1) // steps  # in their order, so that no weights are far from the trainer's
                policy = Policy(tasks=tuple(tasks), oldest_version=version, newest_version=version)
                known = eligible(found.table, before, policy)
                drawn = draw(known, policy, seed=seed, step=step, rollouts=rollouts)
                rows = build(database, SELECTION, rollouts=drawn, position=found.position).rows
                correction = Correction(kind="token")  # other weights sampled these: each token weighs by its ratio
                said += "  " + train(database, training, rows, worth, run="history", step=step, correction=correction)
            print(f"step {step:3}  {said}", flush=True)
        training.save(folder / "trained")
    draw_lines(folder / "history.svg", seen, "mean log-probability of held-out answers, by reward")


def watch(database: Engine, rollouts: Sequence[str]) -> list[Pack]:
    """The rows of rollouts, to be looked at and not trained."""
    rows = build(database, SELECTION, rollouts=rollouts).rows
    return packs(plan(rows, seed=0, step=0, token_budget=BUDGET), rows, dict.fromkeys(rollouts, 0.0))


def draw_lines(path: Path, lines: Mapping[str, Sequence[float]], what: str) -> None:
    """Plot values by step."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, values in lines.items():
        axes.plot(values, marker=".", label=name)
    axes.set(xlabel="step", ylabel=what)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    print(f"wrote {path}")


def main(
    folder: Path = Path("grpo"),
    from_log_of: Annotated[Path | None, typer.Option("--from-log")] = None,
    steps: int = 24,
    groups: int = 8,
    size: int = 8,
    seed: int = 0,
    learning_rate: float = 3e-3,
) -> None:
    """Train on rollouts that are played now or, with --from-log, on those that a log has already."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # more would wait for the server's threads, of which a small machine has one for each core
    if from_log_of is None:
        from_rollouts(folder, steps=steps, groups=groups, size=size, seed=seed, learning_rate=learning_rate)
    else:
        from_log(folder, from_log_of, steps=steps, rollouts=groups * size, seed=seed, learning_rate=learning_rate)


if __name__ == "__main__":
    typer.run(main)
