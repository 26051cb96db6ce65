"""What the commands share: options, the opened log, tables, JSON and progress.

Knows the terminal; does not know any command. Law: results go to stdout, all else to stderr.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy import Engine

if TYPE_CHECKING:
    from replay.pool import Pool

Db = Annotated[
    str | None,
    typer.Option("--db", metavar="URL", help="The log. Default: $TURNLOG_URL, else sqlite:///turnlog.db"),
]
Rule = Annotated[
    Literal["completed", "declared", "output"],
    typer.Option(help="Which calls count: all that completed, those that the outcome accepts, or those in its output."),
]


def _known(roles: list[str] | None) -> list[str] | None:
    """The roles again, if all are ones that a hint may name: a slip of the pen would leave nothing out."""
    from engine.hints import ROLES

    for role in roles or ():
        if role not in ROLES:
            raise typer.BadParameter(f"{role!r} is no role of a call: one of {', '.join(ROLES)}")
    return roles


ExcludeRole = Annotated[
    list[str] | None,
    typer.Option(callback=_known, help="Leave out calls of this role: title, summary or subagent; may be repeated."),
]
AsOf = Annotated[str | None, typer.Option(metavar="POSITION", help="The log as it was at this position. Default: now.")]
Archived = Annotated[
    str | None,
    typer.Option(
        "--archive", metavar="URL", help="Read with the log as one. Default: $TURNLOG_ARCHIVE; empty for the log alone."
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Read with so many processes. Default: one a core for a large log, half as many for a sealed one.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for another program instead.")]


_LARGE = 50_000
"""Calls that one process reads in two seconds; to start others takes it about one."""


@contextmanager
def opened(url: str | None) -> Generator[Engine]:
    """The log, at the schema of this release."""
    from store import migrate
    from store.database import database_url, open_database

    database = open_database(database_url(url))
    try:
        migrate.require_current(database)
        yield database
    finally:
        database.dispose()


@contextmanager
def pool_of(asked: int | None, database: Engine, archive: str | None) -> Generator[Pool | None]:
    """As many processes as asked for; else one, or several for a log that takes longer than to start them."""
    from replay.pool import Pool

    processes = asked or _worth(database, archive)
    if processes == 1:
        yield None
        return
    with Pool(processes) as pool:
        yield pool


def _worth(database: Engine, archive: str | None) -> int:
    """One process a core; where most calls are sealed one for two, since a process has a thread that reads ahead."""
    from replay.archive import archive_url, open_archive
    from store.database import read_one
    from store.settled import settled

    with read_one(database) as connection:
        calls = settled(connection).calls
    if calls < _LARGE:
        return 1
    place = archive_url(archive)
    sealed = sum(file.lines for file in open_archive(place).files["model_call"]) if place is not None else 0
    return _cores() if 2 * sealed < calls else max(1, _cores() // 2)


def _cores() -> int:
    """Cores that this process may use, at most eight: the rest is the trainer's."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(here, 8)


def command_line(words: Sequence[str], urls: Mapping[str, str | None]) -> str:
    """A command to type again, with the options of those URLs that were given; passwords are left out.

    >>> command_line(["turnlog", "rows"], {"--archive": None, "--db": "postgresql://me:secret@db/log"})
    "turnlog rows --db 'postgresql://me:***@db/log'"
    """
    from store.database import shown_url

    given = [word for name, url in urls.items() if url is not None for word in (name, shown_url(url))]
    return shlex.join([*words, *given])


def table_of(rows: Sequence[Mapping[str, JsonValue]], *, empty: str) -> Table | str:
    """Rows of equal keys as a table; what to say instead when there are none."""
    if not rows:
        return empty
    table = Table()
    for name, value in rows[0].items():
        numeric = isinstance(value, int | float)
        table.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else escape(_cell(value)) for value in row.values()))
    return table


def _cell(value: JsonValue) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def print_json(value: JsonValue) -> None:
    """The command's result for another program."""
    print(json.dumps(value, indent=2))


def notes() -> Console:
    """Where everything goes that is not the command's result."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


@contextmanager
def progress_bar(what: str) -> Generator[Progress]:
    """A bar on stderr while something goes on; its one task has no total yet."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes(), transient=True) as progress:
        progress.add_task(what, total=None)
        yield progress
