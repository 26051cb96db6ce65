"""One call for the eye: its tokens, their texts, and the calls around it."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from store.database import read
from store.events import CallCompleted, logprob_array, token_array
from store.log import calls as calls_of
from turnlog.boundary import Detokenizer
from turnlog.ui import call, tokens
from turnlog.ui.errors import UnknownCall


def letters(ids: Any) -> str:
    """A tokenizer of bytes: one token, one byte."""
    return bytes(each % 256 for each in ids).decode(errors="replace")


@given(st.text(max_size=60))
def test_texts_end_to_end_are_the_text(said: str) -> None:
    found = tokens.texts(list(said.encode()), letters)
    assert "".join(found) == said
    assert len(found) == len(said.encode())


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert tokens.texts(list("ä".encode())[:1], letters) == ["\ufffd"]


def test_the_mask_and_the_scores_stand_where_tokens_were_sampled(chain_maker: Any) -> None:
    _, second = chain_maker([(20, 10), (8, 5)])
    part = tokens.part(second, Detokenizer(decode=letters, special={int(token_array(second.token_ids)[0])}))
    assert [token.token_id for token in part.tokens] == token_array(second.token_ids).tolist()
    assert [token.place for token in part.tokens] == list(range(30, 43))
    assert [token.logprob is not None for token in part.tokens] == [False] * 8 + [True] * 5
    assert [token.logprob for token in part.tokens[8:]] == logprob_array(second.logprobs).tolist()
    assert [token.policy for token in part.tokens[8:]] == [1, 1, 2, 2, 2]
    assert [token.changes for token in part.tokens[8:]] == [True, False, True, False, False]
    assert [token.special for token in part.tokens[:2]] == [True, False]
    assert all(token.text is None for token in tokens.part(second, None).tokens)


def test_long_calls_come_in_parts_that_hold_each_token_once(chain_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = chain_maker([(70, 30)])
    monkeypatch.setattr(tokens, "PAGE", 32)
    monkeypatch.setattr(tokens, "BEFORE", 5)
    assert tokens.part(one, None).first == 65  # where its generation begins, and a little before
    seen: list[int] = []
    place: int | None = 0
    while place is not None:
        part = tokens.part(one, None, place)
        seen += [token.place for token in part.tokens]
        place = part.later
    assert seen == list(range(100))
    assert tokens.part(one, None, 40).earlier == 8
    assert tokens.part(one, None, 0).earlier is None
    assert tokens.part(one, None, 10**9).first == 99


def test_a_call_knows_the_calls_around_it(filled: Engine) -> None:
    with read(filled) as connection:
        first, second, fourth, third = calls_of(connection, "forked")
        found = call.load(connection, first.call_id)
        assert (found.state, found.number, found.parent, found.before) == ("completed", 1, None, None)
        assert [(each.call_id, each.number) for each in found.children] == [(second.call_id, 2), (fourth.call_id, 3)]
        assert found.after is not None
        assert (found.after.call_id, found.after.number) == (second.call_id, 2)
        root = call.load(connection, third.call_id)
        assert root.nearest is not None
        assert (root.nearest.call_id, root.nearest.number, root.number) == (second.call_id, 2, 4)
        assert root.after is None
        compared = call.compared(connection, third, None)
        assert compared is not None
        assert compared.nearest is not None
        assert compared.nearest.call == second
        assert call.compared(connection, second, None) is None


def test_a_call_without_an_answer_has_its_intent_and_its_end(filled: Engine) -> None:
    with read(filled) as connection:
        ids = connection.execute(text("select call_id from call_end union select call_id from call_intent")).scalars()
        found = [call.load(connection, UUID(bytes=each) if isinstance(each, bytes) else each) for each in ids]
    states = {each.state: each for each in found}
    assert states.keys() == {"failed", "pending", "refused"}
    assert states["failed"].parent is not None
    assert states["pending"].end is None
    assert states["refused"].intent is None


def test_an_unknown_call_is_said_to_be_unknown(filled: Engine) -> None:
    with read(filled) as connection, pytest.raises(UnknownCall):
        call.load(connection, uuid4())


def test_contexts_too_long_for_a_page_are_not_compared(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "COMPARED", 10)
    with read(filled) as connection:
        root: CallCompleted = calls_of(connection, "forked")[-1]
        assert call.compared(connection, root, None) is None
