"""What a seal proves is not derived again, and what it does not prove is; either way the rows are those of the log."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, text

from replay.archive import Archive, SealedFile, open_archive
from replay.chain import Chains, check
from replay.errors import ArchiveDamaged
from replay.fill import fill
from replay.piece import Ints
from replay.pool import Pool
from replay.rowset import build, stream
from replay.sealed import Proven, Sealed
from replay.sealing import seal, verify
from replay.source import Contents
from replay.stretches import Stretches
from replay.walk import paths
from store.events import CallCompleted, Event

Remember = Callable[[Engine, Iterable[Event]], None]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


def archived(database: Engine, url: str, name: str = "test") -> Archive:
    seal(database, open_archive(url, new=True), before=2**62, name=name)
    return open_archive(url)


def chained(archive: Archive) -> list[bool]:
    return [file.chained for file in archive.files["model_call"]]


def as_version_1(url: str) -> None:
    """Make the seals what an older release would have written: they say nothing of chains, and have no digest."""
    for manifest in Path(url, "seals").iterdir():
        said = json.loads(manifest.read_text())
        files = [{name: value for name, value in each.items() if name != "chained"} for each in said["files"]]
        del said["digest"]
        manifest.write_text(json.dumps(said | {"version": 1, "files": files}))


@pytest.mark.parametrize("version", [1, 2])
def test_branches_and_short_calls_give_the_rows_of_the_log(
    version: int, sqlite_database: Engine, remember: Remember, grow: Any, make_chain_maker: Any, url: str
) -> None:
    """From payloads and from the file's own buffer, whole and cut."""
    lengths = [(1, 1), (0, 2), (3, 3), (4, 1), (1, 4), (40, 30)]
    for n in range(4):
        remember(
            sqlite_database, grow(make_chain_maker(n), [None, 0, 0, 2, None, 1], lengths=lengths, rollout_id=f"r{n}")
        )
    archive = archived(sqlite_database, url)
    sequences = np.array([3, 1, 3, 2])
    if version == 1:
        as_version_1(url)
    proven = Sealed(open_archive(url)).proven(sequences)
    assert chained(archive) == [True]
    assert (proven is None) == (version == 1)
    log, both = build(sqlite_database), build(sqlite_database, archive=url)
    assert len(log.rows) == 12
    assert both.digest() == log.digest()
    assert both.refusals == log.refusals
    cut = [row for part in stream(sqlite_database, archive=url, tokens=100) for row in part.rows]
    assert [row.row_id for row in cut] == [row.row_id for row in log.rows]
    for one, other in zip(cut, log.rows, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


def misfit(database: Engine, call: CallCompleted) -> None:
    """Give a call of a SQLite file another chain hash, and the digest that it then has, as no log would take it."""
    other = call.model_copy(update={"chain_hash": bytes(32)})
    values = {"hash": other.chain_hash, "digest": other.digest(), "id": call.call_id.bytes}
    with database.begin() as connection:
        connection.exec_driver_sql("pragma query_only = off")
        connection.exec_driver_sql("drop trigger model_call_no_update")
        statement = "update model_call set chain_hash = :hash, digest = :digest where call_id = :id"
        assert connection.execute(text(statement), values).rowcount == 1


@pytest.mark.parametrize("version", [1, 2])
def test_a_chain_hash_that_does_not_fit_gives_no_row(
    version: int, sqlite_database: Engine, remember: Remember, chain_maker: Any, make_chain_maker: Any, url: str
) -> None:
    calls = chain_maker()
    remember(sqlite_database, [*calls, *make_chain_maker(3)(rollout_id="good")])
    misfit(sqlite_database, calls[-1])
    archive = archived(sqlite_database, url)
    assert chained(archive) == [False]
    if version == 1:
        as_version_1(url)
    log, both = build(sqlite_database), build(sqlite_database, archive=url)
    assert both.refusals == log.refusals
    assert both.refusals.by_reason() == {"chain_hash_mismatch": 1}
    assert {row.rollout_id for row in both.rows} == {"good"}
    assert both.digest() == log.digest()


def test_what_came_late_is_proven_with_its_parent_or_derived(
    sqlite_database: Engine, remember: Remember, grow: Any, chain_maker: Any, url: str
) -> None:
    calls = grow(chain_maker, [None, 0])
    remember(sqlite_database, calls)
    archived(sqlite_database, url)
    remember(sqlite_database, [chain_maker.call(4, 3, rollout_id="r1", parent=calls[1])])
    archive = archived(sqlite_database, url, "late")
    assert chained(archive) == [True, False]
    assert Sealed(archive).proven(np.array([1, 2])) is not None
    assert Sealed(archive).proven(np.array([1, 2, 3])) is None
    assert Sealed(archive).proven(np.array([1, 99])) is None
    assert build(sqlite_database, archive=url).digest() == build(sqlite_database).digest()


def test_verifying_derives_the_chain_hashes_that_a_seal_claims(
    sqlite_database: Engine, remember: Remember, chain_maker: Any, url: str
) -> None:
    calls = chain_maker()
    remember(sqlite_database, calls)
    misfit(sqlite_database, calls[0])
    archive = archived(sqlite_database, url)
    (file,) = archive.files["model_call"]
    assert verify(archive, file).num_rows == len(calls)
    with pytest.raises(ArchiveDamaged, match="tokens do not give its chain hash"):
        verify(archive, file.model_copy(update={"chained": True}))


def test_proven_arrays_are_taken_when_they_have_the_lengths_that_calls_say_and_are_finite(
    grow: Any, chain_maker: Any, recorded: Callable[..., Any]
) -> None:
    read = recorded(grow(chain_maker, [None, 0, 0, 2]))
    counts = np.ones(len(read.piece.calls), np.bool_)
    chains, _ = check(read.piece, counts, paths(read.piece, counts))
    whole = fill(chains, read.payloads)
    proven = Proven(token_ids=stretches(chains, read, 2, "<i4"), logprobs=stretches(chains, read, 3, "<f4"))
    taken = fill(chains, [], proven=proven)
    for name in ("token_ids", "loss_mask", "logprobs", "offset"):
        assert np.array_equal(getattr(taken, name), getattr(whole, name))
    for name in ("token_ids", "logprobs"):
        length = getattr(proven, name).length - (np.arange(len(chains.call)) == 1)
        short = Stretches(
            arrays=getattr(proven, name).arrays,
            array=getattr(proven, name).array,
            start=getattr(proven, name).start,
            length=length,
        )
        other = Proven(**{"token_ids": proven.token_ids, "logprobs": proven.logprobs} | {name: short})
        assert np.array_equal(fill(chains, read.payloads, proven=other).token_ids, whole.token_ids)
    infinite = read.damaged(3, logprobs=np.full(len(read.lines[3][3]) // 4, np.inf, "<f4").tobytes())
    bad = Proven(token_ids=proven.token_ids, logprobs=stretches(chains, infinite, 3, "<f4"))
    assert [each.reason for each in fill(chains, [], proven=bad).refused] == ["logprob_not_finite"]


def stretches(chains: Chains, read: Any, column: int, kind: str) -> Stretches:
    """Arrays of the calls of these chains, each call's its own."""
    arrays = [np.frombuffer(line[column], kind) for line in read.lines]
    length = np.array([len(array) for array in arrays])[chains.call]
    return Stretches(
        arrays=arrays, array=chains.call.astype(np.int32), start=np.zeros(len(length), np.int64), length=length
    )


def test_stretches_are_laid_end_to_end_in_any_order() -> None:
    dice = np.random.default_rng(0)
    for _ in range(100):
        arrays = [dice.integers(-9, 9, dice.integers(1, 60)).astype(np.int32) for _ in range(dice.integers(1, 4))]
        array = dice.integers(0, len(arrays), dice.integers(0, 12)).astype(np.int32)
        start = np.array([dice.integers(0, len(arrays[each]) + 1) for each in array], np.int64)
        left = [len(arrays[each]) - low for each, low in zip(array.tolist(), start.tolist(), strict=True)]
        length = np.array([dice.integers(0, most + 1) for most in left], np.int64)
        gaps = dice.integers(0, 9, len(array))
        some = Stretches(arrays=arrays, array=array, start=start, length=length)
        parts = [arrays[each][low : low + size] for each, low, size in zip(array, start, length, strict=True)]
        assert some.joined().tolist() == [value for part in parts for value in part.tolist()]
        gapped = [[0] * gap + part.tolist() for gap, part in zip(gaps.tolist(), parts, strict=True)]
        assert some.joined(gaps).tolist() == [value for part in gapped for value in part]


def test_the_next_file_is_read_ahead_and_damage_there_is_told_when_it_is_asked_for(
    sqlite_database: Engine, remember: Remember, make_chain_maker: Any, url: str
) -> None:
    for n in range(3):
        remember(sqlite_database, make_chain_maker(n)(rollout_id=f"r{n}"))
        archived(sqlite_database, url, f"part{n}")
    archive = open_archive(url)
    files = archive.files["model_call"]
    assert len(files) == 3
    begun: list[str] = []
    read, whole = threading.Event(), archive.whole

    def noted(file: SealedFile) -> bytes:
        begun.append(file.path)
        if file is files[1]:
            read.set()
        return whole(file)

    archive.whole = noted  # type: ignore[method-assign]
    Path(url, files[1].path).write_bytes(b"")
    sealed = Sealed(archive)
    sealed.expect([0, 0, -1, 1, 2])
    assert len(sealed.block(0).sequence) == files[0].lines
    assert read.wait(10)
    with pytest.raises(ArchiveDamaged, match="holds other bytes"):
        sealed.block(1)
    assert len(sealed.block(2).sequence) == files[2].lines
    assert begun == [file.path for file in files]
    with pytest.raises(ArchiveDamaged, match="part1-0000"):
        build(sqlite_database, archive=url)


def test_processes_that_get_nothing_of_a_small_archive_give_nothing(
    sqlite_database: Engine, remember: Remember, chain_maker: Any, url: str
) -> None:
    remember(sqlite_database, chain_maker(rollout_id="only"))
    archived(sqlite_database, url)
    with Pool(2) as pool:
        apart = [row for part in stream(sqlite_database, archive=url, pool=pool) for row in part.rows]
    assert [row.row_id for row in apart] == [row.row_id for row in build(sqlite_database, archive=url).rows]
    assert len(apart) == 1


def test_what_is_sealed_is_cut_where_files_end() -> None:
    def contents(*file: int) -> Contents:
        calls: Ints = np.full(len(file), 10, np.int64)
        return Contents(
            rollouts=tuple(range(len(file))),  # type: ignore[arg-type]
            logged=calls,
            sealed=calls,
            file=np.array(file, np.int64),
        )

    def sizes(found: Contents, calls: int) -> list[int]:
        return [len(part.rollouts) for part in found.cut(calls=calls)]

    assert sizes(contents(-1, -1, -1, -1, -1), 20) == [2, 2, 1]
    assert sizes(contents(0, 0, 0, 1, 1, 1), 20) == [3, 3]
    assert sizes(contents(0, 1, 0, 1, 0, 1), 20) == [2, 2, 2]
    assert sizes(contents(0, 0, 0, -1, -1, -1, 1), 20) == [3, 2, 2]
    assert sizes(contents(), 20) == [0]
