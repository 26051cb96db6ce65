"""A recorded request stream, decided call by call as the server would decide it: no model, no log, no server.

Knows recordings (one rollout a file, one call a line) and the index that a log would keep of it; does not know files,
terminals or templates. Law: a call is decided when it arrives, among the calls that had been answered by then, by the
rule of `engine.decide` and nothing else; a line that cannot be read is named with its number, never skipped in silence.

A line is a JSON object: `endpoint`, `request` (the body as sent) and `response` (the plain answer, or one with `error`,
`stream_cut` or `client_gone`, which is no answer and no parent); of use are `seq` (else calls are counted) and
`t_start_ms` and `t_end_ms` (else a call begins when those before it have ended). Other keys are ignored.

A server hashes what shapes a prompt where it renders it. Without one, these stand for it: the dialect, the model, the
tools without `cache_control`, and what vLLM's templates are given by name (`_TEMPLATE_OPTIONS`). Not compared, since
it depends on the model whether a prompt shows them: `tool_choice`, response formats, and how much to think.

>>> recording = Recording("strict", name="trace.jsonl")
>>> ask = {"role": "user", "content": "Hi"}
>>> line = {"endpoint": "/v1/chat/completions", "request": {"messages": [ask]},
...     "response": {"choices": [{"index": 0, "message": {"content": "Hello."}}]}}
>>> recording.read(json.dumps(line), 1).reason
'first_call'
>>> line["request"] = {"messages": [ask, {"role": "assistant", "content": "Hello."}, ask]}
>>> found = recording.read(json.dumps(line), 2)
>>> found.kind, found.parent
('continuation', 1)
>>> [row.calls for row in recording.rows()]
[(1, 2)]
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, cast
from urllib.parse import urlsplit
from uuid import UUID

from pydantic import JsonValue

from engine.decide import Continuation, Root, candidate_keys, decide
from engine.dialects.routes import DIALECTS, PASSED
from engine.dialects.wire import Dialect, Fields, followed, shown, without_cache_control
from engine.errors import BadRequest, EngineError, UnreadableAnswer
from engine.hints import hints
from engine.items import Answer, Item, answer_key, reasoning_digest, traces
from store import hashing
from store.events import ReasoningPolicy
from store.lineage import KnownCall, TracedCall

_RECENT = 32
"""Calls that a root's reason looks at, as many as a server looks at."""
_KEPT = 128
"""Calls kept for that: more, since some of the latest may not have been answered when another one arrives."""
_TEMPLATE_OPTIONS = (
    "chat_template", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "media_io_kwargs", "mm_processor_kwargs",
)  # fmt: skip


