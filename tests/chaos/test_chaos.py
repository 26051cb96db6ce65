"""The chaos run in short, and that its proof can fail."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store import log
from store.database import write
from store.events import CallAdmitted, CallCompleted, RolloutOpened, token_array
from tests.chaos import run
from tests.chaos.proof import Found, prove


class Words:
    """Shows each token as its number."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, tokens))


def noted(call: CallCompleted, parent: CallCompleted | None, **changed: Any) -> dict[str, Any]:
    tokens = token_array(call.token_ids)[-call.sampled_len :].tolist()
    return {
        "kind": "answered", "rollout": call.rollout_id, "response_id": call.response_id,
        "text": Words().decode(tokens), "tokens": tokens, "parent": parent and parent.response_id,
    } | changed  # fmt: skip


def test_the_proof_finds_what_is_lost_doubled_or_changed(
    sqlite_database: Engine, chain_maker: Any, tmp_path: Path
) -> None:
    first, second, third = chain_maker()
    # Ids of one test's calls are close together, and so are the names that its answers get.
    first, second, third = (
        call.model_copy(update={"response_id": name})
        for call, name in zip((first, second, third), ("a", "b", "b"), strict=True)
    )
    with write(sqlite_database) as connection:
        opening = RolloutOpened(rollout_id="r1", opened_at=1)
        intents = [
            CallAdmitted(
                call_id=call.call_id, rollout_id="r1", decision=call.decision, reason=call.reason,
                parent_id=call.parent_id, worker="w", at=1,
            )
            for call in (first, second, third)
        ]  # fmt: skip
        log.append(connection, [opening, *intents, first, second, third])

    def found(*notes: dict[str, Any]) -> Any:
        path = tmp_path / "notes.jsonl"
        path.write_text("".join(json.dumps(note) + "\n" for note in notes))
        return prove(sqlite_database, [path], Words(), exact=True)  # type: ignore[arg-type]

    right = found(noted(first, None))
    assert (right.answered, right.calls, right.wrong) == (1, 3, [])
    assert found(noted(first, None, response_id="never")).lost == 1
    assert found(noted(second, first)).doubled == 1
    for changed in ({"text": "else"}, {"tokens": [1]}, {"rollout": "r2"}):
        assert len(found(noted(first, None, **changed)).wrong) == 1
    assert found({"kind": "opened", "rollout": "r3"}, {"kind": "scored", "outcome_id": "x"}).wrong[0].startswith("roll")


def test_too_few_kills_are_told_in_all_and_of_each_kind_on_each_database() -> None:
    def result(log: str, **kills: int) -> run.Result:
        phase = run.Phase(log=log, on_log_failure="refuse", kills=45)
        return run.Result(phase=phase, kills=Counter(kills), found=Found(), seconds=1.0)

    enough = [result(log, server=25, engine=10, **{"database: writer": 10}) for log in ("sqlite", "postgresql")]
    assert run.too_few(enough, 90) == []
    assert run.too_few(enough, 91) == ["90 of 91 kills"]
    few = result("postgresql", server=33, engine=2, **{"database: postmaster": 10})
    assert run.too_few([enough[0], few], 90) == ["2 kills of engine on postgresql, fewer than 3"]


@pytest.mark.postgres
def test_kills_of_servers_engines_and_databases_lose_nothing(record_property: Any) -> None:
    seed = 7
    (result,) = run.run(seed=seed, kills=8, seconds=60, short=True)
    assert result.kills.total() == 8
    assert min(result.in_flight) > 0
    assert result.found.wrong == []
    assert (result.found.lost, result.found.doubled) == (0, 0)
    assert result.found.answered > 20
    assert result.found.continued > 10
    record_property("answers", result.found.answered)
