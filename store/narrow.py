"""A rollout's calls as JSON, without what grows with their prompts: arrays of tokens and traces of items.

Knows the narrow columns of two tables; does not know what is done with them. Law: what is shown is what the events say,
and no byte of a wide column is read for it.
"""

from __future__ import annotations

from pydantic import JsonValue
from pydantic_core import to_jsonable_python
from sqlalchemy import Connection, Table, select

from store import schema
from store.events import CallCompleted, CallEnded

WIDE = frozenset({"token_ids", "logprobs", "request_items", "answer_items"})
"""Fields of an event that are left out."""


def calls(connection: Connection, rollout_id: str) -> list[dict[str, JsonValue]]:
    """The rollout's completed calls, in order of sequence."""
    return _read(connection, CallCompleted, schema.model_call, rollout_id)


def ends(connection: Connection, rollout_id: str) -> list[dict[str, JsonValue]]:
    """The rollout's calls that ended without an answer, in order of sequence."""
    return _read(connection, CallEnded, schema.call_end, rollout_id)


def _read(
    connection: Connection, event: type[CallCompleted | CallEnded], table: Table, rollout_id: str
) -> list[dict[str, JsonValue]]:
    kind: str = event.model_fields["kind"].default
    names = [name for name in event.model_fields if name != "kind" and name not in WIDE]
    statement = select(*(table.c[name] for name in names)).where(table.c.rollout_id == rollout_id)
    rows = connection.execute(statement.order_by(table.c.sequence))
    return [{"kind": kind, **to_jsonable_python(dict(zip(names, row, strict=True)), bytes_mode="hex")} for row in rows]
