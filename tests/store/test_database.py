"""From a URL to a database that keeps its promises, or to an error that says what to do."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import exc, make_url, select, text

from store import log, migrate, schema
from store.database import claim_sqlite, database_url, open_database, read, read_one, shown_url, write
from store.errors import BadUrl, LogUnavailable
from store.events import RolloutOpened


@pytest.mark.parametrize(
    ("given", "opened"),
    [
        ("postgres://a:b@h/d", "postgresql+psycopg://a:b@h/d"),
        ("postgresql://a:b%40c@h:1/d?sslmode=require", "postgresql+psycopg://a:b%40c@h:1/d?sslmode=require"),
        ("postgresql+psycopg://h/d", "postgresql+psycopg://h/d"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
    ],
)
def test_a_url_of_a_supported_database_names_its_driver(given, opened):
    assert database_url(given) == opened


def test_without_a_url_the_environment_counts_then_a_file_in_this_folder(monkeypatch):
    monkeypatch.delenv("TURNLOG_URL", raising=False)
    assert database_url() == "sqlite:///turnlog.db"
    monkeypatch.setenv("TURNLOG_URL", "postgres://h/d")
    assert database_url() == "postgresql+psycopg://h/d"
    assert database_url("sqlite:///b.db") == "sqlite:///b.db"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://h/d", "names a mysql database"),
        ("duckdb:///a.db", "names a duckdb database"),
        ("postgresql+asyncpg://h/d", r"names a postgresql\+asyncpg database"),
        ("sqlite://", "a log in memory is not durable"),
        ("sqlite:///:memory:", "a log in memory is not durable"),
        ("turnlog.db", "is not a URL"),
        ("postgresql://h:port/d", "is not a URL"),
    ],
)
def test_any_other_url_is_refused_with_the_forms_to_use(url, why):
    with pytest.raises(BadUrl, match=why + ".*: use sqlite:///FILE or postgresql://"):
        open_database(url)


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:hunter2@h/d",
        "mysql://user:hunter2@x@h/d",
        "mysql://h/d?password=hunter2&x=1",
        "://user:hunter2@h/d",
        "postgresql://user:hunter2@h:port/d",
    ],
)
def test_no_message_shows_a_password(url):
    with pytest.raises(BadUrl) as caught:
        open_database(url)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in shown_url(url)


def test_a_database_that_cannot_be_reached_is_unavailable_and_its_password_stays_hidden():
    database = open_database("postgresql://user:hunter2@127.0.0.1:1/turnlog")
    for use in (read, write):
        with pytest.raises(LogUnavailable, match="check TURNLOG_URL and retry") as caught, use(database):
            pytest.fail("connected to nothing")
        assert "hunter2" not in str(caught.value)
        assert "refused" in caught.value.cause
    database.dispose()


def test_an_option_the_driver_does_not_know_is_told():
    database = open_database("postgresql://127.0.0.1:1/turnlog?nonsense=1")
    with pytest.raises(LogUnavailable, match="nonsense"), read(database):
        pytest.fail("connected to nothing")
    database.dispose()


def test_a_missing_folder_is_named_with_its_remedy(tmp_path):
    with pytest.raises(LogUnavailable, match=r"folder '.*/nowhere' of the SQLite file does not exist: create it"):
        open_database(f"sqlite:///{tmp_path}/nowhere/turnlog.db")


def test_a_file_that_is_no_database_is_unavailable(tmp_path):
    (tmp_path / "turnlog.db").write_text("this is not a database, but it is longer than a header of one" * 100)
    database = open_database(f"sqlite:///{tmp_path}/turnlog.db")
    with pytest.raises(LogUnavailable, match="file is not a database"), read(database):
        pytest.fail("read a file that is no database")
    database.dispose()


def test_a_file_that_cannot_be_made_is_unavailable_at_once():
    database = open_database("sqlite:////proc/turnlog.db")
    with pytest.raises(LogUnavailable, match="unable to open database file"):
        migrate.upgrade(database)
    database.dispose()


def test_sqlite_is_prepared_for_durable_commits(sqlite_database):
    with read(sqlite_database) as connection:
        settings = {
            name: connection.exec_driver_sql(f"pragma {name}").scalar()
            for name in ("journal_mode", "page_size", "synchronous", "busy_timeout")
        }
    assert settings == {"journal_mode": "wal", "page_size": 16384, "synchronous": 2, "busy_timeout": 30000}


def test_a_write_that_raises_leaves_nothing(database):
    def write_and_fail() -> None:
        with write(database) as connection:
            log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=1)])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    with read(database) as connection:
        assert log.rollouts(connection) == []


def test_a_read_sees_one_snapshot_whatever_is_written_meanwhile(database):
    with read(database) as reader:
        assert log.rollouts(reader) == []
        with write(database) as writer:
            log.append(writer, [RolloutOpened(rollout_id="r1", opened_at=1)])
        assert log.rollouts(reader) == []
    with read(database) as reader:
        assert len(log.rollouts(reader)) == 1


def test_a_read_cannot_write(database):
    event = RolloutOpened(rollout_id="r1", opened_at=1)
    with pytest.raises((LogUnavailable, exc.DBAPIError), match=r"readonly|read-only"), read(database) as connection:
        log.append(connection, [event])
    with write(database) as connection:
        log.append(connection, [event])
    with read(database) as connection:
        assert log.rollouts(connection) == [event]


def test_a_write_waits_for_the_lock_of_another_and_sees_what_it_wrote(sqlite_database):
    file = str(sqlite_database.url.database)
    with closing(sqlite3.connect(file, isolation_level=None, timeout=0)) as other:
        with write(sqlite_database) as connection:
            connection.execute(select(schema.rollout))
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("begin immediate")
        other.execute("begin immediate")
        other.execute("rollback")


def test_a_broken_rule_is_told_as_one(database):
    with pytest.raises(exc.IntegrityError), write(database) as connection:
        connection.execute(text("insert into rollout (rollout_id) values ('r1')"))


@pytest.mark.postgres
def test_a_connection_that_is_cut_is_unavailable_and_the_next_one_works(postgres_database):
    cut = text("select pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(LogUnavailable, match="terminat"), write(postgres_database) as connection:
        connection.execute(cut)
    with read(postgres_database) as connection:
        assert log.rollouts(connection) == []


@pytest.mark.postgres
def test_a_connection_that_is_closed_while_it_rests_is_replaced_unseen(postgres_database, monkeypatch):
    monkeypatch.setattr("store.database._REST_SECONDS", 0)
    backend = text("select pg_backend_pid()")
    with read(postgres_database) as connection:
        rested = connection.scalar(backend)
    other = open_database(postgres_database.url.render_as_string(hide_password=False))
    with write(other) as connection:
        connection.execute(text(f"select pg_terminate_backend({rested}, 10000)"))
    other.dispose()
    with read(postgres_database) as connection:
        assert connection.scalar(backend) != rested


@pytest.mark.postgres
def test_a_connection_that_breaks_in_use_is_not_used_again(postgres_database):
    with pytest.raises(LogUnavailable, match="terminat"), read_one(postgres_database) as connection:
        connection.connection.cursor().execute("select pg_terminate_backend(pg_backend_pid())")
    with read_one(postgres_database) as connection:
        assert log.rollouts(connection) == []


def test_looking_at_a_log_does_not_create_one(tmp_path):
    database = open_database(f"sqlite:///{tmp_path}/turnlog.db")
    assert migrate.current(database) is None
    assert list(tmp_path.iterdir()) == []
    database.dispose()


@pytest.mark.postgres
def test_a_commit_is_durable_where_the_servers_default_is_off_and_relaxed_only_when_asked(postgres_url):
    name = make_url(postgres_url).database
    server = open_database(postgres_url)
    with write(server) as connection:
        connection.execute(text(f"alter database {name} set synchronous_commit = off"))
    server.dispose()
    for durability, expected in (("full", "on"), ("relaxed", "off")):
        database = open_database(postgres_url, durability=durability)
        with write(database) as connection:
            assert connection.scalar(text("show synchronous_commit")) == expected
        database.dispose()


@pytest.mark.postgres
def test_a_server_that_waits_for_more_than_its_own_disk_goes_on_doing_so(postgres_url):
    name = make_url(postgres_url).database
    database = open_database(postgres_url)
    with write(database) as connection:
        connection.execute(text(f"alter database {name} set synchronous_commit = remote_apply"))
    database.dispose()
    with write(database) as connection:
        assert connection.scalar(text("show synchronous_commit")) == "remote_apply"
    database.dispose()


def test_sqlite_is_relaxed_only_when_asked(sqlite_database, sqlite_url):
    relaxed = open_database(sqlite_url, durability="relaxed")
    with read(relaxed) as connection:
        assert connection.exec_driver_sql("pragma synchronous").scalar() == 1
    with read(sqlite_database) as connection:
        assert connection.exec_driver_sql("pragma synchronous").scalar() == 2
    relaxed.dispose()


def test_a_second_process_that_writes_to_a_file_is_told_where_sqlite_may_damage_it(
    sqlite_database, caplog, monkeypatch
):
    held = claim_sqlite(sqlite_database)
    assert held is not None
    assert caplog.text == ""
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 51, 2))
    assert claim_sqlite(sqlite_database) is None
    assert "--api-server-count 1" in caplog.text
    caplog.clear()
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 51, 3))
    assert claim_sqlite(sqlite_database) is None
    assert caplog.text == ""
    held.close()
