"""`turnlog db`: bring a log to this release's schema, and check it.

Knows arguments and output; does not know how a schema is changed. Law: nothing here changes or removes an event.
"""

from __future__ import annotations

import typer
from pydantic import JsonValue
from rich.console import Console

from turnlog.console import AsJson, Db, opened, print_json, shown, table_of

db = typer.Typer(no_args_is_help=True, help="Bring a log to this release's schema, and check it.")


@db.command(epilog="Example: [bold]turnlog db upgrade --db postgresql://user@host/turnlog[/]")
def upgrade(url: Db = None) -> None:
    """Bring the log to this release's schema; a log that is there already stays as it is."""
    from store import migrate
    from store.database import database_url, open_database

    database = open_database(database_url(url))
    migrate.upgrade(database)
    Console(soft_wrap=True).print(f"{shown(database)} is at schema revision {migrate.current(database)}")


@db.command(epilog="Example: [bold]turnlog db current[/]")
def current(url: Db = None, as_json: AsJson = False) -> None:
    """Show the log's schema revision and the one that this release needs."""
    from store import migrate
    from store.database import database_url, open_database

    database = open_database(database_url(url))
    found, needed = migrate.current(database), migrate.head()
    if as_json:
        print_json({"url": shown(database), "current": found, "needed": needed})
    else:
        advice = "" if found == needed else ": run `turnlog db upgrade`"
        state = f"{found or 'no schema'}, this release needs {needed}{advice}"
        Console(soft_wrap=True).print(f"{shown(database)} is at {state}")


@db.command(epilog="Example: [bold]turnlog db check[/]")
def check(url: Db = None, as_json: AsJson = False) -> None:
    """List calls that were admitted and neither completed nor ended: in flight, or left by a server that was killed.

    A server ends its own on its next start. They never train, and never hold up later calls.
    """
    from store import log
    from store.database import read

    with opened(url) as database, read(database) as connection:
        pending = log.pending(connection)
    listed: list[dict[str, JsonValue]] = [
        {
            "rollout_id": intent.rollout_id,
            "call_id": str(intent.call_id),
            "decision": intent.decision,
            "reason": intent.reason,
            "worker": intent.worker,
            "at": intent.at,
        }
        for intent in pending
    ]
    if as_json:
        print_json([*listed])
    else:
        Console().print(table_of(listed, empty="no pending calls"))
