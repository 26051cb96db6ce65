"""`turnlog db`: bring a log to this release's schema, check it, and set up what PostgreSQL needs beside.

Knows arguments and output; does not know how a schema is changed. Law: nothing here changes an event, and none is lost
unasked.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer
from pydantic import JsonValue
from rich.console import Console
from sqlalchemy import Engine

from turnlog.archive import drop_partition
from turnlog.console import AsJson, Db, notes, opened, print_json, table_of

db = typer.Typer(no_args_is_help=True, help="Bring a log to this release's schema, and check it.")
AsSql = Annotated[
    bool, typer.Option("--sql", help="Print the SQL that would do it, for psql or sqlite3, and do nothing.")
]


@db.command(
    epilog="Examples: [bold]turnlog db upgrade --db postgresql://user@host/turnlog[/]; "
    "[bold]turnlog db upgrade --sql > upgrade.sql[/] for somebody else to run."
)
def upgrade(url: Db = None, as_sql: AsSql = False) -> None:
    """Bring the log to this release's schema; a log that is there already stays as it is. Servers may go on."""
    from store import migrate
    from store.database import database_url, open_database, shown_url
    from store.partitions import reminder

    database = open_database(database_url(url))
    if as_sql:
        sys.stdout.write(migrate.upgrade_sql(database))
        return
    ran = migrate.upgrade(database)
    did = f" (ran {', '.join(ran)})" if ran else ""
    Console(soft_wrap=True).print(f"{shown_url(database.url)} is at schema revision {migrate.current(database)}{did}")
    if (said := reminder(database, datetime.now(UTC))) is not None:
        notes().print(said)


@db.command(
    epilog="Example: [bold]turnlog db downgrade 0001[/], before an older release of turnlog uses the log again."
)
def downgrade(
    revision: Annotated[str, typer.Argument(help="The revision to go back to; `turnlog db history` lists them.")],
    url: Db = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask, not even when something that events say is lost.")
    ] = False,
    as_sql: AsSql = False,
) -> None:
    """Take back revisions of the schema. Asks first, and refuses when that loses what events say."""
    from store import migrate
    from store.database import database_url, open_database, shown_url

    database = open_database(database_url(url))
    if as_sql:
        sys.stdout.write(migrate.downgrade_sql(database, revision))
        return
    if not yes and not migrate.losses(database, revision):
        typer.confirm(f"Take {shown_url(database.url)} back to schema revision {revision}?", abort=True, err=True)
    undone = migrate.downgrade(database, revision, lose=yes)
    did = f" (took back {', '.join(undone)})"
    Console(soft_wrap=True).print(f"{shown_url(database.url)} is at schema revision {revision}{did}")


db.command(
    "drop-partition",
    epilog="Examples: [bold]turnlog db drop-partition model_call_20261001 --archive s3://bucket/turnlog[/]; "
    "[bold]turnlog db drop-partition model_call_default --archive s3://bucket/turnlog[/] for what no partition is for.",
)(drop_partition)


@db.command(epilog="Example: [bold]turnlog db history[/]")
def history(url: Db = None, as_json: AsJson = False) -> None:
    """List every revision of the schema that this release knows, and where the log is."""
    from store import migrate
    from store.database import database_url, open_database

    here = migrate.current(open_database(database_url(url)))
    listed: list[dict[str, JsonValue]] = [
        {
            "revision": each.name,
            "what": each.what,
            "in_one_transaction": each.in_one_transaction,
            "here": each.name == here,
        }
        for each in migrate.history()
    ]
    if as_json:
        print_json([*listed])
    else:
        Console().print(table_of(listed, empty="no revisions"))


@db.command(epilog="Example: [bold]turnlog db current[/]")
def current(url: Db = None, as_json: AsJson = False) -> None:
    """Show the log's schema revision and the one that this release needs."""
    from store import migrate
    from store.database import database_url, open_database, shown_url

    database = open_database(database_url(url))
    found, needed = migrate.current(database), migrate.head()
    if as_json:
        print_json({"url": shown_url(database.url), "current": found, "needed": needed})
    else:
        advice = "" if found == needed else ": run `turnlog db upgrade`"
        state = f"{found or 'no schema'}, this release needs {needed}{advice}"
        Console(soft_wrap=True).print(f"{shown_url(database.url)} is at {state}")


