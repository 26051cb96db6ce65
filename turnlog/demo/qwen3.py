"""A Hugging Face Qwen3 folder as a megatron-core GPT model in float32, and back.

Knows the two layouts of the same weights; does not know how the model is trained or served.
Law: the model gives the log-probabilities that the folder's own does, to float32 rounding; what is loaded and saved
again is the same weights, bit for bit.

Queries, keys and values are fused per key-value group, gate and up projections are stacked; all else maps one to one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from pydantic import BaseModel, ConfigDict, JsonValue
from safetensors.torch import load_file, save_file


class Shape(BaseModel):
    """The fields of `config.json` that the model is built from."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_theta: float

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Read `config.json`, of transformers 4 or 5."""
        config: dict[str, JsonValue] = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters")  # transformers 5 keeps the base in here
        return cls.model_validate({**config, **rope} if isinstance(rope, dict) else config)


def load(folder: Path, core_attention: type[torch.nn.Module] | None = None) -> GPTModel:
    """Build the model and load its weights.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        core_attention: replaces megatron's local core attention, which refuses packed sequences.
    """
    shape = Shape.read(folder)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    if core_attention is not None:
        layer: Any = spec.submodules
        layer.self_attention.submodules.core_attention = core_attention
    model = GPTModel(
        config=_config(shape),
        transformer_layer_spec=spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
    )
    weights = megatron_weights(shape, load_file(folder / "model.safetensors"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    absent = [name for name in missing if not name.endswith("_extra_state")]  # megatron's own bookkeeping, empty here
    if absent or unexpected:
        raise ValueError(
            f"{folder} lacks {absent} and has {unexpected} beyond a Qwen3 model: give a dense Qwen3 folder"
        )
    return model


def save(model: GPTModel, folder: Path) -> None:
    """Write the weights to a folder that has the model's `config.json`, at once: a reader never finds half of them."""
    weights = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    mapped = huggingface_weights(Shape.read(folder), weights)
    whole = {name: value.clone(memory_format=torch.contiguous_format) for name, value in mapped.items()}  # no views
    aside = folder / "model.safetensors.new"
    save_file(whole, aside, metadata={"format": "pt"})
    aside.replace(folder / "model.safetensors")


def trainable(model: GPTModel, *, learning_rate: float) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wrap the model for training and make its optimizer: Adam without weight decay, gradients clipped at norm 1."""
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=learning_rate, weight_decay=0.0, clip_grad=1.0, params_dtype=torch.float32
        ),
        [wrapped],
    )
    return wrapped, optimizer


def megatron_weights(shape: Shape, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under megatron's names and in its layout."""
    mapped = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not shape.tie_word_embeddings:
        mapped["output_layer.weight"] = weights["lm_head.weight"]
    for layer in range(shape.num_hidden_layers):
        source, target = f"model.layers.{layer}", f"decoder.layers.{layer}"
        gate_up = [weights[f"{source}.mlp.{half}_proj.weight"] for half in ("gate", "up")]
        mapped |= {
            f"{target}.input_layernorm.weight": weights[f"{source}.input_layernorm.weight"],
            f"{target}.self_attention.linear_qkv.weight": _fused_qkv(shape, weights, f"{source}.self_attn"),
            f"{target}.self_attention.q_layernorm.weight": weights[f"{source}.self_attn.q_norm.weight"],
            f"{target}.self_attention.k_layernorm.weight": weights[f"{source}.self_attn.k_norm.weight"],
            f"{target}.self_attention.linear_proj.weight": weights[f"{source}.self_attn.o_proj.weight"],
            f"{target}.pre_mlp_layernorm.weight": weights[f"{source}.post_attention_layernorm.weight"],
            f"{target}.mlp.linear_fc1.weight": torch.cat(gate_up),
            f"{target}.mlp.linear_fc2.weight": weights[f"{source}.mlp.down_proj.weight"],
        }
    return mapped


def huggingface_weights(shape: Shape, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under Hugging Face's names and in its layout: what `megatron_weights` takes."""
    mapped = {
        "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"],
        "model.norm.weight": weights["decoder.final_layernorm.weight"],
    }
    if not shape.tie_word_embeddings:
        mapped["lm_head.weight"] = weights["output_layer.weight"]
    for layer in range(shape.num_hidden_layers):
        source, target = f"decoder.layers.{layer}", f"model.layers.{layer}"
        query, key, value = _parted_qkv(shape, weights[f"{source}.self_attention.linear_qkv.weight"])
        gate, up = weights[f"{source}.mlp.linear_fc1.weight"].chunk(2)
        mapped |= {
            f"{target}.input_layernorm.weight": weights[f"{source}.input_layernorm.weight"],
            f"{target}.self_attn.q_proj.weight": query,
            f"{target}.self_attn.k_proj.weight": key,
            f"{target}.self_attn.v_proj.weight": value,
            f"{target}.self_attn.q_norm.weight": weights[f"{source}.self_attention.q_layernorm.weight"],
            f"{target}.self_attn.k_norm.weight": weights[f"{source}.self_attention.k_layernorm.weight"],
            f"{target}.self_attn.o_proj.weight": weights[f"{source}.self_attention.linear_proj.weight"],
            f"{target}.post_attention_layernorm.weight": weights[f"{source}.pre_mlp_layernorm.weight"],
            f"{target}.mlp.gate_proj.weight": gate,
            f"{target}.mlp.up_proj.weight": up,
            f"{target}.mlp.down_proj.weight": weights[f"{source}.mlp.linear_fc2.weight"],
        }
    return mapped


def _fused_qkv(shape: Shape, weights: Mapping[str, torch.Tensor], source: str) -> torch.Tensor:
    groups = shape.num_key_value_heads
    parts = [weights[f"{source}.{part}_proj.weight"].view(groups, -1, shape.hidden_size) for part in "qkv"]
    return torch.cat(parts, dim=1).reshape(-1, shape.hidden_size)


def _parted_qkv(shape: Shape, fused: torch.Tensor) -> list[torch.Tensor]:
    groups = shape.num_key_value_heads
    queries = shape.num_attention_heads // groups
    rows = [part * shape.head_dim for part in (queries, 1, 1)]
    parts = torch.split(fused.view(groups, -1, shape.hidden_size), rows, dim=1)
    return [part.reshape(-1, shape.hidden_size) for part in parts]


def _config(shape: Shape) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        calculate_per_token_loss=True,  # one global token count, see replay.megatron
    )
