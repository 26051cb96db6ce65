"""Group commit: many callers, few transactions, nothing lost.

Knows a queue, a thread, the log's `append` and what to do while the database is away; does not know what the events
mean. Law: a submission is whole or absent, and its future has a result only when it would survive a power cut.

No time is waited for company: while one commit is under way the next group gathers by itself. A group that the
database could not take is appended again, as it is, for as long as the writer is patient: where only the
acknowledgement was lost, the events are found and nothing is written twice. What then is still not in the log fails,
or goes to the spool; while the spool holds events all later ones follow them there, and a second thread hands them
over in order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol
from uuid import UUID

from sqlalchemy import Engine

from store import log
from store.at_once import append_new, few
from store.database import Pen
from store.errors import LogUnavailable
from store.events import CallCompleted, CallEnded, Event
from store.log import UNPREPARED, Tip
from store.patience import Patience
from store.spool import Spool

logger = logging.getLogger("turnlog")

_TIPS_KEPT = 20_000
"""Calls committed here whose children need not look them up: 10 MB."""
_QUEUED_BYTES = 64 << 20
_GROUP_EVENTS, _GROUP_BYTES = 1024, 16 << 20
"""What one transaction holds at most; a submission that is larger goes alone."""
_EVENT_BYTES = 1024
"""What an event takes besides its arrays, about."""
_DRAIN_PAUSE = 0.25
_CLOSED = "the writer is closed"


@dataclass(slots=True)
class Counters:
    """What a writer did since it started; read from any thread, written by the writer."""

    commits: int = 0
    events: int = 0
    """Events committed, or found to be in the log already."""
    bytes: int = 0
    """Bytes of committed token arrays and log-probabilities, uncompressed, and about a kilobyte an event."""
    waits: int = 0
    """Submissions that waited for room in the queue."""
    waited_seconds: float = 0.0
    retries: int = 0
    """Commits tried again because of the database."""
    failed: int = 0
    """Submissions that were told an error."""
    spooled: int = 0
    """Submissions that went to the spool."""
    drained: int = 0
    """Submissions that the spool handed over."""
    refused: int = 0
    """Of these, those that the log did not take."""


Missed = Literal["retried", "spooled", "drained", "failed"]
"""While the log is away: commits are tried again, submissions go to the spool, come back from it, or fail."""


class Watcher(Protocol):
    """Who is told what a writer does, by its threads."""

    def durable(self, events: Sequence[Event]) -> None:
        """These events are in the log, or in the spool."""
        ...

    def committed(self, seconds: float, events: int, waiting: int) -> None:
        """A transaction took so long; by then this many submissions wait for the next."""
        ...

    def missed(self, what: Missed, times: int) -> None:
        """The log was away."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    events: tuple[Event, ...]
    size: int
    durable: Future[None] = field(default_factory=Future[None])


