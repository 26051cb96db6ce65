"""The scripted model, and the recorded traffic of stock harnesses played through it.

The server is real vLLM with turnlog on and `--reasoning restore`; only what it samples is given (tests/scripted). Each
recording is played as it was recorded and once more with `stream` flipped, all of them side by side. The calls that the
log then holds are matched with the recorded ones through what the script saw on its way to the engine.
"""

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import numpy as np
import pytest
from sqlalchemy import Engine

from engine.dialects.routes import DIALECTS
from store import log
from store.database import read
from store.events import CallAdmitted, CallCompleted, CallEnded, logprob_array
from store.lineage import chain_tokens
from tests.scripted import player
from tests.scripted.player import CHAT, Fields, Played

RECORDINGS = Path(__file__).parents[2] / "../shared/recordings"
CAPTURED = frozenset(dialect.PATH for dialect in DIALECTS)
SIDE_BY_SIDE = 6
CASES = [
    (path.parent.name, flip)
    for path in sorted(RECORDINGS.glob("*/requests.jsonl"))
    if player.read(path.parent)[0].endpoint in CAPTURED
    for flip in (False, True)
]
each_case = pytest.mark.parametrize(
    ("name", "flip"), CASES, ids=[f"{name}-{'flipped' if flip else 'recorded'}" for name, flip in CASES]
)
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


@dataclass(frozen=True, kw_only=True)
class Server:
    address: str
    database: Engine

    def script(self, rollout: str, *answers: Fields, otherwise: Fields | None = None) -> None:
        body = {"answers": answers, "otherwise": otherwise}
        queued = httpx.post(f"{self.address}/scripted/{rollout}", json=body, timeout=60)
        assert queued.status_code == 200, queued.text

    def scripted(self, rollout: str) -> Fields:
        found: Fields = httpx.get(f"{self.address}/scripted/{rollout}", timeout=60).json()
        return found

    def ask(self, rollout: str, text: str = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}
        return httpx.post(f"{self.address}/rollouts/{rollout}{CHAT}", json=body, timeout=60)

    def calls(self, rollout: str) -> list[CallCompleted]:
        with read(self.database) as connection:
            return log.calls(connection, rollout)

    def ends(self, rollout: str) -> list[CallEnded]:
        with read(self.database) as connection:
            return log.ends(connection, rollout)


@pytest.fixture(scope="module")
def scripted_server(server: Any) -> Server:
    return Server(address=server.address, database=server.database)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("stream", [False, True])
def test_a_scripted_answer_is_sampled_by_the_engine_and_read_by_its_parsers(
    scripted_server: Server, stream: bool
) -> None:
    rollout = f"whole-{stream}"
    calls = [{"name": "look", "arguments": {"at": "café <b>"}}, {"name": "look", "arguments": {}}]
    scripted_server.script(rollout, {"reasoning": " Hm.\n", "text": "\nLet me look.  ", "tool_calls": calls})
    answer = scripted_server.ask(rollout, tools=[TOOL], tool_choice="required", stream=stream, temperature=2.0)
    found = player.said(CHAT, player.assembled(CHAT, answer.text) if stream else answer.json())
    served = (("look", '{"at": "café <b>"}'), ("look", "{}"))
    assert found.content == (" Hm.\n", "\nLet me look.  ", served, "tool_calls")
    (call,), (seen,) = scripted_server.calls(rollout), scripted_server.scripted(rollout)["calls"]
    with read(scripted_server.database) as connection:
        assert chain_tokens(connection, call.call_id).tolist() == seen["prompt_token_ids"] + seen["token_ids"]
    assert np.array_equal(logprob_array(call.logprobs), np.zeros(call.sampled_len))


def test_answers_are_taken_in_order_and_then_the_model_speaks_freely(scripted_server: Server) -> None:
    scripted_server.script("order", {"text": "One."}, {"text": "Two."})
    assert [text_of(scripted_server.ask("order")) for _ in range(2)] == ["One.", "Two."]
    free, stock = scripted_server.ask("order", max_tokens=8, seed=1), scripted_server.ask("free", max_tokens=8, seed=1)
    assert free.json()["choices"] == stock.json()["choices"]
    assert [seen["answer"] for seen in scripted_server.scripted("order")["calls"]] == [0, 1, None]


def test_conditions_come_first_and_an_answer_may_stay(scripted_server: Server) -> None:
    title = {"text": "A title.", "repeat": True, "when": {"last_user_contains": "title for"}}
    tools = {"text": "A tool.", "when": {"tools": True, "messages": 1}}
    scripted_server.script("when", {"text": "One."}, title, tools, otherwise={"text": "No more."})
    asked = ["Find a title for this", "Hi", "a title for that", "Hi", "Hi"]
    assert [text_of(scripted_server.ask("when", text)) for text in asked] == [
        "A title.", "One.", "A title.", "No more.", "No more.",
    ]  # fmt: skip
    assert text_of(scripted_server.ask("when", tools=[TOOL])) == "A tool."
    assert scripted_server.scripted("when")["left"] == 0


