"""Tiny random vision models, built from nothing but this machine's Python: Qwen2.5-VL and Qwen3-VL in 3 MB each.

Knows how to make a folder that vLLM and transformers load; does not know servers or the log. Law: the same seed and
library versions give the same bytes, and nothing is downloaded (decision 0010).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from turnlog.demo import model as demo

Name = Literal["qwen2_5_vl", "qwen3_vl"]
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}
MEAN = {"qwen2_5_vl": (0.48145466, 0.4578275, 0.40821073), "qwen3_vl": (0.5, 0.5, 0.5)}
DEVIATION = {"qwen2_5_vl": (0.26862954, 0.26130258, 0.27577711), "qwen3_vl": (0.5, 0.5, 0.5)}
_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    "initializer_range": 0.1,
}  # fmt: skip


def build_vision_model(folder: Path, name: Name, *, seed: int = 0, min_pixels: int = 28 * 28) -> Path:
    """Build the model in an empty folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    end_of_turn, end_of_text = demo._write_tokenizer(folder, demo.VOCABULARY)
    (folder / "chat_template.jinja").write_text(Path(__file__).with_name("chat_template.jinja").read_text())
    write_processor(folder, name, min_pixels=min_pixels)
    _write_weights(folder, name, end_of_turn=end_of_turn, end_of_text=end_of_text, seed=seed)
    return folder


def write_processor(folder: Path, name: Name, *, min_pixels: int = 28 * 28) -> None:
    """The processor's settings: what it makes of an image follows from them."""
    kind = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}[name]
    image: dict[str, Any] = {
        "processor_class": kind,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH[name],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [*MEAN[name]],
        "image_std": [*DEVIATION[name]],
        "size": {"shortest_edge": min_pixels, "longest_edge": 256 * 256},
    }
    video = {
        **image,
        "video_processor_type": {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[name],
    }
    del video["image_processor_type"]
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))


def _write_weights(folder: Path, name: Name, *, end_of_turn: int, end_of_text: int, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import (
        GenerationConfig,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )
    from transformers.utils import logging

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    ids = {each: tokenizer.token_to_id(mark) for each, mark in marks.items()}
    text = {**_TEXT, "vocab_size": demo.VOCABULARY, "eos_token_id": end_of_turn, "pad_token_id": end_of_text}
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64,
        "patch_size": PATCH[name], "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    if name == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [1], "window_size": 112, "hidden_act": "silu"}
        text["rope_parameters"] = {**rope, "mrope_section": [4, 6, 6]}
        config: Any = Qwen2_5_VLConfig(text_config=text, vision_config=vision, dtype="float32", **ids)
        kind: Any = Qwen2_5_VLForConditionalGeneration
    else:
        vision |= {
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 256,
            "hidden_act": "gelu_pytorch_tanh",
        }
        text["rope_parameters"] = {**rope, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        config = Qwen3VLConfig(text_config=text, vision_config=vision, dtype="float32", **ids)
        kind = Qwen3VLForConditionalGeneration
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
