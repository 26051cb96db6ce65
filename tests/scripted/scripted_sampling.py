"""Sampling forced to given tokens: a vLLM logits processor that leaves one choice a step.

Knows token ids and nothing of where they come from. Law: a request without a script samples as if this were not loaded.

Only the scripted token keeps a usable logit, so it is sampled at every temperature and its processed log-probability is
0.0: finite, and truly the probability under which it was sampled. The others get a large negative logit, not minus
infinity, so that no step of the sampler meets infinities. Loaded in the engine's worker process.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

SCRIPT = "scripted"
"""The name in `SamplingParams.extra_args` under which a request's token ids stand."""
_FORBIDDEN = -1e6


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM is Any to the type checker
    """Forces the n-th token of a request to the n-th id of its script; behind the script's end sampling is free."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}
        """Row of the batch to the script and the tokens sampled so far; vLLM keeps the latter up to date."""

    def is_argmax_invariant(self) -> bool:
        """It changes greedy sampling too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that come, go and change rows."""
        process_dict_updates(self._rows, batch_update, _scripted)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave each scripted row its next token."""
        for row, (script, sampled) in self._rows.items():
            if len(sampled) < len(script):
                logits[row] = _FORBIDDEN
                logits[row, script[len(sampled)]] = 0.0
        return logits


def _scripted(
    params: SamplingParams, _prompt: list[int] | None, sampled: list[int]
) -> tuple[list[int], list[int]] | None:
    script = (params.extra_args or {}).get(SCRIPT)
    return (script, sampled) if script else None
