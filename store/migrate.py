"""Bring a database to the newest schema revision, and refuse one that this release does not know.

Knows where the migrations are and how to run them one process at a time; does not know what they do.
Law: a migration is whole or absent, and a server never starts on a schema it does not know.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from store import schema
from store.database import read, write
from store.errors import SchemaMismatch

_UPGRADE = "run `turnlog db upgrade`"
_ONE_UPGRADE = text("select pg_advisory_xact_lock(hashtext('turnlog'), hashtext('upgrade'))")
_TRIGGERS = {
    "sqlite": text("select name from sqlite_master where type = 'trigger'"),
    "postgresql": text(
        "select tgname from pg_trigger join pg_class on pg_class.oid = tgrelid"
        " where relnamespace = current_schema()::regnamespace and tgenabled = 'A'"
    ),
}


def upgrade(database: Engine) -> None:
    """Run every migration the database lacks, in one transaction; several processes may do so at once.

    Raises SchemaMismatch when the database is newer than this release.
    """
    with write(database) as connection:  # on SQLite this holds the write lock, so the others wait
        if database.dialect.name == "postgresql":
            connection.execute(_ONE_UPGRADE)
        found = _revision(connection)
        if found == head():
            return
        _refuse_newer(found)
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def current(database: Engine) -> str | None:
    """The revision the database is at; None when it has no turnlog schema."""
    if database.dialect.name == "sqlite" and not Path(database.url.database or "").exists():
        return None  # looking at a log does not create one
    with read(database) as connection:
        return _revision(connection)


def head() -> str:
    """The revision that this release needs."""
    newest = ScriptDirectory.from_config(_config()).get_current_head()
    assert newest is not None, "the migrations folder holds no revision"
    return newest


def require_current(database: Engine) -> None:
    """Refuse a database whose schema this release does not know, or whose events could be changed.

    Raises SchemaMismatch with the command that mends it.
    """
    found = current(database)
    expected = head()
    if found != expected:
        _refuse_newer(found)
        raise SchemaMismatch(found=found, expected=expected, remedy=_UPGRADE)
    with read(database) as connection:
        present = set(connection.scalars(_TRIGGERS[database.dialect.name]))
    if missing := sorted(schema.guards(database.dialect.name) - present):
        raise SchemaMismatch(
            found=f"{found} without its triggers {', '.join(missing)}",
            expected=expected,
            remedy="events could have been changed; restore the database from a copy, "
            f"or check it and create the triggers again from {_folder() / 'versions'}",
        )


def _refuse_newer(found: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if found is not None and found not in known:
        raise SchemaMismatch(found=found, expected=head(), remedy=f"use the release of turnlog that knows {found!r}")


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    return config


def _folder() -> Path:
    """`store/migrations` in a wheel, `migrations` beside `store` in a checkout."""
    packaged = Path(__file__).with_name("migrations")
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "migrations"
