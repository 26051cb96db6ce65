"""A commit fails for what the database is: it is tried again as it was, and its events are in the log once."""

from __future__ import annotations

import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import Engine, event, make_url, text

from store import log, migrate
from store.database import open_database, read, write
from store.errors import LogUnavailable
from store.events import RolloutOpened
from store.patience import Patience
from store.writer import Writer


def opening(number: int, **change: Any) -> RolloutOpened:
    return RolloutOpened.model_validate({"rollout_id": f"r{number}", "opened_at": number, "task": "t"} | change)


def implicit(number: int) -> RolloutOpened:
    return RolloutOpened(rollout_id=f"r{number}", opened_at=number)


def opened(database: Engine) -> list[str]:
    with read(database) as connection:
        return [rollout.rollout_id for rollout in log.rollouts(connection)]


def waits_for_a_lock(administer: Any, database: Engine) -> bool:
    asked = "select count(*) from pg_stat_activity where datname = :name and wait_event_type = 'Lock'"
    return bool(administer.scalar(text(asked), {"name": database.url.database}))


@pytest.mark.postgres
def test_a_connection_dropped_in_mid_insert(
    postgres_database: Engine, administer: Any, outage: Any, chain_maker: Any, until: Any
) -> None:
    chain = chain_maker()
    with Writer(postgres_database) as writer:
        with write(postgres_database) as other:
            other.execute(text("lock table model_call in share mode"))
            durable = writer.submit([opening(1), *chain])
            until(lambda: waits_for_a_lock(administer, postgres_database))  # the opening is inserted, the calls wait
            ended = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where wait_event_type = 'Lock'"
            assert administer.execute(text(ended)).scalars().all() == [True]
        assert durable.result(20) is None
    assert writer.counters.retries >= 1
    with read(postgres_database) as connection:
        assert log.calls(connection, "r1") == chain


@pytest.mark.postgres
def test_a_serialisation_failure(postgres_database: Engine, administer: Any, until: Any) -> None:
    """A server whose default is serializable: an insert meets a row that its snapshot does not have."""
    name = postgres_database.url.database
    administer.execute(text(f"alter database {name} set default_transaction_isolation = serializable"))
    postgres_database.dispose()
    with Writer(postgres_database) as writer:
        with write(postgres_database) as other:
            log.append(other, [implicit(1)])
            durable = writer.submit([implicit(1), opening(2)])
            until(lambda: waits_for_a_lock(administer, postgres_database))
        assert durable.result(20) is None
    assert writer.counters.retries == 1
    assert sorted(opened(postgres_database)) == ["r1", "r2"]


@pytest.mark.postgres
def test_a_server_that_loses_its_power_and_comes_back(own_postgres: Any, make_chain_maker: Any) -> None:
    database = open_database(own_postgres.url)
    chains = [make_chain_maker(seed)([(9, 3)] * 20, rollout_id=f"r{seed}") for seed in range(4)]
    acknowledged: list[int] = []
    with Writer(database, patience=Patience(30)) as writer:

        def submit(chain: Any) -> None:
            for call in chain:
                writer.submit([call]).result(60)
                acknowledged.append(1)
                time.sleep(0.005)

        threads = [threading.Thread(target=submit, args=(chain,)) for chain in chains]
        for thread in threads:
            thread.start()
        while len(acknowledged) < 10:
            time.sleep(0.001)
        own_postgres.kill()
        assert len(acknowledged) < 80
        own_postgres.start()
        for thread in threads:
            thread.join()
    assert writer.counters.retries >= 1
    with read(database) as connection:
        for seed, chain in enumerate(chains):
            assert log.calls(connection, f"r{seed}") == chain
    database.dispose()


_COMMITTED = b"Z\0\0\0\5I"
"""How the server's last answer ends when no transaction is open."""


