"""Media bytes by content address, on any store fsspec can reach.

Knows bytes and where they are; does not know images, calls or tokens. Law: the same bytes are stored once, under their
own SHA-256, and are whole as soon as their address is known.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import make_url

from store.database import shown_url
from store.errors import MediaDamaged, MediaMissing, MediaUnavailable, MediaUnreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object that lies in a media store."""

    address: bytes
    size: int
    written_at: datetime | None
    """By the store's clock; None where the store does not say."""


class MediaStore:
    """One place for media bytes.

    >>> media = open_media(str(getfixture("tmp_path")), "sqlite:///turnlog.db")
    >>> media.get(media.put(b"pixels"))
    b'pixels'
    """

    def __init__(self, url: str, files: AbstractFileSystem, root: str) -> None:
        self.url = url
        self._files = files
        self._root = root

    def put(self, data: bytes) -> bytes:
        """Store the bytes if they are new, durably; returns their address, the 32 bytes of their SHA-256."""
        address = hashlib.sha256(data).digest()
        path = self._path(address)
        try:
            if not self._files.exists(path):
                self._write_whole(path, data)
        except Exception as error:  # each fsspec store raises its own kinds
            raise MediaUnavailable(self.url, _cause(error)) from error
        return address

    def get(self, address: bytes) -> bytes:
        """The bytes at an address, those that were stored. Raises MediaMissing, MediaDamaged, MediaUnreadable."""
        try:
            data = cast("bytes", self._files.cat_file(self._path(address)))
        except FileNotFoundError as error:
            raise MediaMissing(self.url, address) from error
        except Exception as error:
            raise MediaUnreadable(self.url, f"{address.hex()}: {_cause(error)}") from error
        if hashlib.sha256(data).digest() != address:
            raise MediaDamaged(self.url, address)
        return data

    def objects(self) -> Iterator[Stored]:
        """What lies here, in the order of addresses. Raises MediaUnreadable."""
        try:
            found = cast("dict[str, dict[str, Any]]", self._files.find(self._root, detail=True))
        except Exception as error:
            raise MediaUnreadable(self.url, _cause(error)) from error
        for path, said in sorted(found.items()):
            name = path.rpartition("/")[2]
            if len(name) == 64 and all(letter in "0123456789abcdef" for letter in name):
                yield Stored(address=bytes.fromhex(name), size=int(said["size"]), written_at=_written_at(said))

    def delete(self, address: bytes) -> None:
        """Remove an object: for one that no event names. Raises MediaMissing, MediaUnavailable."""
        try:
            self._files.rm_file(self._path(address))
        except FileNotFoundError as error:
            raise MediaMissing(self.url, address) from error
        except Exception as error:
            raise MediaUnavailable(self.url, _cause(error)) from error

    def prove_writable(self) -> None:
        """Write a probe and delete it. Raises MediaUnavailable."""
        probe = f"{self._root}/probe-{uuid4().hex}"
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(probe, b"")
            self._files.rm_file(probe)
        except Exception as error:
            raise MediaUnavailable(self.url, _cause(error)) from error

    def _path(self, address: bytes) -> str:
        name = address.hex()
        return f"{self._root}/{name[:2]}/{name}"

    def _write_whole(self, path: str, data: bytes) -> None:
        """Object stores show an object when it is whole; a local file is written aside, synced and renamed."""
        if not isinstance(self._files, LocalFileSystem):
            self._files.pipe_file(path, data)
            return
        aside = Path(f"{path}.{uuid4().hex}")
        aside.parent.mkdir(exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
        _sync(aside.parent)
        _sync(aside.parent.parent)


def open_media(url: str | None, database_url: str, *, writable: bool = True) -> MediaStore:
    """The media store at `url`, else at $TURNLOG_MEDIA, else in a folder beside the SQLite file.

    It is proven writable, unless it is only read. Raises MediaUnavailable.
    """
    given = url or os.environ.get("TURNLOG_MEDIA")
    if not given:
        log = make_url(database_url)
        if log.get_backend_name() != "sqlite":
            raise MediaUnavailable(shown_url(database_url), "a PostgreSQL log has no folder beside it")
        given = str(Path(log.database or "").with_suffix(".media"))
    try:
        files, root = fsspec.url_to_fs(given)
    except (ImportError, ValueError, OSError) as error:
        raise MediaUnavailable(shown_url(given), _cause(error)) from error
    media = MediaStore(shown_url(given), files, str(root).rstrip("/"))
    if writable:
        media.prove_writable()
    return media


def _written_at(said: dict[str, Any]) -> datetime | None:
    """When an object was written, by the names that stores have for it."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        at = said.get(name)
        if isinstance(at, int | float):
            return datetime.fromtimestamp(at, UTC)
        if isinstance(at, datetime):
            return at if at.tzinfo else at.replace(tzinfo=UTC)
    return None


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__
