"""A log of millions of calls, spread over a year: what look-ups are measured on.

Knows the tables and both databases' own ways to be filled; the statements are in `long_log.sql`. Its calls are narrow,
three tokens each, for a look-up reads no arrays; their links, ids and summary hashes are as in a real log, 256 rollouts
at a time, 20 calls each. All is written past the triggers, on PostgreSQL into a partition a month.
"""

from __future__ import annotations

import hashlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import psycopg
from sqlalchemy import Engine

from store import partitions
from store.database import session, write
from store.statements import named

_LIVE, _TURNS = 256, 20
_SQL = named(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def fill(database: Engine, calls: int, first: int, step: float) -> None:
    """Put so many calls into an empty log: the first at that time in milliseconds, the others a step later each."""
    (_fill_sqlite if database.dialect.name == "sqlite" else _fill_postgres)(database, calls, first, step)


def key_of(number: int) -> bytes:
    """Summary hash of a call of the filled log."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def rollout_of(number: int) -> str:
    """Its rollout: 256 live ones at a time."""
    return f"r{(number - 1) // (_LIVE * _TURNS) * _LIVE + (number - 1) % _LIVE:08}"


def _fill_postgres(database: Engine, calls: int, first: int, step: float) -> None:
    """Narrow calls by SQL, two sessions at once, past the triggers; a partition a month, all indexes there."""
    begins = datetime.fromtimestamp(first / 1000, UTC)
    with session(database) as connection:
        partitions.make(connection, partitions.missing(connection, begins, "month", 12))
    with write(database) as connection:
        for change in ("alter table model_call disable trigger user", "alter table rollout disable trigger user"):
            connection.exec_driver_sql(change)
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    piece = -(-calls // 24)
    values = {"first": first, "step": step, "live": _LIVE, "turns": _TURNS}

    def fill(low: int) -> None:
        with psycopg.connect(url) as connection:
            connection.execute("set synchronous_commit = off")
            connection.execute(_SQL["fill_postgresql"], {**values, "low": low, "high": min(low + piece - 1, calls)})

    with ThreadPoolExecutor(2) as sessions:
        list(sessions.map(fill, range(1, calls + 1, piece)))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_SQL["open_postgresql"], {**values, "rollouts": _rollouts_of(calls)})
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")


def _rollouts_of(calls: int) -> int:
    """How many rollouts so many calls begin."""
    whole, rest = divmod(calls, _LIVE * _TURNS)
    return whole * _LIVE + min(rest, _LIVE)


def _fill_sqlite(database: Engine, calls: int, first: int, step: float) -> None:
    """The same calls, past the triggers, which are put back."""
    file = str(database.url.database)
    database.dispose()
    connection = sqlite3.connect(file, isolation_level=None)
    for pragma in ("journal_mode = off", "synchronous = off", "cache_size = -2000000", "locking_mode = exclusive"):
        connection.execute(f"pragma {pragma}")
    connection.create_function("call_id", 1, lambda n: _id_bytes(n, first, step), deterministic=True)
    connection.create_function("key", 1, lambda n: hashlib.sha256(n.to_bytes(8, "big")).digest(), deterministic=True)
    triggers = connection.execute(
        "select name, sql from sqlite_master where type = 'trigger' and tbl_name in ('model_call', 'rollout')"
    ).fetchall()
    for name, _ in triggers:
        connection.execute(f"drop trigger {name}")
    connection.execute("begin")
    values = {
        "first": first,
        "step": step,
        "live": _LIVE,
        "turns": _TURNS,
        "calls": calls,
        "rollouts": _rollouts_of(calls),
    }
    connection.execute(_SQL["fill_sqlite"], values)
    connection.execute(_SQL["open_sqlite"], values)
    for _, words in triggers:
        connection.execute(words)
    connection.execute("commit")
    connection.execute("analyze")
    connection.execute("pragma journal_mode = wal")
    connection.close()


def _id_bytes(number: int, first: int, step: float) -> bytes:
    """The id of a call of the filled log."""
    return (int(first + number * step) << 80 | 0x70008000 << 48 | number).to_bytes(16, "big")
