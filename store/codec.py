"""How token arrays are kept: compressed where that helps, under a number that says how.

Knows bytes in and bytes out; does not know what they mean. Law: a codec's number is never given to another codec, and
stored bytes are never rewritten, so every release reads what an older one wrote.

>>> packed = pack(bytes(400))
>>> packed.codec, len(packed.data) < 40, unpack(packed.codec, packed.data) == bytes(400)
(1, True, True)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import zstandard

from store.errors import DamagedArray, UnknownCodec

RAW = 0
ZSTD = 1
_THREAD = threading.local()
_THREADS = min(4, os.cpu_count() or 1)
_RAW_BELOW = 4 * 64
"""Bytes below which a frame's own header eats the gain: 64 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Bytes as they are stored."""

    codec: int
    data: bytes


def pack(raw: bytes) -> Packed:
    """Compress with zstd level 1 (int32 tokens of text: 1.1 bytes a token, 26 us per 2,000); small arrays stay raw."""
    if len(raw) < _RAW_BELOW:
        return Packed(codec=RAW, data=raw)
    return Packed(codec=ZSTD, data=_compressor().compress(raw))


def _compressor() -> zstandard.ZstdCompressor:
    """One a thread: to make one costs a fifth of compressing 2,000 tokens, and no two threads may share one."""
    if (found := getattr(_THREAD, "compressor", None)) is None:
        found = _THREAD.compressor = zstandard.ZstdCompressor(level=1)
    return found


def unpack(codec: int, data: bytes | memoryview) -> bytes:
    """The bytes again. Raises UnknownCodec for a number of a later release, DamagedArray for bytes of no frame."""
    return Unpacker()(codec, data)


class Unpacker:
    """`unpack` for many arrays, by one thread: a decompressor costs as much to make as a small array to unpack."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def __call__(self, codec: int, data: bytes | memoryview) -> bytes:
        """The bytes again; errors are those of `unpack`."""
        if codec == RAW:
            return bytes(data)
        if codec == ZSTD:
            try:
                return bytes(self._zstd.decompress(data))
            except zstandard.ZstdError as error:
                raise DamagedArray(str(error)) from error
        raise UnknownCodec(codec)

    def all(self, codecs: Sequence[int], data: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """Many arrays at once, on several cores: half the time of one by one. Errors are those of `unpack`."""
        packed = [array for codec, array in zip(codecs, data, strict=True) if codec == ZSTD]
        if unknown := {*codecs}.difference((RAW, ZSTD)):
            raise UnknownCodec(min(unknown))
        if not packed:
            return [*data]
        try:
            whole = self._zstd.multi_decompress_to_buffer(cast("Any", packed), threads=_THREADS)
        except (zstandard.ZstdError, ValueError) as error:  # ValueError: a frame that does not say its size
            raise DamagedArray(str(error)) from error
        # A segment has a length and the buffer protocol, which its types do not say.
        segments = iter(cast("Sequence[memoryview]", whole))
        return [next(segments) if codec == ZSTD else array for codec, array in zip(codecs, data, strict=True)]