@pytest.mark.parametrize("limit", [None, 1])
def test_an_output_that_a_limit_cut_off_is_continued_exactly(scripted_server: Server, limit: int | None) -> None:
    rollout = f"limit-{limit}"
    scripted_server.script(rollout, {"raw": "<think></think>Cut", "finish": "length"}, {"text": "On."})
    first = scripted_server.ask(rollout, max_tokens=limit).json()["choices"][0]
    assert first["finish_reason"] == "length"
    echo = {"role": "assistant", "content": first["message"]["content"] or ""}
    messages = [{"role": "user", "content": "Hi"}, echo, {"role": "user", "content": "Go on."}]
    assert text_of(scripted_server.ask(rollout, messages=messages)) == "On."
    one, two = scripted_server.calls(rollout)
    assert (two.parent_id, two.prev_len) == (one.call_id, one.prompt_len + one.sampled_len)
    assert one.sampled_len == (limit or 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "state"), [(400, "refused"), (500, "failed")])
def test_a_scripted_failure_is_one_for_client_and_log(
    scripted_server: Server, status: int, state: str, stream: bool
) -> None:
    rollout = f"fail-{status}-{stream}"
    scripted_server.script(rollout, {"fail": {"status": status, "message": "no luck"}}, {"text": "Luck."})
    failed = scripted_server.ask(rollout, stream=stream)
    assert (failed.status_code, failed.json()["error"]["message"]) == (status, "no luck")
    assert text_of(scripted_server.ask(rollout)) == "Luck."
    (end,) = scripted_server.ends(rollout)
    assert (end.state, end.token_ids) == (state, b"")


