"""The media of packed rows as torch tensors, row by row as the engine's processor made them.

Knows handles, their files of tensors and torch; does not know images or models. Law: every tensor is the engine's, bit
for bit; a field of a pack is its rows' tensors end to end, and says how much of it is each row's, so that a row of text
has nothing of it.

    media = packed(pack.media, len(pack.row_ids), source)
    model(input_ids, pixel_values=media["pixel_values"].values, image_grid_thw=media["image_grid_thw"].values)
    torch.split(media["pixel_values"].values, media["pixel_values"].lengths.tolist())  # one part a row, empty for text

vLLM sends pixels as bytes to models that scale them themselves (`--mm-device-do-normalize`, its default where it can);
`normalised` does the same for a trainer's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from replay.media import MediaHandle, MediaSource
from store.tensors import Tensor

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By the names that files of tensors have for them."""


_KINDS = {"image": 1, "video": 2, "audio": 3}


class Packed(NamedTuple):
    """One field of a pack's media, such as `pixel_values`."""

    values: torch.Tensor  # [sum of lengths, ...]
    lengths: torch.Tensor  # [rows] int64


def tensor_of(kept: Tensor) -> torch.Tensor:
    """A kept tensor as torch's."""
    if not kept.data:
        return torch.empty(kept.shape, dtype=TYPES[kept.dtype])
    return torch.frombuffer(bytearray(kept.data), dtype=TYPES[kept.dtype]).reshape(kept.shape)


def packed(rows: Sequence[Sequence[MediaHandle]], count: int, source: MediaSource) -> dict[str, Packed]:
    """The fields of the media of `count` rows, in the order of rows and of places in them; empty when none shows any.

    Raises MediaMissing, MediaDamaged, MediaUnreadable.
    """
    known: dict[bytes, dict[str, torch.Tensor]] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    lengths: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        for handle in row:
            if handle.sha256 not in known:
                kept = source.tensors(handle.sha256)
                known[handle.sha256] = {name: tensor_of(tensor) for name, tensor in kept.items()}
            for name, tensor in known[handle.sha256].items():
                parts.setdefault(name, []).append(tensor)
                lengths.setdefault(name, [0] * count)[place] += len(tensor)
    return {name: Packed(values=torch.cat(found), lengths=torch.tensor(lengths[name])) for name, found in parts.items()}


def token_types(media: Sequence[MediaHandle], length: int) -> torch.Tensor:
    """[length] int64 what each token of a row is: 0 text, 1 image, 2 video, as `mm_token_type_ids` says it."""
    types = torch.zeros(length, dtype=torch.int64)
    for handle in media:
        here = types[handle.start : handle.start + handle.length]
        here[torch.from_numpy(handle.embeds)] = _KINDS[handle.modality]
    return types


def normalised(
    pixel_values: torch.Tensor, mean: Sequence[float], deviation: Sequence[float], *, scale: float = 1 / 255
) -> torch.Tensor:
    """Pixels as bytes, [patches, channels * rest], as the model sees them: (pixel * scale - mean) / deviation, float32.

    What is no byte is normalised already and comes back as it is.
    """
    if pixel_values.dtype != torch.uint8:
        return pixel_values
    by_channel = pixel_values.reshape(len(pixel_values), len(mean), -1)
    at, spread = (torch.tensor(each, dtype=torch.float32).view(1, -1, 1) for each in (mean, deviation))
    return (by_channel * (scale / spread) - at / spread).reshape(pixel_values.shape)
