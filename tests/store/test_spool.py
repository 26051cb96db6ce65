"""The spool: what it accepted is on the disk, comes back in order, and reaches the log once."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from store import log, migrate
from store.database import open_database, read
from store.errors import LogUnavailable, SpoolTaken
from store.events import CallAdmitted, CallEnded, RolloutOpened, RolloutScored, RowTrained, uuid7
from store.spool import Spool, default_folder, left_over, workers_with_spools


def opening(number: int, **change: object) -> RolloutOpened:
    return RolloutOpened.model_validate({"rollout_id": f"r{number}", "opened_at": number, "task": "t"} | change)


def opened(database) -> list[str]:
    with read(database) as connection:
        return [rollout.rollout_id for rollout in log.rollouts(connection)]


@pytest.fixture
def spool(tmp_path):
    with closing(Spool(tmp_path / "spool", "host:8000")) as found:
        yield found


def test_every_kind_of_event_comes_back_as_it_went_in(database, spool, chain_maker):
    chain = chain_maker()
    call_id, outcome_id = uuid7(1, bytes(10)), uuid7(2, bytes(10))
    events = [
        opening(1, metadata={"wörter": ["ä", None, 0.1]}, slot=3, secret_hash=bytes(32)),
        CallAdmitted(
            call_id=call_id, rollout_id="r1", decision="root", reason="first_call", parent_id=None, worker="w", at=1
        ),
        CallEnded(call_id=call_id, rollout_id="r1", state="failed", reason="x", at=1, token_ids=bytes(8),
                  logprobs=bytes(8)),
        RolloutScored(outcome_id=outcome_id, rollout_id="r1", reward=0.1, output={"a": [1, 2.5]}, at=1),
        RowTrained(
            run="a", step=1, row_id="1", rollout_id="r1", tip_call_id=chain[-1].call_id, selection="completed",
            selection_version=1, advantage=-0.5, trainer_policy_version=1, at=1,
        ),
    ]  # fmt: skip
    spool.append([events, *([call] for call in chain)])
    assert spool.holds_events
    spool.drain(database)
    assert (spool.holds_events, spool.size, spool.path.stat().st_size) == (False, 0, 0)
    assert (spool.drained, spool.refused) == (4, 0)
    with read(database) as connection:
        assert log.rollout(connection, "r1") == events[0]
        assert log.intents(connection, "r1") == [events[1]]
        assert log.ends(connection, "r1") == [events[2]]
        assert log.outcomes(connection, "r1") == [events[3]]
        assert log.calls(connection, "r1") == chain


def test_draining_twice_changes_nothing(database, spool, chain_maker, tmp_path):
    chain = chain_maker()
    spool.append([[call] for call in chain])
    shutil.copy(spool.path, tmp_path / "again.spool")
    spool.drain(database)
    with read(database) as connection:
        before = log.calls(connection, "r1")
    with closing(Spool(tmp_path, "again")) as again:
        again.drain(database)
        assert (again.drained, again.refused) == (3, 0)
    with read(database) as connection:
        assert log.calls(connection, "r1") == before == chain


def test_what_comes_while_it_is_drained_goes_behind_and_too(sqlite_database, spool, monkeypatch):
    monkeypatch.setattr("store.spool._PIECE_EVENTS", 2)
    spool.append([[opening(number)] for number in range(5)])
    append, late = log.append, [[opening(5)], [opening(6)]]

    def append_and_submit(connection, events, **options):
        append(connection, events, **options)
        if late:
            spool.append([late.pop(0)])

    monkeypatch.setattr("store.log.append", append_and_submit)
    spool.drain(sqlite_database)
    assert opened(sqlite_database) == [f"r{number}" for number in range(7)]
    assert not spool.holds_events


def test_a_torn_last_frame_is_cut_wherever_it_was_torn_and_told(sqlite_database, tmp_path, caplog):
    with closing(Spool(tmp_path, "whole")) as whole:
        whole.append([[opening(1)], [opening(2)]])
        first = whole.size
        whole.append([[opening(3)]])
        data = whole.path.read_bytes()
    for end in [first + 1, first + 11, first + 12, (first + len(data)) // 2, len(data) - 1]:
        caplog.clear()
        path = tmp_path / "torn.spool"
        path.write_bytes(data[:end])
        with closing(Spool(tmp_path, "torn")) as torn:
            assert torn.size == first
            assert f"{end - first} bytes of no whole frame" in caplog.text
            torn.append([[opening(4)]])
            torn.drain(sqlite_database)
        assert opened(sqlite_database) == ["r1", "r2", "r4"]
    assert (tmp_path / "torn.spool.cut").read_bytes().startswith(data[first : first + 1])


def test_a_frame_whose_bytes_changed_is_not_taken_for_one(tmp_path):
    with closing(Spool(tmp_path, "w")) as spool:
        spool.append([[opening(number)] for number in range(3)])
        data = bytearray(spool.path.read_bytes())
    rng = random.Random(1)
    at = rng.randrange(len(data) // 3, len(data))
    data[at] ^= 0x40
    (tmp_path / "w.spool").write_bytes(data)
    with closing(Spool(tmp_path, "w")) as spool:
        assert spool.size < len(data)
        kept = (tmp_path / "w.spool.cut").read_bytes()
    assert bytes(data[-len(kept) :]) == kept  # nothing is thrown away


def test_what_the_log_refuses_is_kept_beside_it_with_the_reason_and_the_rest_goes_on(
    database, spool, chain_maker, caplog
):
    root, child, grandchild = chain_maker([(9, 3), (5, 2), (5, 2)])
    spool.append([[opening(1)], [root, grandchild], [opening(1, task="another")], [root], [child], [opening(2)]])
    spool.drain(database)
    assert (spool.drained, spool.refused, spool.holds_events) == (6, 2, False)
    assert opened(database) == ["r1", "r2"]
    with read(database) as connection:
        assert log.calls(connection, "r1") == [root, child]
    kept = [json.loads(line) for line in spool.path.with_suffix(".refused").read_text().splitlines()]
    assert "which is not in the log" in kept[0]["why"]
    assert [event["call_id"] for event in kept[0]["events"]] == [str(root.call_id), str(grandchild.call_id)]
    assert "is already in the log with other content" in kept[1]["why"]
    assert "the log refuses what was spooled" in caplog.text


def test_a_spool_that_is_full_takes_no_more_and_new_calls_stop_before_those_in_flight(sqlite_database, tmp_path):
    with closing(Spool(tmp_path, "w", limit=4000)) as spool:
        intent = CallAdmitted(
            call_id=uuid7(1, bytes(10)), rollout_id="r", decision="root", reason="x", parent_id=None, worker="w", at=1
        )
        accepted = 0

        def fill() -> None:
            nonlocal accepted
            while True:
                spool.append([[opening(accepted, metadata={"x": os.urandom(90).hex()}), intent]])
                accepted += 1

        with pytest.raises(LogUnavailable, match="of 4000 bytes"):
            fill()
        assert spool.size <= 3600
        spool.append([[opening(accepted)]])
        with pytest.raises(LogUnavailable, match="of 4000 bytes"):
            spool.append([[opening(number)] for number in range(accepted, 1000)])
        spool.drain(sqlite_database)
    assert opened(sqlite_database) == [f"r{number}" for number in range(accepted + 1)]


@contextmanager
def files_no_larger_than(size: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_that_is_full_under_the_spool_leaves_whole_frames_only(sqlite_database, spool):
    """The limit on a file's size fails a write half way, as a full disk does."""
    spool.append([[opening(1)]])
    with files_no_larger_than(spool.size + 50), pytest.raises(LogUnavailable, match=r"spool.*File too large"):
        spool.append([[opening(2)]])
    assert spool.path.stat().st_size == spool.size
    spool.append([[opening(3)]])
    spool.drain(sqlite_database)
    assert opened(sqlite_database) == ["r1", "r3"]


