"""Whose turn it is to write to a file, in the order in which processes asked.

Knows one lock of the operating system; does not know what is written. Law: this is a queue and no guard. Who comes past
it, or waited too long in it, meets the database's own lock; a turn ends with its process, however it ends.

SQLite's own waiting is a sleep that grows to a tenth of a second, while the lock lies idle or goes to whoever asks
first. Here the next in line wakes at once.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from store.claim import claim, claimable


@contextmanager
def turn(path: Path, seconds: float) -> Generator[None]:
    """Hold the turn for the block, as soon as it comes and at the latest after some seconds without it.

    Its file is made if it is missing; where there can be none, in a folder that is read-only, nobody waits.
    """
    try:
        held = claim(path) or _awaited(path, seconds)
    except OSError:
        held = None
    try:
        yield
    finally:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_UN)  # also where a child has the file that was forked meanwhile
            held.close()


def _awaited(path: Path, seconds: float) -> BinaryIO | None:
    """The file, held; None when its turn does not come in time.

    The lock can only be waited for without an end, so another thread does, which gives away what comes too late.
    """
    file = claimable(path)
    came: Future[None] = Future()

    def wait() -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            came.set_result(None)
        except (OSError, InvalidStateError):
            file.close()

    threading.Thread(target=wait, name="turnlog-turn", daemon=True).start()
    try:
        came.result(seconds)
    except TimeoutError:
        if came.cancel():
            return None
    return file
