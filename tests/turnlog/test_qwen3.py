from __future__ import annotations

import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's, about libraries that only a GPU needs
    from turnlog.demo import qwen3


def test_weights_come_back_from_megatrons_layout_bit_for_bit(demo_model: Path) -> None:
    shape, weights = qwen3.Shape.read(demo_model), load_file(demo_model / "model.safetensors")
    back = qwen3.huggingface_weights(shape, qwen3.megatron_weights(shape, weights))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())
