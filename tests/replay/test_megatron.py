"""What real megatron-core makes of our rows, on the CPU and in processes of its own.

`megatron_checks.py` shows all that one rank can, `parallel_checks.py` what two share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECONDS = 300
LAYOUTS = ["DP2", "TP2", "TP2 sequence parallel", "PP2", "PP2 variable lengths"]


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
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
    (found,) = answers([start("megatron_checks.py", folder)])
    print(json.dumps(found, indent=1))
    return found


@pytest.fixture(scope="module")
def ranks(figures: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    assert figures["trained"], "the log, the model and the gradients of one rank are in the folder"
    found = answers([start("parallel_checks.py", folder, rank) for rank in (0, 1)])
    print({name: [rank[name]["gradient"] for rank in found] for name in LAYOUTS})
    return found


def test_rows_of_the_log_reach_megatron(figures: dict[str, Any]) -> None:
    assert figures["rows"] == [[1, 2], [3, 4], [1, 2, 3], [1, 2, 4], [5, 6], [1], [2, 3]]


def test_packed_rows_have_the_logprobs_of_unpacked_rows(figures: dict[str, Any]) -> None:
    assert figures["packed_against_alone"] < 1e-5
    assert figures["packed_backwards_against_alone"] < 1e-5
    assert figures["packed_against_unpacked"] < 1e-5


@pytest.mark.parametrize("feed", ["one_pack", "each_row_alone", "planned", "with_fillers", "padded"])
def test_rows_in_packs_train_what_the_calls_one_by_one_do(figures: dict[str, Any], feed: str) -> None:
    found = figures["gradients"][feed]
    assert found["tokens"] == figures["trained"]
    assert found["loss"] < 1e-6
    assert found["gradient"] < 1e-6 < figures["largest_gradient"] / 1e4


@pytest.mark.parametrize(
    "corruption", ["history_reordered", "call_trained_twice", "advantage_by_row_count", "rows_as_denominator"]
)
def test_each_corruption_changes_loss_and_gradient(figures: dict[str, Any], corruption: str) -> None:
    found = figures["corrupted"][corruption]
    assert found["loss"] > 1e-4
    assert found["gradient"] > 1e-4


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_a_correction_does_not_depend_on_how_rows_are_packed(figures: dict[str, Any], kind: str) -> None:
    assert figures["corrected"][kind]["packing"] < 1e-6
    assert figures["corrected"][kind]["against_none"] > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_give_the_gradient_of_one(ranks: list[dict[str, Any]], layout: str) -> None:
    first, second = (rank[layout] for rank in ranks)
    assert {*first["parameters"], *second["parameters"]} == {*first["all_parameters"]}
    assert max(first["gradient"], second["gradient"]) < 1e-6
    assert first["report"] == second["report"]
    for name, expected in first["one_rank"].items():
        if name != "micro_batches":
            assert first["report"][name] == pytest.approx(expected, rel=1e-5), name


def test_ranks_hold_what_their_layout_asks_for(ranks: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    shares = {layout: [rank[layout]["own_tokens"] for rank in ranks] for layout in LAYOUTS}
    first, second = shares.pop("DP2")
    assert first != second
    assert first + second == figures["trained"]
    assert {*map(tuple, shares.values())} == {(figures["trained"], figures["trained"])}
    stages = [{*rank["PP2"]["parameters"]} for rank in ranks]
    assert not stages[0] & stages[1]
    assert len({*ranks[0]["PP2"]["packs"]}) > 1, "the schedule gets packs of one length all the same"
    assert any(length % 2 for length in ranks[0]["TP2 sequence parallel"]["packs"]), "two ranks halve it all the same"


def test_packs_that_do_not_belong_together_are_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["DP2"]["refused"]["more"].startswith("data-parallel ranks have from 3 to 4 packs: ")
        for layout in LAYOUTS[1:]:
            for said in rank[layout]["refused"].values():
                assert said.startswith("the packs of ranks that share a model differ: ")
        assert rank["context_parallel"].startswith("context_parallel_size is 2: rows are not cut over ranks")


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
