"""How fast does a log become rows? From SQLite and PostgreSQL, for many rollouts and for long chains, against what a
machine can do at best and against the earlier design.

    python benchmarks/rows.py                  # everything: about half an hour, 10 GB of disk
    python benchmarks/rows.py --scale 0.1      # a tenth of the rollouts

Each reading is a process of its own (peak memory is its own), the variants of one question take turns, and medians are
kept. Rows come out the same way each time: tokens, mask and log-probabilities end to end, 9 bytes a token.

- *turnlog* selects, walks, checks links and lengths, decodes, derives every chain hash again and gives `Row`s; *side by
  side* is the same with a pool of one process a core, started before.
- *joined* is the fastest way that `notes` found for the source, with nothing checked: ordered by (root, depth) in the
  database, decoded, joined. Its rows are the same where no chain branches.
- *sealed* is turnlog on the archive of the same log (`replay.sealing.seal`), *joined* there what its files give when
  they are read whole in chain order: arrays end to end, nothing checked.
- *exported* reads the rows that `turnlog rows --out` wrote, zstd-compressed Parquet in chain order.
- *copied* copies the same bytes in memory, *read* reads the database file from end to end.
- *full prompts* is the earlier design: each call kept with its whole prompt, rows found by comparing prefixes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
from figures import keep, kept, options
from servers import postgres
from sqlalchemy import Engine, text
from synthetic_log import Shape, fill_both, fill_sqlite

from replay import walk
from replay.archive import open_archive
from replay.export import stream_parquet
from replay.piece import Flags, Piece
from replay.pool import Pool
from replay.rowset import build, outlined, stream
from replay.sealing import seal
from replay.selection import Selection
from store import codec, migrate
from store.database import open_database, read

BATCH = 500
FIGURES = Path(__file__).with_suffix(".json")


def main() -> None:
    """Make the logs, measure in turns, print and keep the figures beside this script."""
    parser = options(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rollouts")
    parser.add_argument("--only", default="", help="shapes whose names contain this; the figures of others are kept")
    parser.add_argument("--repeats", type=int, default=3, help="of each reading; medians are kept")
    parser.add_argument("--out", type=Path, default=FIGURES, help="where the figures go; default: beside this script")
    parser.add_argument("--child", nargs=3, metavar=("VARIANT", "URL", "OTHER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(*asked.child)
        return
    figures = kept(asked.out)
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as scratch, postgres(Path(scratch) / "pg") as server:
        folder = Path(scratch) / "log"
        folder.mkdir()
        shapes = {
            "10k x 20, full size": Shape(rollouts=int(10_000 * asked.scale)),
            "100k x 20, a tenth": Shape(rollouts=int(100_000 * asked.scale), scale=0.1),
            "10k x 20, no rewrite": Shape(rollouts=int(10_000 * asked.scale), rewrites=0, scale=0.1),
            "1k x 200, no rewrite": Shape(rollouts=int(1_000 * asked.scale), calls=200, rewrites=0, scale=0.1),
            "100 x 2000, no rewrite": Shape(rollouts=int(100 * asked.scale), calls=2000, rewrites=0, scale=0.1),
        }
        for name, shape in shapes.items():
            if asked.only not in name:
                continue
            file = folder / "log.db"
            urls = {"sqlite": f"sqlite:///{file}", "postgresql": server.new_database()}
            measured = measure(name, shape, file, urls, asked.repeats)
            figures.setdefault("rows", {})[name] = {"rollouts": shape.rollouts, "repeats": asked.repeats, **measured}
            keep(asked.out, figures)
            for each in folder.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        if asked.only in "storage":
            figures["storage"] = [storage(folder, turns, asked.repeats) for turns in (5, 20, 100, 500)]
    keep(asked.out, figures)


def measure(name: str, shape: Shape, file: Path, urls: dict[str, str], repeats: int) -> dict[str, Any]:
    """One shape on both databases, all variants in turns."""
    began = time.perf_counter()
    for url in urls.values():
        database = open_database(url)
        migrate.upgrade(database)
        database.dispose()
    fill_both(file, open_database(urls["postgresql"]), shape)
    print(f"{name}: logs made in {time.perf_counter() - began:.0f} s", flush=True)
    database = open_database(urls["sqlite"])
    stream_parquet(stream(database), file.with_suffix(".parquet"), Selection())
    began = time.perf_counter()
    seal(database, open_archive(archive_of(file), new=True), before=2**62, name="bench")
    print(f"{name}: sealed in {time.perf_counter() - began:.0f} s", flush=True)
    database.dispose()
    unlogged = file.with_name("unlogged.db")  # a log of which nothing is left but its archive
    urls["sealed"] = f"sqlite:///{unlogged}"
    empty = open_database(urls["sealed"])
    migrate.upgrade(empty)
    empty.dispose()
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        for source, url in urls.items():
            for variant in ("turnlog", "side by side", "joined", "outline", "batch", "batch, side by side"):
                if source == "sealed":
                    if "batch" in variant:
                        continue
                    os.environ["TURNLOG_ARCHIVE"] = archive_of(file)
                found.setdefault(f"{source} {variant}", []).append(run(variant, url, str(file)))
                os.environ.pop("TURNLOG_ARCHIVE", None)
        for variant in ("exported", "copied", "read"):
            found.setdefault(variant, []).append(run(variant, urls["sqlite"], str(file)))
    table = {
        each: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for each, runs in found.items()
    }
    for each, values in table.items():
        print(f"  {each:20}", "  ".join(f"{key} {value:,.4g}" for key, value in values.items()), flush=True)
    return table


def run(variant: str, url: str, other: str) -> dict[str, float]:
    """One variant in a process of its own."""
    answer = subprocess.run(
        [sys.executable, __file__, "--child", variant, url, other], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise SystemExit(answer.stderr)
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def child(variant: str, url: str, other: str) -> None:
    """Measure one variant here, and print the figures as JSON."""
    database = open_database(url)
    reading: Callable[[Engine, str], dict[str, float]] = {
        "turnlog": by_turnlog,
        "side by side": by_processes,
        "batch, side by side": batch_by_processes,
        "joined": joined(database),
        "outline": by_outline,
        "batch": random_batch,
        "exported": exported,
        "copied": copied,
        "read": read_file,
        "prompts": full_prompts,
    }[variant]
    cpu = sum(os.times()[:4])
    found = reading(database, other)
    print(json.dumps({**found, "cpu_s": sum(os.times()[:4]) - cpu, "peak_mb": peak_of("self")}))


def archive_of(file: Path | str) -> str:
    """Where the log of a file is sealed."""
    return str(Path(file).with_suffix(".archive"))


def joined(database: Engine) -> Callable[[Engine, str], dict[str, float]]:
    """The fastest way to read what the child is asked to read."""
    if "TURNLOG_ARCHIVE" in os.environ:
        return joined_sealed
    return joined_sqlite if database.dialect.name == "sqlite" else joined_postgres


def peak_of(process: str) -> float:
    """Most memory that a process held, in MB; not getrusage's, which begins with what its parent held."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[0]) / 1024


