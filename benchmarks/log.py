"""What does the log take? Writers against the raw driver, the wait of one call, look-ups in a long log, bytes on disk.

    python benchmarks/log.py                      # everything: about 15 minutes and 20 GB of disk
    python benchmarks/log.py writers idle         # a part; the figures of the others are kept
    python benchmarks/log.py writers --processes 16 --kinds small --only sqlite    # one cell: half a minute
    python benchmarks/log.py --quick              # all of it, tiny: does it run?

- *turnlog* is `store.writer.Writer` with 16 calls in flight a process: 16 submissions, and when all are durable 16
  more. Every event is checked, hashed and compressed.
- *raw* inserts the same rows, made before, through the driver alone, in transactions as large as turnlog's were on
  average: into the same tables, with the same triggers, indexes and durability. *encoding* is raw that makes the rows
  within the time, hashed and compressed as turnlog has them, and checks nothing. *plain* is raw whose tokens nobody has
  compressed, four bytes each: what a program sends that takes no trouble.

Events are made before the clock starts (`submissions.py`): *small* continues chains by 2,000 tokens of which 500 are
sampled, *large* are roots of 32,000 of which 500 are, *mix* is what an agent does, each call with its intent.
"""

from __future__ import annotations

import gc
import multiprocessing
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import long_log
import numpy as np
from figures import keep, kept, options
from servers import Server, postgres
from sqlalchemy import Engine
from submissions import Submissions, prepared

from store import codec, lineage, migrate
from store.columns import place_of, stored_row
from store.database import open_database, read_one, write
from store.events import Event
from store.writer import Writer

