"""Tensors as bytes: any tool reads them, and the same ones are the same bytes."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from store import tensors
from store.errors import DamagedTensors
from store.tensors import Tensor

GRID = Tensor(dtype="I64", shape=(1, 3), data=torch.tensor([[1, 4, 6]]).numpy().tobytes())
PIXELS = Tensor(dtype="U8", shape=(2, 3), data=bytes(range(6)))


def test_the_files_are_those_of_the_format_that_everybody_reads() -> None:
    found = safetensors.torch.load(tensors.pack({"pixel_values": PIXELS, "grid": GRID}))
    assert found["grid"].tolist() == [[1, 4, 6]]
    assert torch.equal(found["pixel_values"], torch.arange(6, dtype=torch.uint8).reshape(2, 3))


def test_order_changes_nothing_and_every_part_counts() -> None:
    one = tensors.pack({"a": PIXELS, "b": GRID})
    assert tensors.pack({"b": GRID, "a": PIXELS}) == one
    assert tensors.unpack(one) == {"a": PIXELS, "b": GRID}
    reshaped = Tensor(dtype="U8", shape=(3, 2), data=PIXELS.data)
    retyped = Tensor(dtype="I8", shape=(2, 3), data=PIXELS.data)
    others = [{"a": reshaped, "b": GRID}, {"a": retyped, "b": GRID}, {"x": PIXELS, "b": GRID}, {"a": PIXELS}]
    assert len({one, *map(tensors.pack, others)}) == 5


def test_a_tensor_whose_bytes_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"5 bytes for U8 of shape \(2, 3\)"):
        Tensor(dtype="U8", shape=(2, 3), data=bytes(5))
    with pytest.raises(ValueError, match="'complex64', which the format does not have"):
        Tensor(dtype="complex64", shape=(1,), data=bytes(8))


@pytest.mark.parametrize("data", [bytes(7), b"\xff" * 8, b"\x02" + bytes(7) + b"[]", tensors.pack({"a": GRID})[:-1]])
def test_bytes_that_are_no_such_file_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedTensors, match="restore them from a copy"):
        tensors.unpack(data)
