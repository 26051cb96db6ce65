"""A log of a given size, made without a model: what `rows.py` measures on.

Rollouts of `calls` calls whose context is rewritten once, in the middle; the events of 256 live rollouts interleave.
Token ids are drawn from a text-like distribution (slices of a corpus with Zipf's frequencies and repeated phrases),
chain hashes, lengths and digests are right, and all is written through the drivers, past the checks of `store.log`,
since two million events would take half an hour.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from sqlalchemy import Engine

from store import codec, hashing, schema
from store.events import CallCompleted, ItemTrace, RolloutOpened, uuid7

LIVE = 256
ROOT, DELTA, SAMPLED = 2500, 550, 165
"""Tokens of a root, of a continuation, and how many of them are sampled, at scale 1."""
COLUMNS = tuple(column.name for column in schema.model_call.columns if column.name != "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the log holds."""

    rollouts: int
    calls: int = 20
    rewrites: int = 1
    scale: float = 1.0
    """Of the events' sizes."""


def corpus(size: int = 4_000_000, vocabulary: int = 151_000, seed: int = 0) -> np.ndarray:
    """Tokens with Zipf's frequencies in which phrases recur, as text has them."""
    dice = np.random.default_rng(seed)
    phrases = np.minimum(dice.zipf(1.15, (20_000, 12)), vocabulary - 1).astype(np.int32)
    return phrases[np.minimum(dice.zipf(1.2, size // 12), len(phrases) - 1)].reshape(-1)


def events(shape: Shape, *, seed: int = 0) -> Iterator[tuple[Any, ...]]:
    """Rows of model_call in the order of the log, in the order of `COLUMNS`."""
    dice = np.random.default_rng(seed)
    text = corpus()
    writer = uuid7(0, b"benchmarks")
    blank = hashing.render_hash({"benchmark": True})
    traces = {
        "request_items": (ItemTrace(role="tool_result", digest=blank),),
        "answer_items": (ItemTrace(role="message", digest=blank),),
        "answer_item_ids": (),
    }
    names = sorted({*CallCompleted.model_fields}.difference(("kind", "token_ids", "logprobs")))
    spans = {n: f'[{{"end":{n},"policy_version":{n % 7},"start":0}}]' for n in range(4 * SAMPLED + 8)}
    live = [_Rollout(number) for number in range(min(LIVE, shape.rollouts))]
    begun = len(live)
    count = 0
    draws = np.zeros((0, 4))
    while live:
        if not len(draws):
            draws = dice.random((10_000, 4))
            draw = iter(draws.tolist())
            noise = dice.bytes(len(draws) * 42)
            scores = (-dice.exponential(0.5, 1 << 20)).astype("<f4")
        one = next(draw, None)
        if one is None:
            draws = draws[:0]
            continue
        which = int(one[0] * len(live))
        random = noise[count % 10_000 * 42 :][:42]
        rollout = live[which]
        cut = rollout.done % -(-shape.calls // (shape.rewrites + 1)) == 0
        size = int((ROOT if cut else DELTA) * shape.scale * (0.7 + 0.6 * one[1])) + 2
        sampled = max(1, min(int(SAMPLED * shape.scale * (0.5 + one[2])), size - 1))
        start = int(one[3] * (len(text) - size))
        raw = text[start : start + size].astype("<i4").tobytes()
        count += 1
        call_id = uuid7(count, random[:10])
        parent = None if cut else rollout.parent
        prev_len = 0 if parent is None else rollout.length
        chain_hash = hashing.chain_hash(None if parent is None else rollout.chain_hash, raw)
        root = call_id if parent is None else rollout.root
        depth = 0 if parent is None else rollout.depth + 1
        packed = codec.pack(raw)
        request = random[10:42]
        values = {
            "call_id": call_id,
            "rollout_id": rollout.name,
            "parent_id": parent,
            "root_id": root,
            "depth": depth,
            "decision": "root" if parent is None else "continuation",
            "reason": "item_edited" if parent is None else "extends",
            "candidates": 0 if parent is None else 1,
            "reasoning_policy": "strict",
            "summary_hash": request,
            "request_hash": request,
            "answer_key": blank,
            "render_hash": blank,
            "tools_digest": blank,
            "hash_version": hashing.HASH_VERSION,
            "reasoning_digest": None,
            "prev_len": prev_len,
            "prompt_len": prev_len + size - sampled,
            "sampled_len": sampled,
            "chain_hash": chain_hash,
            "policy_spans": spans[sampled],
            "finish_reason": "stop",
            "dialect": "chat",
            "model": "benchmark",
            "response_id": f"chatcmpl-{call_id.hex}",
            "answer_item_ids": "[]",
            "choice": 0,
            "media_count": 0,
            "writer_id": writer,
            "writer_seq": count,
            "started_at": count,
            "completed_at": count + 1,
            "digest": b"",
            "evidence": "{}",
            "sampling": '{"temperature":1.0}',
            "hints": "{}",
            "request_roles": '["tool_result"]',
            "request_digests": blank,
            "answer_roles": '["message"]',
            "answer_digests": blank,
            "codec": packed.codec,
            "token_ids": packed.data,
            "logprobs": scores[start % 1_000_000 :][:sampled].tobytes(),
        }
        written = {"policy_spans": spans[sampled], "evidence": "{}", "sampling": '{"temperature":1.0}', "hints": "{}"}
        texts = written | hashing.json_texts(values | traces, [name for name in names if name not in written])
        texts = {name: texts[name] for name in names}
        tokens = chain_hash if parent is None else raw  # as `CallCompleted.digest` has it
        values["digest"] = hashing.event_digest("call_completed", texts, tokens, values["logprobs"])
        yield tuple(values[name] for name in COLUMNS)
        rollout.parent, rollout.root, rollout.depth, rollout.chain_hash = call_id, root, depth, chain_hash
        rollout.length, rollout.done = prev_len + size, rollout.done + 1
        if rollout.done == shape.calls:
            if begun < shape.rollouts:
                live[which] = _Rollout(begun)
                begun += 1
            else:
                live.pop(which)


class _Rollout:
    def __init__(self, number: int) -> None:
        self.name = f"r{number:06}"
        self.parent: Any = None
        self.root: Any = None
        self.depth = self.length = self.done = 0
        self.chain_hash = b""


def fill_both(file: Path, database: Engine, shape: Shape) -> None:
    """Write the same log into a SQLite file and a PostgreSQL database, both empty and of the newest schema."""
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as postgres, postgres.cursor() as cursor:
        with cursor.copy(f"copy model_call ({', '.join(COLUMNS)}) from stdin (format binary)") as copy:
            types = {column.name: _type(column) for column in schema.model_call.columns}
            copy.set_types([types[name] for name in COLUMNS])
            fill_sqlite(file, shape, also=copy.write_row)
        cursor.executemany(
            "insert into rollout (rollout_id, group_id, metadata, opened_at, digest) values (%s, %s, '{}', %s, %s)",
            list(_openings(shape)),
        )
        postgres.commit()
    with psycopg.connect(url, autocommit=True) as postgres:
        postgres.execute("vacuum analyze")


def fill_sqlite(file: Path, shape: Shape, *, also: Callable[[tuple[Any, ...]], None] | None = None) -> None:
    """Write the log into a SQLite file of the newest schema; `also` sees every line."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("pragma synchronous = off")
    connection.execute("pragma cache_size = -400000")
    connection.execute("begin immediate")
    marks = ", ".join("?" * len(COLUMNS))
    ids = [COLUMNS.index(name) for name in ("call_id", "parent_id", "root_id", "writer_id")]

    def line(values: tuple[Any, ...]) -> list[Any]:
        if also is not None:
            also(values)
        found = list(values)
        for at in ids:
            found[at] = found[at] and found[at].bytes
        return found

    connection.executemany(f"insert into model_call ({', '.join(COLUMNS)}) values ({marks})", map(line, events(shape)))
    connection.executemany(
        "insert into rollout (rollout_id, group_id, metadata, opened_at, digest) values (?, ?, '{}', ?, ?)",
        _openings(shape),
    )
    connection.execute("commit")
    connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()


def _type(column: Any) -> str:
    if isinstance(column.type, schema.Id):
        return "uuid"
    return {"BIGINT": "int8", "SMALLINT": "int2", "BLOB": "bytea", "INTEGER": "int8"}.get(str(column.type), "text")


def _openings(shape: Shape) -> Iterator[tuple[str, str, int, bytes]]:
    opened = (RolloutOpened(rollout_id=f"r{n:06}", group_id=f"g{n // 8}", opened_at=n) for n in range(shape.rollouts))
    return ((each.rollout_id, str(each.group_id), each.opened_at, each.digest()) for each in opened)