def test_a_text_that_the_model_cannot_say_is_refused(scripted_server: Server) -> None:
    body = {"answers": [{"text": "e\u0301"}]}
    refused = httpx.post(f"{scripted_server.address}/scripted/odd", json=body)
    assert refused.status_code == 422
    assert "script what it can say" in refused.text


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recording that was played: each recorded call by its seq, beside what script, client and log know of it."""

    rollout: str
    truth: dict[int, Fields]
    played: dict[int, Played]
    seen: dict[int, Fields]
    ids: dict[int, UUID]
    intents: dict[UUID, CallAdmitted]
    completed: dict[UUID, CallCompleted]
    ends: dict[UUID, CallEnded]
    chains: dict[UUID, list[int]]

    @property
    def answered(self) -> list[int]:
        return [seq for seq, played in self.played.items() if not played.call.failed]

    @property
    def continued(self) -> list[int]:
        return [seq for seq, truth in self.truth.items() if truth["parent"] is not None]

    def parent(self, seq: int) -> tuple[object, object]:
        """(kind and parent in the log, in the truth)"""
        seqs = {call_id: other for other, call_id in self.ids.items()}
        intent = self.intents[self.ids[seq]]
        found = intent.decision, None if intent.parent_id is None else seqs[intent.parent_id]
        return found, (self.truth[seq]["kind"], self.truth[seq]["parent"])

    def prefix(self, seq: int) -> tuple[object, object]:
        """(as much of the engine's prompt as the parent's chain is long, the chain)"""
        chain = self.chains[self.ids[self.truth[seq]["parent"]]]
        return self.seen[seq]["prompt_token_ids"][: len(chain)], chain

    def answer(self, seq: int) -> tuple[object, object]:
        """(what the client read, what was scripted)"""
        played = self.played[seq]
        found = played.said.content if played.said else (played.status, played.raw)
        return found, player.as_served(played.call, played.body).content


@pytest.fixture(scope="module")
def runs(scripted_server: Server) -> dict[tuple[str, bool], Run]:
    """Every case, played once."""

    async def play_all() -> list[list[Played]]:
        turns = asyncio.Semaphore(SIDE_BY_SIDE)

        async def play(name: str, flip: bool) -> list[Played]:
            calls = player.read(RECORDINGS / name)
            async with turns:
                return await player.play(calls, scripted_server.address, f"{name}-{flip}", flip=flip)

        return await asyncio.gather(*(play(name, flip) for name, flip in CASES))

    played = asyncio.run(play_all())
    return {
        (name, flip): run_of(scripted_server, name, f"{name}-{flip}", calls)
        for (name, flip), calls in zip(CASES, played, strict=True)
    }


def run_of(server: Server, name: str, rollout: str, played: list[Played]) -> Run:
    truth = json.loads((RECORDINGS / name / "expected.json").read_text())["calls"]
    by_answer = {seen["answer"]: seen for seen in server.scripted(rollout)["calls"]}
    seen = {call.call.seq: by_answer[call.number] for call in played}
    failed = sum(call.call.failed for call in played)
    give_up = time.monotonic() + 20
    while len(server.ends(rollout)) < failed and time.monotonic() < give_up:
        time.sleep(0.1)  # a client that left waits for nothing, so its call may end later
    with read(server.database) as connection:
        completed = {call.call_id: call for call in log.calls(connection, rollout)}
        return Run(
            rollout=rollout,
            truth={call["seq"]: call for call in truth},
            played={call.call.seq: call for call in played},
            seen=seen,
            ids={seq: UUID(call["call_ids"][0]) for seq, call in seen.items()},
            intents={intent.call_id: intent for intent in log.intents(connection, rollout)},
            completed=completed,
            ends={end.call_id: end for end in log.ends(connection, rollout)},
            chains={call_id: chain_tokens(connection, call_id).tolist() for call_id in completed},
        )


@pytest.fixture
def run(runs: dict[tuple[str, bool], Run], name: str, flip: bool) -> Run:
    return runs[name, flip]


@each_case
def test_every_call_has_the_recorded_kind_and_parent(run: Run) -> None:
    assert run.played.keys() == run.truth.keys()
    for seq in run.truth:
        found, wanted = run.parent(seq)
        assert found == wanted, (seq, run.truth[seq]["reason"], run.intents[run.ids[seq]].reason)
    for call_id, call in run.completed.items():
        assert (call.decision, call.parent_id) == (run.intents[call_id].decision, run.intents[call_id].parent_id)


@each_case
def test_every_continuation_begins_with_its_parents_tokens(run: Run) -> None:
    for seq in run.continued:
        found, chain = run.prefix(seq)
        assert found == chain, f"call {seq} does not begin with its parent's tokens"


@each_case
def test_the_log_holds_the_tokens_that_the_engine_was_given_and_made(run: Run) -> None:
    for seq in run.answered:
        call, seen, said = run.completed[run.ids[seq]], run.seen[seq], run.played[seq].said
        assert run.chains[call.call_id] == [*seen["prompt_token_ids"], *seen["token_ids"][: call.sampled_len]]
        assert call.sampled_len == len(seen["token_ids"]) or run.played[seq].body.get("stop")
        assert np.array_equal(logprob_array(call.logprobs), np.zeros(call.sampled_len))
        assert said is not None
        assert said.token_ids in ((), tuple(run.chains[call.call_id]))


@each_case
def test_every_answer_reached_the_client_as_it_was_scripted(run: Run) -> None:
    for seq in run.answered:
        found, wanted = run.answer(seq)
        assert found == wanted, seq
        said = run.played[seq].said
        assert said is not None
        assert said.response_id == run.completed[run.ids[seq]].response_id


@each_case
def test_calls_that_failed_ended_as_they_failed(run: Run) -> None:
    assert len(run.completed) == len(run.answered)
    failed = run.truth.keys() - set(run.answered)
    assert {run.ids[seq] for seq in failed} == run.ends.keys()
    for seq in failed:
        status = run.played[seq].call.response["status"] if run.played[seq].status else None
        assert run.played[seq].status == status
        state = {None: "abandoned", 400: "refused", 500: "failed"}[status]
        assert run.ends[run.ids[seq]].state == state


def test_every_recording_is_played() -> None:
    assert CASES, f"{RECORDINGS} is missing: the recordings are played here"
    assert len(CASES) == 2 * len([folder for folder in RECORDINGS.iterdir() if folder.is_dir()])


def test_the_whole_play_in_figures(runs: dict[tuple[str, bool], Run], record_property: Any) -> None:
    figures: Counter[tuple[str, str, str]] = Counter()
    for run in runs.values():
        for seq, played in run.played.items():
            way = (played.call.endpoint, "streamed" if played.body.get("stream") else "plain")
            figures[*way, "calls"] += 1
            figures[*way, "parents"] += len(set(map(repr, run.parent(seq)))) == 1
            figures[*way, "continuations"] += seq in run.continued
            figures[*way, "prefixes"] += seq in run.continued and run.prefix(seq)[0] == run.prefix(seq)[1]
            figures[*way, "answered"] += seq in run.answered
            figures[*way, "answers"] += seq in run.answered and run.answer(seq)[0] == run.answer(seq)[1]
    paths = Counter(call.evidence.get("path") for run in runs.values() for call in run.completed.values())
    ways = sorted({(endpoint, way) for endpoint, way, _ in figures})
    for pair in (("parents", "calls"), ("prefixes", "continuations"), ("answers", "answered")):
        for way in ways:
            line = f"{' '.join(way)}: {pair[0]} {figures[*way, pair[0]]} of {figures[*way, pair[1]]}"
            record_property("figure", line)
            print(f"\n{line}", end="")
            assert figures[*way, pair[0]] == figures[*way, pair[1]]
    print(f"\nsplices: {dict(paths)}")
    assert set(paths) == {None, "marker"}
