"""What is owed to calls whose server stopped: an end that says so.

Knows intents without an end; does not know who was killed, or when. Law: a call that ended meanwhile stays as it
ended. Whoever waits in a spool has ended too: hand spools over first (`turnlog db drain`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Engine

from store import log
from store.database import write
from store.errors import EventConflict
from store.events import CallAdmitted, CallEnded

_TOGETHER = 500


def mark_lost(database: Engine, intents: Sequence[CallAdmitted], *, why: str, at: int) -> list[CallEnded]:
    """End these calls as lost; returns those that had not ended otherwise by then. Raises LogUnavailable."""
    lost = [
        CallEnded(call_id=each.call_id, rollout_id=each.rollout_id, state="lost", reason=why, at=at) for each in intents
    ]
    marked: list[CallEnded] = []
    for begin in range(0, len(lost), _TOGETHER):
        some = lost[begin : begin + _TOGETHER]
        if _appended(database, some):
            marked += some
        else:
            marked += [each for each in some if _appended(database, [each])]
    return marked


def _appended(database: Engine, ends: Sequence[CallEnded]) -> bool:
    try:
        with write(database) as connection:
            log.append(connection, ends)
    except EventConflict:
        return False
    return True
