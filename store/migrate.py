"""Bring a database to the newest schema revision, and refuse one that this release does not know.

Knows where the migrations are and how to run them one process at a time, or to write them down as SQL; does not know
what they do. Law: a revision is whole or can be run again, nothing that events say is dropped unasked, and a server
never starts on a schema it does not know.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection, Engine, text

from store import partitions, roles, schema
from store.database import read, shown_url
from store.errors import LogUnavailable, LosesEvents, SchemaMismatch, UnknownRevision
from store.exclusive import LOCK_SECONDS, exclusively
from store.patience import SECONDS, Patience

logger = logging.getLogger("turnlog")

_UPGRADE = "run `turnlog db upgrade` on it (--db, or TURNLOG_URL)"
_TRIGGERS = {
    "sqlite": text("select name from sqlite_master where type = 'trigger'"),
    "postgresql": text(
        "select tgname from pg_trigger join pg_class on pg_class.oid = tgrelid"
        " where relnamespace = current_schema()::regnamespace and tgenabled = 'A'"
        " and not relispartition"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One change of the schema."""

    name: str
    what: str
    in_one_transaction: bool
    """Whether PostgreSQL runs it in one; otherwise it is committed in parts, and can be run again from its start."""


def upgrade(database: Engine, to: str | None = None) -> tuple[str, ...]:
    """Run every migration the database lacks and say which; several processes may do so at once, and one does it.

    `to` stops at an earlier revision than this release's.

    On PostgreSQL partitions are made ahead, too. Raises SchemaMismatch when the database is newer than this release,
    and SchemaBusy when a table cannot be had.
    """
    with exclusively(database) as connection:
        found = _revision(connection)
        _refuse_newer(database, found)
        lacking = _between(found, to or head())
        if database.dialect.name == "postgresql":
            connection.commit()  # each revision begins its own transaction
        if lacking:
            command.upgrade(_config(connection=connection), lacking[-1])
        if database.dialect.name == "postgresql":
            partitions.make(connection, partitions.missing(connection, datetime.now(UTC)))
            roles.show_new_views(connection)
            connection.commit()
        return lacking


def downgrade(database: Engine, to: str, *, lose: bool = False) -> tuple[str, ...]:
    """Take back the revisions above `to`, and say which, newest first.

    Raises UnknownRevision when `to` is not below where the database is, and LosesEvents when what events say would be
    dropped, unless `lose` says that it may.
    """
    with exclusively(database) as connection:
        undone = _above(database, _revision(connection), to)
        if (lost := _losses(connection, undone)) and not lose:
            raise LosesEvents(to, lost)
        if database.dialect.name == "postgresql":
            connection.commit()
        command.downgrade(_config(connection=connection), to)
        return undone


def losses(database: Engine, to: str) -> list[str]:
    """What a downgrade would drop of what events say; raises UnknownRevision."""
    with read(database) as connection:
        return _losses(connection, _above(database, _revision(connection), to))


def upgrade_sql(database: Engine) -> str:
    """What `upgrade` would do, as SQL for `psql` or `sqlite3`; the database is only read."""
    if current(database) is None and database.dialect.name == "sqlite":
        return "pragma page_size = 16384;\npragma journal_mode = wal;\n" + _offline("sqlite", None, f"base:{head()}")
    with read(database) as connection:
        found = _revision(connection)
        _refuse_newer(database, found)
        words = "" if found == head() else _offline(database.dialect.name, connection, f"{found or 'base'}:{head()}")
        if database.dialect.name == "postgresql":
            now = datetime.now(UTC)
            words += partitions.as_sql(
                partitions.missing(connection, now, to_come=True) if found else partitions.wanted(now)
            )
        return words


def downgrade_sql(database: Engine, to: str) -> str:
    """What `downgrade` would do, as SQL; the database is only read. Raises UnknownRevision."""
    with read(database) as connection:
        found = _revision(connection)
        lost = "".join(f"-- loses {each}\n" for each in _losses(connection, _above(database, found, to)))
        return lost + _offline(database.dialect.name, connection, f"{found}:{to}")


def history() -> list[Revision]:
    """Every revision, oldest first."""
    return [
        Revision(name=script.revision, what=script.doc, in_one_transaction=script.module.in_one_transaction)
        for script in reversed(_scripts())
    ]