FIGURES = Path(__file__).with_suffix(".json")
IN_FLIGHT = 16
PARTS = ("writers", "idle", "lookups")
GOALS = {"of raw at 16 writers": 0.7, "idle wait ms, PostgreSQL": 15, "look-up ms": 1, "disk / payload, large": 1.15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    writers: tuple[int, ...] = (1, 4, 16)
    calls: tuple[tuple[str, int], ...] = (("small", 4096), ("large", 1280), ("mix", 4096))
    repeats: int = 2
    idle: int = 200
    logged: int = 10_000_000
    asked: int = 4000


QUICK = Size(
    writers=(2,), calls=(("small", 120), ("large", 24), ("mix", 120)), repeats=1, idle=10, logged=20_000, asked=100
)


def main() -> None:
    """Measure what was asked for, print it and keep it beside this script."""
    parser = options(__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is kept unless --out says where")
    parser.add_argument("--processes", type=int, nargs="+", help="writer processes; default: 1, 4 and 16")
    parser.add_argument("--kinds", nargs="+", help="of small, large and mix; default: all")
    parser.add_argument("--only", default="", help="databases whose name contains this")
    parser.add_argument("--out", type=Path, help=f"where figures are kept; default: {FIGURES.name} beside this script")
    asked = parser.parse_args()
    size, out = (QUICK, asked.out) if asked.quick else (Size(), asked.out or FIGURES)
    size = replace(
        size,
        writers=tuple(asked.processes or size.writers),
        calls=tuple(each for each in size.calls if each[0] in (asked.kinds or each[0])),
    )
    figures = kept(out) | {"goals": GOALS, "sqlite_version": sqlite3.sqlite_version}
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder, postgres(Path(folder) / "pg") as server:
        for name, make in {"sqlite": sqlite_in(Path(folder)), "postgresql": postgresql_in(server)}.items():
            if asked.only not in name:
                continue
            measured = figures.setdefault(name, {})
            for part in asked.parts or PARTS:
                found = {"writers": writers, "idle": idle, "lookups": lookups}[part](name, make, size)
                if part == "writers":
                    found = {kind: measured.get(part, {}).get(kind, {}) | cells for kind, cells in found.items()}
                    found = measured.get(part, {}) | found
                measured[part] = found
                keep(out, figures)


Make = Callable[[], Engine]
"""Makes an empty log; the one made before may go."""


def sqlite_in(folder: Path) -> Make:
    """Files of a folder, one at a time."""

    def make() -> Engine:
        for file in folder.glob("log.db*"):
            file.unlink()
        database = open_database(f"sqlite:///{folder}/log.db")
        migrate.upgrade(database)
        return database

    return make


def postgresql_in(server: Server) -> Make:
    """Databases of a server, one at a time."""

    def make() -> Engine:
        database = open_database(server.new_database())
        migrate.upgrade(database)
        return database

    return make


# Writers: ours and the driver's.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What some processes did together."""

    events: int
    commits: int
    seconds: float
    waits: list[float]

    @property
    def rate(self) -> float:
        """Events a second."""
        return self.events / self.seconds

    @property
    def group(self) -> float:
        """Events of a transaction, on average."""
        return self.events / self.commits

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Ran:
        """The processes as one: from the first one's start to the last one's end."""
        return cls(
            events=sum(part[2] for part in parts),
            commits=sum(part[3] for part in parts),
            seconds=max(part[1] for part in parts) - min(part[0] for part in parts),
            waits=[wait for part in parts for wait in part[4]],
        )


Part = tuple[float, float, int, int, list[float]]
"""Of one process: start, end, events, commits, and each call's wait for its commit."""


def writers(name: str, make: Make, size: Size) -> dict[str, Any]:
    """Each kind of calls by 1, 4 and 16 processes: turnlog, then the driver alone."""
    found: dict[str, Any] = {}
    for kind, calls in size.calls:
        for processes in size.writers:
            rounds = max(1, calls // processes // IN_FLIGHT)
            runs: dict[str, list[Ran]] = {variant: [] for variant in WORK}
            disk: dict[str, float] = {}
            for _ in range(size.repeats):  # in turns, for the disk has moods
                for variant, ran in runs.items():
                    group = 1 if variant == "turnlog" else max(1, round(runs["turnlog"][-1].group))
                    database = make()
                    ran.append(in_processes(WORK[variant], database, kind, rounds, processes, group))
                    if variant == "turnlog" and processes == size.writers[0] and not disk:
                        disk = on_disk(database)
                    database.dispose()
            rates = {variant: float(np.mean([each.rate for each in ran])) for variant, ran in runs.items()}
            ours = runs["turnlog"]
            line = {
                **{f"{variant}_per_s": round(rate) for variant, rate in rates.items()},
                "of_raw": round(rates["turnlog"] / rates["raw"], 2),
                "of_encoding": round(rates["turnlog"] / rates["encoding"], 2),
                "of_plain": round(rates["turnlog"] / rates["plain"], 2),
                "group": round(float(np.mean([each.group for each in ours])), 1),
                **percentiles([wait for each in ours for wait in each.waits]),
                **disk,
            }
            found.setdefault(kind, {})[str(processes)] = line
            print(f"{name:10} {kind:5} {processes:2} writers ", *(f"{k} {v}" for k, v in line.items()), flush=True)
    return found


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The middle and the slow end, in milliseconds."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    return {"p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3)}


def in_processes(
    work: Callable[..., Part], database: Engine, kind: str, rounds: int, processes: int, group: int
) -> Ran:
    """The work in so many processes that start at once."""
    fork = multiprocessing.get_context("fork")
    barrier, done = fork.Barrier(processes), fork.Queue()
    url = database.url.render_as_string(hide_password=False)

    def run(number: int) -> None:
        own = open_database(url)
        with read_one(own):
            pass  # connected
        tasks = prepared(kind, number, rounds, IN_FLIGHT)
        gc.collect()
        gc.freeze()
        done.put(work(own, tasks, group, barrier.wait))
        own.dispose()

    running = [fork.Process(target=run, args=(number,)) for number in range(processes)]
    for process in running:
        process.start()
    parts = [done.get() for _ in running]
    for process in running:
        process.join()
    return Ran.of(parts)


def by_turnlog(database: Engine, tasks: list[Submissions], _: int, ready: Callable[[], object]) -> Part:
    """One submission of each task at once; when all are durable, the next one of each."""
    waits: list[float] = []
    with Writer(database) as writer:
        ready()
        start = time.monotonic()
        for turn in zip(*tasks, strict=True):
            for durable in [submit(writer, submission, waits) for submission in turn]:
                durable.result()
        end = time.monotonic()
        commits = writer.counters.commits
    events = sum(len(submission) for submissions in tasks for submission in submissions)
    return (start, end, events, commits, waits)


def submit(writer: Writer, events: list[Event], waits: list[float]) -> Future[None]:
    """Hand over, and note how long it takes until they are durable."""
    began = time.perf_counter()
    durable = writer.submit(events)
    durable.add_done_callback(lambda _: waits.append(time.perf_counter() - began))
    return durable


def by_driver(database: Engine, tasks: list[Submissions], group: int, ready: Callable[[], object]) -> Part:
    """The same rows in the same order, made before, by the driver's own `executemany`."""
    return _by_driver(database, [made(batch, database) for batch in batches(tasks, group)], lambda rows: rows, ready)


def by_driver_encoding(database: Engine, tasks: list[Submissions], group: int, ready: Callable[[], object]) -> Part:
    """The same, and the rows are made meanwhile."""
    return _by_driver(database, batches(tasks, group), lambda batch: made(batch, database), ready)


def by_driver_plain(database: Engine, tasks: list[Submissions], group: int, ready: Callable[[], object]) -> Part:
    """The same rows, made before, with their tokens as they are."""
    todo = [made(batch, database, compressed=False) for batch in batches(tasks, group)]
    return _by_driver(database, todo, lambda rows: rows, ready)


WORK: dict[str, Callable[..., Part]] = {
    "turnlog": by_turnlog, "raw": by_driver, "encoding": by_driver_encoding, "plain": by_driver_plain,
}  # fmt: skip
Rows = list[tuple[str, list[tuple[Any, ...]]]]
"""Of one transaction: statements, and the rows of each."""


def batches(tasks: list[Submissions], group: int) -> list[list[Event]]:
    """The events of all tasks in turns, in pieces."""
    events = [event for turn in zip(*tasks, strict=True) for submission in turn for event in submission]
    return [events[at : at + group] for at in range(0, len(events), group)]


def made(batch: list[Event], database: Engine, *, compressed: bool = True) -> Rows:
    """The batch as the driver takes it, kind by kind."""
    sqlite = database.dialect.name == "sqlite"
    found: Rows = []
    for kind in dict.fromkeys(event.kind for event in batch):
        names, text = insertion(kind, sqlite)
        rows = (stored_row(event) for event in batch if event.kind == kind)
        if not compressed:
            rows = (row | _as_they_are(row) for row in rows)
        found.append((text, [tuple(row[name] for name in names) for row in rows]))
        if sqlite:
            found[-1] = (text, [tuple(_id_as_bytes(value) for value in row) for row in found[-1][1]])
    return found


def _as_they_are(row: dict[str, Any]) -> dict[str, Any]:
    """Tokens that nobody has compressed."""
    return {"codec": 0, "token_ids": codec.unpack(row["codec"], row["token_ids"])} if "codec" in row else {}


def _id_as_bytes(value: Any) -> Any:
    return value.bytes if isinstance(value, UUID) else value


@cache
def insertion(kind: str, sqlite: bool) -> tuple[list[str], str]:
    """An insert of whole rows: columns and statement."""
    table = place_of(kind).table
    names = [column.name for column in table.c if column.name != "sequence"]
    marks = ", ".join(["?" if sqlite else "%s"] * len(names))
    return names, f"insert into {table.name} ({', '.join(names)}) values ({marks})"


def _by_driver(database: Engine, todo: list[Any], rows_of: Callable[[Any], Rows], ready: Callable[[], object]) -> Part:
    with write(database) as connection:
        driver: Any = connection.connection.driver_connection
        connection.exec_driver_sql("commit")
        ready()
        start = time.monotonic()
        count = 0
        for batch in todo:
            cursor = driver.cursor()
            if database.dialect.name == "sqlite":
                cursor.execute("begin immediate")
            for text, rows in rows_of(batch):
                cursor.executemany(text, rows)
                count += len(rows)
            driver.commit()
        end = time.monotonic()
    return (start, end, count, len(todo), [])


def on_disk(database: Engine) -> dict[str, float]:
    """Bytes of the tables and indexes for each token, and against the arrays alone as they are stored."""
    with write(database) as connection:
        tokens, arrays = connection.exec_driver_sql(
            "select sum(prompt_len - prev_len + sampled_len), sum(length(token_ids) + length(logprobs)) from model_call"
        ).one()
        if database.dialect.name == "postgresql":
            taken = connection.exec_driver_sql(
                "select sum(pg_total_relation_size(oid)) from pg_class"
                " where relkind = 'r' and starts_with(relname, 'model_call')"
            ).scalar_one()
    if database.dialect.name == "sqlite":
        with database.connect() as connection:
            connection.connection.driver_connection.execute("pragma query_only = off")  # type: ignore[union-attr]
            connection.connection.driver_connection.execute("pragma wal_checkpoint(truncate)")  # type: ignore[union-attr]
        taken = Path(str(database.url.database)).stat().st_size
    return {
        "disk_bytes_per_token": round(float(taken) / float(tokens), 2),
        "array_bytes_per_token": round(float(arrays) / float(tokens), 2),
        "disk_of_arrays": round(float(taken) / float(arrays), 2),
    }


def idle(name: str, make: Make, size: Size) -> dict[str, Any]:
    """How long one call waits for its commit when nothing else happens."""
    database = make()
    (submissions,) = prepared("small", 0, size.idle, 1)
    waits: list[float] = []
    with Writer(database) as writer:
        for events in submissions:
            began = time.perf_counter()
            writer.submit(events).result()
            waits.append(time.perf_counter() - began)
            time.sleep(0.005)
    database.dispose()
    found = percentiles(waits)
    print(f"{name:10} idle ", *(f"{k} {v}" for k, v in found.items()), flush=True)
    return found


def lookups(name: str, make: Make, size: Size) -> dict[str, Any]:
    """How long the look-up of a summary hash takes in a log of a year, its calls spread over the months."""
    database = make()
    began = time.perf_counter()
    last = time.time_ns() // 10**6
    first = last - 365 * 86_400_000
    step = (last - first) / size.logged
    long_log.fill(database, size.logged, first, step)
    made = time.perf_counter() - began
    dice = np.random.default_rng(0)
    waits: dict[str, list[float]] = {}
    for when, oldest in (("of this month", size.logged * 23 // 24), ("of the year", 1)):
        asked = dice.integers(oldest, size.logged + 1, size.asked).tolist()
        for turn in range(2):  # the first one warms up
            for number in asked:
                for which, key in (("found", long_log.key_of(number)), ("not found", dice.bytes(32))):
                    start = time.perf_counter()
                    with read_one(database) as connection:
                        calls = lineage.find_by_summary(
                            connection, long_log.rollout_of(number), [key], now=time.time_ns() // 1000
                        )
                    if turn:
                        waits.setdefault(f"{which}, {when}", []).append(time.perf_counter() - start)
                    assert len(calls) == (which == "found"), (number, which, calls)
    database.dispose()
    found = {"calls": size.logged, "made_s": round(made), **{which: percentiles(each) for which, each in waits.items()}}
    print(f"{name:10} look-ups ", *(f"{k} {v}" for k, v in found.items()), flush=True)
    return found


if __name__ == "__main__":
    main()
