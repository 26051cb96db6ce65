"""Real megatron-core on the CPU, measured: prints one JSON object of figures for `test_megatron.py` to judge.

    python megatron_checks.py FOLDER

A program of its own: it replaces parts of torch, and starts a process group. What it leaves in the folder, the log, the
model and the gradients of one rank, is what `parallel_checks.py` compares two ranks with.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from replay.advantage import advantages
from replay.errors import NothingToTrain, TrainerSetup
from replay.megatron import accumulate, forward, micro_batches, train_step
from replay.objective import Clip, Correction
from replay.pack import Pack, pack, packs
from replay.padding import align
from replay.plan import plan
from replay.row import Row
from replay.rowset import RowSet, build
from store import hashing, log, migrate
from store.database import open_database, write
from store.events import (
    CallCompleted,
    PolicySpan,
    RolloutOpened,
    RolloutScored,
    logprob_array,
    logprob_bytes,
    token_array,
    token_bytes,
    uuid7,
)
from turnlog.demo import megatron_cpu, qwen3

VOCABULARY = 256
BUDGET = 90
CLIP = Clip(low=0.2, high=0.2)
Gradients = dict[str, torch.Tensor]


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


FORESTS = [
    [(None, 9, 5), (0, 4, 6), (None, 7, 4), (2, 5, 3)],
    [(None, 30, 20), (0, 3, 7), (1, 2, 2), (1, 6, 4), (None, 7, 4), (4, 5, 3)],
    [(None, 12, 3), (None, 7, 4), (1, 5, 3)],
]
"""Calls of three rollouts, each (parent, interstitial tokens, sampled tokens): rewrites, and a fork of shared calls."""


@dataclass(frozen=True)
class Recorded:
    """The calls that went into a log, and the rows that came out."""

    calls: list[CallCompleted]
    found: RowSet

    @property
    def by_rollout(self) -> dict[str, float]:
        return advantages(self.found.scores)


def make_log(model: Path, url: str, *, noise: float) -> Recorded:
    """A group of three rollouts, with the log-probabilities that Hugging Face gives."""
    judge = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    source = np.random.default_rng(1)
    database = open_database(url)
    migrate.upgrade(database)
    everything: list[CallCompleted] = []
    for number, forest in enumerate(FORESTS):
        rollout_id = f"r{number}"
        calls: list[CallCompleted] = []
        whole: list[np.ndarray] = []
        for parent, interstitial, sampled in forest:
            tokens = source.integers(0, VOCABULARY, interstitial + sampled)
            whole.append(tokens if parent is None else np.concatenate([whole[parent], tokens]))
            with torch.no_grad():
                logits = judge(torch.from_numpy(whole[-1])[None], use_cache=False).logits[0, :-1]
            own = logits.log_softmax(-1)[torch.arange(len(logits)), torch.from_numpy(whole[-1][1:])].numpy()
            drift = noise * source.standard_normal(sampled)
            above = None if parent is None else calls[parent]
            made = len(everything) + len(calls)
            calls.append(_call(made, rollout_id, above, tokens, own[-sampled:] + drift, interstitial))
        outcome_id = uuid7(0, rollout_id.encode().ljust(10))
        outcome = RolloutScored(outcome_id=outcome_id, rollout_id=rollout_id, reward=float(number), at=0)
        opened = RolloutOpened(rollout_id=rollout_id, group_id="g", opened_at=number)
        with write(database) as connection:
            log.append(connection, [opened, *calls, outcome])
        everything += calls
    found = build(database)
    database.dispose()
    return Recorded(everything, found)


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
        return -forward(model, next(micro_batches([packed], torch.device("cpu"))))[0]


def plain_logprobs(model: torch.nn.Module, token_ids: np.ndarray) -> torch.Tensor:
    """Megatron's own path without packing: the log-probability of every token but the first."""
    tokens = torch.from_numpy(token_ids.astype(np.int64))
    losses: torch.Tensor = model(
        input_ids=tokens[None, :-1],
        position_ids=torch.arange(len(tokens) - 1)[None],
        attention_mask=torch.ones(len(tokens) - 1, len(tokens) - 1).tril() < 0.5,  # True is masked
        labels=tokens[None, 1:],
    )
    return -losses[0]