class Proxy:
    """A way to the server that can be cut just when the answer to a commit has come, and goes no further."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        self._host = str(parsed.query.get("host") or parsed.host or "localhost")
        self._port = int(parsed.port or parsed.query.get("port") or 5432)  # type: ignore[arg-type]
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = parsed.set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False)
        self.swallow = False
        self.swallowed = 0
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for each in self._sockets:
            _hang_up(each)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _start(self, work: Callable[..., None], *ends: socket.socket) -> None:
        self._sockets += ends
        self._threads.append(threading.Thread(target=work, args=ends, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._carry, client, self._connect())

    def _connect(self) -> socket.socket:
        if self._host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{self._host}/.s.PGSQL.{self._port}")
            return server
        return socket.create_connection((self._host, self._port))

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        committing = threading.Event()

        def towards_server() -> None:
            while data := _received(client):
                if self.swallow:
                    committing.set()
                with suppress(OSError):  # the client may say goodbye to a server that is gone
                    server.sendall(data)
            _hang_up(server)

        self._start(towards_server)
        while data := _received(server):
            if committing.is_set() and data.endswith(_COMMITTED):  # done, and the client will not hear of it
                self.swallow = False
                self.swallowed += 1
                break
            client.sendall(data)
        _hang_up(client)
        _hang_up(server)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):  # the other side may have been first
        end.shutdown(socket.SHUT_RDWR)


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


@pytest.mark.postgres
def test_an_acknowledgement_that_is_lost_finds_its_events_and_writes_nothing_twice(
    postgres_url: str, postgres_database: Engine, chain_maker: Any
) -> None:
    proxy = Proxy(postgres_url)
    database = open_database(proxy.url)
    root, child = chain_maker([(9, 3), (5, 2)])
    with Writer(database) as writer:
        assert writer.submit([opening(0)]).result(20) is None
        proxy.swallow = True
        assert writer.submit([opening(1), root]).result(20) is None
        assert writer.submit([child]).result(20) is None
    assert (proxy.swallowed, writer.counters.retries) == (1, 1)
    with read(postgres_database) as connection:
        assert log.calls(connection, "r1") == [root, child]
        assert connection.scalar(text("select count(*) from rollout")) == 2
    database.dispose()
    proxy.close()


@contextmanager
def no_room(database: Engine) -> Iterator[Callable[[], None]]:
    """A SQLite file that may not grow any more; what is returned makes room again."""
    limit = [True]

    def bound(connection: Any, record: Any, proxy: Any) -> None:
        (pages,) = connection.execute("pragma page_count").fetchone()
        connection.execute(f"pragma max_page_count = {pages if limit[0] else 1_000_000}")

    def make_room() -> None:
        limit[0] = False

    event.listen(database, "checkout", bound)
    yield make_room
    event.remove(database, "checkout", bound)


def test_a_disk_that_is_full_refuses_whole_submissions_and_takes_the_rest_when_there_is_room(
    sqlite_database: Engine, chain_maker: Any
) -> None:
    chain = chain_maker([(100_000, 50_000), (5, 2)])
    with Writer(sqlite_database, patience=Patience(0.3)) as writer, no_room(sqlite_database) as make_room:
        with pytest.raises(LogUnavailable, match="full"):
            writer.submit(chain).result(20)
        make_room()
        time.sleep(1)
        assert writer.submit(chain).result(20) is None
    with read(sqlite_database) as connection:
        assert log.calls(connection, "r1") == chain
        assert connection.execute(text("pragma integrity_check")).scalars().all() == ["ok"]


def test_a_file_that_may_not_grow_is_a_full_disk(sqlite_database: Engine, chain_maker: Any) -> None:
    """As `ulimit -f`, a quota or a full file system: the write itself fails, half way."""
    chain = chain_maker([(100_000, 50_000), (5, 2)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Writer(sqlite_database, patience=Patience(0.3)) as writer:
        assert writer.submit([opening(0)]).result(20) is None
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
        try:
            with pytest.raises(LogUnavailable):
                writer.submit(chain).result(20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert opened(sqlite_database) == ["r0"]
        time.sleep(1)
        assert writer.submit(chain).result(20) is None
    with read(sqlite_database) as connection:
        assert log.calls(connection, "r1") == chain
        assert connection.execute(text("pragma integrity_check")).scalars().all() == ["ok"]


@pytest.mark.parametrize("on_log_failure", ["refuse", "spool"])
def test_a_lock_that_a_backup_holds(
    sqlite_url: str, serve: Any, said_by: Any, until: Any, monkeypatch: pytest.MonkeyPatch, lock_held: Any,
    on_log_failure: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("store.database.BUSY_SECONDS", 0.1)
    database = open_database(sqlite_url)
    migrate.upgrade(database)
    question = [{"role": "user", "content": "Hi"}]
    server = serve(database, on_log_failure, patience=0.5)
    with lock_held(database, for_seconds=0.3):  # shorter than the patience: nobody notices
        assert said_by(server.ask(question)) == "answer 1"
    with lock_held(database, for_seconds=1.5):
        answer = server.ask(question, rollout="r2")
    if on_log_failure == "refuse":
        assert (answer.status_code, server.engine.generations) == (503, 1)
        assert "locked" in answer.text
    else:
        assert said_by(answer) == "answer 2"
        until(lambda: not server.journal.writer.spooling)
    with read(database) as connection:
        assert len(log.calls(connection, "r")) == 1
        assert len(log.calls(connection, "r2")) == (1 if on_log_failure == "spool" else 0)
        assert log.pending(connection) == []
    server.close()
    database.dispose()


@pytest.mark.parametrize("on_log_failure", ["refuse", "spool"])
def test_a_file_that_is_read_only(serve: Any, said_by: Any, until: Any, read_only: Any, on_log_failure: str) -> None:
    question = [{"role": "user", "content": "Hi"}]
    server = serve(read_only.database, on_log_failure)
    first = said_by(server.ask(question))
    with read_only():
        answer = server.ask([*question, {"role": "assistant", "content": first}, *question])
        if on_log_failure == "refuse":
            assert (answer.status_code, server.engine.generations) == (503, 1)
            assert "readonly" in answer.text
        else:
            assert said_by(answer) == "answer 2"
    if on_log_failure == "spool":
        until(lambda: not server.journal.writer.spooling)
    with read(read_only.database) as connection:
        calls = log.calls(connection, "r")
        assert log.pending(connection) == []
    assert [call.decision for call in calls] == ["root", "continuation"][: 1 if on_log_failure == "refuse" else 2]


@pytest.mark.postgres
def test_a_table_that_is_gone_is_the_databases_fault_and_mended_without_a_restart(postgres_database: Engine) -> None:
    with write(postgres_database) as connection:
        connection.execute(text("alter table rollout rename to gone"))
    with Writer(postgres_database, patience=Patience(0.2)) as writer:
        with pytest.raises(LogUnavailable, match='relation "rollout" does not exist'):
            writer.submit([opening(1)]).result(20)
        with write(postgres_database) as connection:
            connection.execute(text("alter table gone rename to rollout"))
        time.sleep(1)
        assert writer.submit([opening(1)]).result(20) is None
