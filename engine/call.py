"""One model call on its way through the server, shared by the gateway that answers it and the worker that runs it.

Knows the call's life (design §8) and which events each step of it owes the log; does not know HTTP, vLLM or SQL. Law:
an admitted call ends exactly once, as completed, failed, refused or abandoned, whatever is cancelled around it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
from pydantic import JsonValue

from engine import capture, media
from engine.capture import Admission, Generation
from engine.errors import EngineError, LogDown
from engine.items import Answer, Item
from engine.journal import Journal
from store.events import CallCompleted, MediaShown, RolloutOpened, token_array

logger = logging.getLogger("turnlog")

EndState = Literal["failed", "refused", "abandoned"]


@dataclass(slots=True, kw_only=True)
class Call:
    """A captured request; `admission` is set when its decision is made, `ended` when the log was told how it ended."""

    journal: Journal
    rollout_id: str
    dialect: str
    model: JsonValue
    """What the request names, if it names one."""
    choices: int
    """How many answers the request asks for."""
    items: tuple[Item, ...]
    hints: Mapping[str, JsonValue]
    started_at: int
    admission: Admission | None = None
    generation: Generation = field(default_factory=Generation)
    policy_version: int = 0
    error: EngineError | None = None
    """What the worker wants answered in place of what the server would say."""
    ended: bool = False
    media_count: int = field(init=False)
    """Images, sounds, videos and files in all items."""

    def __post_init__(self) -> None:
        self.media_count = sum(len(item.media) for item in self.items)

    async def admit(self, admission: Admission) -> None:
        """Make the intent durable. Raises LogDown."""
        self.admission = admission
        try:
            await self.journal.open_and_append(self.rollout_id, capture.intents(admission))
        except LogDown:
            self.ended = True  # nothing reached the log, so nothing is owed to it
            raise

    def refuse(self, admission: Admission, error: EngineError) -> None:
        """Note that nothing will run, and why; the log is told with the answer."""
        self.admission = admission
        self.error = error

    async def complete(self, answers: Sequence[Answer], *, response_id: str | None) -> None:
        """Make the answered call durable: one event a choice, one transaction. Raises CaptureFailed, LogDown."""
        admission = self.admission
        if admission is None:
            raise capture.CaptureFailed("the server answered without rendering: this path of it cannot be captured")
        if sorted(answer.index for answer in answers) != list(range(len(admission.call_ids))):
            raise capture.CaptureFailed(f"{len(admission.call_ids)} choices asked for, {len(answers)} answered")
        events = [
            capture.completed(
                admission,
                self.generation,
                answer,
                response_id=response_id,
                policy_version=self.policy_version,
                writer=self.journal.next_writer(),
                completed_at=self.journal.now(),
            )
            for answer in answers
        ]
        shown = {
            event.call_id: media.events(admission.media, event.call_id, event.rollout_id, event.completed_at)
            for event in events
        }
        self.ended = True  # from here on a cancelled caller changes nothing: the commit goes on by itself
        try:
            await self.journal.append([*events, *chain.from_iterable(shown.values())])
        except EngineError:
            self.ended = False
            raise
        for event in events:
            self._remember(admission, event, [each for each in shown[event.call_id] if isinstance(each, MediaShown)])

    def end(self, state: EndState, reason: str) -> None:
        """Tell the log that the call ended without an answer; never waits, does nothing when it has ended already."""
        if self.ended or self.admission is None:
            return
        self.ended = True
        events = capture.ended(self.admission, self.generation, state=state, reason=reason, at=self.journal.now())
        opening = RolloutOpened(rollout_id=self.rollout_id, opened_at=self.started_at)
        self.journal.append_later([opening, *events])
        logger.info("rollout %s: call %s %s: %s", self.rollout_id, self.admission.call_ids[0], state, reason)

    def _remember(self, admission: Admission, event: CallCompleted, shown: Sequence[MediaShown]) -> None:
        delta = token_array(event.token_ids)
        whole = delta if admission.parent_chain is None else np.concatenate([admission.parent_chain, delta])
        self.journal.remember_call(event, whole)
        if admission.media_count:
            self.journal.remember_media(event.call_id, admission.parent_id, shown)


CURRENT: ContextVar[Call | None] = ContextVar("turnlog_call", default=None)
"""The call that the current request is; set by the gateway, read where the server renders and generates."""
