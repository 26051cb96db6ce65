"""Which calls are about to append, so that one commit can hold what they all have.

Knows who is expected and for how long others wait for them; does not know events, threads or the log. Law: nobody waits
for a call that is not expected, nor longer than `WAIT` for one that is; what waits is let go in its order.

A model server answers calls in bunches: those that were sampled in one step of the engine end in it together, and their
harnesses send the next ones together. Each of them appends twice, milliseconds apart. One commit for all of them costs
what one for the first would, and the engine gets the next calls in one step, not in as many as there were commits.
PostgreSQL does the same for its own log under `commit_delay` and `commit_siblings`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT = 0.01
"""Seconds that the first append waits at most for those that are expected."""


class Together:
    """What waits for the next commit, and for whom."""

    def __init__(self, wait: float = WAIT) -> None:
        self._wait = wait
        self._expected: set[int] = set()
        self._held: list[Callable[[], None]] = []
        self._due: asyncio.Handle | None = None

    def expect(self, who: object) -> None:
        """Somebody will append within milliseconds, or say `arrived` without."""
        self._expected.add(id(who))

    def arrived(self, who: object) -> None:
        """Who was expected appends now, or will not."""
        self._expected.discard(id(who))
        if self._held and not self._expected:
            self._let_go_soon()

    def hold(self, submit: Callable[[], None]) -> None:
        """Call `submit` when nobody is expected any more: at the event loop's next turn at the earliest.

        So what is ready in one turn makes one commit, which calls leave side by side.
        """
        self._held.append(submit)
        if not self._expected:
            self._let_go_soon()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._wait, self.let_go)

    def let_go(self) -> None:
        """Submit all that waits, in its order."""
        if self._due is not None:
            self._due.cancel()
        self._due = None
        held, self._held = self._held, []
        for submit in held:
            submit()

    def _let_go_soon(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = asyncio.get_running_loop().call_soon(self.let_go)