def oracle(folder: Path, recorded: Recorded) -> tuple[float, Gradients]:
    """The calls of the log one by one, each a sequence of its own, by plain autograd: no rows, packs or schedule."""
    model = qwen3.load(folder, megatron_cpu.PackedAttention)
    whole: dict[object, np.ndarray] = {None: np.empty(0, np.int32)}
    total = torch.zeros(())
    for call in recorded.calls:
        whole[call.call_id] = np.concatenate([whole[call.parent_id], token_array(call.token_ids)])
        own = plain_logprobs(model, whole[call.call_id])[call.prompt_len - 1 :]
        ratio = (own - torch.from_numpy(logprob_array(call.logprobs).copy())).exp()
        advantage = recorded.by_rollout[call.rollout_id]
        clipped = ratio.clamp(1 - CLIP.low, 1 + CLIP.high)
        total = total - torch.minimum(ratio * advantage, clipped * advantage).sum()
    loss = total / sum(call.sampled_len for call in recorded.calls)
    loss.backward()
    return float(loss.detach()), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def megatron_gradients(
    folder: Path, mine: Sequence[Pack], correction: Correction | None = None
) -> tuple[float, int, Gradients]:
    model, _ = qwen3.trainable(qwen3.load(folder, megatron_cpu.PackedAttention), learning_rate=1e-3)
    model.zero_grad_buffer()
    seen = accumulate(model, mine, clip=CLIP, correction=correction or Correction())
    return seen.loss, seen.tokens, {name: each.main_grad.clone() for name, each in model.module.named_parameters()}


def difference(ours: Gradients, reference: Gradients) -> float:
    assert ours.keys() == reference.keys()
    return max(float((ours[name] - reference[name]).abs().max()) for name in reference)


def figures(folder: Path) -> dict[str, object]:
    model_folder = folder / "model"
    make_model(model_folder)
    exact = make_log(model_folder, f"sqlite:///{folder}/exact.db", noise=0.0)
    noisy = make_log(model_folder, f"sqlite:///{folder}/noisy.db", noise=0.3)
    result: dict[str, object] = {"rows": [list(row.call_numbers) for row in exact.found.rows]}
    before = torch.cuda.current_device
    with megatron_cpu.installed(), megatron_cpu.single_process(str(folder / "figures.rendezvous")):
        result |= packing_figures(model_folder, exact.found.rows)
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
    with torch.no_grad():
        plain = [plain_logprobs(model, row.token_ids) for row in rows]
    return {
        "packed_against_alone": float((together - alone).abs().max()),
        "packed_backwards_against_alone": float((torch.cat(pieces[::-1]) - alone).abs().max()),
        "packed_against_unpacked": float((together - torch.cat(plain)).abs().max()),
    }


