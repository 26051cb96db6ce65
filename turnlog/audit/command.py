"""The command `turnlog audit`: its options and its output.

Knows the terminal; what is audited lives in `turnlog.audit.run`. Law: the exit code is 0 when all of the log follows
from the rest of it, and 1 for any difference, each of which is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from turnlog.audit.findings import NOTES, RULES
from turnlog.console import Archived, AsJson, Db, command_line, print_json, progress_bar

if TYPE_CHECKING:
    from store.media import MediaStore
    from turnlog.audit.run import Audited

_SHOWN = 50
"""Differences that the terminal names; `--json` has up to 1,000."""


def audit_log(
    position: Annotated[
        str | None,
        typer.Option(metavar="POSITION", help="The log as it was at this position, as `turnlog tail` prints them."),
    ] = None,
    archive: Archived = None,
    media: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where media bytes lie, to check them too. Default: $TURNLOG_MEDIA."),
    ] = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="Nothing is running any more: a call without an end is a difference.")
    ] = False,
    url: Db = None,
    as_json: AsJson = False,
) -> None:
    """Derive everything in the log again, and name each difference; exit code 1 when there is one.

    Deleted events, digests, chain hashes, parent links, roots and depths, lengths, masks, every decision with its
    reason, rows that trained, media, writers' counts, and what harnesses declare against what was found.
    The log may be in use.
    """
    from store.database import database_url, open_database
    from store.settled import Position
    from turnlog.audit.run import audit

    database = open_database(database_url(url))
    try:
        with progress_bar("Auditing") as progress:
            found = audit(
                database,
                position=None if position is None else Position.parse(position),
                archive=archive,
                media=_media(media, database_url(url)),
                finished=finished,
                progress=lambda done, total: progress.update(progress.task_ids[0], completed=done, total=total),
            )
    finally:
        database.dispose()
    if as_json:
        print_json(facts(found))
    else:
        words = ["turnlog", "audit", "--position", str(found.position), *(["--finished"] if finished else [])]
        again = command_line(words, {"--archive": archive, "--media": media, "--db": url})
        show(found, again, Console(soft_wrap=True, highlight=False))
    if not found.clean:
        raise typer.Exit(1)


def _media(named: str | None, log: str) -> MediaStore | None:
    """The media store, if there is one to look into. Raises MediaUnavailable for one that was named."""
    from store.errors import MediaUnavailable
    from store.media import open_media

    try:
        return open_media(named, log, writable=False)
    except MediaUnavailable:
        if named is not None:
            raise
        return None


def show(found: Audited, again: str, console: Console) -> None:
    """The audit as tables, then each difference in a line; `again` is the command that gives the same."""
    findings = found.findings
    table = Table("what holds", "looked at", "differences")
    for column in table.columns[1:]:
        column.justify = "right"
    for rule, meaning in RULES.items():
        if findings.checked[rule] or findings.differences[rule]:
            many = findings.differences[rule]
            table.add_row(
                f"[bold]{rule}[/] {meaning}", f"{findings.checked[rule]:,}", f"[red]{many:,}[/]" if many else "0"
            )
    console.print(table)
    for name, many in findings.notes.most_common():
        console.print(f"[yellow]{many:,}[/] {NOTES[name]} [dim]{escape(findings.examples[name][0])}[/]")
    for difference in findings.shown[:_SHOWN]:
        console.print(f"[red]✗[/] {escape(str(difference))}")
    if (more := findings.differences.total() - _SHOWN) > 0:
        console.print(f"and {more:,} more differences: --json names up to {findings.kept:,}")
    verdict = "[green]clean[/]" if found.clean else "[red]not clean[/]"
    console.print(
        f"{verdict}: {sum(found.events.values()):,} events of {found.rollouts:,} rollouts, "
        f"{found.tokens:,} tokens in {found.seconds:.1f} s, {found.tokens / max(found.seconds, 1e-9):,.0f} tokens/s; "
        f"the same again: [bold]{escape(again)}[/]"
    )


def facts(found: Audited) -> dict[str, JsonValue]:
    """The same as one JSON object."""
    findings = found.findings
    differences: list[JsonValue] = [
        {
            "rule": each.rule,
            "rollout_id": each.rollout_id,
            "event": each.event,
            "stored": each.stored,
            "derived": each.derived,
        }
        for each in findings.shown
    ]
    notes: dict[str, JsonValue] = {
        name: {"count": many, "meaning": NOTES[name], "examples": [*findings.examples[name]]}
        for name, many in findings.notes.items()
    }
    return {
        "position": str(found.position),
        "clean": found.clean,
        "rollouts": found.rollouts,
        "events": {**found.events},
        "tokens": found.tokens,
        "seconds": round(found.seconds, 3),
        "tokens_per_second": round(found.tokens / max(found.seconds, 1e-9)),
        "checked": {**findings.checked},
        "differences_by_rule": {**findings.differences},
        "differences": differences,
        "notes": notes,
    }
