"""`turnlog show ROLLOUT --boundary CALL`: what changed before a call that begins a row, for people and programs.

Knows the terminal and the log; how two contexts are compared lives in `turnlog.boundary`. Law: what is not certain is
said to be so, and a text that only looks like an item's is never shown as proven.
"""

from __future__ import annotations

from pydantic import JsonValue
from rich.console import Console
from rich.markup import escape
from sqlalchemy import Connection

from replay.errors import UnknownRollout
from store import log
from turnlog.boundary import Boundary, Change, Part, boundary
from turnlog.errors import NoBoundary
from turnlog.tokenizer import open_tokenizer, tokenizer_of

_LONGEST = 400
"""Characters of a text that the terminal shows; `--json` has all."""
_FOLDED = 120
"""Of a tool result."""


def found_boundary(connection: Connection, rollout_id: str, named: str, tokenizer: str | None) -> Boundary:
    """The boundary at a call, by its number among the completed calls or its id.

    Raises UnknownRollout, NoBoundary and NoTokenizer.
    """
    if log.rollout(connection, rollout_id) is None:
        raise UnknownRollout(rollout_id)
    calls = log.calls(connection, rollout_id)
    found = next(
        (call for number, call in enumerate(calls, 1) if named in (str(number), str(call.call_id), call.response_id)),
        None,
    )
    if found is None:
        raise NoBoundary(rollout_id, named, f"is none of its {len(calls)} completed calls")
    if found.decision != "root":
        raise NoBoundary(rollout_id, named, "continues an earlier one, so no row begins there")
    detokenizer = tokenizer_of(found.model) if tokenizer is None else open_tokenizer(tokenizer)
    return boundary({call.call_id: call for call in calls}, found, detokenizer)


def print_boundary(found: Boundary, console: Console) -> None:
    """Headline, then one block a change."""
    call = found.here.call
    console.print(f"[bold]row begins[/] at call {call.call_id} · {escape(call.reason)}")
    if found.nearest is None:
        console.print(f"{len(found.here.request)} items, and no earlier call to compare them with")
        return
    told = "its request and answer" if found.nearest.call.answer_items else "its request"
    console.print(f"[dim]beside call {found.nearest.call.call_id}, {told}[/]")
    for change in found.changes:
        _print_change(change, console)
    if found.loose:
        console.print("[yellow]not every item's text is certain; all text that differs:[/]")
    for there, here in found.loose:
        _print_text("-", "red", there, console)
        _print_text("+", "green", here, console)
    if not found.loose and not any(part.text for change in found.changes for part in (*change.there, *change.here)):
        console.print("[dim]without texts: name the served model's folder with --tokenizer[/]")


def _print_change(change: Change, console: Console) -> None:
    if change.kind == "same":
        console.print(f"  [dim]{change.sentence()}[/]")
        return
    mark = {"replaced": "~", "removed": "-", "inserted": "+", "appended": "+"}[change.kind]
    console.print(f"[bold]{mark} {escape(change.sentence())}[/] [dim]at item {_place(change)}[/]")
    for sign, colour, parts in (("-", "red", change.there), ("+", "green", change.here)):
        for part in parts:
            if part.text is not None:
                _print_text(sign, colour, part.text, console, part)


def _print_text(sign: str, colour: str, text: str, console: Console, part: Part | None = None) -> None:
    longest = _FOLDED if part is not None and part.role == "tool_result" else _LONGEST
    shown = text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest} more characters)"
    proven = "" if part is None else f"[dim]{part.name}{', proven by its digest' if part.proven else ''}:[/] "
    console.print(f"    [{colour}]{sign}[/] {proven}{escape(shown)}")


def _place(change: Change) -> int:
    return (change.here or change.there)[0].index


def facts_of_boundary(found: Boundary) -> dict[str, JsonValue]:
    """The same as one JSON object, texts whole."""
    nearest = found.nearest
    return {
        "call_id": str(found.here.call.call_id),
        "reason": found.here.call.reason,
        "nearest_call": None if nearest is None else str(nearest.call.call_id),
        "changes": [
            {
                "kind": change.kind,
                "sentence": change.sentence(),
                "there": [_facts(part) for part in change.there],
                "here": [_facts(part) for part in change.here],
            }
            for change in found.changes
        ],
        "loose": [{"there": there, "here": here} for there, here in found.loose],
    }


def _facts(part: Part) -> dict[str, JsonValue]:
    return {
        "index": part.index,
        "role": part.role,
        "name": part.name,
        "digest": part.digest.hex(),
        "text": part.text,
        "proven": part.proven,
    }
