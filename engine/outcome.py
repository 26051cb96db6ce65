"""How a rollout is scored: what a caller says about it, checked and read into the event that the log keeps.

Knows rewards, statuses and the ways to say which calls count; does not know HTTP, files or which call wrote what. Law:
an outcome is either an event or an error that names the field; nothing of it is stored before all of it is read.

Which calls count is said in one way at most: by ids (`accepted`), by the harness's ordinary output (`output`), or not
at all. An output that only refers to calls is a way of accepting them, and is kept as that. Of any other output its
digests are kept, not its text: the log has every answer token for token, and an output can be as long as all of them.

A client that posts an outcome again, because it never saw the answer, sends the same `outcome_id` again: the same
outcome is then in the log once.

>>> event = scored("r1", Outcome(reward=1, output=["chatcmpl-1"]), new_id=UUID(int=1), at=0)
>>> event.accepted, event.output
(('chatcmpl-1',), None)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError

from engine.dialects.wire import shown
from engine.errors import BadRequest, OutcomeTaken
from engine.output import read_output
from store.events import RolloutScored

STATUSES = ("completed", "truncated", "failed")
"""The harness ran to its end; it was stopped by a limit of turns, tokens or time; it or its environment broke."""


class Outcome(BaseModel):
    """Body of `POST /rollouts/{id}/outcome`."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float, Field(strict=True, description="A finite number.")]
    status: Annotated[str, Field(description=f"One of {', '.join(STATUSES)}.")] = "completed"
    accepted: list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    """Call or response ids of the calls that count."""
    output: JsonValue = None
    """The harness's ordinary output, in one of the forms of `engine.output`."""
    declared_rewrites: list[JsonValue] = Field(default_factory=list[JsonValue])
    outcome_id: UUID | None = None
    """Chosen by the client, so that it may post again what it has posted before."""


def scored(rollout_id: str, outcome: Outcome, *, new_id: UUID, at: int) -> RolloutScored:
    """The event of an outcome; `new_id` is its id if it brings none. Raises BadRequest, UnknownItem."""
    if not math.isfinite(outcome.reward):
        raise BadRequest(f"reward is {outcome.reward}, no advantage can be taken of it: send a finite number")
    if outcome.status not in STATUSES:
        why = f"status is {shown(outcome.status)}, not one that has a meaning: send {', '.join(STATUSES)}"
        raise BadRequest(why, param="status")
    accepted, output = outcome.accepted, None
    if outcome.output is not None:
        if accepted is not None:
            raise BadRequest("accepted and output both say which calls count, one may: leave one out", param="output")
        read = read_output(outcome.output)
        if read.output is None:
            accepted = list(read.references or ())
        else:
            output = read.output.as_json()
    try:
        return RolloutScored(
            outcome_id=outcome.outcome_id or new_id,
            rollout_id=rollout_id,
            reward=outcome.reward,
            status=outcome.status,
            accepted=None if accepted is None else tuple(accepted),
            output=output,
            declared_rewrites=tuple(outcome.declared_rewrites),
            at=at,
        )
    except ValidationError as error:
        raise unreadable(error) from error


def unreadable(error: ValidationError) -> BadRequest:
    """What is wrong with the first field that is."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])) or "the outcome"
    why = f"{field} is {shown(first['input'])}, which the log cannot hold ({first['msg']}): mend it"
    return BadRequest(why, param=field)


def is_known(event: RolloutScored, known: Iterable[RolloutScored]) -> bool:
    """Whether this outcome is among those of its rollout. Raises OutcomeTaken when another one has its id."""
    for other in known:
        if other.outcome_id == event.outcome_id:
            if other.model_copy(update={"at": event.at}) != event:
                raise OutcomeTaken(str(event.outcome_id))
            return True
    return False


def receipt(event: RolloutScored) -> dict[str, JsonValue]:
    """What whoever posted it is told: the id, and what was read of the output."""
    output: Any = event.output
    return {
        "outcome_id": str(event.outcome_id),
        "rollout_id": event.rollout_id,
        "accepted": None if event.accepted is None else [*event.accepted],
        "output": None if output is None else {"form": output["form"], "passages": len(output["passages"])},
    }
