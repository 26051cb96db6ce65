"""The command `turnlog tail`: its options and its output.

Knows the terminal and how long to wait; which events are told, and in which order, lives in `store.tail`. Law: each
event is printed once, with the position from which a later `--after` goes on behind it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, cast

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.markup import escape

from turnlog.console import Db, notes, opened

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from store.settled import Position
    from store.tail import Kind, Page, Told

_IDLE = 0.2
"""Seconds between two looks at a log in which nothing happens."""
_AWAY = 2.0
"""Seconds until a database that did not answer is asked again."""
_PAGE, _WIDE_PAGE = 1000, 100
"""Events read at once, and with their tokens."""
_COLOURS = {
    "rollout_opened": "cyan",
    "call_admitted": "dim",
    "call_completed": "green",
    "call_ended": "yellow",
    "media_stored": "dim",
    "media_shown": "green",
    "rollout_scored": "magenta",
    "row_trained": "blue",
}


def tail_log(
    after: Annotated[
        str | None,
        typer.Option(metavar="POSITION", help="Begin behind this position, or `now`. Default: the log's beginning."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens, until stopped.")] = False,
    rollout: Annotated[list[str] | None, typer.Option(help="Only this rollout; may be repeated.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only this kind of event, such as call_completed; may be repeated.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With tokens, log-probabilities and item traces: whole events.")
    ] = False,
    url: Db = None,
    as_json: Annotated[
        bool | None, typer.Option("--json/--text", help="One JSON object an event, or a line. Default: by the output.")
    ] = None,
) -> None:
    """Print the log's events as they settle: each once, none skipped, however late it is committed.

    Each JSON line has the event, its sequence and the position behind it, for the same --rollout and --kind. Of one
    kind, events come in the order of their sequences, and none comes before one that it names.
    """
    from store import tail
    from store.settled import Position

    for each in kind or ():
        if each not in tail.KINDS:
            raise typer.BadParameter(
                f"{each!r} is no kind of event: one of {', '.join(tail.KINDS)}", param_hint="--kind"
            )
    plain = not sys.stdout.isatty() if as_json is None else as_json
    console = Console(soft_wrap=True, highlight=False)
    with opened(url) as database:
        position = tail.now(database) if after == "now" else Position.parse(after) if after else Position()
        if beyond := _beyond(position, tail.now(database)):
            notes().print(f"[yellow]turnlog:[/] {beyond}")
        wanted = _Wanted(
            rollouts=tuple(rollout or ()), kinds=cast("tuple[Kind, ...]", tuple(kind or tail.KINDS)), tokens=tokens
        )
        code = 0
        try:
            for page in _pages(database, position, wanted, follow=follow):
                for told in page.events:
                    if plain:
                        line = {"position": str(told.position), "sequence": told.sequence, "event": told.fields}
                        print(json.dumps(line, ensure_ascii=False))
                    else:
                        console.print(_line(told))
                    position = told.position
                position = page.position
                sys.stdout.flush()
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:  # whoever read has enough; the interpreter must not try again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    notes().print(f"what follows: --after {position}", style="dim")
    if code:
        raise typer.Exit(code)


def _beyond(after: Position, reached: Position) -> str | None:
    """What is to be said of a position that the log has not reached: it may be one of another log.

    It is no error: a log whose newest partitions have gone into the archive does not know how far it was.
    """
    if all(had <= has for had, has in zip(astuple(after), astuple(reached), strict=True)):
        return None
    return (
        f"--after {after} is ahead of the log, which has reached {reached}: what it gets up to there is not told; "
        "give a position of this log"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    rollouts: tuple[str, ...]
    kinds: tuple[Kind, ...]
    tokens: bool


def _pages(database: Engine, position: Position, wanted: _Wanted, *, follow: bool) -> Iterator[Page]:
    """Page after page; a database that goes away while it is followed is waited for."""
    from store import tail
    from store.errors import LogUnavailable

    limit = _WIDE_PAGE if wanted.tokens else _PAGE
    while True:
        try:
            page = tail.read(
                database,
                after=position,
                limit=limit,
                rollouts=wanted.rollouts,
                kinds=wanted.kinds,
                tokens=wanted.tokens,
            )
        except LogUnavailable as error:
            if not follow:
                raise
            notes().print(f"[yellow]turnlog:[/] {escape(str(error))}")
            time.sleep(_AWAY)
            continue
        position = page.position
        yield page
        if not page.events:
            if not follow:
                return
            time.sleep(_IDLE)


def _line(told: Told) -> str:
    """One event as people read it."""
    at = datetime.fromtimestamp(told.time / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    colour = _COLOURS[told.kind]
    rollout_id = escape(str(told.fields.get("rollout_id", "")))
    words = told.kind.replace("_", " ")
    return f"[dim]{at}[/] [{colour}]{words:14}[/] [bold]{rollout_id}[/] {escape(_said(told.kind, told.fields))}"


def _said(kind: Kind, fields: Mapping[str, JsonValue]) -> str:
    match kind:
        case "rollout_opened":
            named = (f"{name} {fields[name]}" for name in ("group_id", "task", "harness") if fields[name] is not None)
            return ", ".join(named)
        case "call_admitted":
            return f"{fields['call_id']} {fields['decision']}: {fields['reason']}"
        case "call_completed":
            stored = f"{fields['prompt_len']} prompt and {fields['sampled_len']} sampled tokens"
            return f"{fields['call_id']} {fields['decision']}: {fields['reason']}, {stored}, {fields['finish_reason']}"
        case "call_ended":
            return f"{fields['call_id']} {fields['state']}: {fields['reason']}"
        case "media_stored":
            return f"{str(fields['sha256'])[:16]} {fields['size']} bytes"
        case "media_shown":
            at = f"{fields['tokens']} tokens from {fields['start']} on"
            return f"{fields['call_id']} {fields['modality']} {str(fields['sha256'])[:16]}, {at}"
        case "rollout_scored":
            return f"reward {fields['reward']}, {fields['status']}"
        case "row_trained":
            return f"run {fields['run']} step {fields['step']} row {fields['row_id']}"
