"""Fixtures of the replay tests: recorded calls without a database, forests of calls, and fresh logs by the dozen."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sqlalchemy import Engine

from replay.piece import CALLS, Piece, Rollout
from replay.reader import Payloads
from store import codec, hashing, log, migrate
from store.database import open_database, write
from store.events import CallCompleted, Event, PolicySpan, RolloutOpened, RolloutScored, uuid7

# Programs: they replace parts of torch, or are killed, and want processes of their own.
collect_ignore = ["megatron_checks.py", "parallel_checks.py", "resumed_run.py"]


@dataclass(frozen=True)
class Recorded:
    """Completed calls as replay would read them, without a database, to tamper with. Calls are named by their place."""

    piece: Piece
    lines: list[tuple[Any, ...]]
    """Its heavy columns, a line a call."""

    @property
    def payloads(self) -> list[Payloads]:
        """As one batch."""
        return [Payloads(*zip(*self.lines, strict=True))]

    def facts(self, **changes: Any) -> Recorded:
        """Other facts of its first rollout."""
        first, *rest = self.piece.rollouts
        return replace(self, piece=Piece(rollouts=(first._replace(**changes), *rest), calls=self.piece.calls))

    def tampered(self, call: int, **columns: Any) -> Recorded:
        """Other values in the narrow columns of one call."""
        lines = self.piece.calls.to_pylist()
        lines[call] |= columns
        return replace(self, piece=Piece(rollouts=self.piece.rollouts, calls=pa.Table.from_pylist(lines, CALLS)))

    def damaged(self, call: int, **columns: Any) -> Recorded:
        """Other stored arrays of one call."""
        values = dict(zip(Payloads._fields, self.lines[call], strict=True)) | columns
        lines = [*self.lines]
        lines[call] = tuple(values[name] for name in Payloads._fields)
        return replace(self, lines=lines)

    def without(self, call: int) -> Recorded:
        """As if the log did not hold a call."""
        kept = pa.array([place for place in range(len(self.piece.calls)) if place != call])
        calls = self.piece.calls.take(kept)
        return replace(
            self,
            piece=Piece(rollouts=self.piece.rollouts, calls=calls),
            lines=[self.lines[place] for place in kept.to_pylist()],
        )

    def id_of(self, call: int) -> bytes:
        """The id of one call."""
        found: bytes = self.piece.column("call_id")[call].as_py()
        return found


def all_but(recorded: Recorded, *calls: int) -> Any:
    """Flags of the calls of a piece, false for those named."""
    return ~np.isin(np.arange(len(recorded.piece.calls)), calls)


@pytest.fixture(scope="session")
def remember() -> Callable[[Engine, Iterable[Event]], None]:
    """Append events to a log, in one transaction."""

    def append(database: Engine, events: Iterable[Event]) -> None:
        with write(database) as connection:
            log.append(connection, events)

    return append


@pytest.fixture(scope="session")
def recorded() -> Callable[..., Recorded]:
    """Completed calls, in the order of the log, as replay would read them: see `Recorded`."""

    def record(calls: Sequence[CallCompleted], **facts: Any) -> Recorded:
        nothing: dict[str, Any] = dict.fromkeys(("group_id", "task", "harness", "reward", "accepted", "output"))
        names = dict.fromkeys(call.rollout_id for call in calls)
        rollouts = [Rollout(**{"rollout_id": name, "opened_at": 0, **nothing, **facts}) for name in names]
        narrow = pa.Table.from_pylist([_narrow(place, call) for place, call in enumerate(calls, 1)], CALLS)
        heavy = [_heavy(place, call) for place, call in enumerate(calls, 1)]
        return Recorded(piece=Piece.of(rollouts, narrow), lines=heavy)

    return record


@pytest.fixture(scope="session")
def grow() -> Callable[..., list[CallCompleted]]:
    """A forest of one rollout: `grow(maker, [None, 0, 0])` is a root and two calls that continue it."""

    def forest(
        maker: Any, parents: Sequence[int | None], *, lengths: Sequence[tuple[int, int]] = (), rollout_id: str = "r1"
    ) -> list[CallCompleted]:
        calls: list[CallCompleted] = []
        for index, parent in enumerate(parents):
            interstitial, sampled = lengths[index] if lengths else (5 + index, 3 + index)
            above = None if parent is None else calls[parent]
            calls.append(maker.call(interstitial, sampled, rollout_id=rollout_id, parent=above))
        return calls

    return forest


@pytest.fixture(scope="session")
def fresh_log(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """`with fresh_log() as database`: an empty SQLite log, for property tests that need many."""
    folder = tmp_path_factory.mktemp("fresh")
    template = folder / "template.db"
    database = open_database(f"sqlite:///{template}")
    migrate.upgrade(database)
    database.dispose()
    made = iter(range(1_000_000))

    @contextmanager
    def fresh() -> Iterator[Engine]:
        file = folder / f"{next(made)}.db"
        shutil.copyfile(template, file)
        database = open_database(f"sqlite:///{file}")
        try:
            yield database
        finally:
            database.dispose()
            for leftover in folder.glob(f"{file.name}*"):
                leftover.unlink()

    return fresh


@pytest.fixture(scope="session")
def groups_of_rollouts(grow: Callable[..., list[CallCompleted]]) -> Callable[..., list[Event]]:
    """Groups of three scored rollouts of two rows or three: `groups_of_rollouts(maker, ["g0", "g1"])`."""

    def record(maker: Any, groups: Sequence[str]) -> list[Event]:
        events: list[Event] = []
        for number, group in enumerate(groups):
            for slot in range(3):
                name = f"{group}.{slot}"
                shape = ([None, 0, 1, None], [None, 0, 0, None])[slot % 2]
                lengths = [(12 + 5 * number, 6 + slot), (9, 4), (7 + slot, 5), (20, 8)]
                events.append(RolloutOpened(rollout_id=name, group_id=group, slot=slot, opened_at=10 * number + slot))
                events += grow(maker, shape, lengths=lengths, rollout_id=name)
                outcome_id = uuid7(number, name.encode()[:10].ljust(10))
                reward = float((slot * 3 + number) % 4)
                events.append(RolloutScored(outcome_id=outcome_id, rollout_id=name, reward=reward, at=number))
        return events

    return record


def spans_text(spans: Iterable[PolicySpan]) -> str:
    """Policy spans as the log stores them."""
    return hashing.canonical_json([span.model_dump() for span in spans]).decode()


def _narrow(sequence: int, call: CallCompleted) -> dict[str, Any]:
    """The call's narrow columns, as the log would give them."""
    fields = {name: getattr(call, name) for name in CALLS.names if hasattr(call, name)}
    ids = {name: value and value.bytes for name, value in fields.items() if name in ("call_id", "parent_id", "root_id")}
    return {
        **fields,
        **ids,
        "sequence": sequence,
        "digest": call.digest(),
        "policy_spans": spans_text(call.policy_spans),
        "hints": hashing.canonical_json(call.hints).decode(),
    }


def _heavy(sequence: int, call: CallCompleted) -> tuple[Any, ...]:
    packed = codec.pack(call.token_ids)
    return sequence, packed.codec, packed.data, call.logprobs
