"""`turnlog sql`: what it shows, and that no text gets past reading."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, func, select

from replay.archive import open_archive
from replay.attached import attached
from replay.sealing import seal
from store import schema
from store.database import read, write
from store.events import CallCompleted, RolloutOpened, RowTrained
from store.log import append
from turnlog.errors import BadSql, NotTabular
from turnlog.sql import ask, ask_both, ask_copy, first_lines, tables, write_csv, write_json, write_parquet


@pytest.fixture
def calls(database: Engine, chain_maker: Any) -> list[CallCompleted]:
    """A log of one rollout of three calls, the row of which trained in step 2 of run x."""
    chain: list[CallCompleted] = chain_maker([(20, 10), (8, 4), (6, 4)])
    trained = RowTrained(
        run="x", step=2, row_id="row", rollout_id="r1", tip_call_id=chain[-1].call_id, selection="completed",
        selection_version=1, advantage=-0.5, trainer_policy_version=3, at=9,
    )  # fmt: skip
    with write(database) as connection:
        append(connection, [RolloutOpened(rollout_id="r1", task="[b]", opened_at=0), *chain, trained])
    return chain


def lines(database: Engine, sql: str) -> list[tuple[Any, ...]]:
    with ask(database, sql) as answer:
        return list(answer.lines)


def test_ids_are_uuids_and_other_bytes_stay_bytes(database: Engine, calls: list[CallCompleted]) -> None:
    found = lines(database, "select call_id, parent_id, digest, logprobs, depth from model_call order by depth")
    assert [line[0] for line in found] == [str(call.call_id) for call in calls]
    assert [line[1] for line in found] == [None, *(str(call.call_id) for call in calls[:-1])]
    assert [line[2] for line in found] == [call.digest() for call in calls]
    assert [line[3] for line in found] == [call.logprobs for call in calls]  # 16 bytes, and no id
    assert [line[4] for line in found] == [0, 1, 2]


def test_a_text_names_an_id(database: Engine, calls: list[CallCompleted]) -> None:
    assert lines(database, f"select depth from model_call where call_id = uuid('{calls[1].call_id}')") == [(1,)]


def test_a_row_of_a_step_is_explained_in_one_query(database: Engine, calls: list[CallCompleted]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    (question,) = [part.split("```")[0] for part in page.split("```sql\n")[1:] if "tip_call_id" in part.split("```")[0]]
    assert "run = 'grpo'" in question
    found = lines(database, question.replace("'grpo'", "'x'").replace("step = 3", "step = 2").replace("ROW", "row"))
    assert [line[1] for line in found] == [str(call.call_id) for call in calls]
    assert {line[-4:] for line in found} == {("completed", 1, -0.5, 3)}


def test_tables_and_their_columns_are_listed(database: Engine) -> None:
    listed = {str(each["name"]): str(each["columns"]) for each in tables(database)}
    assert listed.keys() >= {table.name for table in schema.metadata.sorted_tables}
    assert "tip_call_id" in listed["trained_row"]
    assert "alembic_version" not in listed


def count(database: Engine) -> int:
    with read(database) as connection:
        return connection.scalar(select(func.count()).select_from(schema.rollout)) or 0


ESCAPES = [
    "insert into rollout (rollout_id, metadata, opened_at, digest) values ('r9', '{}', 0, zeroblob(32))",
    "delete from rollout",
    "with gone as (delete from rollout returning 1) select * from gone",
    "drop table trained_row",
    "create table mine (a integer)",
    "create temporary table mine (a integer)",
    "create view mine as select 1",
    "alter table rollout add column mine integer",
    "drop trigger rollout_no_delete",
    "select 1; delete from rollout",
    "commit; delete from rollout",
    "rollback; begin; delete from rollout; commit",
    "begin",
    "commit",
    "end; delete from rollout",
    "savepoint mine",
    "explain select 1; delete from rollout",
    "vacuum",
    "analyze",
    "reindex",
    "",
    "-- nothing",
]
OF_SQLITE = [
    "pragma query_only = off",
    "pragma writable_schema = on",
    "pragma user_version = 7",
    "pragma journal_mode = delete",
    "attach database 'other.db' as other",
    "vacuum into 'other.db'",
    "update sqlite_master set sql = ''",
    "replace into rollout select * from rollout",
    "select load_extension('mine')",
    "select uuid('no id')",
]
OF_POSTGRESQL = [
    "set transaction read write",
    "set session characteristics as transaction read write",
    "set default_transaction_read_only = off",
    "select set_config('transaction_read_only', 'off', false)",
    "select set_config('transaction_read_only', 'off', true), * from rollout",
    "with off as (select set_config('transaction_read_only', 'off', true)) select * from off",
    "reset all",
    "do $$ begin set transaction read write; delete from rollout; end $$",
    "do $$ begin commit; delete from rollout; end $$",
    "copy rollout to '/tmp/mine'",
    "copy rollout to program 'cat'",
    "copy rollout from stdin",
    "explain analyze delete from rollout",
    "prepare mine as delete from rollout",
    "declare mine cursor for select 1",
    "select * from rollout for update",
    "select 1 into mine",
    "lock table rollout",
    "notify mine",
    "truncate rollout",
    "select lo_create(0)",
    "select nextval(pg_get_serial_sequence('rollout', 'sequence'))",
    "call mine()",
]


@pytest.mark.parametrize(
    ("database", "text"),
    [
        *(("sqlite", text) for text in ESCAPES + OF_SQLITE),
        *(pytest.param("postgres", text, marks=pytest.mark.postgres) for text in ESCAPES + OF_POSTGRESQL),
    ],
    indirect=["database"],
)
def test_no_text_gets_past_reading(
    database: Engine, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with write(database) as connection:
        append(connection, [RolloutOpened(rollout_id="r1", opened_at=0)])
    before = {each.name for each in tmp_path.iterdir()}
    with pytest.raises(BadSql, match="give one statement that only reads"):
        lines(database, text)
    assert count(database) == 1
    assert {each.name for each in tmp_path.iterdir()} <= before
    with write(database) as connection:  # the connection is as it was
        append(connection, [RolloutOpened(rollout_id="r2", opened_at=0)])
    assert count(database) == 2


@pytest.mark.postgres
def test_a_function_cannot_write_for_a_query(postgres_database: Engine) -> None:
    with postgres_database.connect() as connection:
        connection.exec_driver_sql(
            "create function mine() returns int language plpgsql as $$ begin "
            "perform set_config('transaction_read_only', 'off', true); "
            "insert into rollout (rollout_id, metadata, opened_at, digest) "
            "values ('r9', '{}', 0, decode(repeat('00', 32), 'hex')); return 1; end $$"
        )
        connection.commit()
    for question in ("select mine()", "explain analyze select mine()"):
        with pytest.raises(BadSql, match="transaction read-write mode must be set before any query"):
            lines(postgres_database, question)
    assert count(postgres_database) == 0


@pytest.mark.postgres
def test_what_explain_makes_is_gone_with_its_answer(postgres_database: Engine) -> None:
    """PostgreSQL lets this one through although the transaction is read only."""
    assert lines(postgres_database, "explain analyze create table mine as select 1")
    assert "mine" not in {each["name"] for each in tables(postgres_database)}


OF_DUCKDB = [
    *ESCAPES,
    "copy (select 1) to 'mine.csv'",
    "select * from read_csv('/etc/hosts')",
    "attach 'mine.db' as mine",
    "set enable_external_access = true",
    "reset lock_configuration",
    "install httpfs",
    "export database 'mine'",
]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_log_and_archive_are_asked_as_one_and_not_changed(
    database: Engine, calls: list[CallCompleted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    archive = str(tmp_path / "archive")
    seal(database, open_archive(archive, new=True), before=2**62, name="a")
    with write(database) as connection:
        append(connection, [RolloutOpened(rollout_id="r2", opened_at=0)])
    before = {each.name for each in tmp_path.iterdir()}
    with attached(database, archive) as engine:
        for text in OF_DUCKDB:
            with pytest.raises(BadSql), ask_copy(engine, text) as answer:
                list(answer.lines)
    others = f"from model_call where call_id <> uuid('{calls[0].call_id}')"
    question = f"select call_id, depth, 7 / 2 as half {others} order by depth"
    with ask_both(database, archive, question) as answer:
        assert [*answer.lines] == [(str(calls[1].call_id), 1, 3), (str(calls[2].call_id), 2, 3)]
    with ask_both(database, archive, "select rollout_id, calls from rollout_state order by rollout_id") as answer:
        assert [*answer.lines] == [("r1", 3), ("r2", 0)]
    assert {each.name for each in tmp_path.iterdir()} <= before
    assert count(database) == 2


def test_explain_is_answered(database: Engine) -> None:
    assert lines(database, "explain select * from rollout where rollout_id = 'r1'")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_what_sqlite_reads_without_a_table_is_answered(database: Engine) -> None:
    assert lines(database, "select value from json_each('[1, 2]')") == [(1,), (2,)]
    assert ("run",) in lines(database, "select name from pragma_table_info('trained_row')")
    assert lines(database, "pragma table_info(trained_row)")
    assert lines(
        database, "with recursive n (i) as (select 1 union all select i + 1 from n where i < 3) select i from n"
    )


def test_the_terminal_shows_the_first_lines_and_says_that_there_are_more(
    database: Engine, calls: list[CallCompleted]
) -> None:
    for limit, expected in ((2, (2, True)), (3, (3, False)), (0, (3, False))):
        with ask(database, "select depth, logprobs, parent_id from model_call order by depth") as answer:
            table, more = first_lines(answer, limit)
        assert (table.row_count, more) == expected
    shown = [list(column.cells) for column in table.columns]
    assert shown[0] == ["0", "1", "2"]
    assert shown[1][0] == f"{calls[0].logprobs[:16].hex()}... 40 bytes"
    assert shown[1][1] == calls[1].logprobs.hex()
    assert shown[2][0] == ""


def test_csv_and_json_hold_all_lines_in_plain_values(database: Engine, calls: list[CallCompleted]) -> None:
    question = "select call_id, call_id, digest, parent_id, 0.5 as half from model_call order by depth"
    out = io.StringIO()
    with ask(database, question) as answer:
        write_csv(answer, out)
    heading, *found = csv.reader(out.getvalue().splitlines())
    assert heading == ["call_id", "call_id_2", "digest", "parent_id", "half"]
    assert found[0] == [str(calls[0].call_id)] * 2 + [calls[0].digest().hex(), "", "0.5"]
    out = io.StringIO()
    with ask(database, question) as answer:
        write_json(answer, out)
    objects = json.loads(out.getvalue())
    assert [line["call_id_2"] for line in objects] == [str(call.call_id) for call in calls]
    assert (objects[0]["parent_id"], objects[0]["half"]) == (None, 0.5)
    out = io.StringIO()
    with ask(database, "select sum(depth) as total from model_call where depth > 9") as answer:
        write_json(answer, out)
    assert json.loads(out.getvalue()) == [{"total": None}]


def test_parquet_keeps_the_types(database: Engine, calls: list[CallCompleted], tmp_path: Path) -> None:
    file = tmp_path / "calls.parquet"
    with ask(
        database, "select call_id, depth, digest, cast(0.5 as double precision) as half from model_call order by depth"
    ) as answer:
        assert write_parquet(answer, file) == 3
    written = pq.read_table(file)
    assert [str(field.type) for field in written.schema] == ["string", "int64", "binary", "double"]
    assert written.column("digest").to_pylist() == [call.digest() for call in calls]
    with ask(database, "select call_id from model_call where depth > 9") as answer:
        assert write_parquet(answer, file) == 0
    assert pq.read_table(file).column_names == ["call_id"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_column_of_several_types_fits_no_parquet_file(database: Engine, tmp_path: Path) -> None:
    with (
        ask(database, "select 1 as a union all select 'b'") as answer,
        pytest.raises(NotTabular, match="cast them in the query"),
    ):
        write_parquet(answer, tmp_path / "mixed.parquet")
    assert not list(tmp_path.glob("*.part"))
    assert not (tmp_path / "mixed.parquet").exists()


Run = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_command_asks_in_every_format(
    run: Run, database: Engine, calls: list[CallCompleted], sqlite_url: str, tmp_path: Path
) -> None:
    question = "select task, depth from model_call join rollout using (rollout_id) order by depth"
    shown = run("sql", question, "--limit", "2", "--db", sqlite_url)
    assert "[b]" in shown.stdout
    assert "these are the first 2 lines: --limit 0 shows all" in shown.stderr
    assert run("sql", question, "--csv", "--db", sqlite_url).stdout == "task,depth\n[b],0\n[b],1\n[b],2\n"
    found = run("sql", question, "--parquet", "found.parquet", "--db", sqlite_url)
    assert "wrote 3 lines to found.parquet" in found.stdout
    assert pq.read_table(tmp_path / "found.parquet").num_rows == 3
    refused = run("sql", "delete from rollout", "--db", sqlite_url)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("turnlog: the log refused the query (not authorized): give one statement")
    both = run("sql", question, "--csv", "--json", "--db", sqlite_url)
    assert both.returncode == 2
    assert "ask for one of them" in both.stderr
    assert "trained_row" in run("sql", "--db", sqlite_url).stdout


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_query_is_read_from_stdin(run: Run, database: Engine, calls: list[CallCompleted], sqlite_url: str) -> None:
    found = run("sql", "-", "--json", "--db", sqlite_url, stdin="select max(depth) as deepest\nfrom model_call;\n")
    assert json.loads(found.stdout) == [{"deepest": 2}]
