"""Stretches of a few arrays, laid end to end in one.

Knows where each stretch lies and what goes before it; does not know calls, files or rows. Law: nothing is looked at,
and what lies end to end already is not copied.

>>> tokens = np.array([1, 2, 3, 4, 5], np.int32)
>>> some = Stretches(arrays=(tokens,), array=np.zeros(2, np.int32), start=np.array([3, 0]), length=np.array([2, 1]))
>>> some.joined().tolist(), some.joined(gaps=np.array([1, 2])).tolist()
([4, 5, 1], [0, 4, 5, 0, 0, 1])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]

_SHORT = 3
"""Values of a stretch that Arrow keeps in the view itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretches:
    """Stretch n has the values `start[n]` to `start[n] + length[n]` of array `array[n]`; values have four bytes."""

    arrays: Sequence[npt.NDArray[Any]]
    array: npt.NDArray[np.int32]  # [N]
    start: Ints  # [N]
    length: Ints  # [N]

    def joined(self, gaps: Ints | None = None) -> npt.NDArray[Any]:
        """All values in the order of the stretches, as a view where they lie so; zeros before each, [N], if asked."""
        if gaps is None and self._end_to_end():
            first = int(self.start[0])
            return self.arrays[int(self.array[0])][first : first + int(self.length.sum())]
        if gaps is None:
            return self._laid(self._views(), self.arrays)
        views = np.zeros((2 * len(self.array), 4), np.int32)
        views[0::2, 0], views[0::2, 2] = 4 * gaps, np.where(gaps > _SHORT, len(self.arrays), 0)
        views[1::2] = self._views()
        zeros = np.zeros(int(gaps.max(initial=0)), np.int32)
        return self._laid(views, [*self.arrays, zeros])

    def _end_to_end(self) -> bool:
        if not len(self.array):
            return False
        follows = self.start[1:] == self.start[:-1] + self.length[:-1]
        return bool(follows.all() and (self.array == self.array[0]).all())

    def _views(self) -> npt.NDArray[np.int32]:
        """[N, 4] as Arrow has them: length, four first bytes, array, start; a short one holds its bytes instead."""
        short = self.length <= _SHORT
        views = np.zeros((len(self.array), 4), np.int32)
        views[:, 0], views[:, 2], views[:, 3] = 4 * self.length, self.array, 4 * self.start
        views[short, 2:] = 0
        for number, array in enumerate(self.arrays):
            mine, words = self.array == number, array.view(np.int32)
            for place in range(_SHORT):
                here = np.flatnonzero(mine & (self.length > place) & (short | (place == 0)))
                views[here, 1 + place] = words[self.start[here] + place]
        return views

    @staticmethod
    def _laid(views: npt.NDArray[np.int32], arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        buffers = [None, pa.py_buffer(views), *map(pa.py_buffer, arrays)]
        laid = pa.Array.from_buffers(pa.binary_view(), len(views), buffers).cast(pa.large_binary())
        size = int(views[:, 0].sum(dtype=np.int64))
        return np.frombuffer(memoryview(laid.buffers()[2])[:size] if size else b"", arrays[0].dtype)
