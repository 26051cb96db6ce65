"""What `turnlog rows` found: where its rows go, and in numbers, for people as tables, for programs as JSON.

Knows the forms of an export and how to lay out a tally; does not know how rows are made. Law: what gave no row is
counted by its reason, beside what did.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import JsonValue
from rich.markup import escape
from rich.table import Table

from replay.rowset import Part
from replay.selection import Selection
from replay.tally import Tally, tally
from turnlog.console import command_line
from turnlog.errors import NoMegatron

Consumer = Callable[[Iterable[Part], Selection], Tally]


def writer(form: Literal["parquet", "megatron"], out: Path | None) -> Consumer:
    """What takes a stream of rows: a file or a folder to write, or nothing but a count. Raises NoMegatron."""
    if out is None:
        return tally
    if form == "parquet":
        from replay.export import stream_parquet

        return lambda parts, selection: stream_parquet(parts, out, selection)
    if find_spec("megatron") is None:
        raise NoMegatron(form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing Megatron makes it warn of what a GPU would need
        from replay.indexed import stream_indexed
    return lambda parts, selection: stream_indexed(parts, out, selection)


def summary(found: Tally, unfinished: Mapping[str, int]) -> dict[str, JsonValue]:
    """The tally, and the calls that did not complete, as one JSON object."""
    return {
        "rollouts": found.rollouts,
        "rows": found.rows,
        "tokens": found.tokens,
        "trained_tokens": found.trained,
        "left_out_calls": dict(found.left_out),
        "unfinished_calls": dict(unfinished),
        "refused_rollouts": [
            {"rollout_id": refusal.rollout_id, "reason": refusal.reason, "detail": refusal.detail}
            for refusal in found.refusals.rollouts
        ],
        "selection": found.selection.as_json(),
        "position": str(found.position),
        "sha256": found.sha256,
    }


def again(found: Tally, rollouts: Sequence[str] | None, archive: str | None, url: str | None) -> str:
    """The command that gives the same rows, whatever the log gets from now on; passwords are left out."""
    words = ["turnlog", "rows", "--as-of", str(found.position)]
    if found.selection.rule != "completed":
        words += ["--rule", found.selection.rule]
    for role in sorted(found.selection.excluded_roles):
        words += ["--exclude-role", role]
    for rollout_id in rollouts or ():
        words += ["--rollout", rollout_id]
    return command_line(words, {"--archive": archive, "--db": url})


def summary_tables(found: Tally, unfinished: Mapping[str, int]) -> Iterator[Table]:
    """The tally in numbers, then what gave no row, if anything did."""
    numbers = Table("rollouts", "rows", "tokens", "trained", "position", "sha256")
    counts = (found.rollouts, found.rows, found.tokens, found.trained)
    numbers.add_row(*map(str, counts), str(found.position), found.sha256[:16])
    yield numbers
    if found.left_out:
        left_out = Table("calls left out by the selection", "reason")
        for reason, count in found.left_out.items():
            left_out.add_row(str(count), reason)
        yield left_out
    if unfinished:
        without = Table("calls that did not complete", "state")
        for state, count in unfinished.items():
            without.add_row(str(count), state)
        yield without
    if found.refusals.rollouts:
        refused = Table("rollouts refused", "reason", "for example")
        for reason, count in found.refusals.by_reason().items():
            example = next(refusal.detail for refusal in found.refusals.rollouts if refusal.reason == reason)
            refused.add_row(str(count), reason, escape(example))
        yield refused
