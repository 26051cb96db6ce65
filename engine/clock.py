"""Times and ids that never go back, whatever the machine's clock does.

Knows one wall clock and the newest time it must not fall behind; does not know what the times are for. Law: each time
that a clock gives is later than every one before, and each id sorts behind every id before, so that neither an order
nor a look-up by time depends on whether the machine's clock was set back.

>>> walls = iter([5_000_000, 1_000_000, 6_000_000])
>>> clock = Clock(lambda: next(walls))
>>> clock.now(), clock.now(), clock.now()
(5000000, 5000001, 6000000)
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from uuid import UUID

from store.events import uuid7


def wall() -> int:
    """The machine's clock: Unix time in microseconds."""
    return time.time_ns() // 1000


class Clock:
    """One process's clock; may be used by any thread."""

    def __init__(self, wall: Callable[[], int] = wall) -> None:
        self._wall = wall
        self._last = 0
        self._lock = threading.Lock()

    def now(self) -> int:
        """Unix time in microseconds, later than any that this clock gave."""
        with self._lock:
            self._last = max(self._wall(), self._last + 1)
            return self._last

    def new_id(self) -> UUID:
        """A fresh UUIDv7 that sorts behind any that this clock gave: its time is told to a quarter of a microsecond."""
        milliseconds, rest = divmod(self.now(), 1000)
        return uuid7(milliseconds, (rest * 4096 // 1000).to_bytes(2, "big") + secrets.token_bytes(8))

    def start_behind(self, newest: UUID) -> int:
        """Give nothing earlier than this UUIDv7; returns by how many microseconds it is ahead of the wall clock.

        >>> clock = Clock(lambda: 1_000_000)
        >>> clock.start_behind(uuid7(3_000, bytes(10)))
        2000000
        >>> clock.now()
        3001000
        """
        newest_ms = newest.int >> 80
        with self._lock:
            self._last = max(self._last, 1000 * newest_ms + 999)
        return max(1000 * newest_ms - self._wall(), 0)
