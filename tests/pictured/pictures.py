"""Pictures for tests, and what a processor of Qwen's vision models makes of one, computed without it."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]


def pixels(seed: int, *, height: int = 64, width: int = 96) -> Pixels:
    """Coloured noise in blocks: no two are alike."""
    dice = np.random.default_rng(seed)
    blocks = dice.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return blocks.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]


def png(picture: Pixels, *, level: int = 6) -> bytes:
    """The file; another level of compression gives other bytes of the same pixels."""
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "png", compress_level=level)
    return out.getvalue()


def data_uri(file: bytes, kind: str = "image/png") -> str:
    """A file as harnesses send it."""
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def frames(pictures: list[Pixels]) -> str:
    """A video as a list of JPEG frames, in vLLM's spelling."""
    files: list[str] = []
    for picture in pictures:
        out = io.BytesIO()
        Image.fromarray(picture).save(out, "jpeg")
        files.append(base64.b64encode(out.getvalue()).decode())
    return f"data:video/jpeg;base64,{','.join(files)}"


def patches(picture: Pixels, *, patch: int) -> Pixels:
    """[patches, 3 * 2 * patch * patch] of a picture that needs no resizing: merged two by two, its frame twice."""
    height, width = picture.shape[0] // patch, picture.shape[1] // patch
    channels = picture.transpose(2, 0, 1)
    frames_of = np.stack([channels, channels])
    cut = frames_of.reshape(1, 2, 3, height // 2, 2, patch, width // 2, 2, patch)
    return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(height * width, 3 * 2 * patch * patch)
