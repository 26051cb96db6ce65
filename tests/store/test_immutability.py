"""The schema itself refuses to change an event, whoever asks and however."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from contextlib import closing
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine, make_url, select, text
from sqlalchemy.exc import IntegrityError

from store import log, schema
from store.database import read, write
from store.events import (
    CallAdmitted,
    CallEnded,
    MediaShown,
    MediaStored,
    RolloutOpened,
    RolloutScored,
    RowTrained,
    uuid7,
)

TABLES = sorted(schema.metadata.tables)
ONE, TWO = uuid7(1, bytes(10)), uuid7(2, bytes(10))


def filled(database: Engine, chain_maker) -> Engine:
    """The log with events in every table."""
    intent = CallAdmitted(
        call_id=ONE, rollout_id="r1", decision="root", reason="first_call", parent_id=None, worker="w", at=1
    )
    row = RowTrained(
        run="run",
        step=1,
        row_id="row",
        rollout_id="r1",
        tip_call_id=ONE,
        selection="completed",
        selection_version=1,
        advantage=1.0,
        trainer_policy_version=1,
        at=1,
    )
    end = CallEnded(call_id=TWO, rollout_id="r1", state="failed", reason="x", at=1)
    outcome = RolloutScored(outcome_id=ONE, rollout_id="r1", reward=1.0, at=1)
    with write(database) as connection:
        media = [MediaStored.example(), MediaShown.example()]
        opened = RolloutOpened(rollout_id="r1", opened_at=1)
        log.append(connection, [opened, intent, end, *chain_maker(), *media, outcome, row])
    return database


@pytest.fixture
def sqlite_file(sqlite_database, chain_maker) -> str:
    """A SQLite log with events in every table."""
    return str(filled(sqlite_database, chain_maker).url.database)


def contents(database: Engine) -> dict[str, list[tuple[object, ...]]]:
    with read(database) as connection:
        return {
            name: [tuple(row) for row in connection.execute(select(table).order_by(table.c.sequence))]
            for name, table in schema.metadata.tables.items()
        }


def refused(file: str, statement: str, why: str) -> None:
    with closing(sqlite3.connect(file)) as connection, pytest.raises(sqlite3.IntegrityError, match=why):
        connection.execute(statement)


def changed(names: str, name: str, expression: str) -> str:
    """The column list with an expression in the place of one column."""
    return ", ".join(expression if column == name else column for column in names.split(", "))


def test_no_event_is_updated_or_deleted(database, chain_maker):
    before = contents(filled(database, chain_maker))
    for table in TABLES:
        assert before[table]
        for statement in (f"update {table} set digest = digest", f"delete from {table}"):
            refusal = pytest.raises(IntegrityError, match=f"{table} is append-only: events are never")
            with refusal, write(database) as connection:
                connection.execute(text(statement))
    assert contents(database) == before


def test_the_tally_is_appended_to_alone(database, chain_maker):
    filled(database, chain_maker)
    with read(database) as connection:
        before = [tuple(row) for row in connection.execute(select(schema.tally).order_by("table_name", "low"))]
    assert {row[0] for row in before} == set(TABLES)
    for statement in (
        "update tally set low = low",
        "update tally set high = high + 2",
        "update tally set dropped = not dropped",
        "update tally set table_name = 'other'",
        "delete from tally",
    ):
        with pytest.raises(IntegrityError, match="tally is append-only"), write(database) as connection:
            connection.execute(text(statement))
    if database.dialect.name == "sqlite":
        again = (
            "insert or replace into tally (rowid, table_name, low, high, dropped) select rowid, 'x', 1, 1, 0 from tally"
        )
        refused(str(database.url.database), again, "tally is append-only")
        refused(str(database.url.database), "update or replace tally set rowid = rowid + 1", "tally is append-only")
    with read(database) as connection:
        after = [tuple(row) for row in connection.execute(select(schema.tally).order_by("table_name", "low"))]
    assert after == before


def test_no_statement_that_replaces_rows_gets_past_the_guards_on_sqlite(sqlite_database, sqlite_file):
    before = contents(sqlite_database)
    for table in TABLES:
        names = ", ".join(schema.metadata.tables[table].columns.keys())
        other = changed(names, "digest", "randomblob(32)")
        elsewhere = changed(other, "sequence", "sequence + 1000")
        for statement in (
            f"update or replace {table} set sequence = sequence",
            f"update or ignore {table} set sequence = sequence + 1000",
            f"insert or replace into {table} ({names}) select {other} from {table}",
            f"insert or replace into {table} ({names}) select {elsewhere} from {table}",
            f"insert or ignore into {table} ({names}) select {other} from {table}",
            f"insert into {table} ({names}) select {other} from {table} where true"
            " on conflict do update set digest = excluded.digest",
        ):
            refused(sqlite_file, statement, table)
    assert contents(sqlite_database) == before


def test_no_row_is_replaced_through_another_unique_key_on_sqlite(sqlite_database, sqlite_file):
    before = contents(sqlite_database)
    names = ", ".join(schema.rollout.columns.keys())
    new_id = changed(changed(names, "rollout_id", "'other'"), "digest", "randomblob(32)")
    refused(
        sqlite_file,
        f"insert or replace into rollout ({names}) select {new_id} from rollout",
        "sequence is already used",
    )
    assert contents(sqlite_database) == before


def test_an_insert_that_comes_again_with_the_same_content_is_a_no_op_on_sqlite(sqlite_database, sqlite_file):
    before = contents(sqlite_database)
    for table in TABLES:
        with closing(sqlite3.connect(sqlite_file)) as connection, connection:
            connection.execute(f"insert or replace into {table} select * from {table}")
    assert contents(sqlite_database) == before


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="the sqlite3 shell is not installed")
@pytest.mark.parametrize("statement", ["update model_call set reason='x'", "delete from model_call"])
def test_the_sqlite_shell_is_refused_with_the_reason(sqlite_database, sqlite_file, statement):
    before = contents(sqlite_database)
    done = subprocess.run(["sqlite3", sqlite_file, statement], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "model_call is append-only: events are never" in done.stderr
    assert contents(sqlite_database) == before


@pytest.mark.postgres
@pytest.mark.parametrize("role", ["origin", "replica"])
def test_the_owner_is_refused_on_postgres_also_as_a_replica(postgres_database, postgres_url, chain_maker, role):
    before = contents(filled(postgres_database, chain_maker))
    url = make_url(postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"set session_replication_role = {role}")
        for table in TABLES:
            owner = connection.execute("select tableowner from pg_tables where tablename = %s", [table]).fetchone()
            assert owner == connection.execute("select current_user").fetchone()
            for statement in (
                f"update {table} set digest = digest",
                f"delete from {table}",
                f"truncate {table}",
                f"truncate {table} cascade",
                f"merge into {table} using {table} as same on {table}.digest = same.digest when matched then delete",
            ):
                with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match=f"{table} is append-only"):
                    connection.execute(statement)
    assert contents(postgres_database) == before


@pytest.mark.postgres
def test_an_insert_that_updates_on_conflict_is_refused_on_postgres(postgres_database, chain_maker):
    before = contents(filled(postgres_database, chain_maker))
    with pytest.raises(IntegrityError, match="rollout is append-only"), write(postgres_database) as connection:
        connection.execute(
            text(
                "insert into rollout (rollout_id, metadata, opened_at, digest)"
                " select rollout_id, metadata, 2, digest from rollout"
                " on conflict (rollout_id) do update set opened_at = excluded.opened_at"
            )
        )
    assert contents(postgres_database) == before


def test_a_row_that_is_no_event_is_refused_by_the_checks(database, chain_maker):
    filled(database, chain_maker)
    call = schema.model_call
    with read(database) as connection:
        stored = select(*(column for column in call.c if column.name != "sequence")).where(call.c.depth == 0)
        root = {**connection.execute(stored).mappings().one(), "call_id": ONE, "root_id": ONE, "writer_seq": 99}
    for wrong in (
        {"prev_len": 1},
        {"depth": 1},
        {"root_id": UUID(int=1)},
        {"decision": "continuation"},
        {"decision": "other"},
        {"sampled_len": 1},
        {"prompt_len": -1},
        {"logprobs": b"123"},
        {"codec": 0, "token_ids": b"1234"},
        {"summary_hash": bytes(31)},
        {"chain_hash": bytes(33)},
        {"request_digests": bytes(33)},
        {"digest": b""},
    ):
        refusal = pytest.raises(IntegrityError, match=r"CHECK constraint failed: model_call|violates check constraint")
        with refusal, write(database) as connection:
            connection.execute(call.insert().inline(), [root | wrong])
    with write(database) as connection:
        connection.execute(call.insert().inline(), [root])


@pytest.mark.parametrize("table", ["model_call", "call_end"])
def test_a_call_cannot_end_twice_past_the_log_either(database, chain_maker, table):
    filled(database, chain_maker)
    source, target = ("call_end", "model_call") if table == "model_call" else ("model_call", "call_end")
    with read(database) as connection:
        taken = connection.scalar(select(schema.metadata.tables[source].c.call_id).limit(1))
        of_target = schema.metadata.tables[target]
        columns = [column for column in of_target.c if column.name != "sequence"]
        row = dict(connection.execute(select(*columns).limit(1)).mappings().one())
    row |= {"call_id": taken} | ({"root_id": taken, "writer_seq": 99} if target == "model_call" else {})
    with pytest.raises(IntegrityError, match="already"), write(database) as connection:
        connection.execute(of_target.insert().inline(), [row])
