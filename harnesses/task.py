"""What a harness is given to do, and what a driver says about its harness.

Knows the task, the answers that a scripted model gives to it, and the shape of a driver; does not know any harness, the
server or the log. Law: the answers name the harness's own tools, and those really run, in a folder of the run's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "demo"
"""What the server calls the model."""
KEY = "test"
"""Any key does: nobody checks it."""
PROMPT = "Look through this folder, collect the numbers of all notes in report.md, and say when you are done."
FINAL = "Done: report.md holds all numbers."
NOTES = "So far ({}): the notes were read, report.md was begun. Next: read what is left, then finish report.md."
"""What the model answers to a call that is not the agent's own, a title or a summary; each time another text."""
LONG_LINES = 400
"""Lines of `long.txt`: reading it fills several thousand tokens, which is how a compaction comes about."""

Answer = dict[str, Any]
Shell = Callable[[str], tuple[str, dict[str, Any]]]
"""A shell command as a harness's own tool call: the tool's name and its arguments."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one run of one harness happens."""

    base: str
    """The rollout's base URL, without `/v1`."""
    folder: Path
    """The agent's working folder."""
    home: Path
    """A home folder of the run's own: no configuration of this machine's user is read or written."""
    installed: Path
    """Where `make harnesses` installs the harnesses."""


@dataclass(frozen=True, kw_only=True)
class Harness:
    """One way to run one harness."""

    name: str
    version: str
    dialect: str
    answers: Sequence[Answer]
    command: Callable[[Place], Sequence[str]]
    environment: Callable[[Place], Mapping[str, str]] = lambda _: {}
    prepare: Callable[[Place], None] = lambda _: None
    seconds: int = 240
    needs: str = ""
    """A pattern of files below `Place.installed` without which the harness is not installed."""
    roots: Mapping[str, int] = field(default_factory=dict[str, int])
    """Roots by reason that a correct log has, by what the harness is known to do; a run with others fails."""


def notes(folder: Path) -> None:
    """Write the files that the task is about."""
    for number in range(1, 7):
        (folder / f"note{number}.txt").write_text(f"Note {number}: the number is {number * 111}. Grüße – «ok»\n")
    lines = (
        f"{number}: nothing to see on line {number} of this long file, number {number * 7}"
        for number in range(LONG_LINES)
    )
    (folder / "long.txt").write_text("\n".join(lines) + "\n")


def steps(shell: Shell, *, final: Answer | None = None, again: int = 1) -> list[Answer]:
    """The agent's answers: thoughts or none, text or none, one tool call or two, commands that fail, and an end.

    `again` is how often the second reading of the long file reads it, in one answer: what it takes to fill a context.
    """

    def call(command: str) -> dict[str, Any]:
        name, arguments = shell(command)
        return {"name": name, "arguments": arguments}

    def spaced(command: str) -> dict[str, Any]:
        """Arguments spelled as a model may, and no JSON library does."""
        name, arguments = shell(command)
        return {"name": name, "arguments": "{ " + json.dumps(arguments, separators=(" ,", " : "))[1:-1] + " }"}

    return [
        {"reasoning": "\nI look around first.\n", "text": "\n\nLet me look.", "tool_calls": [call("ls -1")]},
        {"reasoning": "\nThe first note.\n", "tool_calls": [spaced("cat note1.txt")]},
        {"tool_calls": [call("cat note2.txt"), call("cat note3.txt")], "text": "Two more."},
        {"reasoning": "\nA file that is not there.\n", "tool_calls": [call("cat missing.txt")]},
        {"text": "I write «Grüße» – to a file.\n", "tool_calls": [call("printf '%s\\n' '111 «ä»' >> report.md")]},
        {"reasoning": "\nNow the long one.\n", "tool_calls": [spaced("cat long.txt")]},
        {"reasoning": "\nOn.\n", "text": "  Next note.  ", "tool_calls": [call("cat note4.txt")]},
        {"tool_calls": [call("cat note5.txt && grep -c nothing long.txt")]},
        {"reasoning": "\nAnd again the long one.\n", "tool_calls": [call("cat long.txt")] * again},
        {"reasoning": "\nThe last.\n", "text": "The last note.", "tool_calls": [call("cat note6.txt")]},
        {"reasoning": "\nWrite.\n", "tool_calls": [call("printf '222\\n333\\n444\\n555\\n666\\n' >> report.md")]},
        {"reasoning": "\nCheck.\n", "tool_calls": [call("cat report.md")]},
        final or {"reasoning": "\nAll there.\n", "text": FINAL},
    ]


def side_calls(count: int) -> list[Answer]:
    """Answers to the calls that offer no tools: titles and summaries."""
    return only([{"text": NOTES.format(number)} for number in range(1, count + 1)], tools=False)


def only(answers: Sequence[Answer], **conditions: Any) -> list[Answer]:
    """The answers, taken only by requests that meet the conditions (`When` of tests/scripted)."""
    return [{**answer, "when": conditions} for answer in answers]
