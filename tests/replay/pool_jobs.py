"""What the processes of `test_pool.py` are asked to do: a process imports it by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from store.errors import LogUnavailable


def arrays(first: int, count: int) -> Iterator[dict[str, object]]:
    """Numbered arrays of a megabyte, and the process that made them."""
    for number in range(first, first + count):
        yield {"number": number, "pid": os.getpid(), "array": np.full(250_000, number, np.int32), "none": np.zeros(0)}


def fails(after: int) -> Iterator[int]:
    """Some numbers, then an error of this project, whose arguments are not its message."""
    yield from range(after)
    raise LogUnavailable("read the log", "it is away")


def fails_untold() -> Iterator[int]:
    """An error that cannot be handed over."""
    yield 1
    error = ValueError("with a function in it")
    error.function = lambda: None  # type: ignore[attr-defined]
    raise error


def dies() -> Iterator[int]:
    """One number, then the end of its process."""
    yield 1
    os.kill(os.getpid(), signal.SIGKILL)


def counts_what_it_makes(file: str) -> Iterator[int]:
    """A hundred numbers, each noted in a file before it is given."""
    for number in range(100):
        with Path(file).open("a") as notes:
            notes.write(".")
        yield number
