"""Whether what the log names lies in the media store, and what lies there that no event names.

Knows the events of media and the store's addresses; does not know what an image is, nor rows. Law: an object is whole
when its bytes hash to its address; nothing is repaired or deleted here.

    for fault in faults(connection, media):
        print(fault.reason, fault.sha256.hex(), fault.shown)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID

from sqlalchemy import Connection, select

from store import schema
from store.errors import MediaDamaged, MediaMissing
from store.media import MediaStore, Stored

Reason = Literal["media_missing", "media_damaged"]
Progress = Callable[[int, int], None]
"""Called with the number of objects done and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """Where an object was shown."""

    rollout_id: str
    call_id: UUID
    place: int
    """Among the media that are new in the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An object that the log names and the store does not hold whole."""

    sha256: bytes
    reason: Reason
    detail: str
    shown: tuple[Occurrence, ...]
    """In the order of the log."""


def fault_of(media: MediaStore, sha256: bytes) -> tuple[Reason, str] | None:
    """What is wrong with one object, read whole; None when nothing is. Raises MediaUnreadable."""
    try:
        media.get(sha256)
    except MediaMissing as error:
        return "media_missing", str(error)
    except MediaDamaged as error:
        return "media_damaged", str(error)
    return None


def faults(
    connection: Connection, media: MediaStore, *, rollouts: Collection[str] = (), progress: Progress | None = None
) -> Iterator[Fault]:
    """Every object that was shown and is missing or damaged, in the order of addresses; each is read once.

    Args:
        connection: to the log.
        media: the store that the log's servers wrote to.
        rollouts: only what these were shown; empty for all.
        progress: called after each object.

    Raises MediaUnreadable.
    """
    shown = schema.call_media.c
    wanted = select(shown.sha256).distinct().order_by(shown.sha256)
    if rollouts:
        wanted = wanted.where(shown.rollout_id.in_(sorted(rollouts)))
    addresses = [bytes(address) for address in connection.scalars(wanted)]
    for done, address in enumerate(addresses):
        if (found := fault_of(media, address)) is not None:
            where = select(shown.rollout_id, shown.call_id, shown.place).where(shown.sha256 == address)
            yield Fault(
                sha256=address,
                reason=found[0],
                detail=found[1],
                shown=tuple(
                    Occurrence(rollout_id=each.rollout_id, call_id=each.call_id, place=each.place)
                    for each in connection.execute(where.order_by(shown.sequence))
                ),
            )
        if progress is not None:
            progress(done + 1, len(addresses))


def orphans(connection: Connection, media: MediaStore, *, older_than: timedelta) -> Iterator[Stored]:
    """Objects that no event names, in the order of addresses. Raises MediaUnreadable.

    A call's media are stored before its event, so an object of a call that is still running is named by none yet: what
    is younger than `older_than` is left out, and so is what does not say how old it is.
    """
    named = {bytes(address) for address in connection.scalars(select(schema.media_object.c.sha256))}
    before = datetime.now(UTC) - older_than
    for each in media.objects():
        if each.address not in named and each.written_at is not None and each.written_at <= before:
            yield each
