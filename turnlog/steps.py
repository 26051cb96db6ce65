"""The steps of a run over the history, in numbers and as files.

Knows how to lay out a step; what it holds is `replay.run`'s. Law: a step is a function of the run, which `plan.json`
holds by value: the same run gives the same files again, whatever the log has got since.

The folder of a run holds `plan.json`, the run and each step's plan with the advantages of its rollouts, and
`step-00000.parquet` and so on, the rows of a step as `turnlog rows --out` writes them. The rows of a rollout whose
tokens turn out damaged are planned and not in the file: the plan names it among the refused, with the reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from rich.box import SIMPLE_HEAD
from rich.table import Table

from replay.errors import BadPolicy, FileUnwritable
from replay.export import write_parquet
from replay.history import Policy
from replay.rowset import Outline, RowSet
from replay.run import Steps

_SAID = ["row_id", "length", "trained", "reward", "oldest", "newest"]


def policy_of(text: str | None) -> Policy:
    """A policy from the name of a JSON file or from JSON itself; all of history without either. Raises BadPolicy."""
    if text is None:
        return Policy()
    try:
        written = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        value: JsonValue = json.loads(written)
    except (OSError, ValueError) as error:
        why = f'is no JSON and no file of it ({error}): write it as in {{"min_reward": 0.5}}'
        raise BadPolicy("text", text, why) from error
    return Policy.from_json(value)


class Numbers:
    """Says a step in numbers, from the outline alone."""

    def __init__(self, outline: Outline, steps: Steps) -> None:
        self._steps = steps
        self._table = outline.table
        self._places: dict[str, list[int]] = {}
        for place, rollout_id in enumerate(outline.table.column("rollout_id").to_pylist()):
            self._places.setdefault(rollout_id, []).append(place)

    def of(self, step: int) -> dict[str, JsonValue]:
        """Of the rows that train; rewards, policy versions and staleness from least to most.

        The fill is the part of their packs that rows take. A row that is too long for a pack is counted, and no more.
        """
        planned, rollouts = self._steps.plan(step), self._steps.drawn(step)
        too_long = {row.row_id for row in planned.too_long}
        rows = self._table.take([place for rollout_id in rollouts for place in self._places[rollout_id]])
        lines = [line for line in rows.select(_SAID).to_pylist() if line["row_id"] not in too_long]
        facts: dict[str, JsonValue] = {
            "step": step,
            "rollouts": len(rollouts),
            "rows": len(lines),
            "tokens": sum(line["length"] for line in lines),
            "trained_tokens": sum(line["trained"] for line in lines),
            "rewards": _range(line["reward"] for line in lines),
            "policy_versions": _range(line[name] for line in lines for name in ("oldest", "newest")),
            "micro_batches": planned.micro_batches,
            "fill": planned.fill,
            "too_long": len(too_long),
        }
        version = self._steps.run.trainer_version
        if version is not None:
            facts["staleness"] = _range(version - line["oldest"] for line in lines)
        return facts


def _range(values: Iterable[int | float]) -> list[JsonValue]:
    """The least and the most; nothing of nothing."""
    ordered = sorted(values)
    return [ordered[0], ordered[-1]] if ordered else []


class Folder:
    """Writes a run into a folder: each step as it comes, the plan at the end, since a folder with a plan is whole."""

    def __init__(self, folder: Path, steps: Steps) -> None:
        self._folder = folder
        self._steps = steps
        self._written: list[JsonValue] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in (folder / "plan.json", *folder.glob("step-*.parquet")):  # of an earlier run
                old.unlink(missing_ok=True)
        except OSError as error:
            raise FileUnwritable(str(folder), error.strerror or str(error)) from error

    def write(self, step: int, rows: RowSet) -> None:
        """Write the step's rows."""
        file = f"step-{step:05}.parquet"
        write_parquet(rows, self._folder / file)
        rollouts = self._steps.drawn(step)
        self._written.append(
            {
                "file": file,
                "rollouts": [*rollouts],
                "advantages": {rollout_id: self._steps.advantages[rollout_id] for rollout_id in rollouts},
                "plan": self._steps.plan(step).as_json(),
                "refused": {each.rollout_id: each.detail for each in rows.refusals.rollouts},
            }
        )

    def close(self) -> None:
        """Write the plan."""
        plan: JsonValue = {"run": self._steps.run.as_json(), "steps": self._written}
        file = self._folder / "plan.json"
        aside = file.with_name(f".plan.json.{os.getpid()}.part")
        try:
            aside.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
            aside.replace(file)
        except OSError as error:
            raise FileUnwritable(str(file), error.strerror or str(error)) from error
        finally:
            aside.unlink(missing_ok=True)


def steps_table(facts: Sequence[Mapping[str, Any]]) -> Table:
    """Steps in numbers, a line each, narrow enough for a terminal."""
    headings = {**_HEADINGS, **({"staleness": "stale"} if "staleness" in facts[0] else {"policy_versions": "version"})}
    if not any(step["too_long"] for step in facts):
        del headings["too_long"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings.values():
        table.add_column(heading, justify="right", overflow="fold")
    for step in facts:
        table.add_row(*(_cell(step[name]) for name in headings))
    return table


_HEADINGS = {
    "step": "step",
    "rollouts": "rollouts",
    "rows": "rows",
    "tokens": "tokens",
    "trained_tokens": "trained",
    "micro_batches": "packs",
    "fill": "fill",
    "too_long": "long",
    "rewards": "reward",
}


def _cell(value: int | float | list[int | float]) -> str:
    """A number, or the least and the most of several.

    >>> _cell([0.5, 1.0]), _cell([3, 3]), _cell([]), _cell(0.98765)
    ('0.5..1', '3', '', '0.988')
    """
    if isinstance(value, list):
        return "..".join(dict.fromkeys(map(_cell, value)))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
