"""Group commit: few transactions, every future answered, nothing acknowledged lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text

from store import lineage, log
from store.database import read, write
from store.errors import BrokenLink, EventConflict, LogUnavailable
from store.events import CallEnded, RolloutOpened, uuid7
from store.patience import Patience
from store.writer import Writer


def opening(number: int, **change: object) -> RolloutOpened:
    return RolloutOpened.model_validate({"rollout_id": f"r{number}", "opened_at": number, "task": "t"} | change)


def opened(database: Engine) -> list[str]:
    with read(database) as connection:
        return [rollout.rollout_id for rollout in log.rollouts(connection)]


@contextmanager
def commits(database: Engine):
    """The commits of this engine, as they happen."""
    seen: list[None] = []

    def note(_: object) -> None:
        seen.append(None)

    event.listen(database, "commit", note)
    yield seen
    event.remove(database, "commit", note)


@contextmanager
def held_up(database: Engine):
    """Keep every write to the log waiting."""
    with write(database) as connection:
        if database.dialect.name == "postgresql":
            connection.execute(text("lock table rollout, model_call in share mode"))
        yield


def test_a_future_has_a_result_only_when_the_events_can_be_read(database, chain_maker):
    chain = chain_maker()
    with Writer(database) as writer:
        durable = writer.submit(chain)
        assert durable.result(10) is None
        with read(database) as connection:
            assert log.calls(connection, "r1") == chain


def test_what_waits_while_a_commit_is_under_way_shares_the_next_one(database):
    with Writer(database) as writer:
        with commits(database) as seen, held_up(database):
            first = writer.submit([opening(0)])
            rest = [writer.submit([opening(number)]) for number in range(1, 200)]
            assert not wait([first, *rest], timeout=0.2).done
        assert not wait([first, *rest], timeout=20).not_done
    assert len(seen) <= 1 + 3  # held_up's own, and two or three groups
    assert opened(database) == [f"r{number}" for number in range(200)]


def test_many_threads_lose_nothing(database, make_chain_maker):
    chains = [make_chain_maker(seed)([(9, 3)] * 10, rollout_id=f"r{seed}") for seed in range(8)]
    with Writer(database, capacity=4) as writer:

        def submit(chain) -> None:
            for call in chain:
                writer.submit([call]).result(30)

        threads = [threading.Thread(target=submit, args=(chain,)) for chain in chains]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with read(database) as connection:
        for seed, chain in enumerate(chains):
            assert log.calls(connection, f"r{seed}") == chain


def test_only_the_guilty_submission_fails(database, chain_maker):
    root, child = chain_maker([(9, 3), (5, 2)])
    (orphan,) = chain_maker([(5, 2)], rollout_id="r2", parent=chain_maker([(9, 3)], rollout_id="r2")[0])
    with Writer(database) as writer:
        with held_up(database):
            good = [writer.submit([opening(1)]), writer.submit([root])]
            conflict = writer.submit([opening(7), opening(1, task="other"), opening(8)])
            broken = writer.submit([opening(9), orphan])
            good += [writer.submit([child]), writer.submit([opening(2)])]
        assert [future.result(20) for future in good] == [None] * 4
        assert isinstance(conflict.exception(20), EventConflict)
        assert isinstance(broken.exception(20), BrokenLink)
        assert writer.submit([opening(3)]).result(20) is None
    assert opened(database) == ["r1", "r2", "r3"]
    with read(database) as connection:
        assert log.calls(connection, "r1") == [root, child]
        assert log.calls(connection, "r2") == []


def test_a_call_that_was_not_committed_is_no_known_parent(database, chain_maker):
    root, child, grandchild = chain_maker([(9, 3), (5, 2), (5, 2)])
    with Writer(database) as writer:
        failed = writer.submit([root, child.model_copy(update={"depth": 7})])
        assert isinstance(failed.exception(20), BrokenLink)
        assert isinstance(writer.submit([child]).exception(20), BrokenLink)
        assert [writer.submit([call]).result(20) for call in (root, child, grandchild)] == [None] * 3
    with read(database) as connection:
        assert log.calls(connection, "r1") == [root, child, grandchild]


def test_a_full_queue_blocks_whoever_submits(sqlite_database):
    with Writer(sqlite_database, capacity=2) as writer:
        submitted: list[int] = []

        def submit() -> None:
            for number in range(10):
                writer.submit([opening(number)])
                submitted.append(number)

        thread = threading.Thread(target=submit)
        with held_up(sqlite_database):
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
            assert len(submitted) <= 4  # one group under way, two waiting, and no more
        thread.join(20)
    assert opened(sqlite_database) == [f"r{number}" for number in range(10)]


def test_a_queue_is_bounded_in_bytes_too_and_counts_who_waits(sqlite_database, chain_maker):
    calls = [chain_maker([(1000, 500)], rollout_id=f"r{number}") for number in range(8)]  # 9 kB each
    with Writer(sqlite_database, capacity_bytes=20_000) as writer:
        submitted: list[int] = []

        def submit() -> None:
            for call in calls:
                writer.submit(call)
                submitted.append(1)

        thread = threading.Thread(target=submit)
        with held_up(sqlite_database):
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
            assert len(submitted) <= 4  # one or two under way, two that fit
            assert writer.submit_now(calls[0]) is None
            assert 1 <= writer.queue_depth <= 2
        thread.join(20)
    assert writer.counters.waits >= 1
    assert writer.counters.waited_seconds > 0.2
    assert (writer.counters.events, writer.counters.failed, writer.queue_depth) == (8, 0, 0)
    assert writer.counters.bytes == sum(4 * 1500 + 4 * 500 + 1024 for _ in calls)
    with read(sqlite_database) as connection:
        assert [log.calls(connection, f"r{number}") for number in range(8)] == calls


def test_a_submission_larger_than_the_queue_goes_through_alone(sqlite_database, chain_maker):
    chain = chain_maker([(1000, 500)] * 3)
    with Writer(sqlite_database, capacity_bytes=1000) as writer:
        for call in chain:
            assert writer.submit([call]).result(20) is None
    with read(sqlite_database) as connection:
        assert log.calls(connection, "r1") == chain


def test_a_burst_makes_no_giant_transaction(database, monkeypatch):
    monkeypatch.setattr("store.writer._GROUP_EVENTS", 10)
    with Writer(database) as writer:
        with held_up(database):
            futures = [writer.submit([opening(3 * each + n) for n in range(3)]) for each in range(20)]
            large = writer.submit([opening(number) for number in range(100, 120)])  # whole or absent, so in one
        assert not wait([*futures, large], timeout=20).not_done
    assert 8 <= writer.counters.commits <= 10  # three submissions a transaction, the first and the large one alone
    assert len(opened(database)) == 80


def test_an_array_of_a_million_tokens_goes_through(database, chain_maker):
    root, child = chain_maker([(1_000_000, 1000), (200_000, 100_000)])
    with Writer(database) as writer:
        futures = [writer.submit([root]), writer.submit([child])]
        assert [future.result(60) for future in futures] == [None, None]
    with read(database) as connection:
        assert log.calls(connection, "r1") == [root, child]
        assert len(lineage.chain_tokens(connection, child.call_id)) == 1_301_000


def test_close_commits_what_waits_and_refuses_the_rest(sqlite_database):
    writer = Writer(sqlite_database)
    with held_up(sqlite_database):
        futures = [writer.submit([opening(number)]) for number in range(50)]
        closing = threading.Thread(target=writer.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join(20)
    assert [future.result(0) for future in futures] == [None] * 50
    with pytest.raises(LogUnavailable, match="the writer is closed"):
        writer.submit([opening(51)])
    assert len(opened(sqlite_database)) == 50
    writer.close()


def test_a_caller_that_is_cancelled_does_not_take_its_events_with_it(sqlite_database):
    async def give_up(writer: Writer) -> None:
        task = asyncio.ensure_future(asyncio.wrap_future(writer.submit([opening(1)])))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Writer(sqlite_database) as writer:
        with held_up(sqlite_database):
            asyncio.run(give_up(writer))
        asyncio.run(asyncio.wait_for(submit_and_wait(writer), 20))
    assert opened(sqlite_database) == ["r1", "r2"]


async def submit_and_wait(writer: Writer) -> None:
    await asyncio.wrap_future(writer.submit([opening(2)]))


@contextmanager
def other_database(url: str):
    """A connection to another database of the same server, from where this one can be closed."""
    server = create_engine(make_url(url).set(database="postgres"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        yield connection
    server.dispose()


@pytest.mark.postgres
def test_a_database_that_goes_away_fails_every_future_and_is_used_again_when_it_is_back(
    postgres_database, postgres_url
):
    away = "alter database {} with allow_connections {}"
    name = make_url(postgres_url).database
    with Writer(postgres_database, patience=Patience(0.3)) as writer:
        writer.submit([opening(0)]).result(20)
        with other_database(postgres_url) as server:
            server.execute(text(away.format(name, "false")))
            server.execute(text(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"))
            futures = [writer.submit([opening(number)]) for number in range(1, 20)]
            assert {type(future.exception(30)) for future in futures} == {LogUnavailable}
            server.execute(text(away.format(name, "true")))
        assert writer.counters.failed == 19
        time.sleep(1)  # once a second it is tried again
        writer.submit([opening(20)]).result(20)
    assert opened(postgres_database) == ["r0", "r20"]


@pytest.mark.postgres
def test_two_servers_that_open_the_same_rollouts_in_another_order_both_succeed(postgres_database, postgres_url):
    def implicit(number: int) -> RolloutOpened:
        return RolloutOpened(rollout_id=f"r{number}", opened_at=number)

    with Writer(postgres_database) as writer, write(postgres_database) as other:
        other.exec_driver_sql("set local deadlock_timeout = '20s'")  # so that it is the writer that is ended
        log.append(other, [implicit(2)])
        futures = [writer.submit([implicit(1), implicit(2)])]
        wait_for_a_lock(postgres_url)  # the writer holds 1 and waits for 2
        futures.append(writer.submit([implicit(3)]))
        log.append(other, [implicit(1)])  # a deadlock: PostgreSQL ends the one that has waited longer
    assert [future.result(20) for future in futures] == [None, None]
    assert writer.counters.retries == 1
    assert sorted(opened(postgres_database)) == ["r1", "r2", "r3"]


def wait_for_a_lock(url: str) -> None:
    """Wait until a connection to this database waits for a lock that another one holds."""
    waiting = text("select count(*) from pg_stat_activity where datname = :name and wait_event_type = 'Lock'")
    with other_database(url) as server:
        give_up = time.monotonic() + 20
        while not server.scalar(waiting, {"name": make_url(url).database}):
            assert time.monotonic() < give_up, "nobody waits for a lock"
            time.sleep(0.01)


KILLED = """
import sys
from uuid import UUID
from store.database import open_database
from store.events import CallAdmitted, CallCompleted, RolloutOpened, token_bytes, logprob_bytes, PolicySpan
from store.hashing import chain_hash
from store.writer import Writer

