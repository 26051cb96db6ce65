"""A file that holds events while the database is away, and hands them over in order when it is back.

Knows frames of bytes, one file and the log's `append`; does not know threads that submit, or why the database is away.
Law: what `append` accepted is on the disk, whole and in order, until the log has it or has refused it; then what was
refused is in a file beside it, with the reason. Handing over the same events twice changes nothing.

A frame is one submission: a mark, the length, the CRC-32, then its events as compressed JSON. A process that is killed
in mid-write leaves a last frame that is too short or has another CRC; nobody was told that it is safe, so it is cut.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, unquote

import zstandard
from pydantic import Field, TypeAdapter
from sqlalchemy import Engine

from store import log
from store.claim import claim
from store.database import write
from store.errors import LogError, LogUnavailable, SpoolTaken
from store.events import CallAdmitted, Event

logger = logging.getLogger("turnlog")

LIMIT = 4 << 30
"""Bytes of a spool beyond which calls are refused, when nobody says."""
_FOR_CALLS_IN_FLIGHT = 0.1
"""Share of the limit that new calls leave to those that were admitted before."""
_FRAME = struct.Struct("<4sII")
_MARK = b"tls1"
_PIECE_EVENTS, _PIECE_BYTES = 256, 8 << 20
"""What one transaction takes over at most: events, and bytes of frames."""
_SUFFIX = ".spool"
_EVENTS: TypeAdapter[list[Event]] = TypeAdapter(list[Annotated[Event, Field(discriminator="kind")]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    events: tuple[Event, ...]
    end: int
    """Where the next frame begins."""


class Spool:
    """One worker's spool; written by one thread, drained by another.

    >>> from store.events import RolloutOpened
    >>> spool = Spool(getfixture("tmp_path"), "host:8000")
    >>> spool.append([[RolloutOpened(rollout_id="r1", opened_at=1)]])
    >>> spool.holds_events, spool.path.name
    (True, 'host%3A8000.spool')
    >>> spool.close()
    """

    def __init__(self, folder: Path, worker: str, *, limit: int = LIMIT) -> None:
        """Claim the spool of this worker, and cut what a killed process left half written.

        Raises SpoolTaken while another process holds it, LogUnavailable when the folder cannot be used.
        """
        self.path = folder / f"{quote(worker, safe='')}{_SUFFIX}"
        self.worker = worker
        self.limit = limit
        self.drained = 0
        """Submissions handed over."""
        self.refused = 0
        """Of these, those that the log did not take."""
        self._lock = threading.Lock()  # over the two places below
        self._read_to = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = claim(self.path)
            _sync_folder(folder)
            if held is None:
                raise SpoolTaken(str(self.path), worker)
            self._held = held
            self._file = held.fileno()
            self._end = self._cut(os.fstat(self._file).st_size)
        except OSError as error:
            raise LogUnavailable(f"open the spool {str(self.path)!r}", str(error)) from error

    @property
    def holds_events(self) -> bool:
        """Whether anything is in it that the log may not have."""
        return self._end > 0

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self._end

    def append(self, submissions: Sequence[Sequence[Event]]) -> None:
        """Put the submissions on the disk, in order and all of them; returns when they would survive a power cut.

        Raises LogUnavailable when there is no room for them; then nothing of them is kept.
        """
        data = b"".join(_frame(events) for events in submissions)
        new_calls = any(isinstance(event, CallAdmitted) for events in submissions for event in events)
        limit = int(self.limit * (1 - _FOR_CALLS_IN_FLIGHT)) if new_calls else self.limit
        with self._lock:
            if self._end + len(data) > limit:
                raise LogUnavailable(
                    "spool an event",
                    f"{str(self.path)!r} holds {self._end} of {self.limit} bytes, which TURNLOG_SPOOL_LIMIT says",
                )
            try:
                written = 0
                while written < len(data):
                    written += os.pwrite(self._file, memoryview(data)[written:], self._end + written)
                os.fdatasync(self._file)
            except OSError as error:
                with suppress(OSError):  # what stays is written over, or cut at the next start
                    self._shorten(self._end)
                raise LogUnavailable(f"spool an event to {str(self.path)!r}", str(error)) from error
            self._end += len(data)

    def drain(self, database: Engine) -> None:
        """Append all that it holds to the log, in order, also what comes meanwhile; then it is empty.

        What the log refuses goes to a file `.refused` beside it, and the rest goes on. Raises LogUnavailable when the
        database is away: what was not handed over stays, and the next call goes on there.
        """
        while piece := self._piece():
            try:
                _append(database, [frame.events for frame in piece])
            except LogUnavailable:
                raise
            except LogError:  # told apart one by one
                for frame in piece:
                    self._hand_over(database, frame)
            self._read_to = piece[-1].end
            self.drained += len(piece)

    def take_over(self, database: Engine) -> None:
        """Drain what an earlier process left, and tell. Raises LogUnavailable."""
        if self.holds_events:
            self.drain(database)
            logger.warning(
                "spool %s of an earlier process: %d submissions handed over, of which the log refused %d",
                self.path, self.drained, self.refused,
            )  # fmt: skip

    def _hand_over(self, database: Engine, frame: _Frame) -> None:
        try:
            _append(database, [frame.events])
        except LogUnavailable:
            raise
        except LogError as error:
            self._keep_refused(frame.events, error)
            self.refused += 1

    def close(self) -> None:
        """Let go of the file; what it holds is for the next process of this worker, or for `turnlog db drain`."""
        self._held.close()

    def _piece(self) -> list[_Frame]:
        """The next frames to hand over; none when all are, and then the file is empty."""
        with self._lock:
            if self._read_to == self._end:
                self._shorten(0)
                self._read_to = self._end = 0
                return []
            end = self._end
        piece: list[_Frame] = []
        events = 0
        for frame in self._frames(self._read_to, end):
            piece.append(frame)
            events += len(frame.events)
            if events >= _PIECE_EVENTS or frame.end - self._read_to >= _PIECE_BYTES:
                break
        return piece

    def _frames(self, at: int, end: int) -> Iterator[_Frame]:
        """Whole frames from one place in the file to another; ends early at one that is not whole."""
        while at < end:
            head = os.pread(self._file, _FRAME.size, at)
            if len(head) < _FRAME.size:
                return
            mark, length, crc = _FRAME.unpack(head)
            data = os.pread(self._file, length, at + _FRAME.size) if mark == _MARK else b""
            if mark != _MARK or len(data) < length or zlib.crc32(data) != crc:
                return
            at += _FRAME.size + length
            yield _Frame(events=tuple(_EVENTS.validate_json(zstandard.ZstdDecompressor().decompress(data))), end=at)

    def _cut(self, size: int) -> int:
        """Cut what follows the last whole frame, and tell; kept beside it, in case the disk and no kill is to blame."""
        end = 0
        for frame in self._frames(0, size):
            end = frame.end
        if end < size:
            rest = self.path.with_suffix(f"{_SUFFIX}.cut")
            _append_to(rest, os.pread(self._file, size - end, end))
            self._shorten(end)
            logger.error(
                "spool %s ended in %d bytes of no whole frame, as a process leaves that is killed while it writes; "
                "nobody was told that they are safe: cut, kept in %s", self.path, size - end, rest,
            )  # fmt: skip
        return end

    def _keep_refused(self, events: Sequence[Event], error: Exception) -> None:
        refused = self.path.with_suffix(".refused")
        told = {"why": str(error), "events": json.loads(_EVENTS.dump_json([*events]))}
        _append_to(refused, json.dumps(told).encode() + b"\n")
        logger.error("the log refuses what was spooled, kept in %s with the reason: %s", refused, error)

    def _shorten(self, size: int) -> None:
        os.ftruncate(self._file, size)
        os.fsync(self._file)


def default_folder(sqlite_file: str | None) -> Path:
    """Where spools are when nobody says: beside the SQLite file, else in the working directory.

    >>> default_folder("logs/turnlog.db").as_posix(), default_folder(None).as_posix()
    ('logs/turnlog.spool', 'turnlog.spool')
    """
    return Path("turnlog.spool") if sqlite_file is None else Path(sqlite_file).with_suffix(_SUFFIX)


def workers_with_spools(folder: Path) -> list[str]:
    """Names of the workers that have a spool in this folder, empty ones too."""
    return sorted(unquote(path.stem) for path in folder.glob(f"*{_SUFFIX}"))


def left_over(folder: Path, worker: str) -> bool:
    """Whether an earlier process of this worker left events in a spool."""
    path = folder / f"{quote(worker, safe='')}{_SUFFIX}"
    return path.is_file() and path.stat().st_size > 0


def _frame(events: Sequence[Event]) -> bytes:
    data = zstandard.ZstdCompressor(level=1).compress(_EVENTS.dump_json([*events]))
    return _FRAME.pack(_MARK, len(data), zlib.crc32(data)) + data


def _append(database: Engine, submissions: Sequence[Sequence[Event]]) -> None:
    with write(database) as connection:
        log.append(connection, (event for events in submissions for event in events))


def _append_to(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A new file's name is durable only then."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
