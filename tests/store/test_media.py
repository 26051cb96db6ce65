"""Media bytes: stored once, whole, and only where they can be."""

from __future__ import annotations

import hashlib

import pytest

from store.errors import MediaDamaged, MediaMissing, MediaUnavailable
from store.media import open_media


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("TURNLOG_MEDIA", raising=False)


def test_bytes_come_back_by_their_sha256_and_are_stored_once(tmp_path):
    media = open_media(str(tmp_path / "media"), "sqlite:///turnlog.db")
    address = media.put(b"pixels")
    assert address == hashlib.sha256(b"pixels").digest()
    assert media.put(b"pixels") == address
    assert media.get(address) == b"pixels"
    assert media.get(media.put(b"")) == b""
    stored = [path for path in (tmp_path / "media").rglob("*") if path.is_file()]
    assert len(stored) == 2


def test_the_folder_beside_the_sqlite_file_is_the_default(tmp_path, monkeypatch):
    open_media(None, f"sqlite:///{tmp_path}/log.db").put(b"pixels")
    assert (tmp_path / "log.media").is_dir()
    monkeypatch.setenv("TURNLOG_MEDIA", str(tmp_path / "elsewhere"))
    open_media(None, f"sqlite:///{tmp_path}/log.db").put(b"pixels")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_postgres_log_needs_a_place_of_its_own():
    with pytest.raises(MediaUnavailable, match="set TURNLOG_MEDIA to a writable place") as caught:
        open_media(None, "postgresql://user:hunter2@h/d")
    assert "hunter2" not in str(caught.value)


def test_other_stores_are_reached_by_url():
    media = open_media("memory://turnlog-test", "sqlite:///turnlog.db")
    assert media.get(media.put(b"pixels")) == b"pixels"


@pytest.mark.parametrize("place", ["{tmp_path}/file/media", "{tmp_path}/file", "/proc/turnlog", "nonsense://media"])
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path, place):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(MediaUnavailable, match=r"cannot be written .*: set TURNLOG_MEDIA to a writable place"):
        open_media(place.format(tmp_path=tmp_path), "sqlite:///turnlog.db")


def test_a_place_that_vanishes_is_told_when_it_is_used(tmp_path):
    media = open_media(str(tmp_path / "media"), "sqlite:///turnlog.db")
    (tmp_path / "media").rmdir()
    (tmp_path / "media").write_text("not a folder")
    with pytest.raises(MediaUnavailable):
        media.put(b"pixels")


def test_missing_and_damaged_bytes_are_told_apart_from_good_ones(tmp_path):
    media = open_media(str(tmp_path / "media"), "sqlite:///turnlog.db")
    with pytest.raises(MediaMissing, match="0" * 64):
        media.get(bytes(32))
    address = media.put(b"pixels")
    (path,) = (path for path in (tmp_path / "media").rglob("*") if path.is_file())
    path.write_bytes(b"pixel")
    with pytest.raises(MediaDamaged, match="other bytes than were stored"):
        media.get(address)
