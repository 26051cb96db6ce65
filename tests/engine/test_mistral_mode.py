"""The real model server in mistral's tokenizer mode, where mistral-common writes prompts and no template is there.

The tokenizer is mistral-common's own file with a small part of its words, read as its version 7. (For newer
versions vLLM 0.32 asks mistral-common for a grammar in a way that its 1.13 refuses, so that no request is served.) The
model has no weights worth the name: what it samples is forced.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from store import log, migrate
from store.database import open_database, read
from store.events import CallCompleted
from store.lineage import chain_tokens
from turnlog.demo.server import start_server

SCRIPTED = Path(__file__).parents[1] / "scripted"
FLAGS = (
    *("--tokenizer-mode", "mistral", "--config-format", "hf", "--load-format", "dummy", "--reasoning", "restore"),
    *("--tool-call-parser", "mistral", "--reasoning-parser", "mistral"),
    *("--logits-processors", "scripted_sampling:ForcedTokens"),
)
TOOLS = [
    {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {"type": "object"}}}
]  # fmt: skip
END = SpecialTokens.eos


def model_in(folder: Path, tekken: Callable[[Path, str], Path]) -> Path:
    """A model that vLLM loads without weights, with a tokenizer of mistral-common's format."""
    folder.mkdir()
    size = Tekkenizer.from_file(tekken(folder, "v7")).n_words
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": size, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory, write_tekken: Callable[[Path, str], Path]) -> Iterator[Any]:
    """A server in mistral's mode, its log, and its tokenizer."""
    folder = tmp_path_factory.mktemp("mistral")
    model = model_in(folder / "model", write_tekken)
    url = f"sqlite:///{folder}/turnlog.db"
    database = open_database(url)
    migrate.upgrade(database)
    running = start_server(
        model,
        url=url,
        log=folder / "server.log",
        flags=FLAGS,
        environment={"PYTHONPATH": str(SCRIPTED), "VLLM_USE_V2_MODEL_RUNNER": "0"},
    )
    yield SimpleNamespace(
        address=running.address,
        database=database,
        log=folder / "server.log",
        tokenizer=Tekkenizer.from_file(model / "tekken.json"),
    )
    running.stop()
    database.dispose()


def tokens(mistral: Any, *pieces: str | SpecialTokens) -> list[int]:
    """Text and control tokens as ids."""
    found: list[int] = []
    for piece in pieces:
        if isinstance(piece, SpecialTokens):
            found.append(mistral.tokenizer.get_special_token(piece))
        else:
            found += mistral.tokenizer.encode(piece, bos=False, eos=False)
    return found


def ask(mistral: Any, rollout: str, messages: list[Any], answer: list[int], **fields: Any) -> dict[str, Any]:
    """Send a request, force what is sampled, and add the answer to the messages as a harness does."""
    body = {
        "model": "demo", "messages": messages, "max_tokens": len(answer), "vllm_xargs": {"scripted": answer}, **fields,
    }  # fmt: skip
    answered = httpx.post(f"{mistral.address}/rollouts/{rollout}/v1/chat/completions", json=body, timeout=60)
    assert answered.status_code == 200, answered.text
    message: dict[str, Any] = answered.json()["choices"][0]["message"]
    messages.append({key: message[key] for key in ("role", "content", "reasoning", "tool_calls") if message.get(key)})
    return message


def calls_of(mistral: Any, rollout: str) -> list[tuple[CallCompleted, list[int], list[int]]]:
    """The rollout's calls, each with its prompt and with its parent's chain."""
    with read(mistral.database) as connection:
        return [
            (
                call,
                chain_tokens(connection, call.call_id).tolist()[: call.prompt_len],
                chain_tokens(connection, call.parent_id).tolist() if call.parent_id else [],
            )
            for call in log.calls(connection, rollout)
        ]


def stock_prompt(mistral: Any, messages: list[Any], **fields: Any) -> list[int]:
    """What the server makes of these messages where turnlog does nothing."""
    answered = httpx.post(f"{mistral.address}/tokenize", json={"model": "demo", "messages": messages, **fields})
    assert answered.status_code == 200, answered.text
    found: list[int] = answered.json()["tokens"]
    return found


def test_tool_results_are_spliced_as_mistral_common_writes_them(mistral: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is here?"}]
    stock: list[list[int]] = []
    for step in range(3):
        call = json.dumps([{"name": "ls", "arguments": {"path": f"/{step}"}}])
        stock.append(stock_prompt(mistral, messages, tools=TOOLS))
        message = ask(mistral, "results", messages, tokens(mistral, SpecialTokens.tool_calls, call, END), tools=TOOLS)
        (made,) = message["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"path": f"/{step}"}
        messages.append({"role": "tool", "tool_call_id": made["id"], "content": f"</s>[INST]{step}.txt"})
    calls = calls_of(mistral, "results")
    (end,) = tokens(mistral, END)
    assert [(call.decision, call.evidence.get("path")) for call, _, _ in calls] == [
        ("root", None), ("continuation", "marker"), ("continuation", "marker"),
    ]  # fmt: skip
    for (_, prompt, before), rendered in zip(calls, stock, strict=True):
        cut = len(rendered) - rendered[::-1].index(end) if end in rendered else 0
        assert prompt == before + rendered[cut:]


def test_a_question_is_spliced_behind_the_answer_as_it_was_sampled(mistral: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    sampled = tokens(mistral, "H", "ell", "o", END)
    assert ask(mistral, "question", messages, sampled)["content"] == "Hello"
    cut_off = tokens(mistral, "y", "es")
    messages.append({"role": "user", "content": "Sure?"})
    ask(mistral, "question", messages, cut_off)
    messages.append({"role": "user", "content": "Go on"})
    ask(mistral, "question", messages, tokens(mistral, "So", END))
    _, (ended, ended_prompt, before_ended), (cut, cut_prompt, before_cut) = calls_of(mistral, "question")
    asked = SpecialTokens.begin_inst, SpecialTokens.end_inst
    assert before_ended[-len(sampled) :] == sampled
    assert (ended.evidence["path"], cut.evidence["path"]) == ("marker", "marker")
    assert ended_prompt == before_ended + tokens(mistral, asked[0], "Sure?", asked[1])
    assert cut_prompt == before_cut + tokens(mistral, END, asked[0], "Go on", asked[1])


def test_a_question_that_moves_the_tools_begins_a_new_row(mistral: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    ask(mistral, "moved", messages, tokens(mistral, "Hi", END), tools=TOOLS)
    messages.append({"role": "user", "content": "Sure?"})
    stock = stock_prompt(mistral, messages, tools=TOOLS)
    ask(mistral, "moved", messages, tokens(mistral, "Yes", END), tools=TOOLS)
    _, (call, prompt, _) = calls_of(mistral, "moved")
    assert (call.reason, prompt) == ("cannot_splice:boundary_not_proven", stock)


def test_start_up_says_which_shapes_are_spliced_and_alarms_nobody(mistral: Any) -> None:
    written = mistral.log.read_text()
    assert "splice of plain: marker" in written
    assert "splice of parallel tool results: marker" in written
    assert "splice of tools offered: cannot_splice:boundary_not_proven" in written
    assert "unsafe" not in written
    assert "Traceback" not in written
