"""Up to where the log is settled: nothing at or below that position will appear later, on either database.

Knows sequences and the announcements of open transactions; does not know events, or who reads them. Law: what was
settled once stays so, for it is committed, and no transaction that is open or yet to come inserts below it.

PostgreSQL hands out sequences before their events are committed, so the highest one says nothing by itself
(docs/decisions/0016); SQLite's one writer commits in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Self

from sqlalchemy import Connection

from store.errors import BadPosition
from store.statements import statements

_SQL = statements("settled")
_POSITION = re.compile(r"\d{1,19}(\.\d{1,19}){5}((\.\d{1,19}){2})?", re.ASCII)
Ask = Callable[[str], Sequence[int | None]]
"""Runs a statement and gives its one row; whose driver it is does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in the log: of each kind of event, the sequence up to which all counts. Its first four are replay's.

    >>> str(Position(calls=60, outcomes=5, rollouts=5, trained=0, intents=62, ends=1))
    '60.5.5.0.62.1'
    >>> Position.parse("60.5.5.0.62.1").intents
    62
    """

    calls: int = 0
    outcomes: int = 0
    rollouts: int = 0
    trained: int = 0
    intents: int = 0
    ends: int = 0
    objects: int = 0
    media: int = 0

    def __str__(self) -> str:
        parts = astuple(self)
        return ".".join(map(str, parts if any(parts[6:]) else parts[:6]))  # as ever where a log has no media

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote; raises BadPosition for anything else."""
        if not _POSITION.fullmatch(text):
            raise BadPosition(text)
        names = (field.name for field in fields(cls))
        return cls(**dict(zip(names, map(int, text.split(".")), strict=False)))


def settled(connection: Connection) -> Position:
    """What is settled now: what a connection of `store.database.read_one` reads from now on has all of it.

    Not for one of `read`, whose snapshot is of before the answer and may lack some.
    """
    return settled_by(lambda text: connection.exec_driver_sql(text).one(), connection.dialect.name)


def settled_by(ask: Ask, database: str) -> Position:
    """The same through any driver of the database `sqlite` or `postgresql`."""
    highest = ask(_SQL["reached"])
    # The announcements come second: whoever is not seen there has committed, or inserts above what was highest.
    lowest = ask(_SQL["announced"]) if database == "postgresql" else [None] * len(highest)
    known = (high if low is None else min(high or 0, low) for high, low in zip(highest, lowest, strict=True))
    return Position(**{field.name: value or 0 for field, value in zip(fields(Position), known, strict=True)})
