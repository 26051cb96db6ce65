from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnlog.demo.model import CONTROL_MARKS, TEXT_MARKS, VOCABULARY, build_model
from turnlog.errors import FolderTaken

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
Render = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def render(tokenizer: Any) -> Render:
    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        options.setdefault("add_generation_prompt", True)
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert isinstance(text, str)
        return text

    return render


def test_two_builds_give_the_same_bytes_and_another_seed_gives_other_weights(demo_model: Path, tmp_path: Path) -> None:
    again = build_model(tmp_path / "again")
    other = build_model(tmp_path / "other", seed=1)
    names = {path.name for path in demo_model.iterdir()}
    assert {path.name for path in again.iterdir()} == names
    assert all((again / name).read_bytes() == (demo_model / name).read_bytes() for name in names)
    assert (other / "model.safetensors").read_bytes() != (demo_model / "model.safetensors").read_bytes()


def test_a_folder_with_the_same_build_is_left_alone_and_one_with_another_build_is_replaced(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "model")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    build_model(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    build_model(folder, seed=1)
    assert (folder / "model.safetensors").stat().st_mtime_ns != written


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FolderTaken, match="needs a folder of its own"):
        build_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_model_and_its_tokenizer_have_the_same_vocabulary(demo_model: Path, tokenizer: Any) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] == VOCABULARY >= 8000
    assert config["head_dim"] == 32
    assert config["dtype"] == "float32"


def test_a_mark_is_one_token_and_an_answer_ends_with_one(demo_model: Path, tokenizer: Any) -> None:
    for mark in (*CONTROL_MARKS, *TEXT_MARKS):
        assert len(tokenizer.encode(mark)) == 1, mark
    assert tokenizer.decode(tokenizer.encode("a<|im_end|><think>"), skip_special_tokens=True) == "a<think>"
    generation = json.loads((demo_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert not {"temperature", "top_p", "top_k"} & generation.keys()


@pytest.mark.parametrize("text", ["def f(x):\n    return x + 1\n", "It's 12,345 – naïve 数字 🦀", "\t \n\n  tail  "])
def test_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tools_stand_in_the_system_turn_and_results_share_one_user_turn(render: Render) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}
    text = render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "one", "tool_call_id": "1"},
            {"role": "tool", "content": "two", "tool_call_id": "2"},
        ],
        tools=[TOOL],
    )
    system, user, assistant, results, prompt = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n# Tools")
    assert '<tools>\n{"type": "function"' in system
    assert user == "user\nGo.<|im_end|>\n"
    one_call = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'
    assert assistant == f"assistant\n{one_call}\n{one_call}<|im_end|>\n"
    one, two = (f"\n<tool_response>\n{content}\n</tool_response>" for content in ("one", "two"))
    assert results == f"user{one}{two}<|im_end|>\n"
    assert prompt == "assistant\n"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_shown_after_the_last_question_only(render: Render, field: str) -> None:
    turn = {"role": "assistant", "content": "Hm.", field: "why"}
    result = {"role": "tool", "content": "seen", "tool_call_id": "1"}
    question = {"role": "user", "content": "Go."}
    assert "<think>\nwhy\n</think>\n\nHm.<|im_end|>" in render([question, turn, result])
    assert "why" not in render([question, turn, result, turn, question])


def test_reasoning_inside_the_text_counts_as_reasoning(render: Render) -> None:
    question = {"role": "user", "content": "Go."}
    turn = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nHm."}
    assert "assistant\n<think>\nwhy\n</think>\n\nHm.<|im_end|>" in render([question, turn])
    assert "assistant\nHm.<|im_end|>" in render([question, turn, question])


def test_thinking_can_be_switched_off_for_the_next_answer(render: Render) -> None:
    question = [{"role": "user", "content": "Go."}]
    assert render(question).endswith("<|im_start|>assistant\n")
    assert render(question, enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_what_follows_an_answer_does_not_depend_on_it(render: Render) -> None:
    after = [{"role": "user", "content": "And?"}]
    tails = [
        render([{"role": "user", "content": "Go."}, {"role": "assistant", "content": answer}, *after]).split(answer)[1]
        for answer in ("Yes.", "No, never.\n")
    ]
    assert tails == ["<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"] * 2


def test_an_unknown_role_is_named(render: Render) -> None:
    with pytest.raises(Exception, match="not critic"):
        render([{"role": "critic", "content": "No."}])
