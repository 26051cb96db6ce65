"""`turnlog db check` and `turnlog db drain`: calls that never ended, and events that wait in spools.

Knows arguments and output; does not know how either came about. Law: nothing is thrown away: what the log refuses stays
in a file that is named.
"""

from __future__ import annotations

import re
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue
from rich.console import Console

from turnlog.console import AsJson, Db, notes, opened, print_json, progress_bar, table_of

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def check(
    url: Db = None,
    mark_lost: Annotated[
        bool, typer.Option("--mark-lost", help="End them as lost: for servers that will not start again.")
    ] = False,
    worker: Annotated[str | None, typer.Option(help="Only calls of this server.")] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only calls admitted so long ago: 30m, 2h, 1d. With --mark-lost 1h, if not said."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List calls that were admitted and neither completed nor ended: in flight, or left by a server that was killed.

    A server ends its own on its next start. They never train, and never hold up later calls. Before --mark-lost, hand
    over the spools of servers that died: `turnlog db drain`.
    """
    from store import log, recovery
    from store.database import read

    age = _seconds(older_than or ("1h" if mark_lost else "0s"))
    now = time.time_ns() // 1000
    with opened(url) as database:
        with read(database) as connection:
            pending = log.pending(connection, worker=worker)
        pending = [intent for intent in pending if intent.at <= now - age * 1_000_000]
        if mark_lost:
            why = "marked by `turnlog db check --mark-lost`: its server did not come back"
            marked = {end.call_id for end in recovery.mark_lost(database, pending, why=why, at=now)}
            pending = [intent for intent in pending if intent.call_id in marked]
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
        return
    Console().print(table_of(listed, empty="no calls to mark" if mark_lost else "no pending calls"))
    if mark_lost and listed:
        notes().print(f"{len(listed)} calls marked lost")


def drain(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Where the spools are: $TURNLOG_SPOOL of the servers.")
    ],
    url: Db = None,
    as_json: AsJson = False,
) -> None:
    """Hand over what servers that died left in their spools. A server that starts again does so with its own.

    May be repeated. Spools of live servers are left to them; what the log refuses is kept in a file beside the spool.
    """
    from store.errors import SpoolTaken
    from store.spool import Spool, workers_with_spools

    listed: list[dict[str, JsonValue]] = []
    refused = 0
    with opened(url) as database, progress_bar(f"Draining {folder}"):
        for worker in workers_with_spools(folder):
            try:
                spool = Spool(folder, worker)
            except SpoolTaken:
                listed.append({"worker": worker, "state": "held by a live server", "drained": 0, "refused": 0})
                continue
            with closing(spool):
                spool.drain(database)
            refused += spool.refused
            listed.append({"worker": worker, "state": "empty", "drained": spool.drained, "refused": spool.refused})
    if as_json:
        print_json([*listed])
    else:
        Console().print(table_of(listed, empty=f"no spools in {folder}"))
    if refused:
        notes().print(
            f"[yellow]{refused} submissions were refused:[/] their events and reasons are in {folder}/*.refused"
        )
        raise typer.Exit(1)


def _seconds(text: str) -> int:
    """So many seconds.

    >>> _seconds("90s"), _seconds("2h")
    (90, 7200)
    """
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"--older-than {text!r} is no time: write a number and s, m, h or d, such as 1h")
    return int(match[1]) * _UNITS[match[2]]
