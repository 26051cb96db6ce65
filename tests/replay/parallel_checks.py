"""One of two ranks that train one step in every layout, over gloo on the CPU, compared with one rank alone.

    python parallel_checks.py FOLDER RANK      after `megatron_checks.py FOLDER`; both ranks at once

Prints one JSON object of figures for `test_megatron.py` to judge. One pair of processes takes all layouts in turn, as
starting one takes longer than a step.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from replay.advantage import advantages
from replay.errors import PlanMismatch, TrainerSetup
from replay.megatron import accumulate, train_step
from replay.objective import Clip, Correction
from replay.pack import Pack, pack, packs
from replay.plan import plan
from replay.rowset import RowSet, build
from store.database import open_database
from turnlog.demo import megatron_cpu, qwen3

WORLD = 2
BUDGET = 90
CLIP = Clip(low=0.2, high=0.2)
SPLIT_BY_ROW = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")
SPLIT_BY_COLUMN = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Layout:
    """How two ranks share the work."""

    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    variable_seq_lengths: bool = False


LAYOUTS = {
    "DP2": Layout(),
    "TP2": Layout(tensor=2),
    "TP2 sequence parallel": Layout(tensor=2, sequence=True),
    "PP2": Layout(pipeline=2),
    "PP2 variable lengths": Layout(pipeline=2, variable_seq_lengths=True),
}


class Norm(torch.nn.RMSNorm):
    """The local norm of megatron refuses sequence parallelism, for want of the mark that its gradient is summed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def whole_name(name: str, stage_layers: int) -> str:
    """The name in the whole model of a parameter of this stage, whose layers are counted from 0."""
    first = parallel_state.get_pipeline_model_parallel_rank() * stage_layers
    return re.sub(r"layers\.(\d+)", lambda layer: f"layers.{int(layer[1]) + first}", name)


def own_part(name: str, whole: torch.Tensor) -> torch.Tensor:
    """What this tensor-parallel rank has of a weight, or of its gradient."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    if name.endswith(SPLIT_BY_ROW):
        return whole.chunk(size, dim=0)[rank]
    if name.endswith(SPLIT_BY_COLUMN):
        return whole.chunk(size, dim=1)[rank]
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])  # gate over up, each split by itself
    return whole


def part_of_model(shape: qwen3.Shape, whole: GPTModel, layout: Layout) -> tuple[GPTModel, dict[str, str]]:
    """This rank's part of the model, and its parameters' names in the whole one."""
    config: TransformerConfig = replace(
        whole.config,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence,
        variable_seq_lengths=layout.variable_seq_lengths,
        moe_token_dispatcher_type="alltoall",  # megatron asks for it with variable lengths, of dense models too
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = Norm
    attention.core_attention = megatron_cpu.PackedAttention
    layers = config.num_layers // layout.pipeline
    part = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
    )
    names = {name: whole_name(name, layers) for name, _ in part.named_parameters()}
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(own_part(name, weights[names[name]]))
    return part, names


def layout_figures(folder: Path, whole: GPTModel, found: RowSet, layout: Layout) -> dict[str, object]:
    """One step in this layout against the one that `megatron_checks.py` took alone."""
    one_rank = torch.load(folder / "one_rank.pt")
    model, names = part_of_model(qwen3.Shape.read(folder / "model"), whole, layout)
    wrapped, optimizer = qwen3.trainable(model, learning_rate=1e-3)
    mine = own_packs(found)
    wrapped.zero_grad_buffer()
    accumulate(wrapped, mine, clip=CLIP, correction=Correction())
    gradients = {
        name: float((parameter.main_grad - own_part(name, one_rank["gradients"][names[name]])).abs().max())
        for name, parameter in model.named_parameters()
    }
    report = asdict(train_step(wrapped, optimizer, mine, clip=CLIP))
    return {
        "gradient": max(gradients.values()),
        "parameters": sorted(names.values()),
        "all_parameters": sorted(one_rank["gradients"]),
        "packs": [len(each.tokens) for each in mine],
        "own_tokens": sum(each.trained for each in mine),
        "report": report,
        "one_rank": one_rank["report"],
        "refused": refusals(wrapped, mine),
    }


def own_packs(found: RowSet) -> list[Pack]:
    """This rank's packs, of unequal lengths, and one without rows."""
    world, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    planned = plan(found.rows, seed=0, step=0, world=world, token_budget=BUDGET)
    return [*packs(planned, found.rows, advantages(found.scores), rank=rank), pack([], {})]


def refusal(model: torch.nn.Module, mine: Sequence[Pack]) -> str:
    try:
        accumulate(model, mine, clip=CLIP, correction=Correction())
    except (PlanMismatch, TrainerSetup) as error:
        return str(error)
    return "done"


def refusals(model: torch.nn.Module, mine: Sequence[Pack]) -> dict[str, str]:
    """What both ranks say where the second has a pack more, and where it has the same packs in another order."""
    odd = torch.distributed.get_rank() == 1
    return {
        "more": refusal(model, [*mine, pack([], {})] if odd else mine),
        "other_order": refusal(model, mine[::-1] if odd else mine),
    }


def unsupported(whole: GPTModel, found: RowSet) -> str:
    """What a step says where ranks would have to share rows."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    said = refusal(whole, own_packs(found))
    parallel_state.destroy_model_parallel()
    return said


def figures(folder: Path, rank: int) -> dict[str, object]:
    database = open_database(f"sqlite:///{folder}/noisy.db")
    found = build(database)
    database.dispose()
    rendezvous = f"file://{folder}/parallel.rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    result: dict[str, object] = {}
    with megatron_cpu.installed():
        parallel_state.initialize_model_parallel()
        whole = qwen3.load(folder / "model", megatron_cpu.PackedAttention)
        parallel_state.destroy_model_parallel()
        for name, layout in LAYOUTS.items():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline
            )
            result[name] = layout_figures(folder, whole, found, layout)
            parallel_state.destroy_model_parallel()
        result["context_parallel"] = unsupported(whole, found)
    torch.distributed.destroy_process_group()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(figures(Path(sys.argv[1]), int(sys.argv[2]))))
