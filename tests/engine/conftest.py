"""The one real model server of a test session."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from store import migrate
from store.database import open_database
from turnlog.demo.model import build_model
from turnlog.demo.server import ENVIRONMENT, FLAGS


class ModelServer:
    """`turnlog serve` in a process group of its own, with its log in a SQLite file; can be killed and started again."""

    worker = "test-server"

    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        self.url = f"sqlite:///{folder}/turnlog.db"
        self.model = build_model(folder / "model")
        self.database = open_database(self.url)
        migrate.upgrade(self.database)
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it is ready."""
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}"
        arguments = ["serve", str(self.model), "--db", self.url, "--worker", self.worker]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "turnlog", *arguments, "--host", "127.0.0.1", "--port", str(port), *FLAGS],
                env={**os.environ, **ENVIRONMENT},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for _ in range(600):
            if self._process.poll() is not None:
                break
            try:
                with urlopen(f"{self.address}/health", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-5000:]}")

    def kill(self) -> None:
        """kill -9 to the server and all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """The session's model server, started on first use."""
    running = ModelServer(tmp_path_factory.mktemp("server"))
    running.start()
    yield running
    running.kill()
    running.database.dispose()