def rates(seconds: float, rows: int, tokens: int, trained: int) -> dict[str, float]:
    """What is kept of a reading."""
    return {
        "seconds": seconds,
        "k_rows_per_s": rows / seconds / 1e3,
        "m_tokens_per_s": tokens / seconds / 1e6,
        "m_trained_per_s": trained / seconds / 1e6,
    }


def by_processes(database: Engine, _: str) -> dict[str, float]:
    """The same by a process a core; and the peak memory of the largest of these."""
    with Pool(os.cpu_count() or 1) as pool:
        pool.ready()
        found = by_turnlog(database, "", pool)
        others = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return {**found, "others_peak_mb": max(map(peak_of, others))}


def batch_by_processes(database: Engine, _: str) -> dict[str, float]:
    """`random_batch` by a process a core."""
    with Pool(os.cpu_count() or 1) as pool:
        pool.ready()
        return random_batch(database, "", pool)


def by_turnlog(database: Engine, _: str, pool: Pool | None = None) -> dict[str, float]:
    """All rows of the log, verified, a part at a time."""
    began = time.perf_counter()
    rows = tokens = trained = 0
    for part in stream(database, pool=pool):
        for row in part.rows:
            rows += 1
            tokens += row.length
            trained += row.trained
    return rates(time.perf_counter() - began, rows, tokens, trained)


def by_outline(database: Engine, _: str) -> dict[str, float]:
    """All rows of the log without their tokens: what choosing costs, and how much of that the recursive query takes."""
    walked = 0.0

    def timed(piece: Piece, counts: Flags, engine: duckdb.DuckDBPyConnection) -> walk.Paths:
        nonlocal walked
        start = time.perf_counter()
        found = paths(piece, counts, engine)
        walked += time.perf_counter() - start
        return found

    paths, walk.paths = walk.paths, timed
    began = time.perf_counter()
    table = outlined(database).table
    seconds = time.perf_counter() - began
    sums = (int(np.sum(table[name].to_numpy())) for name in ("length", "trained"))
    return {**rates(seconds, table.num_rows, *sums), "recursive_query_s": walked}


