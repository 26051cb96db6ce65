"""Rows with media from logs made by hand: placed, checked, sealed, and refused by name when something does not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from engine.media import Made, Shown, events
from replay.archive import open_archive
from replay.errors import PlanMismatch
from replay.export import write_parquet
from replay.indexed import stream_indexed
from replay.nemo import train_data
from replay.rowset import Part, RowSet, build, outlined
from replay.sealing import seal
from store import tensors
from store.database import open_database, read
from store.events import CallCompleted, Event, MediaShown, RolloutOpened
from store.lineage import chain_media
from store.media import MediaStore, open_media
from store.media_check import faults, orphans
from store.migrate import upgrade

Remember = Callable[[Engine, Sequence[Event]], None]
LENGTHS = ((20, 10), (18, 5), (16, 4))
SHOWN = (2, 0, 1)
"""Images that are new in each call."""


@pytest.fixture
def media_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TURNLOG_MEDIA", str(tmp_path / "media"))
    return str(tmp_path / "media")


@pytest.fixture
def media(media_url: str) -> MediaStore:
    return open_media(media_url, "")


def shown_of(media: MediaStore, seed: int, start: int) -> Shown:
    """An image of six patches and six tokens, whose bytes are stored."""
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 12), dtype=np.uint8)
    grid = np.array([[1, 4, 6]])
    found = {
        "pixel_values": tensors.Tensor(dtype="U8", shape=(24, 12), data=pixels.tobytes()),
        "image_grid_thw": tensors.Tensor(dtype="I64", shape=(1, 3), data=grid.tobytes()),
    }
    packed = tensors.pack(found)
    media.put(packed)
    made = Made.of(found, packed, {"image_grid_thw": [1, 4, 6]})
    return Shown(modality="image", made=made, mm_hash=f"h{seed}", start=start, length=6, tokens=6)


def a_chain(chain_maker: Any, media: MediaStore, rollout_id: str = "r1", *, seed: int = 0) -> list[Event]:
    """Three calls: the first shows two images, the last one more."""
    found: list[Event] = [RolloutOpened(rollout_id=rollout_id, opened_at=1)]
    total = 0
    for call, count in zip(chain_maker(LENGTHS, rollout_id=rollout_id), SHOWN, strict=True):
        new = [shown_of(media, seed + total + at, call.prev_len + 1 + 7 * at) for at in range(count)]
        total += count
        event = call.model_copy(update={"media_count": total})
        found += [event, *events(new, event.call_id, rollout_id, event.completed_at)]
    return found


def calls_of(found: Sequence[Event]) -> list[CallCompleted]:
    return [event for event in found if isinstance(event, CallCompleted)]


def reasons(found: RowSet) -> dict[str, str]:
    return {refusal.rollout_id: refusal.reason for refusal in found.refusals.rollouts}


def test_media_stand_at_their_places_in_the_row_and_come_back_for_any_call(
    database: Engine, remember: Remember, chain_maker: Any, media: MediaStore, tmp_path: Path
) -> None:
    history = a_chain(chain_maker, media)
    remember(database, [*history, *chain_maker(rollout_id="text")])
    found = build(database)
    assert reasons(found) == {}
    by_id = {row.rollout_id: row for row in found.rows}
    assert [handle.start for handle in by_id["r1"].media] == [1, 8, calls_of(history)[2].prev_len + 1]
    assert by_id["text"].media == ()
    assert found.digest() == build(database).digest()
    write_parquet(found, tmp_path / "rows.parquet")
    with read(database) as connection:
        for call, count in zip(calls_of(history), (2, 2, 3), strict=True):
            shown = chain_media(connection, call.call_id)
            assert len(shown) == count
            assert shown == sorted(shown, key=lambda each: each.start)
        assert not [*faults(connection, media)]
        assert not [*orphans(connection, media, older_than=timedelta())]


def test_a_branch_shows_what_the_calls_that_it_shares_show(
    sqlite_database: Engine, remember: Remember, chain_maker: Any, media: MediaStore
) -> None:
    history = a_chain(chain_maker, media)
    (branch,) = chain_maker([(9, 3)], rollout_id="r1", parent=calls_of(history)[1])
    remember(sqlite_database, [*history, branch.model_copy(update={"media_count": 2})])
    one, other = build(sqlite_database).rows
    assert [len(one.media), len(other.media)] == [3, 2]
    assert one.media[:2] == other.media


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("uncounted", "media_not_captured"),
        ("lost", "media_not_captured"),
        ("before", "media_misplaced"),
        ("behind", "media_misplaced"),
        ("gap", "media_misplaced"),
        ("gone", "media_missing"),
        ("other", "media_damaged"),
    ],
)
def test_what_does_not_hold_refuses_its_rollout_and_no_other(
    sqlite_database: Engine, remember: Remember, make_chain_maker: Any, media: MediaStore, change: str, reason: str
) -> None:
    history = a_chain(make_chain_maker(1), media)
    shown = [each for each in history if isinstance(each, MediaShown)]
    last, call = shown[-1], calls_of(history)[-1]
    path = Path(media.url) / last.sha256.hex()[:2] / last.sha256.hex()
    match change:
        case "uncounted":
            history[history.index(call)] = call.model_copy(update={"media_count": 2})
        case "lost":
            history.remove(last)
        case "before":
            history[history.index(last)] = last.model_copy(update={"start": call.prev_len - 1})
        case "behind":
            history[history.index(last)] = last.model_copy(update={"start": call.prompt_len - 5})
        case "gap":
            history[history.index(last)] = last.model_copy(update={"place": 1})
        case "gone":
            path.unlink()
        case _:
            path.write_bytes(b"blank")
    remember(sqlite_database, [*history, *a_chain(make_chain_maker(2), media, "r2", seed=50)])
    found = build(sqlite_database)
    assert reasons(found) == {"r1": reason}
    assert [row.rollout_id for row in found.rows] == ["r2"]
    if reason.startswith("media_m") and change in ("gone", "other"):
        with read(sqlite_database) as connection:
            (fault,) = faults(connection, media)
        assert (fault.reason, fault.shown[0].call_id) == (reason, call.call_id)


def test_a_log_whose_media_are_nowhere_gives_no_rows_of_calls_with_images(
    postgres_database: Engine, remember: Remember, chain_maker: Any, media: MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(postgres_database, a_chain(chain_maker, media))
    assert len(build(postgres_database).rows) == 1
    assert len(build(postgres_database, media=media.url).rows) == 1
    monkeypatch.delenv("TURNLOG_MEDIA")
    assert reasons(build(postgres_database)) == {"r1": "media_missing"}
    assert len(build(postgres_database, media=media.url).rows) == 1


def test_what_carries_tokens_alone_refuses_rows_with_images_or_hands_their_handles_on(
    sqlite_database: Engine, remember: Remember, chain_maker: Any, media: MediaStore, tmp_path: Path
) -> None:
    remember(sqlite_database, a_chain(chain_maker, media))
    found = build(sqlite_database)
    (row,) = found.rows
    with pytest.raises(PlanMismatch, match=f"row '{row.row_id}' shows images, which this batch does not carry"):
        train_data(found.rows, {"r1": 1.0})
    assert train_data(found.rows, {"r1": 1.0}, media_apart=True)["input_ids"].shape == (1, row.length)
    stream_indexed([Part(rows=found.rows, counts=None, position=found.position)], tmp_path / "rows", found.selection)
    ((first, *_),) = pq.read_table(tmp_path / "rows" / "rows.parquet")["media"].to_pylist()
    assert first == row.media[0].as_json()


def test_an_archive_gives_the_same_rows_with_the_same_media(
    database: Engine, remember: Remember, make_chain_maker: Any, media: MediaStore, tmp_path: Path
) -> None:
    remember(database, a_chain(make_chain_maker(1), media))
    remember(database, a_chain(make_chain_maker(2), media, "r2"))  # shown the same images
    url = str(tmp_path / "archive")
    found = seal(database, open_archive(url, new=True), before=2**62, name="one")
    assert (found.events["media_object"], found.events["call_media"]) == (3, 6)
    assert not seal(database, open_archive(url), before=2**62, name="two").events
    empty = open_database(f"sqlite:///{tmp_path}/empty.db")
    upgrade(empty)
    digests = {build(each, archive=url).digest() for each in (database, empty)} | {build(database).digest()}
    assert len(digests) == 1
    assert outlined(empty, archive=url).table.num_rows == 2
    empty.dispose()
