"""Rows from the log, from its archive and from both are the same, whatever was dropped, came late, or was damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text

from replay import provenance
from replay.archive import Archive, Seal, columns_of, open_archive, parquet
from replay.dropping import drop_archived
from replay.errors import ArchiveDamaged, ArchiveUnavailable, NotArchived, OtherLog, SealTaken
from replay.rowset import build, outlined, stream
from replay.sealing import Sealed, seal, verify
from replay.selection import Selection
from store import migrate, partitions, schema
from store.database import open_database
from store.events import CallAdmitted, CallCompleted, CallEnded, Event, RolloutOpened, RolloutScored, RowTrained, uuid7
from store.exclusive import exclusively

Remember = Callable[[Engine, Iterable[Event]], None]
NEVER = 2**62
"""A time after everything."""


def sealed(database: Engine, url: str, *, before: int = NEVER, name: str = "test", **options: Any) -> Sealed:
    return seal(database, open_archive(url, new=True), before=before, name=name, **options)


def scored(rollout_id: str, reward: float, at: int) -> RolloutScored:
    return RolloutScored(
        outcome_id=uuid7(at, rollout_id.encode()[:10].ljust(10)), rollout_id=rollout_id, reward=reward, at=at
    )


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Engine]:
    """A log without an event."""
    database = open_database(f"sqlite:///{tmp_path / 'empty.db'}")
    migrate.upgrade(database)
    yield database
    database.dispose()


@pytest.fixture
def history(groups_of_rollouts: Any, chain_maker: Any) -> list[Event]:
    """Six scored rollouts with branches, one with a failed call, one that nobody opened or scored."""
    events = groups_of_rollouts(chain_maker, ["g0", "g1"])
    failed = uuid7(1, b"0123456789")
    return [
        *events,
        *chain_maker(rollout_id="unopened"),
        CallAdmitted(
            call_id=failed, rollout_id="g0.0", decision="root", reason="fresh_context", parent_id=None, worker="w", at=5
        ),
        CallEnded(
            call_id=failed,
            rollout_id="g0.0",
            state="abandoned",
            reason="client gone",
            at=6,
            token_ids=bytes(400),
            logprobs=bytes(400),
        ),
    ]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


@pytest.mark.parametrize("place", ["folder", "file", "memory"])
def test_log_archive_and_both_give_the_same_rows(
    place: str, database: Engine, empty: Engine, history: list[Event], remember: Remember, tmp_path: Path
) -> None:
    url = {
        "folder": str(tmp_path / "archive"),
        "file": f"file://{tmp_path}/archive",
        "memory": f"memory://{tmp_path.name}-{database.dialect.name}",
    }[place]
    remember(database, history)
    before = build(database)
    found = sealed(database, url)
    assert (found.number, found.rollouts) == (1, 7)
    assert found.events == {
        "rollout": 6,
        "call_intent": 1,
        "call_end": 1,
        "model_call": 27,
        "rollout_outcome": 6,
    }
    both, alone = build(database, archive=url), build(empty, archive=url)
    assert before.rows
    assert {each.digest() for each in (before, both, alone)} == {before.digest()}
    assert {str(each.position) for each in (before, both, alone)} == {str(before.position)}
    assert both.scores == alone.scores == before.scores
    assert outlined(empty, archive=url).table.equals(outlined(database).table)
    for each in (*before.rows, *both.rows):
        assert build(empty, rollouts=[each.rollout_id], archive=url).rows[0].rollout_id == each.rollout_id


@pytest.mark.parametrize("rule", ["completed", "declared", "output"])
def test_every_rule_selects_from_the_archive_what_it_selects_from_the_log(
    rule: str, sqlite_database: Engine, empty: Engine, history: list[Event], remember: Remember, url: str
) -> None:
    remember(sqlite_database, history)
    sealed(sqlite_database, url)
    log, alone = build(sqlite_database, Selection(rule=rule)), build(empty, Selection(rule=rule), archive=url)
    assert alone.digest() == log.digest()
    assert alone.refusals == log.refusals
    assert alone.left_out == log.left_out


def test_sealing_again_adds_what_is_new_and_rewrites_nothing(
    database: Engine, history: list[Event], remember: Remember, grow: Any, make_chain_maker: Any, url: str
) -> None:
    remember(database, history)
    assert sealed(database, url).number == 1
    first = {path: path.stat().st_mtime_ns for path in Path(url).rglob("*.*")}
    assert sealed(database, url) == Sealed(number=None, rollouts=0, finished=7, events={}, bytes=0)
    calls = grow(make_chain_maker(9), [None, 0], rollout_id="later")
    remember(database, [RolloutOpened(rollout_id="later", opened_at=1), *calls])
    again = sealed(database, url, name="again")
    assert (again.number, again.rollouts, again.events) == (2, 1, {"rollout": 1, "model_call": 2})
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert build(database, archive=url).digest() == build(database).digest()


def test_what_came_after_the_seal_counts(
    database: Engine, empty: Engine, remember: Remember, grow: Any, chain_maker: Any, url: str
) -> None:
    first = grow(chain_maker, [None, 0, 0])
    remember(database, [RolloutOpened(rollout_id="r1", opened_at=1), *first, scored("r1", 0.5, 2)])
    sealed(database, url)
    then = build(database)
    late = [
        chain_maker.call(4, 3, rollout_id="r1", parent=first[2]),
        chain_maker.call(9, 3, rollout_id="r1", parent=None),
    ]
    remember(database, [*late, scored("r1", 2.0, 3)])
    now, both = build(database), build(database, archive=url)
    assert both.digest() == now.digest() != then.digest()
    assert both.rows[0].reward == 2.0
    assert build(database, position=then.position, archive=url).digest() == then.digest()
    sealed(database, url, name="second")
    assert build(empty, archive=url).digest() == now.digest()
    assert build(empty, position=then.position, archive=url).digest() == then.digest()


def test_the_archive_serves_what_the_log_lost(
    sqlite_database: Engine, history: list[Event], remember: Remember, url: str
) -> None:
    remember(sqlite_database, history)
    before = build(sqlite_database)
    sealed(sqlite_database, url)
    lose(sqlite_database, "g0.1", "g1.2")
    assert build(sqlite_database).digest() != before.digest()
    both = build(sqlite_database, archive=url)
    assert both.digest() == before.digest()
    assert [*stream(sqlite_database, tokens=50, archive=url)][-1].position == before.position
    assert sealed(sqlite_database, url).events == {}


def lose(database: Engine, *rollouts: str) -> None:
    """Take the calls of rollouts out of a SQLite file, as nobody can without taking its guards away."""
    with database.begin() as connection:
        connection.exec_driver_sql("pragma query_only = off")
        for table in ("model_call", "call_intent", "call_end"):
            connection.exec_driver_sql(f"drop trigger {table}_no_delete")
            connection.execute(text(f"delete from {table} where rollout_id in {rollouts}"))


def test_only_finished_rollouts_are_sealed(
    database: Engine, remember: Remember, grow: Any, make_chain_maker: Any, url: str
) -> None:
    running = CallAdmitted(
        call_id=uuid7(7, b"0123456789"),
        rollout_id="running",
        decision="root",
        reason="first_call",
        parent_id=None,
        worker="w",
        at=5,
    )
    old, young = (grow(make_chain_maker(seed), [None], rollout_id=name) for seed, name in ((1, "old"), (2, "young")))
    remember(database, [*old, *young, *grow(make_chain_maker(3), [None], rollout_id="running"), running])
    remember(database, [scored("young", 1.0, old[0].completed_at + 10)])
    assert sealed(database, url, before=old[0].completed_at, write=False).rollouts == 0
    found = sealed(database, url, before=old[0].completed_at + 10)
    assert (found.rollouts, found.events) == (1, {"model_call": 1})
    remember(database, [CallEnded(call_id=running.call_id, rollout_id="running", state="lost", reason="killed", at=6)])
    assert sealed(database, url, name="then").rollouts == 2


def test_a_dry_run_writes_nothing(sqlite_database: Engine, history: list[Event], remember: Remember, url: str) -> None:
    remember(sqlite_database, history)
    found = sealed(sqlite_database, url, write=False)
    assert (found.number, found.rollouts, found.events["model_call"], found.bytes) == (None, 7, 27, 0)
    assert not Path(url).exists()
    with pytest.raises(ArchiveUnavailable, match="nothing is sealed there"):
        open_archive(url)


def test_a_half_written_archive_is_invisible(
    sqlite_database: Engine, history: list[Event], remember: Remember, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    remember(sqlite_database, history)

    def killed(self: Archive, seal: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Archive, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            sealed(sqlite_database, url, name="killed")
    left = {*Path(url).rglob("*.parquet")}
    assert left
    with pytest.raises(ArchiveUnavailable, match="nothing is sealed there"):
        build(sqlite_database, archive=url)
    sealed(sqlite_database, url, name="whole")
    assert left < {*Path(url).rglob("*.parquet")}
    assert build(sqlite_database, archive=url).digest() == build(sqlite_database).digest()


def test_of_two_runs_at_once_one_seals(
    sqlite_database: Engine, history: list[Event], remember: Remember, url: str
) -> None:
    remember(sqlite_database, history)
    one, other = open_archive(url, new=True), open_archive(url, new=True)
    seal(sqlite_database, one, before=NEVER, name="one")
    with pytest.raises(SealTaken, match="written by another run"):
        seal(sqlite_database, other, before=NEVER, name="other")
    assert build(sqlite_database, archive=url).digest() == build(sqlite_database).digest()


def test_another_log_is_refused(
    sqlite_database: Engine, empty: Engine, remember: Remember, grow: Any, make_chain_maker: Any, url: str
) -> None:
    remember(sqlite_database, grow(make_chain_maker(1), [None]))
    sealed(sqlite_database, url)
    remember(empty, grow(make_chain_maker(2), [None]))
    with pytest.raises(OtherLog, match="model_call 1 of the log is another event"):
        sealed(empty, url)


def heavy(url: str) -> Path:
    """The file of the opened rollouts' calls; the unopened one's month is another."""
    (found,) = Path(url).glob("model_call/month=1970-01/*.parquet")
    return found


def test_a_damaged_file_is_refused(sqlite_database: Engine, history: list[Event], remember: Remember, url: str) -> None:
    remember(sqlite_database, history)
    sealed(sqlite_database, url)
    file = heavy(url)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArchiveDamaged, match=r"month=1970-01/00001-test-000.* (other bytes|cannot be read)"):
        build(sqlite_database, archive=url)
    file.unlink()
    with pytest.raises(ArchiveDamaged, match="is missing: restore it"):
        build(sqlite_database, archive=url)


def test_an_event_that_was_changed_with_all_its_hashes_is_found(
    sqlite_database: Engine, history: list[Event], remember: Remember, url: str
) -> None:
    remember(sqlite_database, history)
    sealed(sqlite_database, url)
    file = heavy(url)
    lines = pq.ParquetFile(file).read()
    at = lines.schema.get_field_index("token_ids")
    tokens = lines["token_ids"].to_pylist()
    tokens[3] = tokens[3][:-4] + b"\x01\x00\x00\x00"
    file.write_bytes(parquet(lines.set_column(at, lines.schema.field(at), pa.array(tokens, pa.binary()))))
    manifest = Path(url, "seals", "00001.json")
    said = json.loads(manifest.read_text())
    for each in said["files"]:
        if Path(url, each["path"]) == file:
            each |= {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size": file.stat().st_size}
    manifest.write_text(json.dumps(said))
    with pytest.raises(ArchiveDamaged, match=r"00001\.json' of .* does not say what it said when"):
        open_archive(url)
    manifest.write_text(json.dumps(said | {"digest": Seal.model_validate(said).derived()}))
    archive = open_archive(url)
    with pytest.raises(ArchiveDamaged, match="does not give its digest again"):
        verify(archive, archive.files["model_call"][0])
    as_version_1(manifest)
    log, both = build(sqlite_database), build(sqlite_database, archive=url)
    assert both.refusals.by_reason() == {"chain_hash_mismatch": 1}
    assert len(both.rows) < len(log.rows)


def as_version_1(manifest: Path) -> None:
    """Make a seal what an older release would have written: it says nothing of chains, and has no digest."""
    said = json.loads(manifest.read_text())
    files = [{name: value for name, value in each.items() if name != "chained"} for each in said["files"]]
    del said["digest"]
    manifest.write_text(json.dumps(said | {"version": 1, "files": files}))


def test_seals_that_are_missing_or_unreadable_are_refused(
    sqlite_database: Engine, history: list[Event], remember: Remember, grow: Any, make_chain_maker: Any, url: str
) -> None:
    remember(sqlite_database, history)
    sealed(sqlite_database, url)
    remember(sqlite_database, grow(make_chain_maker(9), [None], rollout_id="later"))
    sealed(sqlite_database, url, name="later")
    second = Path(url, "seals", "00002.json")
    first = Path(url, "seals", "00001.json")
    kept = first.read_bytes()
    first.unlink()
    with pytest.raises(ArchiveDamaged, match="has the seals 2, which are not all since the first"):
        open_archive(url)
    first.write_bytes(kept)
    second.write_bytes(kept.replace(b'"version": 2', b'"version": 3'))
    with pytest.raises(ArchiveDamaged, match=r"'seals/00002.json' of archive .* is no seal of this release"):
        open_archive(url)


def test_what_trained_is_counted_once(
    sqlite_database: Engine, empty: Engine, remember: Remember, chain_maker: Any, url: str
) -> None:
    calls = chain_maker()
    trained = [
        RowTrained(
            run="run",
            step=step,
            row_id="row",
            rollout_id="r1",
            tip_call_id=calls[-1].call_id,
            selection="completed",
            selection_version=1,
            advantage=0.5,
            trainer_policy_version=1,
            at=1,
        )
        for step in (0, 1)
    ]
    remember(sqlite_database, [*calls, trained[0]])
    sealed(sqlite_database, url)
    remember(sqlite_database, trained[1:])
    both = provenance.trained(sqlite_database, archive=url)
    assert both.sort_by("step").to_pylist() == provenance.trained(sqlite_database).to_pylist()
    assert provenance.trained(empty, archive=url)["step"].to_pylist() == [0]


def test_files_hold_every_column_and_calls_in_chain_order(
    sqlite_database: Engine, history: list[Event], remember: Remember, url: str
) -> None:
    remember(sqlite_database, history)
    sealed(sqlite_database, url)
    for table in schema.metadata.tables.values():
        for file in Path(url).glob(f"{table.name}/*/*.parquet"):
            assert pq.read_schema(file).names == columns_of(table).names
    lines = pq.ParquetFile(heavy(url)).read().to_pylist()
    rollouts = [line["rollout_id"] for line in lines]
    assert [*dict.fromkeys(rollouts)] == ["g0.0", "g0.1", "g0.2", "g1.0", "g1.1", "g1.2"]
    runs = [(line["rollout_id"], line["root_id"]) for line in lines]
    assert len({*runs}) == 1 + sum(one != two for one, two in pairwise(runs))
    assert isinstance(lines[0]["call_id"], UUID)


def test_any_store_of_fsspec_will_do(sqlite_database: Engine, history: list[Event], remember: Remember) -> None:
    remember(sqlite_database, history)
    sealed(sqlite_database, "memory://any-store")
    names = fsspec.filesystem("memory").find("/any-store")
    assert "/any-store/seals/00001.json" in names
    assert not [name for name in names if name.endswith(".part")]
    with pytest.raises(ArchiveUnavailable, match="nowhere"):
        open_archive("nowhere://archive")


@pytest.mark.postgres
def test_an_archived_partition_goes_and_the_rows_stay(
    postgres_database: Engine, history: list[Event], remember: Remember, chain_maker: Any, url: str
) -> None:
    remember(postgres_database, history)
    before = build(postgres_database)
    call = next(event for event in history if isinstance(event, CallCompleted))
    period = datetime.fromtimestamp((call.call_id.int >> 80) / 1000, UTC)
    with exclusively(postgres_database) as connection:
        assert not partitions.adopt(connection, period)
    name = f"model_call_{period:%Y%m%d}"
    sealed(postgres_database, url, write=True)
    late = chain_maker(rollout_id="late")
    remember(postgres_database, late)
    with exclusively(postgres_database) as connection, pytest.raises(NotArchived, match="3 of its 30 events"):
        drop_archived(connection, open_archive(url), name)
    sealed(postgres_database, url, name="second")
    now = build(postgres_database)
    with exclusively(postgres_database) as connection:
        dropped = drop_archived(connection, open_archive(url), name)
        connection.commit()
    assert dropped.events == 30
    assert not build(postgres_database).rows
    assert build(postgres_database, archive=url).digest() == now.digest()
    assert build(postgres_database, archive=url, position=before.position).digest() == before.digest()
