"""The log as the event loop of a model server sees it: nothing here blocks, and nothing is lost when it is busy.

Knows how to look up, append and remember recent chains; does not know requests, vLLM or HTTP. Law: `append` returns
only after the events are durable. What the database refuses becomes `LogDown`, so that callers answer one thing.

With a spool a log that is away stops nobody: events are durable in the spool, and what this worker completed itself is
remembered. A look-up then says that it was answered without the log, so that what it did not find is never taken for
what is not there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine

from engine.capture import Writer
from engine.clock import Clock
from engine.errors import LogDown
from engine.remembered import Remembered
from engine.tracing import traced
from store import lineage, log, recovery
from store.database import claim_sqlite, read, read_one
from store.errors import LogError
from store.events import CallCompleted, CallEnded, Event, MediaShown, RolloutOpened
from store.lineage import KnownCall, TracedCall
from store.patience import SECONDS, Patience
from store.spool import Spool
from store.writer import Watcher
from store.writer import Writer as GroupCommit

logger = logging.getLogger("turnlog")

_T = TypeVar("_T")
_CACHED_TOKENS = 16_000_000
"""Tokens of recent chains kept in memory: 64 MB as int32."""
_MEDIA_KEPT = 4096
"""Calls whose media are kept in memory; what two of one chain share is kept once."""
_OPEN_KEPT = 100_000
"""Rollouts remembered as open; beyond that all are forgotten, which costs one statement each."""
_READERS = 4
"""Threads that look up: with the writer they use the connections that a pool keeps, and none is opened for one call."""
_QUEUED = 512
"""Appends waiting for their commit at once; beyond that, calls wait for their turn."""
_AHEAD = 60_000_000
"""Microseconds by which another machine's clock may be ahead before somebody is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """The answer to a look-up."""

    calls: Sequence[KnownCall]
    whole: bool
    """Whether the log was asked, and this worker keeps nothing back from it: what was not found is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A look-up that waits for those of the same turn of the event loop."""

    rollout_id: str
    keys: Sequence[bytes]
    found: asyncio.Future[list[KnownCall]]