def current(database: Engine) -> str | None:
    """The revision the database is at; None when it has no turnlog schema."""
    if database.dialect.name == "sqlite" and not Path(database.url.database or "").exists():
        return None  # looking at a log does not create one
    with read(database) as connection:
        return _revision(connection)


def head() -> str:
    """The revision that this release needs."""
    return _scripts()[0].revision


def require_current(database: Engine) -> None:
    """Refuse a database whose schema this release does not know, or whose events could be changed.

    Raises SchemaMismatch with the command that mends it.
    """
    found = current(database)
    expected = head()
    if found != expected:
        _refuse_newer(database, found)
        raise SchemaMismatch(shown_url(database.url), found=found, expected=expected, remedy=_UPGRADE)
    with read(database) as connection:
        missing = schema.guards(database.dialect.name) - set(connection.scalars(_TRIGGERS[database.dialect.name]))
        if database.dialect.name == "postgresql":
            # Of a table that lacks one its partitions do, too.
            missing |= {each for each in partitions.unguarded(connection) if each.partition(".")[2] not in missing}
    if missing:
        raise SchemaMismatch(
            shown_url(database.url),
            found=f"{found} without its triggers {', '.join(sorted(missing))}",
            expected=expected,
            remedy="events could have been changed; restore the database from a copy, "
            f"or check it and create the triggers again from {_folder() / 'versions'}",
        )


def await_current(database: Engine, *, patience: float = SECONDS) -> None:
    """`require_current` of a database that may be starting or recovering: it is said once, and waited for.

    Raises SchemaMismatch, and LogUnavailable when it is still away after `patience` seconds. A host that does not exist
    is waited for too: while machines start, the name of one that does may not be known yet.
    """
    try:
        require_current(database)
    except LogUnavailable as error:
        logger.warning("%s: %s; waiting for it, %g seconds at most", shown_url(database.url), error.cause, patience)
        Patience(patience).attempt(lambda: require_current(database))


def _losses(connection: Connection, undone: tuple[str, ...]) -> list[str]:
    scripts = {script.revision: script for script in _scripts()}
    return [each for name in undone for each in scripts[name].module.losses(connection)]


def _between(found: str | None, newest: str) -> tuple[str, ...]:
    names = [script.revision for script in reversed(_scripts())]
    return tuple(names[names.index(found) + 1 if found else 0 : names.index(newest) + 1])


def _above(database: Engine, found: str | None, to: str) -> tuple[str, ...]:
    """The revisions above `to`, newest first; a log without its first revision would be no log."""
    _refuse_newer(database, found)
    below = [] if found is None else [name for name in _between(None, found) if name != found]
    if to not in below:
        raise UnknownRevision(to, below)
    return _between(to, found or "")[::-1]


def _offline(dialect: str, reading: Connection | None, revisions: str) -> str:
    """The SQL of Alembic's offline mode."""
    words = io.StringIO()
    run = command.downgrade if _goes_down(revisions) else command.upgrade
    run(_config(output=words, dialect=dialect, reading=reading), revisions.removeprefix("base:"), sql=True)
    timeout = f"set lock_timeout = '{LOCK_SECONDS}s';\n\n" if dialect == "postgresql" else ""
    return timeout + words.getvalue()


def _goes_down(revisions: str) -> bool:
    found, _, to = revisions.partition(":")
    return found != "base" and found > to


def _refuse_newer(database: Engine, found: str | None) -> None:
    if found is not None and found not in {script.revision for script in _scripts()}:
        remedy = f"use the release of turnlog that knows {found!r}"
        raise SchemaMismatch(shown_url(database.url), found=found, expected=head(), remedy=remedy)


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _scripts() -> list[Script]:
    """Every revision, newest first."""
    return list(ScriptDirectory.from_config(_config()).walk_revisions())


def _config(*, output: io.StringIO | None = None, **attributes: object) -> Config:
    config = Config(output_buffer=output or io.StringIO(), attributes=attributes)
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    return config


def _folder() -> Path:
    """`store/migrations` in a wheel, `migrations` beside `store` in a checkout."""
    packaged = Path(__file__).with_name("migrations")
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "migrations"
