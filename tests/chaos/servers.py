"""Servers of the chaos run: light ones, forked from one program, and real ones, each with its worker's name.

Knows how to start a server, to find its engine and to end it; does not know agents or databases. Law: a server that
`start` returns from answers.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from turnlog.demo.server import RunningServer, start_server

ROOT = Path(__file__).parents[2]
READY_SECONDS = 60


class LightServers:
    """Forks light servers; one program for the whole run."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._log = (folder / "light_server.log").open("ab")
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.light_server", str(model)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._read()

    def bear(self, port: int, output: Path, environment: dict[str, str]) -> int:
        """A new server's process id."""
        assert self._program.stdin is not None
        asked = {"port": port, "log": str(output), "environment": environment}
        self._program.stdin.write(json.dumps(asked) + "\n")
        self._program.stdin.flush()
        return int(self._read()["pid"])

    def stop(self) -> None:
        self._program.kill()
        self._program.wait()
        for pipe in (self._program.stdin, self._program.stdout, self._log):
            assert pipe is not None
            pipe.close()

    def _read(self) -> dict[str, Any]:
        """The program's next answer; other libraries print there too."""
        assert self._program.stdout is not None
        for line in self._program.stdout:
            if line.startswith('{"'):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("the light servers' program has ended: see light_server.log")


class Light:
    """One light server under its worker's name, killed and born again at the same port."""

    def __init__(self, servers: LightServers, worker: str, folder: Path, environment: dict[str, str]) -> None:
        self._servers = servers
        self._environment = environment | {"TURNLOG_WORKER": worker}
        self._output = folder / f"{worker}.log"
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self.pid = 0

    def start(self) -> None:
        """Until it is ready."""
        self.pid = self._servers.bear(self._port, self._output, self._environment)
        give_up = time.monotonic() + READY_SECONDS
        while time.monotonic() < give_up:
            if not alive(self.pid):
                raise SystemExit(f"a server ended before it was ready: see {self._output}")
            with suppress(OSError), urlopen(f"{self.address}/health", timeout=5):
                return
            time.sleep(0.02)
        raise SystemExit(f"a server was not ready within {READY_SECONDS} seconds: see {self._output}")

    def engine(self) -> int:
        (core,) = psutil.Process(self.pid).children()
        return core.pid

    def end(self, how: signal.Signals, seconds: float = 10) -> bool:
        """Whether it has ended in time."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, how)
        return gone(self.pid, seconds)


class Real:
    """One real server under its worker's name; each start takes a new port."""

    def __init__(self, model: Path, worker: str, folder: Path, url: str, environment: dict[str, str]) -> None:
        self._model, self._worker, self._url, self._environment = model, worker, url, environment
        self._output = folder / f"{worker}.log"
        self._running: RunningServer | None = None

    @property
    def address(self) -> str:
        assert self._running is not None
        return self._running.address

    def start(self) -> None:
        self._running = start_server(
            self._model, url=self._url, log=self._output, worker=self._worker,
            flags=("--require-open", "--reasoning", "restore", "--uvicorn-log-level", "warning"),
            environment=self._environment,
        )  # fmt: skip

    def engine(self) -> int:
        assert self._running is not None
        children = psutil.Process(self._running.process.pid).children(recursive=True)
        return next(each.pid for each in children if "EngineCore" in each.name() + "".join(each.cmdline()))

    def end(self, how: signal.Signals, seconds: float = 20) -> bool:
        assert self._running is not None
        if how is signal.SIGKILL:
            self._running.kill()
            return True
        with suppress(ProcessLookupError):
            self._running.process.send_signal(how)
        try:
            self._running.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        self._running.kill()
        return True


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be noticed does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pid: int, seconds: float) -> bool:
    """Whether the process ends within that time."""
    give_up = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def free_port() -> int:
    """A port that nobody listens at, and that no client gets by chance while the server is away."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 15_000)))
            return int(probe.getsockname()[1])
