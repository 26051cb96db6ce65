"""How long a database that does not answer is waited for.

Knows `LogUnavailable` and a clock; does not know what is tried. Law: an outage is waited for once. Whoever comes while
it lasts shares the wait, and once it has lasted longer than the patience, one attempt a second finds out whether it is
over, and the others fail at once.

Only what may be repeated is tried again: a look-up, or an append, which changes nothing where the events are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from store.errors import LogUnavailable

_T = TypeVar("_T")
SECONDS = 10.0
"""A PostgreSQL server restarts in two, a standby takes over in ten."""
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


class Patience:
    """Tries again while the database is away; any thread may share it.

    >>> patience = Patience(seconds=1)
    >>> answers = iter([False, True])
    >>> def ask() -> str:
    ...     if not next(answers):
    ...         raise LogUnavailable("read the log", "terminated")
    ...     return "here"
    >>> patience.attempt(ask), patience.retries
    ('here', 1)
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.retries = 0
        self._since: float | None = None  # when the outage began; None while the database answers
        self._quiet_until = 0.0

    def attempt(self, work: Callable[[], _T]) -> _T:
        """What `work` returns, tried again while it raises LogUnavailable; the last LogUnavailable when time is up."""
        began = time.monotonic()
        if self._since is not None and began < self._quiet_until:
            raise LogUnavailable("reach the log", f"it has been away for {began - self._since:.0f} seconds")
        pause = _FIRST_PAUSE
        while True:
            try:
                result = work()
            except LogUnavailable:
                failed = time.monotonic()
                since = self._since = failed if self._since is None else self._since
                left = min(began, since) + self.seconds - failed
                if left <= 0:
                    self._quiet_until = failed + _LONGEST_PAUSE
                    raise
                self.retries += 1
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self.over()
                return result

    def over(self) -> None:
        """Note that the database answers again, as somebody else has found out."""
        self._since = None