@db.command(
    epilog="Examples: [bold]turnlog db partition --every week --ahead 8[/], from a timer; without options as "
    "`turnlog db upgrade` does it; [bold]turnlog db partition --adopt[/] once, where it was not run in time."
)
def partition(
    url: Db = None,
    every: Annotated[
        Literal["day", "week", "month"] | None,
        typer.Option(help="How much time a partition holds. Default: as the latest ones, or a month."),
    ] = None,
    ahead: Annotated[
        int | None, typer.Option(min=0, help="How many to have beyond the present one. Default: enough for months.")
    ] = None,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt", help="Give what the default partition holds a partition of its own; calls wait while it is read."
        ),
    ] = False,
    as_sql: AsSql = False,
) -> None:
    """Make partitions ahead on PostgreSQL, so that the calls of a time can be archived and dropped together."""
    from store import partitions
    from store.database import read
    from store.exclusive import exclusively

    now = datetime.now(UTC)
    with opened(url) as database:
        require_postgres(database, "partitions", "it is one file, which `turnlog archive` reads as it is")
        if as_sql:
            with read(database) as connection:
                sys.stdout.write(partitions.as_sql(partitions.missing(connection, now, every, ahead)))
            return
        with exclusively(database) as connection:
            there = len(partitions.listed(connection))
            stays = partitions.adopt(connection, now) if adopt else []
            held = partitions.make(connection, partitions.missing(connection, now, every, ahead))
            until = partitions.made_until(connection)
            made = len(partitions.listed(connection)) - there
    end = "none yet" if until is None else f"up to {until:%Y-%m-%d}"
    Console(soft_wrap=True).print(f"made {made} partitions; there are partitions {end}")
    known = {each.period.table for each in stays}
    for each in (*stays, *(each for each in held if each.period.table not in known)):
        notes().print(
            f"[yellow]not made:[/] {each.period.name}: the default partition holds {each.events} events of that time: "
            f"{each.why}"
        )
    if stays or held:
        sys.exit(1)


@db.command(epilog="Example: [bold]turnlog db partitions --json[/]")
def partitions(url: Db = None, as_json: AsJson = False) -> None:
    """List the partitions of a log in PostgreSQL: what time each holds, about how many events, and how many bytes."""
    from store.database import read
    from store.partitions import listed

    with opened(url) as database:
        require_postgres(database, "partitions", "it is one file")
        with read(database) as connection:
            found = listed(connection)
    rows: list[dict[str, JsonValue]] = [
        {
            "table": each.table,
            "partition": each.name,
            "from": None if each.low is None else f"{each.low:%Y-%m-%d}",
            "to": None if each.high is None else f"{each.high:%Y-%m-%d}",
            "events": each.events,
            "bytes": each.bytes,
        }
        for each in found
    ]
    if as_json:
        print_json([*rows])
    else:
        Console().print(table_of(rows, empty="no partitions"))


@db.command(epilog="Example: [bold]turnlog db grant[/], then in SQL [bold]grant turnlog_worker to LOGIN[/]")
def grant(
    url: Db = None,
    worker: Annotated[
        str | None, typer.Option(metavar="ROLE", help="May append calls and look them up: for model servers.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(metavar="ROLE", help="May read everything and append which rows were trained.")
    ] = None,
    auditor: Annotated[
        str | None, typer.Option(metavar="ROLE", help="May read the views: neither tokens nor secrets are in them.")
    ] = None,
    as_sql: AsSql = False,
) -> None:
    """Set up roles on PostgreSQL with only what each needs. Without options all three, as turnlog_worker and so on.

    None may change the schema or an event. Run it again at any time: a role then has what this release says, no more.
    """
    from store.database import read
    from store.exclusive import exclusively
    from store.roles import ALL, Roles, grant
    from store.roles import as_sql as sql_of

    chosen = Roles(worker=worker, trainer=trainer, auditor=auditor)
    chosen = ALL if chosen == Roles() else chosen
    with opened(url) as database:
        require_postgres(database, "roles", "protect its file by the rights of the file system")
        if as_sql:
            with read(database) as connection:
                sys.stdout.write(sql_of(connection, chosen))
            return
        with exclusively(database) as connection:
            grant(connection, chosen)
            connection.commit()
    names = ", ".join(name for name in (chosen.worker, chosen.trainer, chosen.auditor) if name)
    Console(soft_wrap=True).print(f"{names} may do what they need: make logins members with `grant ROLE to LOGIN`")


def require_postgres(database: Engine, what: str, instead: str) -> None:
    """Refuse what only PostgreSQL has, and say what to do instead."""
    from store.errors import NeedsPostgres

    if database.dialect.name == "sqlite":
        raise NeedsPostgres(what, instead)
