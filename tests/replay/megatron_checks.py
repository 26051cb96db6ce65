"""Real megatron-core on the CPU, measured: prints one JSON object of figures for `test_megatron.py` to judge.

    python megatron_checks.py figures FOLDER                 everything that one process can show
    python megatron_checks.py gradients FOLDER RANK WORLD    one data-parallel rank, after `figures` in the same folder

A program of its own: it replaces parts of torch, and starts process groups.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from megatron.core import parallel_state
from transformers import Qwen3Config, Qwen3ForCausalLM

from replay.advantage import advantages
from replay.errors import NothingToTrain, TrainerSetup
from replay.megatron import Clip, accumulate, micro_batches, token_logprobs, train_step
from replay.pack import Pack, pack, packs
from replay.plan import plan
from replay.row import Row
from replay.rowset import RowSet, build
from store import hashing, log, migrate
from store.database import open_database, write
from store.events import CallCompleted, PolicySpan, RolloutOpened, RolloutScored, logprob_bytes, token_bytes, uuid7
from turnlog.demo import megatron_cpu, qwen3

VOCABULARY = 256
CLIP = Clip(low=0.2, high=0.2)


def make_model(folder: Path) -> None:
    """A tiny random Qwen3 whose norms are not all one, so that a norm left out shows."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(
        vocab_size=VOCABULARY, max_position_embeddings=512, tie_word_embeddings=False, **shape, **heads
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def make_log(model: Path, url: str, *, noise: float) -> RowSet:
    """A group of three rollouts that rewrite their context, with the log-probabilities that Hugging Face gives."""
    judge = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    source = np.random.default_rng(1)
    database = open_database(url)
    migrate.upgrade(database)
    made = 0
    for number, shape in enumerate([[(9, 5), (4, 6)], [(30, 20), (3, 7), (2, 2)], [(12, 3)]]):
        rollout_id = f"r{number}"
        calls: list[CallCompleted] = []
        for tree in (shape, [(7, 4), (5, 3)]):
            parent: CallCompleted | None = None
            before = np.empty(0, np.int64)
            for interstitial, sampled in tree:
                tokens = source.integers(0, VOCABULARY, interstitial + sampled)
                whole = np.concatenate([before, tokens])
                with torch.no_grad():
                    logits = judge(torch.from_numpy(whole)[None], use_cache=False).logits[0, :-1]
                own = logits.log_softmax(-1)[torch.arange(len(whole) - 1), torch.from_numpy(whole[1:])].numpy()
                drift = noise * source.standard_normal(sampled)
                parent = _call(made, rollout_id, parent, tokens, own[-sampled:] + drift, interstitial)
                calls.append(parent)
                before = whole
                made += 1
        outcome_id = uuid7(0, rollout_id.encode().ljust(10))
        outcome = RolloutScored(outcome_id=outcome_id, rollout_id=rollout_id, reward=float(number), at=0)
        with write(database) as connection:
            log.append(
                connection, [RolloutOpened(rollout_id=rollout_id, group_id="g", opened_at=number), *calls, outcome]
            )
    found = build(database)
    database.dispose()
    return found


def _call(
    made: int,
    rollout_id: str,
    parent: CallCompleted | None,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    interstitial: int,
) -> CallCompleted:
    call_id = uuid7(made + 1, bytes(10))
    prev_len = 0 if parent is None else parent.chain_len
    delta = token_bytes(tokens)
    render = hashing.render_hash({"model": "tiny", "call": made})
    answer = hashing.answer_key(b"[]")
    sampled = len(tokens) - interstitial
    changes = {
        "call_id": call_id,
        "rollout_id": rollout_id,
        "parent_id": None if parent is None else parent.call_id,
        "root_id": call_id if parent is None else parent.root_id,
        "depth": 0 if parent is None else parent.depth + 1,
        "decision": "root" if parent is None else "continuation",
        "request_hash": render,
        "answer_key": answer,
        "summary_hash": hashing.summary_hash(render, answer),
        "prev_len": prev_len,
        "prompt_len": prev_len + interstitial,
        "sampled_len": sampled,
        "chain_hash": hashing.chain_hash(None if parent is None else parent.chain_hash, delta),
        "policy_spans": (PolicySpan(start=0, end=sampled, policy_version=0),),
        "writer_seq": made,
        "token_ids": delta,
        "logprobs": logprob_bytes(logprobs),
    }
    return CallCompleted(**{**dict(CallCompleted.example()), **changes})


