"""What real megatron-core makes of our rows, on the CPU and in processes of its own (`megatron_checks.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("megatron_checks.py")
SECONDS = 300


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def answers(processes: Sequence[subprocess.Popen[str]]) -> list[Any]:
    try:
        spoken = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()  # a rank whose peer failed would wait for it
    for process, (_, errors) in zip(processes, spoken, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(printed) for printed, _ in spoken]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    (found,) = answers([start("figures", folder)])
    print(json.dumps(found, indent=1))
    return found


def test_rows_of_the_log_reach_megatron(figures: dict[str, Any]) -> None:
    assert figures["rows"] == [[1, 2], [3, 4], [1, 2, 3], [4, 5], [1], [2, 3]]


def test_packed_rows_have_the_logprobs_of_unpacked_rows(figures: dict[str, Any]) -> None:
    assert figures["packed_against_alone"] < 1e-5
    assert figures["packed_backwards_against_alone"] < 1e-5
    assert figures["packed_against_unpacked"] < 1e-5


@pytest.mark.parametrize("feed", ["one_pack", "each_row_alone", "planned", "with_fillers"])
def test_loss_and_gradient_are_a_token_sum_over_one_global_count(figures: dict[str, Any], feed: str) -> None:
    found = figures["gradients"][feed]
    assert found["tokens"] == figures["trained"]
    assert found["loss"] < 1e-6
    assert found["gradient"] < 1e-6 < figures["largest_gradient"] / 1e4


def test_two_data_parallel_ranks_give_the_gradient_of_one(figures: dict[str, Any], folder: Path) -> None:
    ranks = answers([start("gradients", folder, rank, 2) for rank in (0, 1)])
    assert ranks[0]["own_tokens"] != ranks[1]["own_tokens"], "the ranks hold unequal shares"
    assert sum(rank["own_tokens"] for rank in ranks) == figures["trained"]
    assert len({rank["micro_batches"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["tokens"] == figures["trained"]
        assert rank["loss"] < 1e-6
        assert rank["gradient"] < 1e-6


def test_one_step_starts_from_the_stored_logprobs_and_lowers_the_loss(figures: dict[str, Any]) -> None:
    first, second = figures["first"], figures["second"]
    assert first["max_logprob_difference"] < 1e-4, "Hugging Face sampled, megatron agrees"
    assert first["loss"] == pytest.approx(-figures["mean_advantage"], abs=1e-5), "every ratio is one before the step"
    assert (first["tokens"], first["clipped"], first["updated"]) == (figures["trained"], 0, True)
    assert first["grad_norm"] > 0
    assert second["loss"] < first["loss"]
    assert second["max_logprob_difference"] > first["max_logprob_difference"]


def test_one_step_moves_every_weight_once(figures: dict[str, Any]) -> None:
    smallest, largest = figures["moved"]  # Adam's first step moves what has a gradient by the learning rate, 1e-3
    assert 0 < smallest <= largest < 1.01e-3


def test_what_would_break_the_promise_is_refused(figures: dict[str, Any]) -> None:
    assert figures["no_token"].startswith("the packs of all ranks train no token")
    assert figures["per_token_loss"].startswith("calculate_per_token_loss is False: set it to True")


def test_the_shim_refuses_a_gpu_and_puts_everything_back(figures: dict[str, Any]) -> None:
    assert figures["gpu"].startswith("this machine has a GPU")
    assert figures["restored"] is True
