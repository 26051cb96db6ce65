"""The log made by playing the recordings (tests/played/make.py), in a database of the newest schema."""

from __future__ import annotations

import gzip
from pathlib import Path

from sqlalchemy import Engine

from store import copy, migrate
from store.database import open_database

PLAYED = Path(__file__).parents[1] / "played" / "played.db.gz"


def played_log(folder: Path) -> Engine:
    """A fresh copy in SQLite."""
    file = folder / "played.db"
    file.write_bytes(gzip.decompress(PLAYED.read_bytes()))
    database = open_database(f"sqlite:///{file}")
    migrate.upgrade(database)
    return database


def played_into(database: Engine, folder: Path) -> None:
    """The same events in another log."""
    source = played_log(folder)
    copy.copy(source, database)
    source.dispose()
