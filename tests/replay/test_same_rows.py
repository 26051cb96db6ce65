"""Rows are the same wherever the events lie, however many processes make them of parts of any size, and ever after."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from replay import rowset
from replay.archive import open_archive
from replay.pool import Pool
from replay.row import rows_digest
from replay.rowset import Counts, Part, RowSet, build, outlined, stream
from replay.sealing import seal
from replay.selection import Selection
from store.events import CallAdmitted, CallCompleted, CallEnded, Event, RolloutOpened, RolloutScored, uuid7

Remember = Callable[[Engine, Iterable[Event]], None]


@pytest.fixture(scope="module")
def pools() -> Iterator[list[Pool | None]]:
    """One process, two, and three, of which a small log leaves some without work."""
    with Pool(2) as two, Pool(3) as three:
        yield [None, two, three]


class Days:
    """Events as they may come: of some rollouts at once, with branches, calls of nothing, ends, and late outcomes."""

    def __init__(self, seed: int, maker: Any) -> None:
        self.dice = random.Random(seed)
        self._maker = maker
        self._at = 0
        self._calls: dict[str, list[CallCompleted]] = {f"r{n}": [] for n in range(self.dice.randint(1, 8))}
        self._opened: set[str] = set()

    def day(self) -> list[Event]:
        return [event for _ in range(self.dice.randrange(25)) for event in self._next(self.dice.choice([*self._calls]))]

    def _next(self, name: str) -> Iterator[Event]:
        self._at += 1
        if name not in self._opened:
            self._opened.add(name)
            group_id = self.dice.choice([None, "g1", "g2"])
            yield RolloutOpened(rollout_id=name, group_id=group_id, opened_at=self._at)
        calls, random_id = self._calls[name], uuid7(self._at, self.dice.randbytes(10))
        kind = self.dice.random()
        if kind < 0.7:
            parent = self.dice.choice([None, *calls[-3:]])
            calls.append(self._maker.call(self._few(1), self._few(0), rollout_id=name, parent=parent))
            yield calls[-1]
        elif kind < 0.85:
            kept = self.dice.sample(calls, self.dice.randint(0, len(calls)))
            accepted = self.dice.choice([None, tuple(str(call.call_id) for call in kept)])
            reward, status = float(self.dice.randrange(3)), self.dice.choice(["completed", "failed"])
            yield RolloutScored(
                outcome_id=random_id, rollout_id=name, reward=reward, status=status, accepted=accepted, at=self._at
            )
        else:
            told: dict[str, Any] = {"call_id": random_id, "rollout_id": name, "at": self._at}
            yield CallAdmitted(**told, decision="root", reason="first_call", parent_id=None, worker="w")
            if self.dice.random() < 0.7:
                yield CallEnded(**told, state="failed", reason="stopped")

    def _few(self, least: int) -> int:
        return self.dice.choice([least, 1, 4, 30])


def together(parts: Iterable[Part]) -> tuple[list[str], str, Counts]:
    """Ids of the rows in their order, their digest, and what was counted."""
    found = [*parts]
    rows = [row for part in found for row in part.rows]
    counts = Counts.total([part.counts for part in found if part.counts is not None])
    return [row.row_id for row in rows], rows_digest(rows), counts


@pytest.mark.postgres
@pytest.mark.parametrize("seed", range(10))
def test_where_events_lie_and_who_makes_rows_of_them_changes_nothing(
    seed: int,
    sqlite_database: Engine,
    postgres_database: Engine,
    pools: Sequence[Pool | None],
    remember: Remember,
    make_chain_maker: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    days, archive = Days(seed, make_chain_maker(seed)), str(tmp_path / "archive")
    monkeypatch.setattr(rowset, "_CALLS_AT_ONCE", days.dice.choice([1, 3, 10, 1000]))
    selection = days.dice.choice([Selection(), Selection(rule="declared")])
    evenings: list[RowSet] = []
    for day in range(seed % 4 + 1):
        events = days.day()
        remember(sqlite_database, events)
        remember(postgres_database, events)
        evenings.append(build(sqlite_database, selection))
        if day < seed % 4:  # what comes on the last day is in the log alone
            seal(sqlite_database, open_archive(archive, new=True), before=2**62, name=f"day{day}")
    expected = together(stream(sqlite_database, selection))
    outline = outlined(sqlite_database, selection)
    assert expected[1] == evenings[-1].digest()
    for database, url in (
        (sqlite_database, None),
        (postgres_database, None),
        (sqlite_database, archive if Path(archive).exists() else None),
    ):
        for pool in pools:
            for tokens in (1, 100, 10**6):
                found = stream(database, selection, archive=url, tokens=tokens, pool=pool)
                assert together(found) == expected
            assert outlined(database, selection, archive=url, pool=pool).table.equals(outline.table)
    for evening in evenings:
        for url in (None, archive if Path(archive).exists() else None):
            assert (
                build(sqlite_database, selection, position=evening.position, archive=url).digest() == evening.digest()
            )
