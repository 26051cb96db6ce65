from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from turnlog.demo.server import model_server
from turnlog.errors import ServerFailed

DEMO = [sys.executable, "-m", "turnlog", "demo"]


def test_the_demo_walks_the_whole_path(tmp_path: Path) -> None:
    """The real server, agent, log, rows and optimizer step; the demo itself fails when a promise does not hold."""
    done = subprocess.run(DEMO, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("{1,2}", "{3,4}", "{5}", "{1,2,...,20}", "gradient norm", "What to type next"):
        assert said in done.stdout
    shown = subprocess.run(
        [sys.executable, "-m", "turnlog", "show", "demo1-1"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert shown.count("▶ row begins") == 3
    assert not _processes_of(tmp_path)


def test_an_interrupted_demo_stops_its_server(tmp_path: Path) -> None:
    process = subprocess.Popen(
        DEMO,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_hear_interrupts,
    )
    log = tmp_path / "demo/server.log"
    give_up = time.monotonic() + 120
    while not (log.is_file() and "vLLM" in log.read_text(errors="replace")):
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.2)
    assert len(_processes_of(tmp_path)) > 1
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopped; the model server too" in output
    assert "Traceback" not in output
    assert not _processes_of(tmp_path)


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(demo_model: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'no_schema.db'}"
    with (
        pytest.raises(ServerFailed, match=r"(?s)ended with code 1 before it was ready.*turnlog db upgrade"),
        model_server(demo_model, url=url, log=tmp_path / "server.log"),
    ):
        pytest.fail("the server must not start on a log without a schema")


def _hear_interrupts() -> None:
    """As a terminal's commands do: a shell starts what it runs in the background deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Processes that work in the folder: the demo's, its server's and the server's children."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if Path(os.readlink(f"/proc/{process.pid}/cwd")) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.NoSuchProcess):
            continue
    return found