def test_one_process_holds_a_spool(spool):
    with pytest.raises(SpoolTaken, match=r"'host:8000'.*TURNLOG_WORKER"):
        Spool(spool.path.parent, "host:8000")


def test_whose_spools_lie_in_a_folder_is_seen_by_their_names(spool, tmp_path):
    folder = spool.path.parent
    with closing(Spool(folder, "a/b.c")) as other:
        other.append([[opening(1)]])
    assert workers_with_spools(folder) == ["a/b.c", "host:8000"]
    assert (left_over(folder, "a/b.c"), left_over(folder, "host:8000"), left_over(tmp_path, "x")) == (
        True,
        False,
        False,
    )
    assert default_folder(str(tmp_path / "turnlog.db")) == tmp_path / "turnlog.spool"


KILLED = """
import sys
from pathlib import Path
from store.events import RolloutOpened
from store.spool import Spool

spool = Spool(Path(sys.argv[1]), "w")
for number in range(1_000_000):
    spool.append([[RolloutOpened(rollout_id=f"r{number}", opened_at=number)]])
    sys.stdout.write(f"r{number}\\n")
    sys.stdout.flush()
"""


def test_kill_9_while_it_is_written_loses_nothing_accepted(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    accepted = [process.stdout.readline().strip() for _ in range(200)]
    os.kill(process.pid, signal.SIGKILL)
    accepted += [line.strip() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    process.stdout.close()
    process.wait()
    database = open_database(f"sqlite:///{Path(tmp_path)}/turnlog.db")
    migrate.upgrade(database)
    with closing(Spool(tmp_path, "w")) as spool:
        spool.take_over(database)
    assert opened(database)[: len(accepted)] == accepted
    database.dispose()
