"""What the processor made of an image, as a picture that a browser shows.

Knows how Qwen's processors lay out an image's patches, and how a PNG is written; does not know calls, or where media
lie.
Law: a picture is made of the very tensors that the model saw, or there is none: nothing is guessed from their size.

The processor cuts an image of h x w patches into squares of m x m patches, which the model merges into one token, and
writes patch after patch: square by square, in a square row by row; a patch is [channels, frames, side, side]. Floats
were normalised with numbers that are not kept, so they are stretched from their least to their largest value.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from store.tensors import Tensor

CHANNELS = 3
_TYPES = {"U8": "u1", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def picture(tensors: Mapping[str, Tensor], *, tokens: int, height: int) -> bytes | None:
    """A PNG of an image, or of a video's first frame; None for what is not laid out as described.

    Args:
        tensors: as the media store has them.
        tokens: that the model sees of it.
        height: of the image in pixels, as its geometry says.
    """
    kind = "image" if "pixel_values" in tensors else "video"
    values = tensors.get("pixel_values" if kind == "image" else "pixel_values_videos")
    grid = tensors.get(f"{kind}_grid_thw")
    if values is None or grid is None or values.dtype not in _TYPES or len(values.shape) != 2:
        return None
    times, rows, columns = np.frombuffer(grid.data, "<i8").tolist()
    merge, side = isqrt(times * rows * columns // max(tokens, 1)), height // max(rows, 1)
    frames, left = divmod(values.shape[1], max(CHANNELS * side * side, 1))
    fits = (
        values.shape[0] == times * rows * columns
        and merge * merge * tokens == values.shape[0]
        and height == side * rows
    )
    if not side or not fits or left or not frames or rows % merge or columns % merge:
        return None
    shape = (times, rows // merge, columns // merge, merge, merge, CHANNELS, frames, side, side)
    # To [time, frame, square row, row, y, square column, column, x, channel].
    laid = _values(values).reshape(shape).transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)[0, 0]
    return png(np.ascontiguousarray(laid).reshape(rows * side, columns * side, CHANNELS))


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of [height, width, 3] bytes of red, green and blue (the format: ISO/IEC 15948)."""
    height, width, _ = pixels.shape
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: not filtered
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    chunks = (
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _values(tensor: Tensor) -> npt.NDArray[np.uint8]:
    if tensor.dtype == "U8":
        return np.frombuffer(tensor.data, np.uint8)
    found: npt.NDArray[Any] = np.frombuffer(tensor.data, _TYPES[tensor.dtype])
    if tensor.dtype == "BF16":
        found = (found.astype("<u4") << 16).view("<f4")
    floats = found.astype(np.float64)
    low, high = floats.min(), floats.max()
    stretched: npt.NDArray[np.uint8] = ((floats - low) * (255 / (high - low or 1))).round().astype(np.uint8)
    return stretched
