"""A queue before a lock: in order, never for ever, and over with its process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

from store import log
from store.database import open_database, read, write
from store.events import RolloutOpened
from store.turn import turn

FORK = multiprocessing.get_context("fork")


def holder(path: Path, came) -> None:
    with turn(path, 10):
        came.set()
        time.sleep(60)


def test_a_turn_comes_as_soon_as_the_one_before_is_over(tmp_path):
    came: list[float] = []
    path = tmp_path / "turn"

    def wait() -> None:
        with turn(path, 10):
            came.append(time.monotonic())

    with turn(path, 10):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        assert came == []
        over = time.monotonic()
    waiting.join()
    assert came[0] - over < 0.2


def test_who_waited_too_long_goes_on_and_holds_up_nobody_later(tmp_path):
    path = tmp_path / "turn"
    with turn(path, 10):
        began = time.monotonic()
        with turn(path, 0.2):
            assert 0.2 <= time.monotonic() - began < 5
    began = time.monotonic()
    with turn(path, 10):
        assert time.monotonic() - began < 5


def test_a_turn_ends_with_its_process(tmp_path):
    path, came = tmp_path / "turn", FORK.Event()
    process = FORK.Process(target=holder, args=(path, came))
    process.start()
    assert came.wait(10)
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with turn(path, 20):
        assert 0.1 < time.monotonic() - began < 10
    process.join()


def test_without_a_place_for_its_file_nobody_waits(tmp_path):
    with turn(tmp_path / "missing" / "turn", 10), turn(tmp_path / "missing" / "turn", 10):
        pass


def test_a_write_that_comes_past_the_queue_is_kept_apart_by_sqlite(sqlite_database, monkeypatch):
    monkeypatch.setattr("store.database._TURN_SECONDS", 0.1)
    other = open_database(sqlite_database.url.render_as_string(hide_password=False))
    events = [RolloutOpened(rollout_id=f"r{number}", opened_at=number) for number in range(2)]

    def late() -> None:
        with write(other) as connection:
            log.append(connection, events[1:])

    waiting = threading.Thread(target=late)
    with write(sqlite_database) as connection:
        waiting.start()
        time.sleep(0.5)
        log.append(connection, events[:1])
    waiting.join()
    other.dispose()
    with read(sqlite_database) as connection:
        assert log.rollouts(connection) == events
