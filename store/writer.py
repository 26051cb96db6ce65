"""Group commit: many callers, few transactions, nothing lost.

Knows a queue, a thread and the log's `append`; does not know what the events mean. Law: a submission is whole or
absent, and its future has a result only after the commit.

No time is waited for company: while one commit is under way the next group gathers by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from uuid import UUID

from sqlalchemy import Engine

from store import log
from store.database import write
from store.errors import LogUnavailable
from store.events import CallCompleted, Event
from store.log import Tip

_TIPS_KEPT = 20_000
"""Calls committed here whose children need not look them up: 10 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    events: tuple[Event, ...]
    durable: Future[None] = field(default_factory=Future[None])


class Writer:
    """Appends submissions of any thread in groups, in the order they came.

    >>> from store import migrate
    >>> from store.database import open_database
    >>> from store.events import CallCompleted
    >>> database = open_database(f"sqlite:///{getfixture('tmp_path')}/turnlog.db")
    >>> migrate.upgrade(database)
    >>> with Writer(database) as writer:
    ...     writer.submit([CallCompleted.example()]).result()
    >>> database.dispose()
    """

    def __init__(self, database: Engine, *, capacity: int = 1024) -> None:
        self._database = database
        self._capacity = capacity
        self._waiting: deque[_Submission] = deque()
        self._closed = False
        self._tips: dict[UUID, Tip] = {}  # read and written by the thread alone
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="turnlog-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, events: Sequence[Event]) -> Future[None]:
        """Append these events in one transaction; the future has a result when they are durable, else the LogError.

        Blocks while `capacity` submissions wait: from an event loop, submit in a thread or bound what is in flight.
        Cancelling the future stops nothing. Raises LogUnavailable after `close`.
        """
        submission = _Submission(events=tuple(events))
        submission.durable.set_running_or_notify_cancel()  # a caller that goes away must not take its events with it
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._waiting) < self._capacity)
            if self._closed:
                raise LogUnavailable("append", "the writer is closed")
            self._waiting.append(submission)
            self._changed.notify_all()
        return submission.durable

    def close(self) -> None:
        """Commit what waits, then stop. Submissions that are blocked on a full queue are refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while group := self._next_group():
            try:
                self._commit(group)
            except Exception:  # told apart one by one, and told to whoever submitted
                self._commit_each(group)

    def _next_group(self) -> list[_Submission]:
        """Everything that waits; empty when closed and done."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            group = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            return group

    def _commit_each(self, group: Sequence[_Submission]) -> None:
        """Again, one transaction each: only those fail that are at fault, and a deadlock with another server ends."""
        for at, submission in enumerate(group):
            try:
                self._commit([submission])
            except LogUnavailable as error:  # nobody's fault: trying the others would only wait longer
                self._fail(group[at:], error)
                return
            except Exception as error:
                self._fail([submission], error)

    def _commit(self, group: Sequence[_Submission]) -> None:
        with write(self._database) as connection:
            log.append(connection, (event for submission in group for event in submission.events), known=self._tips)
        for submission in group:
            submission.durable.set_result(None)
        for submission in group:
            self._tips |= {call.call_id: Tip.of(call) for call in submission.events if isinstance(call, CallCompleted)}
        while len(self._tips) > _TIPS_KEPT:
            del self._tips[next(iter(self._tips))]

    def _fail(self, group: Sequence[_Submission], error: Exception) -> None:
        for submission in group:
            submission.durable.set_exception(error)
