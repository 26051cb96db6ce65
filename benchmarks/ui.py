"""How long does a page take over a log of 100,000 rollouts? Every kind of page of `turnlog ui`, asked over HTTP.

    python benchmarks/ui.py                          # SQLite and PostgreSQL: about ten minutes and 3 GB of disk
    python benchmarks/ui.py --only sqlite --keep /tmp/ui   # keeps the log in that folder, and takes it again next time
    python benchmarks/ui.py --quick                  # tiny: does it run?

The log is synthetic (`synthetic_log.py`): 8 calls of about 75 tokens a rollout, one rewrite each; three harnesses, a
quarter of the rollouts without an outcome, 20 pending calls, one boundary in 1,000 of a rare reason, a run of
200 steps of 100 rows, and one rollout of 3,000 calls. Filters are chosen to be hard: some fit nothing at all. On
PostgreSQL the calls are in partitions of months, as they would be had the log been there at the time.
"""

from __future__ import annotations

import json
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psycopg
from figures import keep, kept, options
from servers import postgres
from sqlalchemy import make_url, text
from synthetic_log import COLUMNS, Shape, events

from store import hashing, migrate, partitions, schema
from store.database import open_database, read, session
from store.events import uuid7

FIGURES = Path(__file__).with_suffix(".json")
BEGAN = 1_760_000_000_000_000
"""Microseconds at which the first call begins; calls are 5 seconds apart."""
HARNESSES = ("codex", "claude-code", "qwen-code")
AT = {name: COLUMNS.index(name) for name in COLUMNS}
GOAL_MS = 500


