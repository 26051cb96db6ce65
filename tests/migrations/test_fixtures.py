"""A log of each released revision, made by that revision, upgrades and gives the rows that it gave then."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, make_url, select

from replay.rowset import build
from store import log, migrate
from store.columns import PLACES, event_of
from store.database import open_database, read, write

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.fixture(params=sorted(EXPECTED))
def revision(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def restored(empty_url: str, revision: str) -> Iterator[Engine]:
    """The revision's fixture database."""
    url = make_url(empty_url)
    dialect = url.get_backend_name()
    words = gzip.decompress((FIXTURES / f"{revision}.{dialect}.sql.gz").read_bytes()).decode()
    if dialect == "sqlite":
        with closing(sqlite3.connect(url.database or "")) as connection:
            connection.executescript(words)
    else:
        shown = url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(shown, autocommit=True) as connection:
            connection.execute(words.encode())
    database = open_database(empty_url)
    yield database
    database.dispose()


def stored(database: Engine) -> int:
    """How many events there are, every one with the digest that it was stored with."""
    count = 0
    with read(database) as connection:
        for place in PLACES:
            for row in connection.execute(select(place.table)).mappings():
                assert event_of(place.event, row).digest() == row["digest"], row
                count += 1
    return count


def test_a_log_of_every_revision_upgrades_and_gives_the_same_rows(restored, revision, make_chain_maker):
    assert migrate.current(restored) == revision
    migrate.upgrade(restored)
    migrate.require_current(restored)
    found = build(restored)
    assert len(found.rows) == EXPECTED[revision]["rows"] > 0
    assert found.digest() == EXPECTED[revision]["rows_sha256"]
    assert stored(restored) == EXPECTED[revision]["events"]
    with write(restored) as connection:
        log.append(connection, make_chain_maker(7)(rollout_id="later"))
    assert stored(restored) == EXPECTED[revision]["events"] + 3


def test_there_is_a_fixture_of_every_revision_on_both_databases():
    revisions = {each.name for each in migrate.history()}
    assert set(EXPECTED) == revisions
    files = {f"{revision}.{dialect}.sql.gz" for revision in revisions for dialect in ("sqlite", "postgresql")}
    assert files == {file.name for file in FIXTURES.glob("*.gz")}
