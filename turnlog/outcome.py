"""`turnlog outcome`: score a rollout straight in its log, where no server runs, or none should be asked.

Knows files and the log; what an outcome may say, and how an output is read, is `engine.outcome`'s. Law: nothing is
written before all of it is read, and the same outcome id again writes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from pydantic import JsonValue, ValidationError
from sqlalchemy import Engine

from engine.outcome import Outcome, is_known, receipt, scored, unreadable
from replay.errors import UnknownRollout
from store import log
from store.database import read, write
from store.errors import EventConflict
from turnlog.errors import BadJson


def record(database: Engine, rollout_id: str, outcome: Outcome, *, new_id: UUID, at: int) -> dict[str, JsonValue]:
    """Append the outcome; what a server would answer. Raises UnknownRollout, EngineError, LogError."""
    event = scored(rollout_id, outcome, new_id=new_id, at=at)
    try:
        with write(database) as connection:
            if log.rollout(connection, rollout_id) is None:
                raise UnknownRollout(rollout_id)
            if not is_known(event, log.outcomes(connection, rollout_id)):
                log.append(connection, [event])
    except EventConflict:
        with read(database) as connection:  # the same id was written at the same time
            if not is_known(event, log.outcomes(connection, rollout_id)):
                raise
    return receipt(event)


def outcome_of(
    *,
    reward: float,
    status: str,
    accepted: Sequence[str] | None,
    output: str | None,
    rewrites: Sequence[str],
    outcome_id: str | None,
) -> Outcome:
    """The outcome that the command's options describe. Raises BadJson, BadRequest."""
    fields = {
        "reward": reward,
        "status": status,
        "accepted": None if accepted is None else [*accepted],
        "output": None if output is None else _read(output),
        "declared_rewrites": [
            _parsed(text, f"--declared-rewrite {text!r}", remedy="write it as in '{\"at\": 3}'") for text in rewrites
        ],
        "outcome_id": outcome_id,
    }
    try:
        return Outcome.model_validate(fields)
    except ValidationError as error:
        raise unreadable(error) from error


def _read(file: str) -> JsonValue:
    """A file's JSON, or that of standard input (`-`)."""
    try:
        return _parsed(sys.stdin.read() if file == "-" else Path(file).read_text("utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise BadJson(file, str(error)) from error


def _parsed(text: str, where: str, **told: str) -> JsonValue:
    try:
        found: JsonValue = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadJson(where, str(error), **told) from error
    return found