def lines(rollouts: int, long: int) -> Iterator[tuple[Any, ...]]:
    """Rows of model_call: the many rollouts, then the long one."""
    ids: dict[UUID, UUID] = {}
    seen: dict[str, int] = {}
    shapes = (Shape(rollouts=rollouts, calls=8, scale=0.1), Shape(rollouts=1, calls=long, scale=0.1))
    for place, shape in enumerate(shapes):
        for number, line in enumerate(events(shape, seed=place)):
            values = list(line)
            at = BEGAN + 5_000_000 * number
            # Ids of the time that the call is of, as real ones are: PostgreSQL keeps calls by them.
            for name in ("call_id", "parent_id", "root_id"):
                old = values[AT[name]]
                if old is not None:
                    ids.setdefault(old, uuid7(at // 1000, old.bytes[6:]))
                    values[AT[name]] = ids[old]
            if place:
                values[AT["rollout_id"]], values[AT["writer_seq"]] = "long", values[AT["writer_seq"]] + 10**9
            if values[AT["parent_id"]] is None:
                begins = seen.setdefault(values[AT["rollout_id"]], number) == number
                rare = "tools_changed" if number % 10_000 < 10 else "item_edited"
                values[AT["reason"]] = "first_call" if begins else rare
            values[AT["started_at"]], values[AT["completed_at"]] = at, at + 2_000_000 + number % 7 * 300_000
            yield tuple(values)


def openings(rollouts: int) -> Iterator[tuple[Any, ...]]:
    """Rows of rollout."""
    for number in range(rollouts):
        yield (
            f"r{number:06}", f"g{number // 8}", number % 8, f"Repair the failing test number {number} of the parser",
            HARNESSES[number % 3], "{}", BEGAN + number * 40_000_000, hashing.render_hash(number),
        )  # fmt: skip
    yield "long", None, None, "One that never ends", "codex", "{}", BEGAN, hashing.render_hash("long")


ROLLOUT = ("rollout_id", "group_id", "slot", "task", "harness", "metadata", "opened_at", "digest")
OUTCOME = ("outcome_id", "rollout_id", "reward", "status", "declared_rewrites", "at", "digest")
INTENT = ("call_id", "rollout_id", "decision", "reason", "parent_id", "worker", "at", "digest")
TRAINED = (
    "run", "step", "row_id", "rollout_id", "tip_call_id", "selection", "selection_version", "advantage",
    "trainer_policy_version", "at", "digest",
)  # fmt: skip


def others(
    calls: list[tuple[UUID, str]], rollouts: int
) -> dict[str, tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]]:
    """Rows of the other tables, by table: their columns and values."""
    digest = hashing.render_hash("other")
    outcomes = (
        (uuid7(number, b"outcome   "), f"r{number:06}", number % 101 / 100, "completed", "[]", BEGAN + number, digest)
        for number in range(rollouts)
        if number % 4
    )
    intents = ((call_id, rollout, "root", "first_call", None, "host:8000", BEGAN, digest) for call_id, rollout in calls)
    pending = ((uuid7(BEGAN // 1000 + 40_000 * number, b"is pending"), number) for number in range(0, rollouts, 5000))
    more = ((id_, f"r{number:06}", "root", "first_call", None, "host:8000", BEGAN, digest) for id_, number in pending)
    tips = [call for call in calls if call[1] != "long"][-20_000:]
    trained = (
        (
            "run-1",
            number // 100,
            f"row{number:08}",
            rollout,
            call_id,
            "completed",
            1,
            0.25,
            number // 100,
            BEGAN,
            digest,
        )
        for number, (call_id, rollout) in enumerate(tips)
    )
    return {
        "rollout": (ROLLOUT, openings(rollouts)),
        "rollout_outcome": (OUTCOME, outcomes),
        "call_intent": (INTENT, (line for each in (intents, more) for line in each)),
        "trained_row": (TRAINED, trained),
    }


def is_filled(url: str) -> bool:
    """Whether the log is there from before; it has the newest schema then in any case."""
    database = open_database(url)
    migrate.upgrade(database)
    with read(database) as connection:
        filled = connection.execute(text("select 1 from rollout limit 1")).scalar() is not None
    database.dispose()
    return filled


def fill_sqlite(file: Path, rollouts: int, long: int) -> None:
    """Write the log through the driver, past the checks of an append."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("pragma synchronous = off")
    connection.execute("begin immediate")
    calls: list[tuple[UUID, str]] = []

    def stored(line: tuple[Any, ...]) -> list[Any]:
        return [value.bytes if isinstance(value, UUID) else value for value in line]

    def noted(line: tuple[Any, ...]) -> list[Any]:
        calls.append((line[AT["call_id"]], line[AT["rollout_id"]]))
        return stored(line)

    def insert(table: str, columns: tuple[str, ...], rows: Iterator[list[Any]]) -> None:
        marks = ", ".join("?" * len(columns))
        connection.executemany(f"insert into {table} ({', '.join(columns)}) values ({marks})", rows)

    insert("model_call", COLUMNS, map(noted, lines(rollouts, long)))
    for table, (columns, rows) in others(calls, rollouts).items():
        insert(table, columns, map(stored, rows))
    connection.execute("commit")
    connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()


def fill_postgres(url: str, rollouts: int, long: int) -> None:
    """The same log."""
    database = open_database(url)
    with session(database) as connection:
        partitions.make(connection, partitions.wanted(datetime.fromtimestamp(BEGAN // 1_000_000, UTC), "month", 1))
    database.dispose()
    calls: list[tuple[UUID, str]] = []
    driver = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(driver) as connection, connection.cursor() as cursor:

        def copy(table: str, columns: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> None:
            with cursor.copy(f"copy {table} ({', '.join(columns)}) from stdin (format binary)") as into:
                into.set_types([_type(schema.metadata.tables[table].c[name]) for name in columns])
                for row in rows:
                    into.write_row(row)

        def noted() -> Iterator[tuple[Any, ...]]:
            for line in lines(rollouts, long):
                calls.append((line[AT["call_id"]], line[AT["rollout_id"]]))
                yield line

        copy("model_call", COLUMNS, noted())
        for table, (columns, rows) in others(calls, rollouts).items():
            copy(table, columns, rows)
    with psycopg.connect(driver, autocommit=True) as connection:
        connection.execute("vacuum analyze")


def _type(column: Any) -> str:
    if isinstance(column.type, schema.Id):
        return "uuid"
    kinds = {"BIGINT": "int8", "SMALLINT": "int2", "BLOB": "bytea", "INTEGER": "int8", "DOUBLE": "float8"}
    return kinds.get(str(column.type), "text")


def pages(url: str, rollouts: int) -> dict[str, str]:
    """What is asked, by name."""
    database = open_database(url)
    with read(database) as connection:

        def call(where: str) -> UUID:
            found = connection.execute(text(f"select call_id from model_call where {where} limit 1")).scalar_one()
            return UUID(bytes=found) if isinstance(found, bytes) else found

        middle = f"r{rollouts // 2:06}"
        root = call(f"rollout_id = '{middle}' and depth = 0")
        deep = call("rollout_id = 'long' and depth > 300")
    database.dispose()
    return {
        "list: newest": "/",
        "list: in the middle": f"/?before={rollouts // 2}",
        "list: the oldest": "/?after=0",
        "task, everywhere": "/?task=parser",
        "task, one old rollout": "/?task=number+17+of",
        "task, nowhere": "/?task=nowhere",
        "harness": "/?harness=claude-code",
        "group": f"/?group=g{rollouts // 20}",
        "reward, a tenth": "/?reward_min=0.9",
        "reward, nowhere": "/?reward_min=2",
        "state: pending, rare": "/?state=pending",
        "state: failed, nowhere": "/?state=failed",
        "boundary, frequent": "/?reason=item_edited",
        "boundary, rare": "/?reason=tools_changed",
        "boundary, nowhere": "/?reason=context_replaced",
        "all filters at once": "/?task=parser&harness=codex&state=scored&reason=tools_changed&reward_min=0.5",
        "days long past": "/?since=2025-10-09&until=2025-10-10",
        "rollout of 8 calls": f"/rollouts/{middle}",
        "rollout of thousands": "/rollouts/long",
        "call": f"/calls/{root}",
        "call, deep in a chain": f"/calls/{deep}",
        "call, as a table": f"/calls/{root}?table=1",
        "runs": "/runs",
        "run": "/run?name=run-1&budget=2048",
        "step": "/step?run=run-1&number=3",
        "boundaries": "/boundaries",
        "boundaries of a harness": "/boundaries?harness=codex",
        "boundaries, all calls": "/boundaries?all=1",
    }


@contextmanager
def page_over(url: str) -> Iterator[str]:
    """`turnlog ui` as a user starts it."""
    command = [sys.executable, "-m", "turnlog", "ui", "--port", "0", "--db", url]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield re.findall(r"http://[^/]+", server.stdout.readline())[0]
    finally:
        server.terminate()
        server.wait()


def measure(url: str, rollouts: int, repeats: int) -> dict[str, Any]:
    """Median and worst time of each page, after one that warms it up; and whether a search stopped early."""
    found: dict[str, Any] = {}
    with page_over(url) as address, httpx.Client(base_url=address, timeout=120) as client:
        for name, path in pages(url, rollouts).items():
            times: list[float] = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                answer = client.get(path)
                times.append(1000 * (time.perf_counter() - began))
                assert answer.status_code == 200, (path, answer.text[-500:])
            found[name] = {
                "p50_ms": round(statistics.median(times[1:]), 1),
                "worst_ms": round(max(times[1:]), 1),
                "first_ms": round(times[0], 1),
                "kB": round(len(answer.content) / 1000),
                **({"stopped": True} if "Looked through" in answer.text else {}),
            }
            print(f"{name:26} {json.dumps(found[name])}", flush=True)
    return found


def main() -> None:
    """Measure, print, and keep the figures beside this script."""
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny; nothing is kept unless --out says where")
    parser.add_argument("--only", default="", help="databases whose name contains this")
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder, and take them again")
    parser.add_argument("--fill", action="store_true", help="only make the logs of --keep")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rollouts, long, repeats = (400, 800, 2) if asked.quick else (100_000, 3000, 15)
    out = asked.out if asked.quick else asked.out or FIGURES
    figures = kept(out) | {"goal_ms": GOAL_MS, "rollouts": rollouts}
    of = figures.pop("commit")
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder:
        logs = asked.keep or Path(folder)
        logs.mkdir(exist_ok=True)
        if asked.only in "sqlite":
            file = logs / "ui.db"
            url = f"sqlite:///{file}"
            if not is_filled(url):
                fill_sqlite(file, rollouts, long)
            if not asked.fill:
                figures["sqlite"] = {"commit": of, **measure(url, rollouts, repeats)}
        if asked.only in "postgresql":
            with postgres(logs / "pg") as server:
                url = server.url
                if not is_filled(url):
                    fill_postgres(url, rollouts, long)
                if not asked.fill:
                    figures["postgresql"] = {"commit": of, **measure(url, rollouts, repeats)}
    if not asked.fill:
        keep(out, figures)


if __name__ == "__main__":
    main()
