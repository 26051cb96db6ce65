"""The command `turnlog db copy`: its arguments and its output.

Knows arguments, a progress bar and a table; what a copy is lives in `store.copy`. Law: nothing in the log copied from
changes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from turnlog.console import AsJson, notes, opened, print_json, table_of


def copy_log(
    source: Annotated[str, typer.Argument(metavar="SRC", help="URL of the log to copy from.")],
    target: Annotated[
        str, typer.Argument(metavar="DST", help="URL of an empty database, or of an earlier copy of the same log.")
    ],
    as_json: AsJson = False,
) -> None:
    """Copy a log into another database, SQLite or PostgreSQL: the same events, sequences and digests.

    Positions (--as-of), stored runs and rows are the same in both. Each event is checked by its digest. A copy that was
    stopped goes on where it was, and running it again adds what is new; SRC may be written to meanwhile, DST may not.

    Media is not in the database: copy the folder or bucket named by TURNLOG_MEDIA with any tool (cp -r, rclone).
    """
    from store import migrate
    from store.copy import copy
    from store.database import database_url, open_database, shown_url

    with opened(source) as here:
        created = open_database(database_url(target))
        try:
            if migrate.current(created) is None:
                migrate.upgrade(created)
        finally:
            created.dispose()
        with opened(target) as there, _bar() as bar:
            (task,) = bar.task_ids

            def progress(doing: Literal["comparing", "copying"], done: int, total: int) -> None:
                bar.update(task, description=f"{doing.capitalize()} events", completed=done, total=total)

            found = copy(here, there, progress=progress)
            names = {"from": shown_url(here.url), "to": shown_url(there.url)}
    if as_json:
        print_json(
            {**names, "added": dict(found.events), "present": dict(found.present), "position": str(found.position)}
        )
        return
    lines: list[dict[str, JsonValue]] = [
        {"event": kind.replace("_", " "), "added": found.events[kind], "there before": found.present[kind]}
        for kind in found.events
    ]
    Console().print(table_of(lines, empty="no events"))
    said = Console(soft_wrap=True, highlight=False)
    said.print(f"{names['to']} has all of {names['from']} up to position {found.position}")


class _Rate(TextColumn):
    """How many events, and how many a second."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f" of {task.total:,.0f}"
        speed = "" if task.speed is None else f", {task.speed:,.0f}/s"
        return Text(f"{task.completed:,.0f}{total}{speed}")


def _bar() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Rate())
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=notes(), transient=True)
    bar.add_task("Comparing events", total=None)
    return bar
