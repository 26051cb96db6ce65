"""Where sealed events lie: an archive of Parquet files and the seals that name them.

Knows folders, seals and whole files; does not know logs, or what is sealed when. Law: a file belongs to the archive
when a seal names it, and a seal is written last, whole and once: what a killed run left is invisible. A token of a file
whose SHA-256 is not its seal's is never read.

    ARCHIVE/seals/00001.json                                    what one run sealed, and the hash of each of its files
    ARCHIVE/model_call/month=2026-11/00001-5f0c-0000.parquet    its completed calls, in chain order; so each table

Any place fsspec reaches can hold one. The month is that in which a rollout was opened, so that
`read_parquet('ARCHIVE/model_call/month=2026-11/*.parquet')` is a question about these rollouts in any tool; a tool that
goes by the files alone also sees what a killed run left.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy import BigInteger, Double, LargeBinary, SmallInteger, Table, Text

from replay.errors import ArchiveDamaged, ArchiveUnavailable, SealTaken
from store import hashing, schema
from store.database import shown_url
from store.settled import Position

_ROW_GROUP = 8192
"""Lines of a row group: what a reading of few rollouts decodes at least."""


class SealedFile(BaseModel):
    """One Parquet file of the archive, as its seal names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    """Within the archive."""
    table: str
    lines: int
    low: int
    """Sequences of its events."""
    high: int
    size: int
    sha256: str
    chained: bool = False
    """Of calls: whether each one's chain hash was derived from its tokens and its parent's, in the file too."""


class Seal(BaseModel):
    """What one run sealed: the manifest that makes its files part of the archive."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[1, 2] = 2
    """1 says nothing of chains and has no digest of its own."""
    number: int
    revision: str
    """Of the schema that its tables have."""
    position: str
    """Of the log when it was sealed: a rollout's events that are sealed here are all that it had by then."""
    before: int
    """Unix microseconds: every call of its rollouts is older."""
    rollouts: int
    events: Mapping[str, int]
    """How many, by table."""
    files: tuple[SealedFile, ...]
    digest: str | None = None
    """In hex, of all that it says beside; given by `Archive.add`."""

    @property
    def whole(self) -> bool:
        """Whether it says what it said when it was written."""
        if self.version == 1:
            return self.digest is None and not any(file.chained for file in self.files)
        return self.digest == self.derived()

    def derived(self) -> str:
        """Its digest."""
        said = self.model_dump(mode="json", exclude={"digest"})
        return hashing.tagged_digest("seal", hashing.canonical_json(said)).hex()


class Archive:
    """One archive as it was when it was opened."""

    def __init__(self, url: str, files: AbstractFileSystem, root: str) -> None:
        self.url = url
        """Without its secrets."""
        self._files = files
        self._root = root
        self.seals: tuple[Seal, ...] = tuple(self._seals())

    @cached_property
    def files(self) -> Mapping[str, tuple[SealedFile, ...]]:
        """The files of each table, in the order in which they were sealed."""
        named = [file for seal in self.seals for file in seal.files]
        return {table: tuple(file for file in named if file.table == table) for table in schema.metadata.tables}

    def whole(self, file: SealedFile) -> bytes:
        """A file's bytes, those that were sealed. Raises ArchiveDamaged."""
        try:
            data = cast("bytes", self._files.cat_file(self._at(file.path)))
        except FileNotFoundError as error:
            raise ArchiveDamaged(self.url, file.path, "is missing") from error
        except Exception as error:  # each fsspec store raises its own kinds
            raise ArchiveUnavailable(self.url, f"{file.path}: {_cause(error)}") from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise ArchiveDamaged(self.url, file.path, "holds other bytes than were sealed")
        return data

    def lines(self, file: SealedFile, columns: pa.Schema, whole: bytes | None = None) -> pa.Table:
        """Some columns of a file, as the schema types them; one that was not there when it was sealed is null.

        Args:
            file: to read.
            columns: their names and types.
            whole: its bytes where they were read already, else only what is asked for is read, by checksums of pages.
        """
        try:
            opened_as = self._opened(file) if whole is None else pa.BufferReader(whole)
            with pq.ParquetFile(opened_as, page_checksum_verification=whole is None) as opened:
                there = [name for name in columns.names if name in opened.schema_arrow.names]
                found = opened.read(there)
        except FileNotFoundError as error:
            raise ArchiveDamaged(self.url, file.path, "is missing") from error
        except (pa.ArrowException, OSError) as error:
            raise ArchiveDamaged(self.url, file.path, f"cannot be read ({_cause(error)})") from error
        if found.num_rows != file.lines:
            raise ArchiveDamaged(self.url, file.path, f"holds {found.num_rows} events, its seal says {file.lines}")
        return typed(found, columns)

    def positions(self) -> Iterator[Position]:
        """Where the log was at each seal."""
        return (Position.parse(seal.position) for seal in self.seals)

    def write(self, path: str, data: bytes) -> None:
        """Write a file that no seal names yet."""
        self._write(path, data, once=False)

    def add(self, seal: Seal) -> None:
        """Write the seal: from here on its files belong to the archive. Raises SealTaken when its number is taken."""
        whole = seal.model_copy(update={"digest": seal.derived()})
        self._write(_seal_path(seal.number), whole.model_dump_json(indent=1).encode(), once=True)

    def _seals(self) -> list[Seal]:
        folder = self._at("seals")
        try:
            names = sorted(self._files.ls(folder, detail=False)) if self._files.isdir(folder) else []
            texts = {name: cast("bytes", self._files.cat_file(name)) for name in names if name.endswith(".json")}
        except Exception as error:
            raise ArchiveUnavailable(self.url, _cause(error)) from error
        found: list[Seal] = []
        for name, text in texts.items():
            path = f"seals/{name.rpartition('/')[2]}"
            try:
                seal = Seal.model_validate_json(text)
            except ValidationError as error:
                raise ArchiveDamaged(
                    self.url, path, f"is no seal of this release ({error.errors()[0]['msg']})"
                ) from error
            if not seal.whole:
                raise ArchiveDamaged(self.url, path, "does not say what it said when it was written")
            found.append(seal)
        if [seal.number for seal in found] != [*range(1, len(found) + 1)]:
            numbers = ", ".join(str(seal.number) for seal in found)
            raise ArchiveDamaged(self.url, "seals", f"has the seals {numbers}, which are not all since the first")
        return found

    def _opened(self, file: SealedFile) -> object:
        path = self._at(file.path)
        return path if isinstance(self._files, LocalFileSystem) else self._files.open(path, "rb")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _write(self, path: str, data: bytes, *, once: bool) -> None:
        """Object stores show an object when it is whole; a local file is written aside, synced and linked."""
        whole = self._at(path)
        try:
            self._files.makedirs(whole.rpartition("/")[0], exist_ok=True)
            if not isinstance(self._files, LocalFileSystem):
                self._files.pipe_file(whole, data, mode="create" if once else "overwrite")
                return
            aside = Path(f"{whole}.{uuid4().hex}.part")
            try:
                with aside.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                if once:
                    os.link(aside, whole)
                else:
                    aside.rename(whole)
                _sync(aside.parent)
            finally:
                aside.unlink(missing_ok=True)
        except FileExistsError as error:
            raise SealTaken(self.url, path) from error
        except Exception as error:
            raise ArchiveUnavailable(self.url, _cause(error)) from error