class BadLine(EngineError):
    """A line of a recording that is not one call of it."""

    status = 400

    def __init__(self, name: str, number: int, why: str) -> None:
        self.name = name
        self.number = number
        super().__init__(f"{name}:{number}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What was decided about one line."""

    seq: int
    kind: Literal["continuation", "root", "refused", "passed"]
    """`refused`: a server would answer 400, for this request cannot be compared; `passed`: this is no model call."""
    parent: int | None = None
    reason: str
    candidates: int = 0
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    """As the log would hold it, with calls named by their seq; `no_answer` says why a call can be no parent."""
    role: str | None = None
    """What the harness says the call is for."""

    def as_json(self) -> dict[str, JsonValue]:
        """The line's JSON object."""
        return {
            "seq": self.seq,
            "kind": self.kind,
            "parent": self.parent,
            "reason": self.reason,
            "candidates": self.candidates,
            "evidence": {**self.evidence},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRow:
    """One row that training would get: the calls from a root to a call that nothing continues."""

    calls: tuple[int, ...]
    trained: tuple[int, ...]
    """Those of them that no earlier row has trained."""
    reason: str
    """Why its root is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """A call that was answered, as a log would know it."""

    end: float
    known: KnownCall
    request_hash: bytes
    choice: int
    reason: str


class Recording:
    """One recorded rollout, as far as it has been read."""

    def __init__(self, policy: ReasoningPolicy, *, name: str) -> None:
        self._policy: ReasoningPolicy = policy
        self._name = name
        self._last_seq = 0
        self._seqs: set[int] = set()
        self._calls: dict[UUID, _Answered] = {}
        self._by_summary: defaultdict[bytes, list[_Answered]] = defaultdict(list)
        self._recent: list[tuple[float, TracedCall]] = []

    def read(self, line: str | bytes, number: int) -> Explained:
        """Decide the call on this line. Raises BadLine; the recording can then go on without it."""
        call = self._object(line, number)
        endpoint, body = call.get("endpoint"), call.get("request")
        if not isinstance(endpoint, str):
            raise self._bad(number, f"endpoint is {shown(endpoint)}: name the path that the call went to")
        start, end = (self._time(call, name, number) for name in ("t_start_ms", "t_end_ms"))
        path = _path(endpoint)
        dialect = next((dialect for dialect in DIALECTS if path.endswith(dialect.PATH)), None)
        if dialect is not None and not isinstance(body, dict):
            raise self._bad(number, f"request is {shown(body)}: write the body as it was sent, an object")
        seq = self._seq(call, number)  # last of the checks: a line that cannot be read takes no number
        if dialect is None or not isinstance(body, dict):
            known = any(path.endswith(passed) for passed in PASSED)
            reason = "not_a_model_call" if known else "unknown_endpoint"
            return Explained(seq=seq, kind="passed", reason=reason, evidence={"endpoint": path})
        try:
            with followed():
                items, shape = dialect.request_items(body), _shaped(dialect, body)
        except BadRequest as error:
            return Explained(seq=seq, kind="refused", reason=str(error), evidence={"param": error.param})
        # Without a time of its own a call begins when all before it have ended, and has ended when the next one begins.
        return self._decide(
            call,
            seq,
            start=inf if start is None else start,
            end=-inf if end is None else end,
            dialect=dialect,
            body=body,
            items=items,
            shape=shape,
        )

    def rows(self) -> list[ExplainedRow]:
        """The rows that training would get, as the selection rule `completed` has it: a retried answer is left out."""
        calls = sorted(self._calls.values(), key=lambda call: call.known.sequence)
        continued = {call.known.parent_id for call in calls}
        latest: dict[tuple[UUID | None, bytes, int], _Answered] = {}
        superseded: set[UUID] = set()
        for call in calls:
            request = (call.known.parent_id, call.request_hash, call.choice)
            earlier = latest.get(request)
            if earlier is not None and earlier.known.call_id not in continued:
                superseded.add(earlier.known.call_id)
            latest[request] = call
        tips = [call for call in calls if call.known.call_id not in continued | superseded]
        rows: list[ExplainedRow] = []
        trained: set[UUID] = set()
        for tip in sorted(tips, key=lambda call: (self._calls[call.known.root_id].known.sequence, call.known.sequence)):
            chain = self._chain(tip)
            new = [call for call in chain if call.known.call_id not in trained]
            trained.update(call.known.call_id for call in new)
            rows.append(
                ExplainedRow(
                    calls=tuple(call.known.sequence for call in chain),
                    trained=tuple(call.known.sequence for call in new),
                    reason=chain[0].reason,
                )
            )
        return rows

    def _decide(
        self,
        call: Fields,
        seq: int,
        *,
        start: float,
        end: float,
        dialect: Dialect,
        body: Fields,
        items: Sequence[Item],
        shape: tuple[bytes, bytes],
    ) -> Explained:
        tools, render = shape
        decision = decide(
            items,
            render,
            tools,
            self._policy,
            look_up=lambda keys: self._look_up(keys, start),
            recent=lambda: self._before(start),
        )
        found = _answers(dialect, call.get("response"))
        for answer in found.answers:
            self._answered(seq, end, decision, items, render, tools, answer)
        headers = call.get("headers")
        sent = (
            {name: value for name, value in headers.items() if isinstance(value, str)}
            if isinstance(headers, dict)
            else {}
        )
        role = hints(sent, body, items).get("role")
        return Explained(
            seq=seq,
            kind="continuation" if isinstance(decision, Continuation) else "root",
            parent=decision.parent.sequence if isinstance(decision, Continuation) else None,
            reason=decision.reason,
            candidates=decision.candidates,
            evidence=self._evidence(decision, found.no_answer),
            role=role if isinstance(role, str) else None,
        )

    def _look_up(self, keys: Sequence[bytes], start: float) -> list[KnownCall]:
        return [call.known for key in keys for call in self._by_summary.get(key, ()) if call.end <= start]

    def _before(self, start: float) -> list[TracedCall]:
        """The latest calls that had been answered by then."""
        return [traced for end, traced in self._recent if end <= start][-_RECENT:]

    def _answered(
        self,
        seq: int,
        end: float,
        decision: Root | Continuation,
        items: Sequence[Item],
        render: bytes,
        tools: bytes,
        answer: Answer,
    ) -> None:
        """Remember a call as a log would."""
        parent = decision.parent if isinstance(decision, Continuation) else None
        call_id = UUID(int=len(self._calls) + 1)
        request_hash = candidate_keys(items, render).request_hash
        known = KnownCall(
            call_id=call_id,
            rollout_id=self._name,
            parent_id=None if parent is None else parent.call_id,
            root_id=call_id if parent is None else parent.root_id,
            depth=0 if parent is None else parent.depth + 1,
            sequence=seq,
            chain_len=0,
            hash_version=hashing.HASH_VERSION,
            summary_hash=hashing.summary_hash(request_hash, answer_key(answer.items)),
            chain_hash=b"",
            reasoning_digest=reasoning_digest(answer.items),
            response_id=None,
            answer_item_ids=tuple(item.item_id for item in answer.items if item.item_id is not None),
        )
        call = _Answered(end=end, known=known, request_hash=request_hash, choice=answer.index, reason=decision.reason)
        self._calls[call_id] = call
        self._by_summary[known.summary_hash].append(call)
        traced = TracedCall(
            call_id=call_id,
            sequence=seq,
            render_hash=render,
            tools_digest=tools,
            request=traces(items),
            answer=traces(answer.items),
        )
        self._recent = [*self._recent[1 - _KEPT :], (end, traced)]

    def _chain(self, tip: _Answered) -> list[_Answered]:
        chain = [tip]
        while (parent_id := chain[-1].known.parent_id) is not None:
            chain.append(self._calls[parent_id])
        return chain[::-1]

    def _evidence(self, decision: Root | Continuation, no_answer: str | None) -> dict[str, JsonValue]:
        evidence = {name: value for name, value in decision.evidence.items() if name != "nearest_sequence"}
        for name in ("nearest_call", "repeats_call"):
            if isinstance(call_id := evidence.get(name), str):
                evidence[name] = self._calls[UUID(call_id)].known.sequence
        return evidence if no_answer is None else {**evidence, "no_answer": no_answer}

    def _object(self, line: str | bytes, number: int) -> dict[str, JsonValue]:
        try:
            call = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise self._bad(number, f"this is no JSON ({error}): write one call a line, as a JSON object") from None
        if not isinstance(call, dict):
            raise self._bad(number, f"this is {shown(call)}: write one call a line, as a JSON object")
        return cast("dict[str, JsonValue]", call)

    def _seq(self, call: Fields, number: int) -> int:
        seq = call.get("seq", self._last_seq + 1)
        if not isinstance(seq, int) or isinstance(seq, bool):
            raise self._bad(number, f"seq is {shown(seq)}: number the calls 1, 2, ...")
        if seq in self._seqs:
            raise self._bad(number, f"seq {seq} is used by an earlier line: give each call its own number")
        self._seqs.add(seq)
        self._last_seq = seq
        return seq

    def _time(self, call: Fields, name: str, number: int) -> float | None:
        value = call.get(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise self._bad(number, f"{name} is {shown(value)}: give milliseconds, or leave it out")
        return value

    def _bad(self, number: int, why: str) -> BadLine:
        return BadLine(self._name, number, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    """The answers of a call, or why there are none."""

    answers: Sequence[Answer] = ()
    no_answer: str | None = None


def _answers(dialect: Dialect, response: JsonValue) -> _Response:
    if not isinstance(response, dict):
        return _Response(no_answer="no response")
    status = response.get("status")
    for mark in ("error", "stream_cut", "client_gone"):
        if response.get(mark):
            return _Response(no_answer=f"{mark} {status}" if isinstance(status, int) and status >= 400 else mark)
    try:
        return _Response(answers=dialect.answers(response))
    except UnreadableAnswer as error:
        return _Response(no_answer=str(error))


def _shaped(dialect: Dialect, body: Fields) -> tuple[bytes, bytes]:
    """Digest of the tools, and digest of all that shapes the prompt besides the messages."""
    tools = without_cache_control(body.get("tools") or None)
    digest = hashing.tagged_digest("tools", hashing.canonical_json(tools))
    options = {name: body[name] for name in _TEMPLATE_OPTIONS if body.get(name) is not None}
    shaped: JsonValue = {"dialect": dialect.NAME, "model": body.get("model"), "tools": digest.hex(), "options": options}
    return digest, hashing.render_hash(shaped)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _path(endpoint: str) -> str:
    """The path of an endpoint that may be a whole URL, with a method in front or a query behind."""
    try:
        return urlsplit(endpoint.split()[-1]).path.rstrip("/")
    except (ValueError, IndexError):
        return endpoint