def gradient_figures(folder: Path, recorded: Recorded) -> dict[str, object]:
    rows, by_rollout = recorded.found.rows, recorded.by_rollout
    loss, reference = oracle(folder, recorded)
    largest = max(float(each.abs().max()) for each in reference.values())
    planned = packs(plan(rows, seed=0, step=0, token_budget=BUDGET), rows, by_rollout)
    feeds = {
        "one_pack": [pack(rows, by_rollout)],
        "each_row_alone": [pack([row], by_rollout) for row in rows],
        "planned": planned,
        "with_fillers": [pack([], {}), pack(rows[:2], by_rollout), pack(rows[2:], by_rollout), pack([], {})],
        "padded": align([*planned, pack([], {})], equal=True),
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
        if name == "planned":
            model, optimizer = qwen3.trainable(qwen3.load(folder, megatron_cpu.PackedAttention), learning_rate=1e-3)
            report = train_step(model, optimizer, feed, clip=CLIP)
            torch.save({"report": asdict(report), "gradients": gradients}, folder.parent / "one_rank.pt")
    corrupted = {
        name: {"loss": abs(own_loss - loss), "gradient": difference(gradients, reference)}
        for name, (own_loss, gradients) in corruptions(folder, recorded).items()
    }
    return {
        "gradients": result,
        "corrupted": corrupted,
        "corrected": correction_figures(folder, recorded),
        "largest_gradient": largest,
        "trained": sum(row.trained for row in rows),
    }


def corruptions(folder: Path, recorded: Recorded) -> dict[str, tuple[float, Gradients]]:
    """Four ways to get a step wrong: loss and gradients of each."""
    rows, by_rollout = recorded.found.rows, recorded.by_rollout
    of_rollout = Counter(row.rollout_id for row in rows)
    cut = recorded.calls[0].chain_len
    arrays = {name: getattr(rows[0], name) for name in ("token_ids", "loss_mask", "logprobs")}
    reordered = replace(rows[0], **{name: np.roll(array, -cut) for name, array in arrays.items()})
    fork = next(index for index, row in enumerate(rows) if row.call_numbers == (1, 2, 4))
    mask = rows[fork].loss_mask | rows[fork].logprobs.astype(bool)
    feeds = {
        "history_reordered": ([reordered, *rows[1:]], by_rollout),
        "call_trained_twice": ([*rows[:fork], replace(rows[fork], loss_mask=mask), *rows[fork + 1 :]], by_rollout),
        "advantage_by_row_count": (rows, {name: value / of_rollout[name] for name, value in by_rollout.items()}),
    }
    found = {}
    for name, (fed, values) in feeds.items():
        loss, _, gradients = megatron_gradients(folder, [pack(fed, values)])
        found[name] = (loss, gradients)
    loss, tokens, gradients = megatron_gradients(folder, [pack(rows, by_rollout)])
    scale = tokens / len(rows)
    found["rows_as_denominator"] = (loss * scale, {name: each * scale for name, each in gradients.items()})
    return found


def correction_figures(folder: Path, recorded: Recorded) -> dict[str, object]:
    """A correction does not depend on how rows are packed, and is not what `none` gives."""
    rows, by_rollout = recorded.found.rows, recorded.by_rollout
    _, _, uncorrected = megatron_gradients(folder, [pack(rows, by_rollout)])
    found: dict[str, object] = {}
    for correction in (Correction(kind="token", cap=1.1), Correction(kind="sequence", cap=1.5)):
        _, _, together = megatron_gradients(folder, [pack(rows, by_rollout)], correction)
        _, _, alone = megatron_gradients(folder, [pack([row], by_rollout) for row in rows], correction)
        found[correction.kind] = {
            "packing": difference(together, alone),
            "against_none": difference(together, uncorrected),
        }
    return found


def step_figures(folder: Path, recorded: Recorded) -> dict[str, object]:
    model, optimizer = qwen3.trainable(qwen3.load(folder, megatron_cpu.PackedAttention), learning_rate=1e-3)
    before = {name: each.detach().clone() for name, each in model.module.named_parameters()}
    rows, by_rollout = recorded.found.rows, recorded.by_rollout
    feed = packs(plan(rows, seed=0, step=0, token_budget=BUDGET), rows, by_rollout)
    first = train_step(model, optimizer, feed, clip=CLIP)
    moved = [float((each.detach() - before[name]).abs().max()) for name, each in model.module.named_parameters()]
    second = train_step(model, optimizer, feed, clip=CLIP)
    return {
        "first": asdict(first),
        "second": asdict(second),
        "moved": [min(moved), max(moved)],
        "mean_advantage": sum(by_rollout[row.rollout_id] * row.trained for row in rows) / first.tokens,
    }


def refusals(folder: Path, recorded: Recorded) -> dict[str, object]:
    model, optimizer = qwen3.trainable(qwen3.load(folder, megatron_cpu.PackedAttention), learning_rate=1e-3)
    messages: dict[str, object] = {}
    try:
        train_step(model, optimizer, [pack([], {})])
    except NothingToTrain as error:
        messages["no_token"] = str(error)
    model.module.config.calculate_per_token_loss = False
    try:
        train_step(model, optimizer, [pack(recorded.found.rows[:1], recorded.by_rollout)])
    except TrainerSetup as error:
        messages["per_token_loss"] = str(error)
    try:
        with patch.object(torch.cuda, "is_available", return_value=True), megatron_cpu.installed():
            messages["gpu"] = "installed"
    except megatron_cpu.GpuPresent as error:
        messages["gpu"] = str(error)
    return messages


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(figures(Path(sys.argv[1]))))