class Journal:
    """One worker's way to the log: look-ups in threads, appends through the group-committing writer."""

    def __init__(
        self,
        database: Engine,
        *,
        worker: str,
        clock: Clock | None = None,
        spool: Spool | None = None,
        patience: float = SECONDS,
        watcher: Watcher | None = None,
    ) -> None:
        self.database = database
        self.worker = worker
        self.spools = spool is not None
        """Whether calls are served while the log is away."""
        self._clock = Clock() if clock is None else clock
        self._remembered = Remembered()
        self.writer = GroupCommit(database, capacity=_QUEUED, patience=Patience(patience), spool=spool, watcher=watcher)
        self._patience = Patience(patience)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="turnlog-reader")
        self._for_room = ThreadPoolExecutor(1, thread_name_prefix="turnlog-queue")
        self._writer_id = self.new_id()
        self._writer_seq = 0
        self._claim: BinaryIO | None = None
        self._asked: list[_Asked] = []
        self._open: set[str] = set()
        self._openings: dict[str, int] = {}
        self._chains: OrderedDict[UUID, npt.NDArray[np.int32]] = OrderedDict()
        self._chain_tokens = 0
        self._media: OrderedDict[UUID, tuple[MediaShown, ...]] = OrderedDict()

    def now(self) -> int:
        """Unix time in microseconds, later than any before."""
        return self._clock.now()

    def new_id(self) -> UUID:
        """A fresh UUIDv7, behind any before."""
        return self._clock.new_id()

    def start(self) -> list[CallEnded]:
        """Take up where the log stands: ids go on behind its newest, and what this worker left open is lost.

        Its spool must have been taken over before: the calls in it have ended. Returns what was lost. Blocks: for
        start-up. Waits for a database that goes away meanwhile. Raises LogUnavailable.
        """
        self._claim = claim_sqlite(self.database)
        return self._patience.attempt(self._take_up)

    def _take_up(self) -> list[CallEnded]:
        with read(self.database) as connection:
            newest = log.newest_call_id(connection)
        if newest is not None and (ahead := self._clock.start_behind(newest)) > _AHEAD:
            logger.warning(
                "the newest call in the log, %s, is %d seconds ahead of this machine's clock: set the clocks of all "
                "machines that write to the log; times go on from there",
                newest, ahead // 1_000_000,
            )  # fmt: skip
        return self.mark_lost()

    def next_writer(self) -> Writer:
        """Who writes the next completed call; a count is used once, so a hole shows an event that was lost."""
        self._writer_seq += 1
        return Writer(writer_id=self._writer_id, writer_seq=self._writer_seq - 1)

    async def look_up(self, rollout_id: str, keys: Sequence[bytes]) -> LookedUp:
        """The rollout's completed calls with one of these summary hashes: one indexed query.

        While calls of this worker wait in its spool, they are among them. Raises LogDown, but never with a spool.
        """
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._look_up_together)
        self._asked.append(asked := _Asked(rollout_id=rollout_id, keys=keys, found=loop.create_future()))
        if not self.spools:
            return LookedUp(calls=await asked.found, whole=True)
        held_back = self.writer.spooling  # before the log is asked: what is in neither then is nowhere
        mine = self._remembered.find(rollout_id, keys)
        try:
            logged = await asked.found
        except LogDown:
            return LookedUp(calls=mine, whole=False)
        if not held_back:
            return LookedUp(calls=logged, whole=True)
        known = {call.call_id for call in logged}
        return LookedUp(calls=[*logged, *(call for call in mine if call.call_id not in known)], whole=False)

    async def recent(self, rollout_id: str) -> list[TracedCall]:
        """The rollout's latest calls with their item digests, to tell the reason of a root.

        Raises LogDown, also while calls of this worker wait in its spool: the reason might then be another.
        """
        if self.writer.spooling:
            raise LogDown("calls of this worker wait in its spool")
        return await self.query(lambda connection: lineage.recent_requests(connection, rollout_id, now=self.now()))

    async def chain(self, call_id: UUID) -> npt.NDArray[np.int32]:
        """[chain_len] all tokens from the call's root to its own last, from memory or by one query."""
        if (chain := self._chains.get(call_id)) is not None:
            self._chains.move_to_end(call_id)
            return chain
        chain = await self.query(lambda connection: lineage.chain_tokens(connection, call_id))
        self.remember(call_id, chain)
        return chain

    async def media(self, call_id: UUID) -> Sequence[MediaShown]:
        """The media in a call's prompt, from memory or by one query. Raises LogDown."""
        if (found := self._media.get(call_id)) is None:
            found = tuple(await self.query(lambda connection: lineage.chain_media(connection, call_id)))
        self._keep_media(call_id, found)
        return found

    def remember_media(self, call_id: UUID, parent_id: UUID | None, shown: Sequence[MediaShown]) -> None:
        """Keep a durable call's media at hand: its parent's, if they are, and those that are new in it."""
        above = () if parent_id is None else self._media.get(parent_id)
        if above is not None:
            self._keep_media(call_id, (*above, *shown))

    def _keep_media(self, call_id: UUID, found: tuple[MediaShown, ...]) -> None:
        self._media[call_id] = found
        self._media.move_to_end(call_id)
        while len(self._media) > _MEDIA_KEPT:
            self._media.popitem(last=False)

    def remember_call(self, call: CallCompleted, chain: npt.NDArray[np.int32]) -> None:
        """Keep a call that is durable at hand for its continuation."""
        if self.spools:
            self._remembered.add(call)
        self.remember(call.call_id, chain)

    def remember(self, call_id: UUID, chain: npt.NDArray[np.int32]) -> None:
        """Keep a durable call's chain at hand."""
        if call_id in self._chains:
            return
        self._chains[call_id] = chain
        self._chain_tokens += len(chain)
        while self._chain_tokens > _CACHED_TOKENS and len(self._chains) > 1:
            _, dropped = self._chains.popitem(last=False)
            self._chain_tokens -= len(dropped)

    async def open_and_append(self, rollout_id: str, events: Sequence[Event]) -> None:
        """Append events of a rollout that may be new: its opening goes first, once. Raises LogDown."""
        if rollout_id in self._open:
            await self.append(events)
            return
        await self.append([RolloutOpened(rollout_id=rollout_id, opened_at=self.now()), *events])
        if len(self._open) >= _OPEN_KEPT:
            self._open.clear()
        self._open.add(rollout_id)

    @traced("turnlog.commit")
    async def append(self, events: Sequence[Event]) -> None:
        """Append the events in one transaction; returns when they are durable. Raises LogDown."""
        # A task begins with the event loop's next turn. So what is ready in one turn makes one commit, which calls
        # leave side by side: none of them could go on before the turn's end. A caller that is cancelled stops none.
        try:
            await asyncio.shield(asyncio.create_task(self._submit(events)))
        except LogError as error:
            raise LogDown(str(error)) from error

    async def _submit(self, events: Sequence[Event]) -> None:
        durable = self.writer.submit_now(events)
        if durable is None:  # the queue is full: this call waits for room, and the event loop goes on
            waits = asyncio.get_running_loop().run_in_executor(self._for_room, self.writer.submit, events)
            durable = await waits
        await asyncio.wrap_future(durable)

    def append_later(self, events: Sequence[Event]) -> None:
        """Append without waiting, for a caller that is being cancelled; a failure is logged."""
        try:
            durable = self.writer.submit_now(events)
        except LogError as error:
            _tell(error)
            return
        if durable is not None:
            durable.add_done_callback(_report)
        else:
            self._for_room.submit(lambda: self.writer.submit(events).add_done_callback(_report))

    async def query(self, question: Callable[[Connection], _T]) -> _T:
        """Answer a question from a consistent snapshot, in a thread. Raises LogDown."""

        def ask() -> _T:
            with read(self.database) as connection:
                return question(connection)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._patience.attempt, ask)
        except LogError as error:
            raise LogDown(str(error)) from error

    def _look_up_together(self) -> None:
        """Look up what was asked in one turn of the event loop, in one thread and on one connection."""
        asked, self._asked = self._asked, []
        now = self.now()

        def ask() -> list[list[KnownCall]]:
            with read_one(self.database) as connection:
                return [
                    lineage.find_by_summary(connection, each.rollout_id, each.keys, now=now, openings=self._openings)
                    for each in asked
                ]

        def answer(done: asyncio.Future[list[list[KnownCall]]]) -> None:
            error = done.exception()
            for number, each in enumerate(asked):
                if each.found.done():  # its request was cancelled
                    continue
                if error is None:
                    each.found.set_result(done.result()[number])
                else:
                    each.found.set_exception(LogDown(str(error)) if isinstance(error, LogError) else error)

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._readers, self._patience.attempt, ask).add_done_callback(answer)

    def mark_lost(self) -> list[CallEnded]:
        """End the intents that this worker left open when it stopped; returns what was lost. Blocks: for start-up."""
        with read(self.database) as connection:
            left = log.pending(connection, worker=self.worker)
        why = f"worker {self.worker} stopped before the call ended"
        return recovery.mark_lost(self.database, left, why=why, at=self.now())

    def close(self) -> None:
        """Write what is queued, then stop."""
        self.writer.close()
        self._readers.shutdown()
        self._for_room.shutdown()
        if self._claim is not None:
            self._claim.close()


def _report(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        _tell(error)


def _tell(error: BaseException) -> None:
    logger.error("an event could not be appended: %s", error)
