"""What the demo prints: the log and the rows as tables.

Knows how to lay them out; does not know where they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table

from replay.row import Row
from turnlog.show import ShownRollout


def calls_table(rollouts: Iterable[ShownRollout]) -> Table:
    """Per call: its decision and reason, and the tokens that the log stores against those the model saw and sampled."""
    table = Table(title="The log, call by call, in tokens", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("rollout", no_wrap=True)
    for name in ("call", "decision", "reason"):
        table.add_column(name)
    for name in ("prompt", "sampled", "stored"):
        table.add_column(name, justify="right")
    for rollout in rollouts:
        for call in rollout.calls:
            place = (call.evidence or {}).get("first_difference")
            table.add_row(
                rollout.opened.rollout_id,
                str(call.number or call.state),
                call.decision if call.parent_id is None else f"continues {rollout.number(call.parent_id)}",
                call.reason if place is None else f"{call.reason}, item {place}",
                str(call.prompt_tokens),
                str(call.sampled_tokens),
                str(call.stored_tokens),
            )
        table.add_section()
    return table


def rows_table(rows: Iterable[Row], advantages: Mapping[str, float]) -> Table:
    """Per row: its calls, tokens, trained tokens and policy versions, with its rollout's reward and advantage."""
    table = Table(title="The same log as training rows", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("rollout", no_wrap=True)
    table.add_column("calls", no_wrap=True)
    for name in ("tokens", "trained", "policy versions", "reward", "advantage"):
        table.add_column(name, justify="right")
    shown = None
    for row in rows:
        if shown not in (None, row.rollout_id):
            table.add_section()
        shown = row.rollout_id
        oldest, newest = row.policy_range
        table.add_row(
            row.rollout_id,
            calls_text(row.call_numbers),
            str(row.length),
            str(row.trained),
            str(oldest) if oldest == newest else f"{oldest} to {newest}",
            "" if row.reward is None else f"{row.reward:.3f}",
            f"{advantages[row.rollout_id]:+.3f}",
        )
    return table


def calls_text(numbers: Iterable[int]) -> str:
    """The calls of a row as people write them, longer runs shortened.

    >>> calls_text((3, 4)), calls_text(range(1, 21)), calls_text((1, 2, 5))
    ('{3,4}', '{1,2,...,20}', '{1,2,5}')
    """
    found = list(numbers)
    if len(found) > 5 and found == list(range(found[0], found[-1] + 1)):
        return f"{{{found[0]},{found[1]},...,{found[-1]}}}"
    return "{" + ",".join(map(str, found)) + "}"
