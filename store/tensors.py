"""Tensors as one file's bytes, in the safetensors format, and back: bit for bit, whatever their type.

Knows names, types, shapes and bytes; does not know what computed them, and no array library. Law: the same tensors give
the same bytes, so that their content address says that they are the same; types and shapes are part of it.

Any tool reads such a file (`safetensors.torch.load_file`), which is why it is this format and no other.

>>> grid = Tensor(dtype="I64", shape=(3,), data=bytes(24))
>>> unpack(pack({"image_grid_thw": grid})) == {"image_grid_thw": grid}
True
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pydantic import JsonValue

from store import hashing
from store.errors import DamagedTensors

MEDIA_TYPE = "application/x-safetensors"
SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of a value, by the format's names of types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as the bytes of its values, little-endian and in row-major order."""

    dtype: str
    """One of `SIZES`."""
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        size = SIZES.get(self.dtype)
        if size is None:
            raise ValueError(f"a tensor of {self.dtype!r}, which the format does not have: use one of {[*SIZES]}")
        if len(self.data) != size * prod(self.shape):
            raise ValueError(f"{len(self.data)} bytes for {self.dtype} of shape {self.shape}: they do not fit")


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a file that holds these tensors."""
    header: dict[str, JsonValue] = {}
    parts: list[bytes] = []
    begin = 0
    # Wide types first, so that every value lies at a multiple of its size.
    for name, tensor in sorted(tensors.items(), key=lambda each: (-SIZES[each[1].dtype], each[0])):
        end = begin + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
        parts.append(tensor.data)
        begin = end
    words = hashing.canonical_json(header)
    words += b" " * (-len(words) % 8)
    return b"".join([len(words).to_bytes(8, "little"), words, *parts])


def unpack(data: bytes) -> dict[str, Tensor]:
    """The tensors again. Raises DamagedTensors for bytes that are no such file."""
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        found: dict[str, Tensor] = {}
        for name, said in json.loads(data[8:begin]).items():
            low, high = said["data_offsets"]
            values = data[begin + low : begin + high]
            found[name] = Tensor(dtype=said["dtype"], shape=tuple(said["shape"]), data=values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedTensors(str(error) or type(error).__name__) from error
    return found


def described(tensors: Mapping[str, Tensor]) -> dict[str, JsonValue]:
    """Type and shape of each, by name: what the log says of a file."""
    return {name: [tensor.dtype, [*tensor.shape]] for name, tensor in tensors.items()}