url, run = sys.argv[1], int(sys.argv[2])
example = CallCompleted.example()
tokens = token_bytes(range(300))
writer = Writer(open_database(url), capacity=64)

def acknowledge(call_id):
    def say(future):
        future.result()
        sys.stdout.write(f"{call_id}\\n")
        sys.stdout.flush()
    return say

for number in range(1, 1_000_000):
    call_id = UUID(int=run << 64 | number)
    rollout_id = f"r{run}.{number // 10}"
    call = example.model_copy(update={
        "call_id": call_id, "root_id": call_id, "rollout_id": rollout_id,
        "writer_id": UUID(int=run), "writer_seq": number,
        "prompt_len": 200, "sampled_len": 100, "token_ids": tokens, "chain_hash": chain_hash(None, tokens),
        "logprobs": logprob_bytes([-0.5] * 100), "policy_spans": (PolicySpan(start=0, end=100, policy_version=1),),
    })
    intent = CallAdmitted(call_id=call_id, rollout_id=rollout_id, decision="root", reason="first_call", parent_id=None,
                          worker="w", at=number)
    opening = RolloutOpened(rollout_id=rollout_id, opened_at=number)
    writer.submit([opening, intent, call]).add_done_callback(acknowledge(call_id))
"""


def test_kill_9_in_mid_load_loses_nothing_acknowledged_and_leaves_no_half_event(database):
    url = database.url.render_as_string(hide_password=False)
    acknowledged: set[UUID] = set()
    for run in range(1, 4):
        process = subprocess.Popen([sys.executable, "-c", KILLED, url, str(run)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(150 * run):
            acknowledged.add(UUID(process.stdout.readline().strip()))
        os.kill(process.pid, signal.SIGKILL)
        whole_lines = [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        acknowledged |= {UUID(line.strip()) for line in whole_lines}
        process.stdout.close()
        process.wait()
    assert len(acknowledged) >= 900
    with read(database) as connection:
        calls = [call for rollout in log.rollouts(connection) for call in log.calls(connection, rollout.rollout_id)]
        digests = set(connection.execute(text("select digest from model_call")).scalars())
        intents = connection.execute(text("select count(*) from call_intent")).scalar()
        assert log.pending(connection) == []
        if database.dialect.name == "sqlite":
            assert connection.execute(text("pragma integrity_check")).scalars().all() == ["ok"]
    assert acknowledged <= {call.call_id for call in calls}
    assert {call.digest() for call in calls} == digests
    assert len(calls) == len(digests) == intents
    with Writer(database) as writer:
        end = CallEnded(call_id=uuid7(1, bytes(10)), rollout_id="r1.0", state="failed", reason="x", at=1)
        assert writer.submit([end]).result(20) is None
