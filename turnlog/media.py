"""`turnlog media`: what lies in the media store, compared with the log.

Knows arguments and output; which bytes are whole or named by no event is found in `store.media_check`. Law: nothing is
deleted unless it is asked for, and never what is younger than a running call may be.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer
from pydantic import JsonValue
from rich.console import Console
from sqlalchemy import Engine

from store.media import MediaStore, open_media
from turnlog.console import AsJson, Db, opened, print_json, table_of

Media = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where media lie. Default: $TURNLOG_MEDIA, else a folder beside the SQLite log."),
]
media = typer.Typer(no_args_is_help=True, help="Images and other media that calls showed the model.")


@media.command(epilog="Example: [bold]turnlog media orphans[/] lists, [bold]--delete[/] removes what is listed.")
def orphans(
    delete: Annotated[bool, typer.Option("--delete", help="Remove them.")] = False,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="HOURS", help="Leave out what is younger: a running call may be about to.")
    ] = 24.0,
    where: Media = None,
    url: Db = None,
    as_json: AsJson = False,
) -> None:
    """List bytes that no event names: those of calls that were refused or failed after their images were stored."""
    from store.database import read
    from store.media_check import orphans as find

    with opened(url) as database:
        store = media_of(database, where, writable=delete)
        with read(database) as connection:
            found = [*find(connection, store, older_than=timedelta(hours=older_than))]
    if delete:
        for each in found:
            store.delete(each.address)
    listed: list[dict[str, JsonValue]] = [
        {"sha256": each.address.hex(), "bytes": each.size, "written_at": str(each.written_at)} for each in found
    ]
    if as_json:
        print_json({"deleted": delete, "orphans": [*listed]})
        return
    console = Console(soft_wrap=True)
    console.print(table_of(listed, empty=f"every object in {store.url} is named by an event, or younger"))
    if found:
        did = "deleted" if delete else "no event names"
        console.print(f"{did} {len(found)} objects, {sum(each.size for each in found)} bytes, in {store.url}")


def media_of(database: Engine, url: str | None, *, writable: bool = False) -> MediaStore:
    """The media store of a log. Raises MediaUnavailable."""
    return open_media(url, database.url.render_as_string(hide_password=False), writable=writable)
