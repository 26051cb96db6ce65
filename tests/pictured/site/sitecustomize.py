"""Lets torchvision's CUDA build be imported beside the CPU build of torch, by processes with this folder on their path.

The processors of Qwen's vision models ask for torchvision; the two operators that it registers for, and that no image
needs, are named before it is imported. For tests alone: a machine with a GPU has a torchvision that fits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Torchvision(MetaPathFinder):
    """Names the operators when torchvision is first looked for, then steps aside."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.kept = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.kept.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


_FINDER = _Torchvision()  # kept, and with it the operators that it names
sys.meta_path.insert(0, _FINDER)
