"""A tiny random chat model with a real tokenizer, built from nothing but this machine's Python.

Knows how to make a folder that vLLM and transformers load as a Qwen3 model; does not know the server, the log or the
trainer. Law: the same seed, code and library versions give the same bytes, and nothing is downloaded.

The tokenizer is a byte-level BPE of 8,192 entries, or as many as are asked for, trained on the source of the Python
standard library, with the ChatML, tool and thinking tokens of Qwen3. The weights are random, so the model's text is
noise. That is a strong test of a log: about every second answer, decoded to text and tokenised again, gives other
tokens than were sampled.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from turnlog.errors import CorpusTooSmall, FolderTaken

VOCABULARY = 8192
"""Entries of the tokenizer, marks included, where nothing else is asked for; the model's vocabulary is exactly as
large, so that every token that it samples has a text."""

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
CONTROL_MARKS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Marks that never show in decoded text."""
TEXT_MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Marks that are one token and stay in decoded text, where the tool and reasoning parsers look for them."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 and Qwen3 cut text into words before merging; the format of their tokenizers prescribes it."""


def build_model(folder: Path, *, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    """Build the model in `folder` and return it; a folder that already holds the same build is left as it is.

    Takes a few seconds. A folder with another build is replaced, a folder with anything else is refused
    (FolderTaken). The fewer tokens the vocabulary has, the fewer samples a reward needs to move it.
    """
    fingerprint = _fingerprint(seed, vocabulary)
    record = folder / "turnlog_build.json"
    if record.is_file():
        if json.loads(record.read_text())["fingerprint"] == fingerprint:
            return folder
        shutil.rmtree(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FolderTaken(folder)
    folder.mkdir(parents=True, exist_ok=True)
    end_of_turn, end_of_text = _write_tokenizer(folder, vocabulary)
    _write_weights(folder, vocabulary, end_of_turn=end_of_turn, end_of_text=end_of_text, seed=seed)
    record.write_text(json.dumps({"fingerprint": fingerprint}) + "\n")
    return folder


def _chat_template() -> str:
    return files("turnlog.demo").joinpath("chat_template.jinja").read_text()


def _fingerprint(seed: int, vocabulary: int) -> str:
    parts = [
        Path(__file__).read_text(),
        _chat_template(),
        platform.python_version(),
        *(version(name) for name in ("tokenizers", "transformers", "torch")),
        str(seed),
        str(vocabulary),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _standard_library() -> Iterator[str]:
    """Text of the standard library's top-level modules, in a fixed order."""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _write_tokenizer(folder: Path, size: int) -> tuple[int, int]:
    """Train the tokenizer, write its files, and return the ids of the end of a turn and the end of text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CONTROL_MARKS) - len(TEXT_MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_standard_library(), trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in CONTROL_MARKS])
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in TEXT_MARKS])
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) != size:
        raise CorpusTooSmall(Path(os.__file__).parent, len(vocabulary), size)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(_chat_template())
    return vocabulary[END_OF_TURN], vocabulary[END_OF_TEXT]


def _write_weights(folder: Path, vocabulary: int, *, end_of_turn: int, end_of_text: int, seed: int) -> None:
    """Write a seeded random Qwen3 in float32, with the end-of-generation ids and no sampling defaults."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention computes
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        initializer_range=0.1,  # wide enough that some tokens are much likelier than others
        tie_word_embeddings=False,  # tied, a random model repeats its last token
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)  # so that a reader which forgets a norm is found out
    # No temperature, top_p or top_k here: vLLM would apply them to each request that names none.
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
