"""The rollout API: open a rollout, score it, look at it, and number the trainer's weights.

Knows HTTP bodies and which events they become; does not know vLLM, how calls are decided, or who may ask
(`engine.access` has let them in). Law: it appends events and reads them back; there is no state here to get out of step
with the log.

A rollout's secret is in the answer to its opening and nowhere else. Who may have to open it again, because that answer
can be lost, brings a secret with the id: the same opening again then has the same answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from sqlalchemy import Connection

from engine.access import Access, digest, is_secret, new_secret
from engine.errors import EngineError, LogDown, OutcomeTaken
from engine.journal import Journal
from engine.outcome import Outcome, is_known, receipt, scored
from store import log, narrow
from store.errors import EventConflict
from store.events import RolloutId, RolloutOpened, RolloutScored

if TYPE_CHECKING:
    from engine.worker import Worker  # loads vLLM, which this module does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes work with; the plug-in puts it on the server's state as `turnlog`."""

    journal: Journal
    worker: Worker
    access: Access


def service(request: Request) -> Service:
    """The running service."""
    return cast("Service", request.app.state.turnlog)


Running = Annotated[Service, Depends(service)]
router = APIRouter(tags=["turnlog"])


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenRollout(_Body):
    """Body of `POST /rollouts`; every field may be left out."""

    rollout_id: RolloutId | None = None
    group_id: str | None = None
    slot: Annotated[int, Field(ge=0)] | None = None
    task: str | None = None
    harness: str | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    secret: JsonValue = Field(default=None, repr=False)
    """The rollout's secret, where the caller brings one; checked by hand, for an error would show it."""


class PolicyVersion(_Body):
    """Body of `POST /policy_version`."""

    policy_version: Annotated[int, Field(ge=0)]


@router.post("/rollouts", status_code=201)
async def open_rollout(body: OpenRollout, request: Request, running: Running) -> dict[str, str]:
    """Open a rollout; its base URL is what the harness is pointed at, and holds its secret: it is shown here only."""
    journal = running.journal
    if body.secret is not None and not is_secret(body.secret):
        raise HTTPException(422, "secret is not 32 to 128 of letters, digits and _-: bring another, or leave it out")
    secret = new_secret() if body.secret is None else str(body.secret)
    rollout_id = body.rollout_id or str(journal.new_id())
    event = RolloutOpened(
        **body.model_dump(exclude={"rollout_id", "secret"}),
        rollout_id=rollout_id,
        opened_at=journal.now(),
        secret_hash=digest(secret),
    )
    try:
        await _append_opening(journal, event)
    except EngineError as error:
        raise HTTPException(error.status, str(error)) from error
    running.access.remember(rollout_id, event.secret_hash)
    return {"rollout_id": rollout_id, "base_url": f"{request.base_url}rollouts/{rollout_id}~{secret}/v1"}


@router.post("/rollouts/{rollout_id}/outcome", status_code=201)
async def score_rollout(rollout_id: RolloutId, body: Outcome, running: Running) -> dict[str, JsonValue]:
    """Score a rollout. Several outcomes are allowed; the latest counts. The same `outcome_id` again changes nothing."""
    journal = running.journal
    await _known(journal, rollout_id)
    try:
        # In a thread: an output can be as long as the whole rollout, and calls go on meanwhile.
        event = await asyncio.to_thread(scored, rollout_id, body, new_id=journal.new_id(), at=journal.now())
        if body.outcome_id is None or not await _is_in_log(journal, event):
            await _append_once(journal, event)
    except EngineError as error:
        raise HTTPException(error.status, str(error)) from error
    return receipt(event)


@router.get("/rollouts/{rollout_id}")
async def show_rollout(rollout_id: RolloutId, running: Running) -> dict[str, JsonValue]:
    """The rollout's calls with their decisions, and what is pending or ended otherwise."""
    opened = await _known(running.journal, rollout_id)
    return await running.journal.query(lambda connection: _state(connection, opened))


@router.post("/policy_version")
async def set_policy_version(body: PolicyVersion, running: Running) -> dict[str, int]:
    """Number the weights that sample from now on."""
    await running.worker.set_policy_version(body.policy_version)
    return {"policy_version": body.policy_version}


async def _known(journal: Journal, rollout_id: str) -> RolloutOpened:
    opened = await _opening(journal, rollout_id)
    if opened is None:
        raise HTTPException(404, f"rollout {rollout_id!r} is not in the log: open it with POST /rollouts")
    return opened


async def _append_opening(journal: Journal, event: RolloutOpened) -> None:
    """Append it, unless this very caller has opened the rollout just so before."""
    known = await _opening(journal, event.rollout_id)
    if known is None:
        try:
            await journal.append([event])
        except LogDown as error:
            if not isinstance(error.__cause__, EventConflict):
                raise
            known = await _opening(journal, event.rollout_id)  # the same id was opened at the same time
    if known is not None and known.model_copy(update={"opened_at": event.opened_at}) != event:
        raise HTTPException(
            409,
            f"rollout {event.rollout_id!r} is open already: choose another id, or leave it out; "
            "who brings the same secret and fields again gets the same answer",
        )


async def _opening(journal: Journal, rollout_id: str) -> RolloutOpened | None:
    return await journal.query(lambda connection: log.rollout(connection, rollout_id))


async def _append_once(journal: Journal, event: RolloutScored) -> None:
    try:
        await journal.append([event])
    except LogDown as error:
        if not isinstance(error.__cause__, EventConflict):
            raise
        if not await _is_in_log(journal, event):  # the same id was posted at the same time
            raise OutcomeTaken(str(event.outcome_id)) from error


async def _is_in_log(journal: Journal, event: RolloutScored) -> bool:
    known = await journal.query(lambda connection: log.outcomes(connection, event.rollout_id))
    return is_known(event, known)


def _state(connection: Connection, opened: RolloutOpened) -> dict[str, JsonValue]:
    rollout_id = opened.rollout_id
    calls, ends = narrow.calls(connection, rollout_id), narrow.ends(connection, rollout_id)
    finished = {str(call["call_id"]) for call in (*calls, *ends)}
    intents = [intent.model_dump(mode="json") for intent in log.intents(connection, rollout_id)]
    return {
        "rollout": opened.model_dump(mode="json", exclude={"secret_hash"}),
        "calls": [*calls],
        "ended": [*ends],
        "pending": [intent for intent in intents if intent["call_id"] not in finished],
        "outcomes": [outcome.model_dump(mode="json") for outcome in log.outcomes(connection, rollout_id)],
    }
