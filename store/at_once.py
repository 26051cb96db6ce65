"""A few new events in one round trip to PostgreSQL.

Knows that what is sent before one wait is one transaction there, which needs no `begin` and no `commit`; does not know
why an event is refused. Law: either all of the events are durable, and each was new, or none is in the log; then they
are appended as `store.log` does it, which looks at what is there and says what is wrong.

A transaction of one event costs half of what it does with a `begin`, an insert and a `commit` that wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg

from store.columns import PLACES
from store.database import Pen
from store.events import CallCompleted, Event, MediaStored, RolloutOpened
from store.insert import insert_into
from store.log import COPIED_FROM, Prepared


def few(events: Sequence[Event]) -> bool:
    """Whether this is for them: more of a kind take COPY, and an object is in the log already as often as not."""
    kinds = Counter(map(type, events))
    return kinds[MediaStored] == 0 and max(kinds.values(), default=COPIED_FROM) < COPIED_FROM


def append_new(pen: Pen, events: Sequence[Event], prepared: Prepared) -> bool:
    """Append events that were prepared; whether they are in the log now. Raises LogUnavailable.

    They are not where a call's parent is still to be looked up, or PostgreSQL refuses an event.
    """
    if any(isinstance(event, CallCompleted) and id(event) not in prepared.checked for event in events):
        return False
    todo: list[tuple[bytes, tuple[Any, ...]]] = []
    for place in PLACES:
        insert = insert_into(place.table, "postgresql")
        for event in events:
            if type(event) is place.event:  # an opening that says nothing but the id may find another
                implicit = isinstance(event, RolloutOpened) and event.implicit
                todo.append(((insert.text if implicit else insert.of_new).encode(), prepared.rows[id(event)]))
    with pen.write_at_once() as driver:
        try:
            if len(todo) == 1:
                driver.execute(*todo[0], prepare=True)
            else:
                with driver.pipeline():
                    for statement, row in todo:
                        driver.execute(statement, row, prepare=True)
        except (psycopg.IntegrityError, psycopg.DataError, psycopg.ProgrammingError):
            return False
    return True