def logprobs_of(model: torch.nn.Module, packed: Pack) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, next(micro_batches([packed], torch.device("cpu"))))[0]


def reference_gradients(folder: Path, found: RowSet) -> tuple[float, dict[str, torch.Tensor]]:
    """Plain autograd, row by row, without megatron's schedule: sum over all trained tokens / their one count."""
    model = qwen3.load(folder, megatron_cpu.PackedAttention)
    by_rollout = advantages(found.scores)
    total = torch.zeros(())
    for row in found.rows:
        tokens = torch.from_numpy(row.token_ids.astype(np.int64))
        losses = model(
            input_ids=tokens[None, :-1],
            position_ids=torch.arange(row.length - 1)[None],
            attention_mask=torch.ones(row.length - 1, row.length - 1).tril() < 0.5,  # True is masked
            labels=tokens[None, 1:],
        )
        ratio = (-losses[0] - torch.tensor(row.logprobs[1:])).exp()
        advantage = by_rollout[row.rollout_id]
        clipped = ratio.clamp(1 - CLIP.low, 1 + CLIP.high)
        per_token = -torch.minimum(ratio * advantage, clipped * advantage)
        total = total + per_token[torch.tensor(row.loss_mask[1:])].sum()
    loss = total / sum(row.trained for row in found.rows)
    loss.backward()
    return float(loss.detach()), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def megatron_gradients(folder: Path, mine: Sequence[Pack]) -> tuple[float, int, dict[str, torch.Tensor]]:
    model, _ = qwen3.trainable(qwen3.load(folder, megatron_cpu.PackedAttention), learning_rate=1e-3)
    model.zero_grad_buffer()
    seen = accumulate(model, mine, clip=CLIP)
    return seen.loss, seen.tokens, {name: each.main_grad.clone() for name, each in model.module.named_parameters()}