def archive_url(url: str | None = None) -> str | None:
    """Where the archive is: `url`, else $TURNLOG_ARCHIVE; None for a log alone. An empty `url` is a log alone too."""
    return (os.environ.get("TURNLOG_ARCHIVE") if url is None else url) or None


def open_archive(url: str, *, new: bool = False) -> Archive:
    """The archive at an fsspec URL or in a folder. Raises ArchiveUnavailable, also when nothing is sealed there.

    Args:
        url: such as `archive`, `s3://bucket/turnlog` or `memory://archive`.
        new: whether there may be nothing yet.
    """
    try:
        files, root = fsspec.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise ArchiveUnavailable(shown_url(url), _cause(error)) from error
    found = Archive(shown_url(url), files, str(root).rstrip("/"))
    if not found.seals and not new:
        raise ArchiveUnavailable(found.url, "nothing is sealed there")
    return found


def columns_of(table: Table) -> pa.Schema:
    """A table's columns in Parquet: ids are UUIDs, times microseconds, JSON is text, arrays bytes without a codec."""
    return pa.schema([pa.field(column.name, _type(column.type), nullable=bool(column.nullable)) for column in table.c])


def parquet(lines: pa.Table) -> bytes:
    """The lines as a Parquet file in memory: zstd over whole columns, a checksum a page.

    Arrays of many events are compressed together, after their lengths, so that reading them in their order gives one
    buffer in which they lie end to end.
    """
    names = lines.schema.names
    out = pa.BufferOutputStream()
    options: dict[str, Any] = {
        "compression": {name: "none" if name == "logprobs" else "zstd" for name in names},  # noise does not compress
        "compression_level": {name: 3 for name in names if name != "logprobs"},
        "use_dictionary": [field.name for field in lines.schema if pa.types.is_string(field.type)],
        "column_encoding": {name: "DELTA_LENGTH_BYTE_ARRAY" for name in names if name in ("token_ids", "logprobs")},
        "write_page_checksum": True,
        "store_schema": False,
    }
    with pq.ParquetWriter(out, lines.schema, **options) as writer:
        writer.write_table(lines, row_group_size=_ROW_GROUP)
    return cast("bytes", out.getvalue().to_pybytes())


def typed(lines: pa.Table, columns: pa.Schema) -> pa.Table:
    """The columns of the schema, in its types; what the lines do not have is null."""
    return pa.Table.from_arrays(
        [
            _stored(lines[field.name]).cast(field.type)
            if field.name in lines.schema.names
            else pa.nulls(lines.num_rows, field.type)
            for field in columns
        ],
        schema=columns,
    )


def _stored(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """An id's 16 bytes; any other column as it is."""
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)


def _type(kind: object) -> pa.DataType:
    if isinstance(kind, schema.Id):
        return pa.uuid()
    if isinstance(kind, Text | schema.CanonicalJson):
        return pa.string()
    if isinstance(kind, SmallInteger):
        return pa.int16()
    if isinstance(kind, BigInteger):
        return pa.int64()
    if isinstance(kind, Double):
        return pa.float64()
    assert isinstance(kind, LargeBinary), f"no Parquet type is known for {kind!r}"
    return pa.binary()


def _seal_path(number: int) -> str:
    return f"seals/{number:05}.json"


def _sync(folder: Path) -> None:
    """Make a name in the folder survive a power cut."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _cause(error: BaseException) -> str:
    return str(error) or type(error).__name__
