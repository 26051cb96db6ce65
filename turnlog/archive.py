"""`turnlog archive` and `turnlog db drop-partition`: finished rollouts into Parquet, archived partitions out of a log.

Knows arguments and output; what is sealed lives in `replay.sealing`. Law: nothing leaves a log that its archive was not
read for, in the same run, event by event.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from turnlog.console import AsJson, Db, opened, print_json, progress_bar


def archive(
    before: Annotated[
        datetime,
        typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="Seal rollouts of which all is older, in UTC."),
    ],
    to: Annotated[str, typer.Option(metavar="URL", help="A folder, or any place that fsspec reaches.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would be sealed, and write nothing.")] = False,
    url: Db = None,
    as_json: AsJson = False,
) -> None:
    """Seal finished rollouts as Parquet and prove it by reading back; run it again and it adds what is new."""
    from replay.archive import open_archive
    from replay.sealing import seal

    until = int(before.replace(tzinfo=UTC).timestamp()) * 1_000_000
    with opened(url) as database, progress_bar("Sealing rollouts") as progress:
        found = seal(
            database,
            open_archive(to, new=True),
            before=until,
            name=secrets.token_hex(6),
            write=not dry_run,
            progress=lambda done, total: progress.update(progress.task_ids[0], completed=done, total=total),
        )
    if as_json:
        print_json(
            {
                "seal": found.number,
                "rollouts": found.rollouts,
                "finished": found.finished,
                "events": dict(found.events),
                "bytes": found.bytes,
            }
        )
        return
    did = "would seal" if dry_run else "sealed and read back"
    events = sum(found.events.values())
    Console(soft_wrap=True).print(
        f"{did} {events} events of {found.rollouts} rollouts; {found.finished} rollouts are finished"
    )


def drop_partition(
    name: Annotated[str, typer.Argument(help="A partition of model_call, as `turnlog db partitions` lists it.")],
    archive: Annotated[str, typer.Option(metavar="URL", envvar="TURNLOG_ARCHIVE", help="Where its events are sealed.")],
    url: Db = None,
) -> None:
    """Remove an archived partition of model_call, with its intents and ends, after checking the archive; PostgreSQL.

    Every event must be in the archive with the same digest, and every file that holds one must verify.
    The default partition, model_call_default, can go too: an empty one takes its place. Calls go on meanwhile.
    """
    from replay.archive import open_archive
    from replay.dropping import drop_archived
    from store.exclusive import exclusively
    from turnlog.db import require_postgres

    with opened(url) as database:
        require_postgres(database, "partitions", "it is one file: archive it and begin a new one (docs/archive.md)")
        with progress_bar("Checking the archive"), exclusively(database) as connection:
            found = drop_archived(connection, open_archive(archive), name)
            connection.commit()
    Console(soft_wrap=True).print(f"dropped {', '.join(found.partitions)}: {found.events} events, all in {archive}")