def difference(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == reference.keys()
    return max(float((ours[name] - reference[name]).abs().max()) for name in reference)


def figures(folder: Path) -> dict[str, object]:
    model_folder = folder / "model"
    make_model(model_folder)
    exact = make_log(model_folder, f"sqlite:///{folder}/exact.db", noise=0.0)
    noisy = make_log(model_folder, f"sqlite:///{folder}/noisy.db", noise=0.3)
    result: dict[str, object] = {"rows": [list(row.call_numbers) for row in exact.rows]}
    before = torch.cuda.current_device
    with megatron_cpu.installed(), megatron_cpu.single_process(str(folder / "figures.rendezvous")):
        result |= packing_figures(model_folder, exact.rows)
        result |= gradient_figures(model_folder, noisy)
        result |= step_figures(model_folder, exact)
        result |= refusals(model_folder, exact)
    result["restored"] = torch.cuda.current_device is before and torch.ones(1).type() == "torch.FloatTensor"
    return result


def packing_figures(folder: Path, rows: Sequence[Row]) -> dict[str, object]:
    model = qwen3.load(folder, megatron_cpu.PackedAttention)
    free = {row.rollout_id: 0.0 for row in rows}
    alone = torch.cat([logprobs_of(model, pack([row], free)) for row in rows])
    together = logprobs_of(model, pack(rows, free))
    backwards = logprobs_of(model, pack(rows[::-1], free))
    pieces = backwards.split([row.length - 1 for row in rows[::-1]])
    plain = [_plain_logprobs(model, row) for row in rows]
    return {
        "packed_against_alone": float((together - alone).abs().max()),
        "packed_backwards_against_alone": float((torch.cat(pieces[::-1]) - alone).abs().max()),
        "packed_against_unpacked": float((together - torch.cat(plain)).abs().max()),
    }


def _plain_logprobs(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """Megatron's own path without packing."""
    tokens = torch.from_numpy(row.token_ids.astype(np.int64))
    with torch.no_grad():
        losses: torch.Tensor = model(
            input_ids=tokens[None, :-1],
            position_ids=torch.arange(row.length - 1)[None],
            attention_mask=torch.ones(row.length - 1, row.length - 1).tril() < 0.5,
            labels=tokens[None, 1:],
        )
    return -losses[0]


def gradient_figures(folder: Path, found: RowSet) -> dict[str, object]:
    by_rollout = advantages(found.scores)
    loss, reference = reference_gradients(folder, found)
    torch.save((loss, reference), folder.parent / "reference.pt")
    feeds = {
        "one_pack": [pack(found.rows, by_rollout)],
        "each_row_alone": [pack([row], by_rollout) for row in found.rows],
        "planned": packs(plan(found.rows, seed=0, step=0, token_budget=70), found.rows, by_rollout),
        "with_fillers": [
            pack([], {}),
            pack(found.rows[:2], by_rollout),
            pack(found.rows[2:], by_rollout),
            pack([], {}),
        ],
    }
    result: dict[str, object] = {}
    for name, feed in feeds.items():
        own_loss, tokens, gradients = megatron_gradients(folder, feed)
        result[name] = {
            "packs": len(feed),
            "tokens": tokens,
            "loss": abs(own_loss - loss),
            "gradient": difference(gradients, reference),
        }
    largest = max(float(each.abs().max()) for each in reference.values())
    trained = sum(row.trained for row in found.rows)
    return {"gradients": result, "largest_gradient": largest, "trained": trained}


def step_figures(folder: Path, found: RowSet) -> dict[str, object]:
    model, optimizer = qwen3.trainable(qwen3.load(folder, megatron_cpu.PackedAttention), learning_rate=1e-3)
    before = {name: each.detach().clone() for name, each in model.module.named_parameters()}
    by_rollout = advantages(found.scores)
    feed = packs(plan(found.rows, seed=0, step=0, token_budget=70), found.rows, by_rollout)
    first = train_step(model, optimizer, feed, clip=CLIP)
    moved = [float((each - before[name]).abs().max()) for name, each in model.module.named_parameters()]
    second = train_step(model, optimizer, feed, clip=CLIP)
    return {
        "first": {name: getattr(first, name) for name in first.__slots__},
        "second": {name: getattr(second, name) for name in second.__slots__},
        "moved": [min(moved), max(moved)],
        "mean_advantage": sum(by_rollout[row.rollout_id] * row.trained for row in found.rows) / first.tokens,
    }


def refusals(folder: Path, found: RowSet) -> dict[str, object]:
    model, optimizer = qwen3.trainable(qwen3.load(folder, megatron_cpu.PackedAttention), learning_rate=1e-3)
    messages: dict[str, object] = {}
    try:
        train_step(model, optimizer, [pack([], {})])
    except NothingToTrain as error:
        messages["no_token"] = str(error)
    model.module.config.calculate_per_token_loss = False
    try:
        train_step(model, optimizer, [pack(found.rows[:1], advantages(found.scores))])
    except TrainerSetup as error:
        messages["per_token_loss"] = str(error)
    try:
        with patch.object(torch.cuda, "is_available", return_value=True), megatron_cpu.installed():
            messages["gpu"] = "installed"
    except megatron_cpu.GpuPresent as error:
        messages["gpu"] = str(error)
    return messages


def gradients(folder: Path, rank: int, world: int) -> dict[str, object]:
    """One data-parallel rank's step over the noisy log, whose reference gradients `figures` left in the folder."""
    database = open_database(f"sqlite:///{folder}/noisy.db")
    found = build(database)
    rendezvous = f"file://{folder}/gradients.rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    with megatron_cpu.installed():
        parallel_state.initialize_model_parallel()
        planned = plan(found.rows, seed=0, step=0, world=world, token_budget=70)
        mine = packs(planned, found.rows, advantages(found.scores), rank=rank)
        loss, tokens, own = megatron_gradients(folder / "model", mine)
    reference_loss, reference = torch.load(folder / "reference.pt")
    torch.distributed.destroy_process_group()
    return {
        "own_tokens": sum(each.trained for each in mine),
        "tokens": tokens,
        "loss": abs(loss - reference_loss),
        "gradient": difference(own, reference),
        "micro_batches": len(mine),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, where, *ranks = sys.argv[1:]
    answer = figures(Path(where)) if what == "figures" else gradients(Path(where), *map(int, ranks))
    print(json.dumps(answer))
