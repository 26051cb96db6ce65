"""The log as replay reads it, from whichever database holds it, as of a position.

Knows the tables and how to read them up to a position; does not know selection rules, chains or rows.
Law: what is read is a function of the position and the events alone. Which database holds them, and in which order
independent rollouts arrived, changes nothing: rollouts come in the order of their opening times and ids, the calls of a
rollout in the order of its log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Self
from uuid import UUID

from pydantic import TypeAdapter
from sqlalchemy import Connection, Select, func, select

from replay.call import Call, Payload, Rollout
from replay.errors import BadPosition, PositionAhead, UnknownRollout
from store import codec
from store.events import PolicySpan, logprob_array, token_array
from store.schema import model_call, rollout, rollout_outcome

_SPANS: TypeAdapter[tuple[PolicySpan, ...]] = TypeAdapter(tuple[PolicySpan, ...])
_NARROW = (
    model_call.c.call_id,
    model_call.c.rollout_id,
    model_call.c.parent_id,
    model_call.c.root_id,
    model_call.c.depth,
    model_call.c.request_hash,
    model_call.c.chain_hash,
    model_call.c.hash_version,
    model_call.c.prev_len,
    model_call.c.prompt_len,
    model_call.c.sampled_len,
    model_call.c.policy_spans,
    model_call.c.response_id,
    model_call.c.choice,
    model_call.c.hints,
    model_call.c.media_count,
)
_FETCH = 1000
"""Calls that the driver holds at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How much of the log counts: the highest sequence of each kind of event that rows depend on.

    >>> str(Position(calls=60, outcomes=5, rollouts=5)), Position.parse("60.5.5").calls
    ('60.5.5', 60)
    """

    calls: int
    outcomes: int
    rollouts: int

    def __str__(self) -> str:
        return f"{self.calls}.{self.outcomes}.{self.rollouts}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote; raises BadPosition for anything else."""
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            raise BadPosition(text)
        calls, outcomes, rollouts = map(int, parts)
        return cls(calls=calls, outcomes=outcomes, rollouts=rollouts)


def reached(connection: Connection) -> Position:
    """The position of everything that this connection's snapshot sees."""
    calls, outcomes, rollouts = (
        connection.scalar(select(func.coalesce(func.max(table.c.sequence), 0))) or 0
        for table in (model_call, rollout_outcome, rollout)
    )
    return Position(calls=calls, outcomes=outcomes, rollouts=rollouts)


def require_reached(connection: Connection, position: Position) -> None:
    """Refuse a position that the log has not reached."""
    now = reached(connection)
    if position.calls > now.calls or position.outcomes > now.outcomes or position.rollouts > now.rollouts:
        raise PositionAhead(asked=str(position), reached=str(now))


def rollouts(connection: Connection, position: Position, only: Sequence[str] | None = None) -> list[Rollout]:
    """The rollouts with their completed calls, without tokens.

    Args:
        connection: to the log.
        position: what counts.
        only: ids of the rollouts to read; None for all. Raises UnknownRollout for one that the log does not hold.
    """
    calls: dict[str, list[Call]] = {}
    narrow = select(*_NARROW).where(model_call.c.sequence <= position.calls).order_by(model_call.c.sequence)
    for line in connection.execute(_of(narrow, model_call.c.rollout_id, only)).mappings().yield_per(_FETCH):
        calls.setdefault(line["rollout_id"], []).append(_call(len(calls.get(line["rollout_id"], ())) + 1, **line))
    opened = select(rollout.c.rollout_id, rollout.c.group_id, rollout.c.opened_at)
    opened = _of(opened.where(rollout.c.sequence <= position.rollouts), rollout.c.rollout_id, only)
    openings = {line.rollout_id: line for line in connection.execute(opened)}
    scored = select(rollout_outcome.c.rollout_id, rollout_outcome.c.reward, rollout_outcome.c.accepted)
    scored = scored.where(rollout_outcome.c.sequence <= position.outcomes).order_by(rollout_outcome.c.sequence)
    outcomes = {line.rollout_id: line for line in connection.execute(_of(scored, rollout_outcome.c.rollout_id, only))}
    known = openings.keys() | calls.keys()
    for rollout_id in only or ():
        if rollout_id not in known:
            raise UnknownRollout(rollout_id)
    order = sorted(known, key=lambda each: (openings[each].opened_at if each in openings else 0, each))
    return [
        Rollout(
            rollout_id=each,
            group_id=openings[each].group_id if each in openings else None,
            reward=outcomes[each].reward if each in outcomes else None,
            accepted=_accepted(outcomes[each].accepted) if each in outcomes else None,
            calls=tuple(calls.get(each, ())),
        )
        for each in order
    ]


def payloads(connection: Connection, rollout_ids: Sequence[str], wanted: Set[UUID]) -> dict[UUID, Payload]:
    """Tokens and log-probabilities of the wanted calls of these rollouts, read in storage order."""
    heavy = select(model_call.c.call_id, model_call.c.codec, model_call.c.token_ids, model_call.c.logprobs)
    heavy = _of(heavy, model_call.c.rollout_id, rollout_ids).order_by(model_call.c.sequence)
    return {
        line.call_id: Payload(
            token_ids=token_array(codec.unpack(line.codec, line.token_ids)), logprobs=logprob_array(line.logprobs)
        )
        for line in connection.execute(heavy).yield_per(_FETCH)
        if line.call_id in wanted
    }


def batches(rollouts: Sequence[Rollout], *, tokens: int, rollouts_at_most: int = 500) -> Iterator[list[Rollout]]:
    """Cut rollouts into runs whose calls hold about so many tokens, so that payloads are read a piece at a time."""
    batch: list[Rollout] = []
    held = 0
    for each in rollouts:
        size = sum(call.delta_len for call in each.calls)
        if batch and (held + size > tokens or len(batch) == rollouts_at_most):
            yield batch
            batch, held = [], 0
        batch.append(each)
        held += size
    if batch:
        yield batch


def _of(statement: Select[*tuple[Any, ...]], column: Any, only: Sequence[str] | None) -> Select[*tuple[Any, ...]]:
    return statement if only is None else statement.where(column.in_(only))


def _call(number: int, *, policy_spans: object, hints: dict[str, object], **columns: Any) -> Call:
    role = hints.get("role")
    return Call(
        number=number,
        policy_spans=_SPANS.validate_python(policy_spans),
        role=role if isinstance(role, str) else None,
        **columns,
    )


def _accepted(listed: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if listed is None else tuple(listed)