class Writer:
    """Appends submissions of any thread in groups, in the order they came.

    >>> from store import migrate
    >>> from store.database import open_database
    >>> from store.events import CallCompleted
    >>> database = open_database(f"sqlite:///{getfixture('tmp_path')}/turnlog.db")
    >>> _ = migrate.upgrade(database)
    >>> with Writer(database) as writer:
    ...     writer.submit([CallCompleted.example()]).result()
    >>> database.dispose()
    """

    def __init__(
        self,
        database: Engine,
        *,
        capacity: int = 1024,
        capacity_bytes: int = _QUEUED_BYTES,
        patience: Patience | None = None,
        spool: Spool | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.counters = Counters()
        self._watcher = watcher
        self._database = database
        self._pen = Pen(database)  # the thread's alone
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._patience = Patience() if patience is None else patience
        self._spool = spool
        self._waiting: deque[_Submission] = deque()
        self._waiting_bytes = 0
        self._closed = False
        self._tips: dict[UUID, Tip] = {}  # read and written by the thread alone
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="turnlog-writer", daemon=True)
        self._drainer: threading.Thread | None = None
        self._stop_draining = threading.Event()
        self._thread.start()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def queue_depth(self) -> int:
        """Submissions that wait for the next commit."""
        return len(self._waiting)

    @property
    def spooling(self) -> bool:
        """Whether what was submitted last may be in the spool and not in the log."""
        return self._spool is not None and self._spool.holds_events

    def submit(self, events: Sequence[Event]) -> Future[None]:
        """Append these events in one transaction; the future has a result when they are durable, else the LogError.

        Blocks while the queue is full, in submissions or bytes: an event loop calls `submit_now` first. Cancelling the
        future stops nothing. Raises LogUnavailable after `close`.
        """
        submission = _submission(events)
        with self._changed:
            if not self._has_room(submission):
                self.counters.waits += 1
                began = time.monotonic()
                self._changed.wait_for(lambda: self._closed or self._has_room(submission))
                self.counters.waited_seconds += time.monotonic() - began
            return self._enqueue(submission)

    def submit_now(self, events: Sequence[Event]) -> Future[None] | None:
        """Like `submit`, but never blocks: None when the queue is full."""
        submission = _submission(events)
        with self._changed:
            return self._enqueue(submission) if self._closed or self._has_room(submission) else None

    def close(self) -> None:
        """Commit what waits, then stop. Submissions that are blocked on a full queue are refused.

        What the spool holds by then stays in it, for the next start of this worker.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._stop_draining.set()
        if self._drainer is not None:
            self._drainer.join()
        if self._spool is not None:
            self._spool.close()

    def _has_room(self, submission: _Submission) -> bool:
        fits = self._waiting_bytes + submission.size <= self._capacity_bytes or not self._waiting
        return fits and len(self._waiting) < self._capacity

    def _enqueue(self, submission: _Submission) -> Future[None]:
        if self._closed:
            raise LogUnavailable("append", _CLOSED)
        self._waiting.append(submission)
        self._waiting_bytes += submission.size
        self._changed.notify_all()
        return submission.durable

    def _run(self) -> None:
        while group := self._next_group():
            self._settle(group)
        self._pen.close()

    def _next_group(self) -> list[_Submission]:
        """What waits, as much of it as one transaction may hold; empty when closed and done."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            group: list[_Submission] = []
            events = size = 0
            while self._waiting:
                following = self._waiting[0]
                events += len(following.events)
                size += following.size
                if group and (events > _GROUP_EVENTS or size > _GROUP_BYTES):
                    break
                group.append(self._waiting.popleft())
                self._waiting_bytes -= following.size
            self._changed.notify_all()
            return group

    def _settle(self, group: Sequence[_Submission]) -> None:
        """Make the group durable, or tell each submission why it is not: only those fail that are at fault."""
        if self.spooling:
            self._to_spool(group)
            return
        try:
            took = self._patience.attempt(lambda: self._commit(group))
        except LogUnavailable as error:
            if self._spool is None:
                self._fail(group, error)
            else:
                logger.error("%s; what is written from now on goes to %s", error, self._spool.path)
                self._to_spool(group)
        except Exception as error:
            if len(group) == 1:
                self._fail(group, error)
            for submission in group if len(group) > 1 else ():
                self._settle([submission])
        else:
            for submission in group:
                submission.durable.set_result(None)
            self._tell(lambda watcher: watcher.committed(took, sum(map(_events_of, group)), len(self._waiting)))
            self._tell_durable(group)
        self._tell_missed("retried", self._patience.retries - self.counters.retries)
        self.counters.retries = self._patience.retries

    def _commit(self, group: Sequence[_Submission]) -> float:
        """Append the group; returns how many seconds that took."""
        began = time.monotonic()
        events = [event for submission in group for event in submission.events]
        sqlite = self._database.dialect.name == "sqlite"  # where all others wait for as long as the transaction takes
        at_once = not sqlite and few(events)
        prepared = UNPREPARED
        if sqlite or at_once:
            prepared = log.prepare(events, self._database.dialect.name, known=self._tips)
        if not (at_once and append_new(self._pen, events, prepared)):
            with self._pen.write() as connection:
                log.append(connection, events, known=self._tips, prepared=prepared)
        took = time.monotonic() - began
        self.counters.commits += 1
        self.counters.events += sum(map(_events_of, group))
        self.counters.bytes += sum(submission.size for submission in group)
        for submission in group:
            self._tips |= {call.call_id: Tip.of(call) for call in submission.events if isinstance(call, CallCompleted)}
        while len(self._tips) > _TIPS_KEPT:
            del self._tips[next(iter(self._tips))]
        return took

    def _to_spool(self, group: Sequence[_Submission]) -> None:
        """Put the group on the disk; where there is no room for all of it, as many of its submissions as there is."""
        assert self._spool is not None
        try:
            self._spool.append([submission.events for submission in group])
        except LogUnavailable as error:
            if len(group) == 1:
                self._fail(group, error)
            for submission in group if len(group) > 1 else ():
                self._to_spool([submission])
            return
        self.counters.spooled += len(group)
        for submission in group:
            submission.durable.set_result(None)
        self._tell_missed("spooled", len(group))
        self._tell_durable(group)
        if self._drainer is None:
            self._drainer = threading.Thread(target=self._drain, args=(self._spool,), name="turnlog-drain", daemon=True)
            self._drainer.start()

    def _drain(self, spool: Spool) -> None:
        """Hand over what the spool holds as soon as the database takes it; goes on until the writer is closed."""
        while not self._stop_draining.wait(_DRAIN_PAUSE):
            if not spool.holds_events:
                continue
            try:
                spool.drain(self._database)
            except LogUnavailable:
                continue
            finally:
                self._tell_missed("drained", spool.drained - self.counters.drained)
                self.counters.drained, self.counters.refused = spool.drained, spool.refused
            self._patience.over()
            logger.warning(
                "the log can be written again, and has what went to the spool: %d submissions since the start, "
                "of which it refused %d", spool.drained, spool.refused,
            )  # fmt: skip

    def _fail(self, group: Sequence[_Submission], error: Exception) -> None:
        self.counters.failed += len(group)
        for submission in group:
            submission.durable.set_exception(error)
        self._tell_missed("failed", len(group))

    def _tell_durable(self, group: Sequence[_Submission]) -> None:
        self._tell(lambda watcher: watcher.durable([event for submission in group for event in submission.events]))

    def _tell_missed(self, what: Missed, times: int) -> None:
        if times:
            self._tell(lambda watcher: watcher.missed(what, times))

    def _tell(self, what: Callable[[Watcher], None]) -> None:
        """Tell the watcher, behind the callers: whatever it makes of it, the events are as durable as they are."""
        if self._watcher is not None:
            try:
                what(self._watcher)
            except Exception:
                logger.exception("what the log did could not be counted")


def _events_of(submission: _Submission) -> int:
    return len(submission.events)


def _submission(events: Sequence[Event]) -> _Submission:
    size = sum(_EVENT_BYTES + _array_bytes(event) for event in events)
    submission = _Submission(events=tuple(events), size=size)
    submission.durable.set_running_or_notify_cancel()  # a caller that goes away must not take its events with it
    return submission


def _array_bytes(event: Event) -> int:
    return len(event.token_ids) + len(event.logprobs) if isinstance(event, CallCompleted | CallEnded) else 0