def exported(_: Engine, other: str) -> dict[str, float]:
    """The rows that `turnlog rows --out` wrote, read with pyarrow, a row group at a time and a column a thread."""
    began = time.perf_counter()
    rows = tokens = trained = 0
    names = ["row_id", "token_ids", "loss_mask", "logprobs"]
    with pq.ParquetFile(Path(other).with_suffix(".parquet")) as file:
        for group in range(file.num_row_groups):
            lines = file.read_row_group(group, columns=names)
            rows += lines.num_rows
            arrays = [lines[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in names[1:]]
            tokens += len(arrays[0])
            trained += int(np.count_nonzero(arrays[1]))
    return rates(time.perf_counter() - began, rows, tokens, trained)


def random_batch(database: Engine, _: str, pool: Pool | None = None) -> dict[str, float]:
    """The rows of 500 rollouts drawn at random, the log's files warm."""
    with read(database) as connection:
        names = [name for (name,) in connection.execute(text("select rollout_id from rollout"))]
    dice = np.random.default_rng(0)
    drawn = [sorted(dice.choice(names, min(BATCH, len(names)), replace=False).tolist()) for _ in range(4)]
    build(database, rollouts=drawn[0], pool=pool)
    spent: list[float] = []
    for each in drawn[1:]:
        began = time.perf_counter()
        found = build(database, rollouts=each, pool=pool)
        spent.append(time.perf_counter() - began)
    tokens = sum(row.length for row in found.rows)
    return rates(statistics.median(spent), len(found.rows), tokens, sum(row.trained for row in found.rows))


def joined_sqlite(_: Engine, other: str) -> dict[str, float]:
    """Ordered by (root, depth) in SQLite, joined in Python, nothing checked."""
    statement = (
        "select root_id, prompt_len - prev_len, sampled_len, codec, token_ids, logprobs"
        " from model_call order by root_id, depth"
    )
    began = time.perf_counter()
    connection = sqlite3.connect(f"file:{other}?mode=ro", uri=True)
    return _joined(began, iter(connection.execute(statement)))


def joined_postgres(database: Engine, _: str) -> dict[str, float]:
    """Ordered by (root, depth) in PostgreSQL, out through ADBC, nothing checked."""
    import adbc_driver_postgresql.dbapi

    statement = (
        "select root_id, prompt_len - prev_len, sampled_len, codec, token_ids, logprobs"
        " from model_call order by root_id, depth"
    )
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    began = time.perf_counter()
    with adbc_driver_postgresql.dbapi.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(statement)

        def lines() -> Iterator[Any]:
            for batch in cursor.fetch_record_batch():
                columns = [batch.column(0).storage, *batch.columns[1:]]
                yield from zip(*(column.to_pylist() for column in columns), strict=True)

        return _joined(began, lines())


def joined_sealed(_: Engine, other: str) -> dict[str, float]:
    """Files read whole, one after the other, in chain order, which is how they lie; nothing checked."""
    began = time.perf_counter()
    rows = tokens = trained = 0
    names = ["root_id", "prev_len", "prompt_len", "sampled_len", "token_ids", "logprobs"]
    for file in sorted(Path(archive_of(other)).glob("model_call/*/*.parquet")):
        lines = pq.read_table(file, columns=names, use_threads=False)
        before = lines["prompt_len"].to_numpy() - lines["prev_len"].to_numpy()
        sampled = lines["sampled_len"].to_numpy()
        token_ids, scores = (
            np.concatenate([np.frombuffer(chunk.buffers()[2], kind) for chunk in lines[name].chunks])
            for name, kind in (("token_ids", "<i4"), ("logprobs", "<f4"))
        )
        mask = np.repeat(np.tile([False, True], len(sampled)), np.stack([before, sampled], axis=1).ravel())
        logprobs = np.zeros(len(token_ids), "<f4")
        logprobs[np.arange(len(scores)) + np.repeat(np.cumsum(before), sampled)] = scores
        rows += int(np.count_nonzero(lines["prev_len"].to_numpy() == 0))
        tokens += len(token_ids)
        trained += int(np.count_nonzero(mask))
    return rates(time.perf_counter() - began, rows, tokens, trained)


def _joined(began: float, lines: Iterator[Any]) -> dict[str, float]:
    unpack = codec.Unpacker()
    rows = tokens = trained = 0
    root, parts, scores, mask = None, [], [], []

    def end() -> None:
        nonlocal rows, tokens, trained
        row = np.frombuffer(b"".join(parts), "<i4")
        np.frombuffer(b"".join(scores), "<f4")
        sampled = np.frombuffer(b"".join(mask), np.bool_)
        rows += 1
        tokens += len(row)
        trained += int(np.count_nonzero(sampled))

    zeros, ones = bytes(400_000), b"\x01" * 100_000
    for root_id, before, sampled, kind, stored, logprobs in lines:
        if root_id != root and parts:
            end()
            parts, scores, mask = [], [], []
        root = root_id
        parts.append(stored if kind == codec.RAW else unpack(kind, stored))
        scores += [zeros[: 4 * before], logprobs]
        mask += [zeros[:before], ones[:sampled]]
    end()
    return rates(time.perf_counter() - began, rows, tokens, trained)


def copied(database: Engine, _: str) -> dict[str, float]:
    """The bytes of all rows, copied in memory in parts of 72 MB into the same buffer."""
    table = outlined(database).table
    tokens, trained = (int(np.sum(table[name].to_numpy())) for name in ("length", "trained"))
    source, target = np.ones(72_000_000, np.uint8), np.zeros(72_000_000, np.uint8)
    began = time.perf_counter()
    for start in range(0, 9 * tokens, len(source)):
        size = min(len(source), 9 * tokens - start)
        target[:size] = source[:size]
    return rates(time.perf_counter() - began, table.num_rows, tokens, trained)


def read_file(database: Engine, other: str) -> dict[str, float]:
    """The SQLite file from end to end, as the operating system has it."""
    table = outlined(database).table
    tokens, trained = (int(np.sum(table[name].to_numpy())) for name in ("length", "trained"))
    began = time.perf_counter()
    buffer = bytearray(8_000_000)
    with open(other, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return rates(time.perf_counter() - began, table.num_rows, tokens, trained)


def storage(folder: Path, turns: int, repeats: int) -> dict[str, Any]:
    """Bytes on disk per trained token, and time to all rows, against full prompts: one rewrite, SQLite both."""
    rollouts = max(2, 2000 // turns)
    ours, theirs = folder / "ours.db", folder / "prompts.db"
    for file in folder.iterdir():
        file.unlink()
    database = open_database(f"sqlite:///{ours}")
    migrate.upgrade(database)
    fill_sqlite(ours, Shape(rollouts=rollouts, calls=turns))
    _write_prompts(database, theirs)
    found = {"turns": turns, "rollouts": rollouts}
    for name, variant, file in (("turnlog", "turnlog", ours), ("full prompts", "prompts", theirs)):
        runs = [run(variant, f"sqlite:///{ours}", str(file)) for _ in range(repeats)]
        seconds = statistics.median(each["seconds"] for each in runs)
        trained = runs[0]["m_trained_per_s"] * runs[0]["seconds"] * 1e6
        found[name] = {
            "seconds": seconds,
            "bytes_per_trained_token": file.stat().st_size / trained,
            "trained": round(trained),
        }
    print(found, flush=True)
    return found


def _write_prompts(database: Engine, file: Path) -> None:
    """The same calls as the earlier design keeps them: the whole prompt, the answer and its log-probabilities."""
    connection = sqlite3.connect(file)
    connection.execute("pragma page_size = 16384")
    connection.execute(
        "create table call (place integer primary key, rollout text, prompt blob, answer blob, logprobs blob)"
    )
    numbers = 0
    for part in stream(database):
        for row in part.rows:
            for start, end, _ in row.version_spans.tolist():
                line = (row.rollout_id, row.token_ids[:start].tobytes(), row.token_ids[start:end].tobytes())
                numbers += 1
                connection.execute(
                    "insert into call values (?, ?, ?, ?, ?)", (numbers, *line, row.logprobs[start:end].tobytes())
                )
    connection.execute("create index call_rollout on call (rollout, place)")
    connection.commit()
    connection.close()


def full_prompts(_: Engine, other: str) -> dict[str, float]:
    """Rows of the earlier design: a row ends where a prompt does not begin with all of the call before."""
    began = time.perf_counter()
    rows = tokens = trained = 0
    connection = sqlite3.connect(f"file:{other}?mode=ro", uri=True)
    context, name, spans = np.zeros(0, np.int32), None, []

    def end() -> None:
        nonlocal rows, tokens, trained
        if not len(context):
            return
        mask, logprobs = np.zeros(len(context), np.bool_), np.zeros(len(context), np.float32)
        for start, scores in spans:
            mask[start : start + len(scores)] = True
            logprobs[start : start + len(scores)] = scores
        rows += 1
        tokens += len(context)
        trained += int(np.count_nonzero(mask))

    for rollout, prompt, answer, scores in connection.execute(
        "select rollout, prompt, answer, logprobs from call order by rollout, place"
    ):
        ids = np.frombuffer(prompt, "<i4")
        same = rollout == name and len(ids) >= len(context) and np.array_equal(ids[: len(context)], context)
        if not same:
            end()
            spans = []
        name = rollout
        spans.append((len(ids), np.frombuffer(scores, "<f4")))
        context = np.concatenate([ids, np.frombuffer(answer, "<i4")])
    end()
    return rates(time.perf_counter() - began, rows, tokens, trained)


if __name__ == "__main__":
    main()
