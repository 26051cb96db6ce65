"""The schema reached by all migrations is the one that is declared, whole or absent, and nothing else is served."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, exc, inspect, text

import store
from store import migrate, schema
from store.database import open_database, read, write
from store.errors import LogUnavailable, SchemaMismatch


@pytest.fixture
def empty(empty_url) -> Iterator[Engine]:
    """A database without a schema."""
    database = open_database(empty_url)
    yield database
    database.dispose()


PARTITIONS = text(
    "select inhrelid::regclass::text from pg_inherits join pg_class on oid = inhparent where relkind = 'p'"
)


def partitions_of(connection: Connection) -> set[str]:
    return set(connection.scalars(PARTITIONS)) if connection.dialect.name == "postgresql" else set()


def shape(database: Engine) -> dict[str, Any]:
    """All that reflection tells of every table."""
    with read(database) as connection:
        seen = inspect(connection)
        partitions = partitions_of(connection)
        return {
            table: {
                "columns": [{**column, "type": str(column["type"])} for column in seen.get_columns(table)],
                "primary key": seen.get_pk_constraint(table),
                "unique": sorted(seen.get_unique_constraints(table), key=str),
                "indexes": sorted(seen.get_indexes(table), key=str),
                "checks": sorted(seen.get_check_constraints(table), key=str),
                "options": seen.get_table_options(table),
            }
            for table in seen.get_table_names()
            if table != "alembic_version" and table not in partitions
        }


def in_one_order(shape: dict[str, Any]) -> dict[str, Any]:
    """The same without the order of columns, in which a later migration may differ from a new table."""
    for table in shape.values():
        table["columns"].sort(key=lambda column: column["name"])
        for check in table["checks"]:
            check["sqltext"] = "".join(check["sqltext"].lower().split())
    return shape


def test_the_migrations_reach_the_declared_schema(empty):
    migrate.upgrade(empty)
    migrated = in_one_order(shape(empty))
    declared = schema.metadata_for(empty.dialect.name)
    assert set(migrated) == set(declared.tables)
    with write(empty) as connection:
        for view in reversed(schema.VIEWS):
            connection.execute(text(f"drop view {view}"))
        declared.drop_all(connection)
        declared.create_all(connection)
    assert migrated == in_one_order(shape(empty))


def test_the_views_are_the_declared_ones_on_both_databases(empty):
    migrate.upgrade(empty)
    with read(empty) as connection:
        seen = inspect(connection)
        found = {view: tuple(column["name"] for column in seen.get_columns(view)) for view in seen.get_view_names()}
    assert found == schema.VIEWS


def test_the_triggers_are_the_declared_ones(empty):
    migrate.upgrade(empty)
    with read(empty) as connection:
        if empty.dialect.name == "sqlite":
            found = set(connection.scalars(text("select name from sqlite_master where type = 'trigger'")))
        else:
            names = "select tgname from pg_trigger where not tgisinternal and tgenabled = 'A'"
            found = set(connection.scalars(text(names)))
    assert found == schema.guards(empty.dialect.name)


def test_autogenerate_finds_nothing_to_do(empty):
    migrate.upgrade(empty)
    with read(empty) as connection:
        options = {"compare_type": True, "compare_server_default": empty.dialect.name == "postgresql"}
        partitions = partitions_of(connection)  # which Alembic would drop, as nobody declares them
        options["include_object"] = lambda _, name, kind, reflected, compared: name not in partitions
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, schema.metadata_for(empty.dialect.name)) == []


def test_every_guard_is_there_after_the_upgrade(empty):
    migrate.upgrade(empty)
    migrate.require_current(empty)
    guards = schema.guards(empty.dialect.name)
    assert {guard for guard in guards if guard.startswith("model_call")} == (
        {"model_call_no_update", "model_call_no_delete", "model_call_insert_once", "model_call_not_ended"}
        | {"model_call_tallied"}
        if empty.dialect.name == "sqlite"
        else {"model_call_no_change", "model_call_no_truncate", "model_call_not_ended", "model_call_announced"}
        | {"model_call_tallied"}
    )


def test_sqlite_tables_are_strict(sqlite_database):
    with read(sqlite_database) as connection:
        strict = connection.execute(text("select name from pragma_table_list where strict = 1")).scalars()
        assert set(strict) == {*schema.metadata.tables, schema.tally.name}


@pytest.mark.postgres
def test_token_bytes_are_not_compressed_again_by_postgres(postgres_database):
    external = text(
        "select attrelid::regclass::text, attname from pg_attribute join pg_class on pg_class.oid = attrelid"
        " where attstorage = 'e' and relkind in ('r', 'p') and relname ~ '^(model_call|call_end)'"
    )
    with read(postgres_database) as connection:
        without = ("call_intent", "call_media")
        tables = {
            "model_call",
            "call_end",
            *(each for each in partitions_of(connection) if not each.startswith(without)),
        }
        assert {tuple(row) for row in connection.execute(external)} == {
            (table, column) for table in tables for column in ("token_ids", "logprobs")
        }


def test_an_upgrade_is_repeatable_and_tells_where_it_is(empty):
    assert migrate.current(empty) is None
    migrate.upgrade(empty)
    migrate.upgrade(empty)
    assert migrate.current(empty) == migrate.head() == migrate.history()[-1].name
    migrate.require_current(empty)


def test_a_missing_schema_is_refused_with_the_command_that_makes_it(empty):
    with pytest.raises(SchemaMismatch, match=r"no turnlog schema, this release needs '....': run `turnlog db upgrade`"):
        migrate.require_current(empty)


def test_a_newer_schema_is_refused_and_left_alone(empty):
    migrate.upgrade(empty)
    with write(empty) as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    for use in (migrate.require_current, migrate.upgrade):
        with pytest.raises(SchemaMismatch, match="use the release of turnlog that knows '9999'") as caught:
            use(empty)
        assert (caught.value.found, caught.value.expected) == ("9999", migrate.head())
    assert migrate.current(empty) == "9999"


def test_a_database_whose_guards_were_dropped_is_refused(empty):
    migrate.upgrade(empty)
    drop = {
        "sqlite": "drop trigger call_end_no_update",
        "postgresql": "alter table call_end disable trigger call_end_no_change",
    }
    with write(empty) as connection:
        connection.execute(text(drop[empty.dialect.name]))
    with pytest.raises(SchemaMismatch, match=r"without its triggers call_end_no_(update|change)'"):
        migrate.require_current(empty)


@pytest.mark.postgres
@pytest.mark.parametrize("trigger", ["model_call_no_change", "model_call_no_truncate", "model_call_announced"])
def test_a_partition_whose_guard_is_off_is_refused(postgres_database, trigger):
    with write(postgres_database) as connection:
        connection.execute(text(f"alter table model_call_default disable trigger {trigger}"))
    with pytest.raises(SchemaMismatch, match=f"without its triggers model_call_default.{trigger}'"):
        migrate.require_current(postgres_database)


@pytest.mark.postgres
def test_a_guard_that_a_replica_would_not_heed_is_refused(postgres_database):
    with write(postgres_database) as connection:
        connection.execute(text("alter table rollout enable trigger rollout_no_change"))
    with pytest.raises(SchemaMismatch, match="without its triggers rollout_no_change"):
        migrate.require_current(postgres_database)


def test_a_migration_that_fails_leaves_nothing(empty):
    with write(empty) as connection:
        connection.execute(text("create table trained_row (mine text)"))  # the last table a migration makes
    with pytest.raises((LogUnavailable, exc.ProgrammingError), match=r"trained_row.* already exists"):
        migrate.upgrade(empty)
    assert set(shape(empty)) == {"trained_row"}
    assert migrate.current(empty) is None
    with write(empty) as connection:
        connection.execute(text("drop table trained_row"))
    migrate.upgrade(empty)
    migrate.require_current(empty)


UPGRADE = """
import sys
from store import migrate
from store.database import open_database
database = open_database(sys.argv[1])
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
ran = migrate.upgrade(database)
migrate.require_current(database)
print(*ran)
"""


def test_of_ten_processes_that_start_at_once_one_upgrades_and_all_go_on(empty, empty_url):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", UPGRADE, empty_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ran = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 10
    assert sorted(ran) == [[]] * 9 + [[each.name for each in migrate.history()]]
    migrate.require_current(empty)


def test_the_migrations_are_found_where_a_wheel_puts_them(tmp_path, sqlite_url):
    package = Path(store.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "site" / "store", ignore=ignore)
    shutil.copytree(package.parent / "migrations", tmp_path / "site" / "store" / "migrations", ignore=ignore)
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]);"
        "from store import migrate; from store.database import open_database;"
        "database = open_database(sys.argv[1]); migrate.upgrade(database); print(migrate.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, sqlite_url, str(tmp_path / "site")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().startswith(str(tmp_path))
    database = open_database(sqlite_url)
    migrate.require_current(database)
    database.dispose()
