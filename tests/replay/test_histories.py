"""Recorded logs and the rows that they must give, for ever (`tests/histories/README.md`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from replay.rowset import RowSet, build
from replay.selection import Selection
from store.events import AnyEvent, Event

FILES = sorted((Path(__file__).parents[1] / "histories").glob("*.json"))


def facts(found: RowSet) -> dict[str, Any]:
    return {
        "selection": found.selection.as_json(),
        "rows": [[row.rollout_id, [*row.call_numbers], row.length, row.trained] for row in found.rows],
        "rows_sha256": found.digest(),
        "refused": {refusal.rollout_id: refusal.reason for refusal in found.refusals.rollouts},
        "left_out": dict(found.left_out),
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_history_gives_the_same_rows_for_ever(
    database: Engine, remember: Callable[[Engine, Iterable[Event]], None], file: Path
) -> None:
    history = json.loads(file.read_text())
    remember(database, [AnyEvent.validate_python(event) for event in history["events"]])
    for expected in history["expected"]:
        rule = expected["selection"]
        selection = Selection(
            rule=rule["rule"], version=rule["version"], excluded_roles=frozenset(rule["excluded_roles"])
        )
        assert facts(build(database, selection)) == expected


def test_there_are_histories() -> None:
    assert len(FILES) >= 3
