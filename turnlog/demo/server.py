"""The demo's model server: a real one in a process of its own, started, watched and stopped.

Knows how to run `turnlog serve` for the demo's model and when it is ready; does not know rollouts or the log. Law: the
server and its children are gone when the block is left, however it is left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from turnlog.errors import ServerFailed

NAME = "demo"
"""What requests call the model, and the worker's name in the log."""
READY_SECONDS = 300
STOP_SECONDS = 10
"""An idle server stops within one second; one that is still loading does not listen, and is killed."""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder: nothing is looked up
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-probabilities on a CPU wait 20 seconds for a compiler
}
FLAGS = (
    *("--served-model-name", NAME),
    *("--dtype", "float32"),  # so that the trainer's log-probabilities can be compared to four digits
    "--enforce-eager",
    *("--max-model-len", "8192"),
    *("--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(128 * 2**20)),
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
    *("--reasoning-parser", "qwen3"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that has been started, with everything that it started itself."""

    address: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """Stop it in order, and by force what does not."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Give the server and its children no time to tidy up (SIGKILL)."""
        with suppress(ProcessLookupError):  # the usual case after `stop`: nothing is left of its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_server(
    model: Path,
    *,
    url: str,
    log: Path,
    worker: str = NAME,
    on_wait: Callable[[str], None] = lambda _: None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> RunningServer:
    """Start the server on a free port and wait until it is ready; it writes to the database at `url`.

    `on_wait` gets the newest line of the server's log while it loads; `flags` and `environment` come on top of the
    demo's own. Raises ServerFailed with the log's last lines.
    """
    port = _free_port()
    arguments = [sys.executable, "-m", "turnlog", "serve", str(model), "--db", url, "--worker", worker]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*arguments, "--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags],
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches the demo alone, which then stops the server in order
        )
    server = RunningServer(address=f"http://127.0.0.1:{port}", process=process)
    try:
        _wait_until_ready(server, log, on_wait)
    except BaseException:
        server.stop()
        raise
    return server


@contextmanager
def model_server(
    model: Path,
    *,
    url: str,
    log: Path,
    on_wait: Callable[[str], None] = lambda _: None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Generator[str]:
    """Run the server for the block; the value is its address. Arguments and errors are those of `start_server`."""
    server = start_server(model, url=url, log=log, on_wait=on_wait, flags=flags, environment=environment)
    try:
        yield server.address
    except Exception as error:
        if server.process.poll() is None:
            raise
        how = f"ended with code {server.process.returncode} while it was in use"
        raise ServerFailed(how, log, tail(log)) from error
    finally:
        server.stop()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send JSON to the server's rollout API, with the token that the server has, and return its answer."""
    headers = {"content-type": "application/json"}
    if token := os.environ.get("TURNLOG_TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    request = Request(url, data=json.dumps(body).encode(), headers=headers)
    with urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _wait_until_ready(server: RunningServer, log: Path, on_wait: Callable[[str], None]) -> None:
    give_up = time.monotonic() + READY_SECONDS
    while time.monotonic() < give_up:
        if server.process.poll() is not None:
            raise ServerFailed(f"ended with code {server.process.returncode} before it was ready", log, tail(log))
        try:
            with urlopen(f"{server.address}/health", timeout=5):
                return
        except (URLError, OSError):
            on_wait(tail(log, lines=1))
            time.sleep(0.5)
    raise ServerFailed(f"was not ready within {READY_SECONDS} seconds", log, tail(log))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
