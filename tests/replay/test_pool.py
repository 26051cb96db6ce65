"""Processes side by side: what they make is what one would, in its order, and none is left behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sqlalchemy import Engine, text

from replay.archive import open_archive
from replay.errors import UnknownRollout, WorkerLost
from replay.pool import AHEAD, Pool
from replay.reader import open_reader, open_reader_apart
from replay.rowset import RowSet, build, outlined, stream
from replay.sealing import seal
from replay.selection import Selection
from replay.source import reached, tokens_a_call
from store.database import session
from store.errors import LogUnavailable
from store.events import Event, RolloutOpened
from tests.replay import pool_jobs

Remember = Callable[[Engine, Iterable[Event]], None]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as processes:
        yield processes


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_each_job_gives_its_results_in_their_order(pool: Pool) -> None:
    first, second = pool.run(pool_jobs.arrays, [(0, 5), (100, 7)])
    later, sooner = [*second], [*first]
    assert [each["number"] for each in sooner] == [*range(5)]
    assert [each["number"] for each in later] == [*range(100, 107)]
    assert {each["pid"] for each in sooner}.isdisjoint(each["pid"] for each in later), "one process each"
    for each in (*sooner, *later):
        np.testing.assert_array_equal(each["array"], np.full(250_000, each["number"], np.int32))
        assert not each["array"].flags.writeable
        assert each["none"].shape == (0,)


def test_what_it_gave_is_kept_as_long_as_it_is_used_and_no_longer(pool: Pool) -> None:
    gc.collect()
    (results,) = pool.run(pool_jobs.arrays, [(0, 20)])
    open_files = len(os.listdir("/proc/self/fd"))
    kept = [each["array"][1000:1010] for each in results]
    assert [view.tolist() for view in kept] == [[number] * 10 for number in range(20)]
    assert Path("/proc/self/maps").read_text().count("memfd:turnlog") == 20
    assert len(os.listdir("/proc/self/fd")) <= open_files, "a file for each would soon be too many"
    del kept
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("memfd:turnlog") == 0


def test_it_makes_only_a_few_results_ahead(pool: Pool, tmp_path: Path) -> None:
    notes = tmp_path / "made"
    (results,) = pool.run(pool_jobs.counts_what_it_makes, [(str(notes),)])
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    for _ in range(200):
        if len(notes.read_text()) >= 3 + AHEAD:
            break
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(notes.read_text()) <= 3 + AHEAD + 1, "those taken, those ahead, and the one that waits to be given"
    results.close()


def test_an_error_is_raised_as_it_was(pool: Pool) -> None:
    good, bad = pool.run(pool_jobs.fails, [(3,), (1,)])
    assert next(bad) == 0
    with pytest.raises(LogUnavailable, match="it is away") as raised:
        next(bad)
    assert any("pool_jobs.py" in note for note in raised.value.__notes__), "where it was raised"
    assert [next(good) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LogUnavailable):
        next(good)
    (again,) = pool.run(pool_jobs.arrays, [(7, 1)])
    assert [each["number"] for each in again] == [7]


def test_an_error_that_cannot_be_handed_over_keeps_its_words(pool: Pool) -> None:
    (results,) = pool.run(pool_jobs.fails_untold, [()])
    assert next(results) == 1
    with pytest.raises(RuntimeError, match="with a function in it"):
        next(results)


def test_a_process_that_ends_is_named_and_replaced(pool: Pool) -> None:
    (results,) = pool.run(pool_jobs.dies, [()])
    assert next(results) == 1
    with pytest.raises(WorkerLost, match=r"code -9.*use fewer processes"):
        next(results)
    one, other = pool.run(pool_jobs.arrays, [(1, 2), (3, 2)])
    assert [each["number"] for each in (*one, *other)] == [1, 2, 3, 4]


def test_results_that_are_left_hold_up_nothing(pool: Pool) -> None:
    left = pool.run(pool_jobs.arrays, [(0, 50), (0, 50)])
    next(left[0])
    one, _ = pool.run(pool_jobs.arrays, [(1, 1), (2, 1)])
    assert [each["number"] for each in one] == [1]
    with pytest.raises(ValueError, match="3 jobs for 2 processes"):
        pool.run(pool_jobs.arrays, [(0, 1)] * 3)
    with pytest.raises(ValueError, match="give 1 or more"):
        Pool(0)


def test_no_process_outlives_its_pool() -> None:
    with Pool(2) as pool:
        results = pool.run(pool_jobs.arrays, [(0, 50), (0, 50)])
        pids = [next(each)["pid"] for each in results]
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


@pytest.fixture
def history(groups_of_rollouts: Any, make_chain_maker: Any, grow: Any) -> list[Event]:
    """Scored groups, forests with shared calls, a rollout without calls and one whose chain does not hold."""
    events: list[Event] = [*groups_of_rollouts(make_chain_maker(1), ["g0", "g1", "g2"])]
    for number, parents in enumerate([[None, 0, 0, 1, 1, 2], [None, None, 0, 1, 3, 2]]):
        events += grow(make_chain_maker(10 + number), parents, rollout_id=f"forest-{number}")
    return [*events, *make_chain_maker(20)(rollout_id="broken"), RolloutOpened(rollout_id="idle", opened_at=5)]


def damage(database: Engine) -> None:
    """One token array of the rollout `broken` is another one."""
    with session(database) as connection:
        if database.dialect.name == "sqlite":
            for trigger in connection.scalars(text("select name from sqlite_master where type = 'trigger'")).all():
                connection.execute(text(f'drop trigger "{trigger}"'))
        else:
            connection.execute(text("alter table model_call disable trigger user"))
        connection.execute(text("update model_call set chain_hash = digest where rollout_id = 'broken' and depth = 1"))
        connection.commit()


def same(one: RowSet, other: RowSet) -> None:
    assert one.digest() == other.digest()
    assert (one.refusals, one.left_out, one.scores, one.rollouts, one.position) == (
        other.refusals,
        other.left_out,
        other.scores,
        other.rollouts,
        other.position,
    )


@pytest.mark.parametrize("rule", ["completed", "declared", "output"])
def test_several_processes_give_the_rows_of_one(
    rule: str, database: Engine, history: list[Event], remember: Remember, pool: Pool
) -> None:
    remember(database, history)
    damage(database)
    selection = Selection(rule=rule)
    same(build(database, selection, pool=pool), build(database, selection))
    assert outlined(database, selection, pool=pool).table.equals(outlined(database, selection).table)
    some = ["forest-1", "g1.0"]
    same(build(database, selection, rollouts=some, pool=pool), build(database, selection, rollouts=some))


def test_small_parts_and_an_old_position_change_nothing(
    database: Engine, history: list[Event], remember: Remember, pool: Pool
) -> None:
    remember(database, history[: len(history) // 2])
    before = build(database)
    remember(database, history)
    parts = [*stream(database, position=before.position, tokens=30, pool=pool)]
    assert [row.row_id for part in parts for row in part.rows] == [row.row_id for row in before.rows]
    assert sum(part.counts is not None for part in parts) > 2, "cut into parts"
    seen: list[tuple[int, int]] = []
    same(build(database, pool=pool, progress=lambda done, total: seen.append((done, total))), build(database))
    assert seen[-1][0] == seen[-1][1]
    with pytest.raises(UnknownRollout, match="'nobody'"):
        build(database, rollouts=["nobody"], pool=pool)


def test_an_empty_log_gives_no_rows(database: Engine, pool: Pool) -> None:
    found = build(database, pool=pool)
    assert (found.rows, found.rollouts, str(found.position)) == ((), 0, "0.0.0.0")
    assert outlined(database, pool=pool).table.num_rows == 0


def test_an_archive_is_read_by_all(
    database: Engine, history: list[Event], remember: Remember, pool: Pool, tmp_path: Path
) -> None:
    url = str(tmp_path / "archive")
    remember(database, history)
    before = build(database)
    seal(database, open_archive(url, new=True), before=2**62, name="test")
    found = build(database, archive=url, pool=pool)
    same(found, build(database, archive=url))
    assert found.digest() == before.digest()


@pytest.mark.postgres
def test_all_processes_read_one_snapshot(
    postgres_database: Engine, history: list[Event], remember: Remember, make_chain_maker: Any
) -> None:
    remember(postgres_database, history)
    url = postgres_database.url.render_as_string(hide_password=False)
    with open_reader(postgres_database) as reader:
        position, snapshot = reached(reader), reader.snapshot
        remember(postgres_database, make_chain_maker(99)(rollout_id="late"))
        with open_reader(postgres_database) as newer:
            assert reached(newer).calls > position.calls, "it has settled since"
        with open_reader_apart(url, "", snapshot) as other:
            assert tokens_a_call(other) == tokens_a_call(reader)
            lengths = pa.schema({"tokens": pa.int64()})
            assert other.table("newest_lengths", lengths).equals(reader.table("newest_lengths", lengths))


@pytest.mark.postgres
def test_a_connection_that_the_server_has_ended_is_made_anew(
    postgres_database: Engine, history: list[Event], remember: Remember, pool: Pool
) -> None:
    remember(postgres_database, history)
    others = "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    expected = build(postgres_database)
    same(build(postgres_database, pool=pool), expected)
    with session(postgres_database) as connection:
        kept = set(connection.scalars(text(f"select pid {others} and state = 'idle'")))
    same(build(postgres_database, pool=pool), expected)
    with session(postgres_database) as connection:
        again = set(connection.scalars(text(f"select pid {others} and state = 'idle'")))
        assert len(kept & again) == pool.processes, "each process went on with its connection, outside a transaction"
        connection.execute(text(f"select pg_terminate_backend(pid) {others}"))
    same(build(postgres_database, pool=pool), expected)


def test_an_error_of_the_database_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(LogUnavailable, match="failed to open"),
        open_reader_apart(f"sqlite:///{tmp_path}/missing.db", "", None),
    ):
        pytest.fail("there is no such log")
