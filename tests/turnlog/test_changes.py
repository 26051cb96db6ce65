"""What changed before a row begins: which items is exact, and a text is an item's only where that is certain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine
from typer.testing import CliRunner

from engine.items import Item, traces
from replay.errors import UnknownRollout
from store import log
from store.database import read
from store.events import CallCompleted, ItemTrace
from tests.turnlog.played import played_log
from turnlog.boundary import Boundary, Detokenizer, boundary, compare
from turnlog.changes import found_boundary
from turnlog.cli import app
from turnlog.errors import NoBoundary, NoTokenizer


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    database = played_log(tmp_path_factory.mktemp("played"))
    yield database
    database.dispose()


def at(database: Engine, rollout_id: str, call: str, tokenizer: Path | None = None) -> Boundary:
    with read(database) as connection:
        return found_boundary(connection, rollout_id, call, None if tokenizer is None else str(tokenizer))


def changed(found: Boundary) -> list[str]:
    return [change.sentence() for change in found.changes if change.kind != "same"]


def test_a_tool_result_that_was_replaced_by_a_marker_is_seen_at_a_glance(played: Engine, demo_model: Path) -> None:
    found = at(played, "nemo-gym-browsecomp-keep-rounds", "4", demo_model)
    assert changed(found)[0] == "tool result 2 was replaced"
    (change,) = [change for change in found.changes if change.kind == "replaced"]
    ((there,), (here,)) = change.there, change.here
    assert "search result 2" in (there.text or "")
    assert "[T5: tool output wrapper]" in (here.text or "")
    assert not there.proven  # its digest holds the id of its call, which no token shows


def test_a_summary_in_place_of_the_history_is_proven_by_its_digest(played: Engine, demo_model: Path) -> None:
    with read(played) as connection:
        calls = log.calls(connection, "pi")
    number = next(number for number, call in enumerate(calls, 1) if call.reason == "context_replaced")
    found = at(played, "pi", str(number), demo_model)
    assert [change.kind for change in found.changes] == ["same", "replaced", "same", "appended"]
    (summary,) = found.changes[1].here
    assert summary.proven
    assert summary.text is not None
    assert Item.message("user", [summary.text]).digest == summary.digest
    assert "## Goal" in summary.text
    assert {part.role for part in found.changes[1].there} >= {"user", "assistant", "tool_call", "tool_result"}


def test_every_boundary_of_the_recordings_can_be_shown(played: Engine, demo_model: Path) -> None:
    with read(played) as connection:
        for rollout in log.rollouts(connection):
            calls = log.calls(connection, rollout.rollout_id)
            known = {call.call_id: call for call in calls}
            for call in calls:
                if call.decision != "root":
                    continue
                found = boundary(known, call)
                here = [part for change in found.changes for part in change.here]
                assert [part.digest for part in here] == (
                    [] if found.nearest is None else [item.digest for item in call.request_items]
                )
                if call.reason in ("item_edited", "item_removed", "context_replaced"):
                    assert changed(found)


def test_without_a_tokenizer_there_are_no_texts(played: Engine) -> None:
    found = at(played, "pi", "10")
    assert all(part.text is None for change in found.changes for part in (*change.there, *change.here))
    assert found.loose == ()


def test_a_first_call_has_nothing_to_be_compared_with(played: Engine) -> None:
    found = at(played, "pi", "1")
    assert (found.nearest, found.changes) == (None, ())


@pytest.mark.parametrize(
    ("call", "why"), [("2", "continues an earlier one"), ("99", "is none of its"), ("x", "is none")]
)
def test_a_call_that_begins_no_row_is_refused(played: Engine, call: str, why: str) -> None:
    with pytest.raises(NoBoundary, match=why):
        at(played, "pi", call)


def test_a_rollout_or_a_tokenizer_that_is_not_there_is_named(played: Engine, tmp_path: Path) -> None:
    with pytest.raises(UnknownRollout):
        at(played, "nobody", "1")
    with pytest.raises(NoTokenizer, match="name the folder of the served model"):
        at(played, "pi", "10", tmp_path)


def letters(text: str) -> tuple[ItemTrace, ...]:
    """One item a letter."""
    return traces([Item.message("user", [letter]) for letter in text])


@given(there=st.text("abcd", max_size=12), here=st.text("abcd", max_size=12))
def test_the_stretches_of_both_contexts_are_all_of_them_in_order(there: str, here: str) -> None:
    found = compare(letters(there), letters(here))
    assert [part.index for change in found for part in change.there] == [*range(len(there))]
    assert [part.index for change in found for part in change.here] == [*range(len(here))]
    for change in found:
        same = [part.digest for part in change.there] == [part.digest for part in change.here]
        assert same == (change.kind == "same")
    if here.startswith(there) and len(here) > len(there) > 0:
        assert [change.kind for change in found] == ["same", "appended"]


def spelled(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def test_a_tool_result_has_a_text_only_when_as_many_pieces_look_like_one() -> None:
    results = traces([Item.tool_result("c1", ["one"]), Item.tool_result("c2", ["two"])])
    other = traces([Item.tool_result("c1", ["none"]), Item.tool_result("c2", ["two"])])
    words = Detokenizer(decode=spelled, special=frozenset({ord("<")}))

    def texts(there: str, here: str) -> list[str | None]:
        found = compare(
            results, other, tokens_there=[*map(ord, there)], tokens_here=[*map(ord, here)], detokenizer=words
        )
        return [part.text for change in found if change.kind == "replaced" for part in (*change.there, *change.here)]

    assert texts("<tool_response>one<tool_response>two", "<tool_response>none<tool_response>two") == [
        "<tool_response>one",
        "<tool_response>none",
    ]
    assert texts("<tool_response>one two", "<tool_response>none<tool_response>two") == [None, "<tool_response>none"]


def test_the_command_shows_a_boundary_to_people_and_programs(played: Engine, demo_model: Path) -> None:
    url = played.url.render_as_string()
    where = ["show", "nemo-gym-browsecomp-keep-rounds", "--boundary", "4", "--db", url]
    shown = CliRunner().invoke(app, [*where, "--tokenizer", str(demo_model)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    assert "~ tool result 2 was replaced at item 10" in shown.stdout
    assert "- tool result 2: <tool_response>" in shown.stdout
    found = json.loads(CliRunner().invoke(app, [*where, "--json"]).stdout)
    assert [change["kind"] for change in found["changes"]] == ["same", "replaced", "same", "appended"]
    assert "without texts: name the served model's folder" in CliRunner().invoke(app, where).stdout
    assert CliRunner().invoke(app, ["show", "--boundary", "4", "--db", url]).exit_code == 2


def test_the_evidence_names_a_call_that_is_gone(chain_maker: Callable[..., list[CallCompleted]]) -> None:
    (root,) = chain_maker([(5, 3)])
    root = root.model_copy(update={"evidence": {"nearest_call": "01a22b6d-37a7-7f1e-9294-064bd2dedb1f"}})
    assert boundary({root.call_id: root}, root).nearest is None
