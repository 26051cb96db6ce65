"""Media bytes by content address, on any store fsspec can reach.

Knows bytes and where they are; does not know images, calls or tokens. Law: the same bytes are stored once, under their
own SHA-256, and are whole as soon as their address is known.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import cast
from uuid import uuid4

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import make_url

from store.database import shown_url
from store.errors import MediaUnavailable


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
        """The bytes at an address. Raises MediaUnavailable when they are missing or are not those that were stored."""
        try:
            data = cast("bytes", self._files.cat_file(self._path(address)))
        except Exception as error:
            raise MediaUnavailable(self.url, f"{address.hex()}: {_cause(error)}") from error
        if hashlib.sha256(data).digest() != address:
            raise MediaUnavailable(self.url, f"{address.hex()} holds other bytes than were stored")
        return data

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


def open_media(url: str | None, database_url: str) -> MediaStore:
    """The media store at `url`, else at $TURNLOG_MEDIA, else in a folder beside the SQLite file; proven writable.

    Raises MediaUnavailable.
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
    media.prove_writable()
    return media


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__
