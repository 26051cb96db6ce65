"""What a replay found, in numbers: for people as tables, for programs as JSON.

Knows how to lay out a row set; does not know how it was built. Law: what gave no row is counted by its reason, beside
what did.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from pydantic import JsonValue
from rich.markup import escape
from rich.table import Table

from replay.rowset import RowSet


def summary(found: RowSet) -> dict[str, JsonValue]:
    """The row set as one JSON object, without its rows."""
    return {
        "rollouts": found.rollouts,
        "rows": len(found.rows),
        "tokens": sum(row.length for row in found.rows),
        "trained_tokens": sum(row.trained for row in found.rows),
        "left_out_calls": dict(found.left_out),
        "refused_rollouts": [
            {"rollout_id": refusal.rollout_id, "reason": refusal.reason, "detail": refusal.detail}
            for refusal in found.refusals.rollouts
        ],
        "selection": found.selection.as_json(),
        "position": str(found.position),
        "sha256": found.digest(),
    }


def again(found: RowSet, rollouts: Sequence[str] | None) -> str:
    """The command that gives the same rows, whatever the log gets from now on; `--db` aside."""
    words = ["turnlog", "rows", "--as-of", str(found.position)]
    if found.selection.rule != "completed":
        words += ["--rule", found.selection.rule]
    for role in sorted(found.selection.excluded_roles):
        words += ["--exclude-role", role]
    for rollout_id in rollouts or ():
        words += ["--rollout", rollout_id]
    return shlex.join(words)


def summary_tables(found: RowSet) -> Iterator[Table]:
    """The row set in numbers, then what gave no row, if anything did."""
    numbers = Table("rollouts", "rows", "tokens", "trained", "position", "sha256")
    counts = (
        found.rollouts,
        len(found.rows),
        sum(row.length for row in found.rows),
        sum(row.trained for row in found.rows),
    )
    numbers.add_row(*map(str, counts), str(found.position), found.digest()[:16])
    yield numbers
    if found.left_out:
        left_out = Table("calls left out by the selection", "reason")
        for reason, count in found.left_out.items():
            left_out.add_row(str(count), reason)
        yield left_out
    if found.refusals.rollouts:
        refused = Table("rollouts refused", "reason", "for example")
        for reason, count in found.refusals.by_reason().items():
            example = next(refusal.detail for refusal in found.refusals.rollouts if refusal.reason == reason)
            refused.add_row(str(count), reason, escape(example))
        yield refused
