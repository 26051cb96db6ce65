from __future__ import annotations

import sys

import pytest

from turnlog.errors import BadModel
from turnlog.serve import command, environment


def test_every_flag_passes_through_and_the_log_probabilities_that_were_sampled_from_are_asked_for() -> None:
    built = command("folder/model", ["--port", "8000", "--enable-auto-tool-choice"])
    assert built[:2] == [sys.executable, "-m"]
    assert "folder/model" in built
    assert built[-5:] == ["--port", "8000", "--enable-auto-tool-choice", "--logprobs-mode", "processed_logprobs"]


@pytest.mark.parametrize("given", [["--logprobs-mode", "raw_logprobs"], ["--logprobs_mode=raw_logprobs"]])
def test_a_mode_of_log_probabilities_that_was_asked_for_stays(given: list[str]) -> None:
    assert command("model", given)[-len(given) :] == given


def test_a_flag_in_the_place_of_the_model_is_refused() -> None:
    with pytest.raises(BadModel, match="--port"):
        command("--port", ["8000"])


def test_the_plug_ins_that_the_server_would_load_by_itself_stay_loaded() -> None:
    """vLLM loads general plug-ins when VLLM_PLUGINS is unset, and its own are among them."""
    found = environment({}, url="sqlite:///a.db", reasoning="strict", require_open=False, worker=None)
    names = found["VLLM_PLUGINS"].split(",")
    assert names[-1] == "turnlog"
    assert "lora_filesystem_resolver" in names
    assert "TURNLOG_WORKER" not in found


def test_a_list_of_plug_ins_is_extended_once() -> None:
    current = {"VLLM_PLUGINS": "mine,turnlog", "PATH": "/bin"}
    found = environment(current, url="sqlite:///a.db", reasoning="restore", require_open=True, worker="w1")
    assert found == {
        "VLLM_PLUGINS": "mine,turnlog",
        "PATH": "/bin",
        "TURNLOG_URL": "sqlite:///a.db",
        "TURNLOG_REASONING": "restore",
        "TURNLOG_REQUIRE_OPEN": "1",
        "TURNLOG_WORKER": "w1",
    }
