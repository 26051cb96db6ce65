"""Every decision of a rollout once more, by the rule that made it, from what the log held then.

Knows the rule's three steps (`engine.decide`) and what events keep of a request; does not know texts, wires or servers.
Law: a stored decision holds when the rule gives it again on the calls that were durable when it was made. The log says
which those were but for calls that ended meanwhile: then each state in between is tried, and one that is needed is
counted as `overlapping`.

What an event keeps: digests and roles of the request's items, the render hash, and of its answer-like end one key for
each start (`engine.decide.Keys.echo`). That is all the verdict depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from pydantic import JsonValue

from engine.decide import ECHOED, explain, parent_among
from engine.items import Item, Kind, Role
from store import hashing
from store.events import CallCompleted, ItemTrace
from store.lineage import KnownCall, TracedCall
from turnlog.audit.events import name
from turnlog.audit.findings import Findings

RECENT = 32
"""Calls that a root's reason looks at."""
_MODEL = ("assistant", "reasoning", "tool_call", "hosted")
_KINDS: Mapping[str, Kind] = {
    "reasoning": "reasoning",
    "tool_call": "tool_call",
    "tool_result": "tool_result",
    "hosted": "hosted",
}
"""What an item is by its role; the other roles are messages'."""
_CLOCKS = 1_000_000
"""Microseconds by which the clocks of two servers may differ."""
_NOT_DERIVED = frozenset({"nearest_sequence", "echo", "path", "suffix_tokens", "named"})
"""Evidence that says how a call was served, or stands for the log's order where that was not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A decision as the rule gives it."""

    decision: str
    reason: str
    parent_id: UUID | None
    candidates: int
    evidence: Mapping[str, JsonValue]

    def __str__(self) -> str:
        of = "" if self.parent_id is None else f" of {self.parent_id}"
        where = self.evidence.get("first_difference")
        at = "" if where is None or self.parent_id is not None else f" at item {where}"
        return f"{self.decision}{of}, {self.reason}{at}, {self.candidates} candidates"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Echo:
    """What came back from one start on."""

    start: int
    answer_key: bytes
    reasoning: bytes | None


def check(rollout_id: str, ordered: Sequence[tuple[int, CallCompleted]], findings: Findings) -> None:
    """Derive every decision of the rollout's completed calls, which come in the order of the log."""
    rollout = _Rollout([sequence for sequence, _ in ordered], [call for _, call in ordered])
    for at, call in enumerate(rollout.calls):
        if call.hash_version not in hashing.DERIVED:
            findings.note("other_version", name(call))
        elif call.call_id in rollout.cut_off:
            findings.note("unexplained_links", name(call))  # `parent` says what is missing
        elif "echo" not in call.evidence:
            findings.note("log_unavailable" if call.reason == "log_unavailable" else "echo_not_kept", name(call))
        else:
            _check(rollout_id, rollout, at, findings)


def _check(rollout_id: str, rollout: _Rollout, at: int, findings: Findings) -> None:
    call = rollout.calls[at]
    findings.checked["decision"] += 1
    try:
        starts = rollout.starts(at)
        echoes = [_echo(each) for each in cast("list[Any]", call.evidence["echo"])]
    except (TypeError, ValueError, KeyError) as error:
        findings.differs("decision", rollout_id, f"{name(call)}: echo", stored=call.evidence["echo"], derived=error)
        return
    if [echo.start for echo in echoes] != [*starts]:
        findings.differs(
            "decision",
            rollout_id,
            f"{name(call)}: echo",
            stored=[echo.start for echo in echoes],
            derived=[*starts],
        )
        return
    if call.reason == "log_unavailable":  # what the log says today, which nobody could ask then
        findings.note("log_unavailable", f"{name(call)}, today a {rollout.derive(at, echoes, at)}")
        return
    first: Derived | None = None
    for cut in range(at, rollout.surely_durable(at) - 1, -1):
        derived = rollout.derive(at, echoes, cut)
        first = first or derived
        if _agree(call, derived):
            if cut < at and not _agree(call, first):
                findings.note("overlapping", name(call))
            if call.reason.startswith("cannot_splice:"):
                findings.note("not_spliced", name(call))
            return
    stored = Derived(
        decision=call.decision,
        reason=call.reason,
        parent_id=call.parent_id,
        candidates=call.candidates,
        evidence=call.evidence,
    )
    if first is not None and str(stored) == str(first):
        parts = [part for part, value in first.evidence.items() if call.evidence.get(part) != value]
        findings.differs(
            "decision",
            rollout_id,
            f"{name(call)}: evidence {', '.join(parts)}",
            stored=[call.evidence.get(part) for part in parts],
            derived=[first.evidence[part] for part in parts],
        )
        return
    findings.differs("decision", rollout_id, name(call), stored=stored, derived=first)


def _agree(call: CallCompleted, derived: Derived) -> bool:
    """Whether the stored decision is this one."""
    if call.reason.startswith("cannot_splice:"):
        return (
            derived.parent_id is not None
            and call.evidence.get("nearest_call") == str(derived.parent_id)
            and call.candidates == derived.candidates
        )
    if derived.reason == "hosted_item:" and call.reason.startswith("hosted_item:"):
        return call.decision == "root"  # which kind it was is text, and that is not kept
    return (
        (call.decision, call.reason, call.parent_id, call.candidates)
        == (derived.decision, derived.reason, derived.parent_id, derived.candidates)
    ) and all(call.evidence.get(part) == value for part, value in derived.evidence.items())


class _Rollout:
    """The completed calls of one rollout, as the rule's look-ups see them."""

    def __init__(self, sequences: Sequence[int], calls: Sequence[CallCompleted]) -> None:
        self.sequences = sequences
        self.calls = calls
        self.place = {call.call_id: at for at, call in enumerate(calls)}
        self._by_request: dict[bytes, list[int]] = {}
        for at, call in enumerate(calls):
            self._by_request.setdefault(call.request_hash, []).append(at)
        self._whole: dict[int, tuple[ItemTrace, ...]] = {}
        self.cut_off: set[UUID] = set()
        """Calls above which one is missing."""
        for call in calls:
            if call.parent_id is not None and (call.parent_id not in self.place or call.parent_id in self.cut_off):
                self.cut_off.add(call.call_id)

    def whole(self, at: int) -> tuple[ItemTrace, ...]:
        """The traces of a call's whole request."""
        path: list[int] = []
        above: int | None = at
        while above is not None and above not in self._whole and above not in path:
            path.append(above)
            parent_id = self.calls[above].parent_id
            above = None if parent_id is None else self.place.get(parent_id)
        whole = () if above is None else self._whole.get(above, ())
        for each in reversed(path):
            whole = self._whole[each] = (*whole, *self.calls[each].request_items)
        return whole

    def starts(self, at: int) -> range:
        """Where the rule looks for an answer: every start in the last run of model-authored items."""
        roles = [trace.role for trace in self.whole(at)]
        last = next((place for place in reversed(range(len(roles))) if roles[place] in _MODEL), None)
        if last is None or last + 1 == len(roles) or "hosted" in roles:
            return range(0)
        first = last
        while first > 0 and roles[first - 1] in _MODEL:
            first -= 1
        return range(first, last + 1)

    def surely_durable(self, at: int) -> int:
        """How many calls, in the order of the log, were durable before the call at this place was decided."""
        call = self.calls[at]
        for place in range(at):
            other = self.calls[place]
            slack = 0 if other.writer_id == call.writer_id else _CLOCKS
            if other.completed_at > call.started_at - slack:
                return place
        return at

    def derive(self, at: int, echoes: Sequence[_Echo], cut: int) -> Derived:
        """The decision on the first `cut` calls of the log."""
        call = self.calls[at]
        whole = self.whole(at)
        hosted = next((place for place, trace in enumerate(whole) if trace.role == "hosted"), None)
        if hosted is not None:
            return _root("hosted_item:", {"items": len(whole), "first_difference": hosted})
        if whole and whole[-1].role in _MODEL:
            return _root("ends_with_model_item", {"items": len(whole), "first_difference": len(whole) - 1})
        found: list[KnownCall] = []
        echo_of: dict[UUID, _Echo] = {}
        for echo in echoes:
            for place in self._by_request.get(self._request_hash(at, echo.start), ()):
                other = self.calls[place]
                if place < cut and other.answer_key[:ECHOED] == echo.answer_key:
                    found.append(_known(self.sequences[place], other))
                    echo_of[other.call_id] = echo
        if not found:
            return self._explained(call, whole, cut)
        named = set(cast("list[str]", call.evidence.get("named") or ()))
        verdict = parent_among(
            found,
            lambda hit: echo_of[hit.call_id].reasoning,
            call.reasoning_policy,
            lambda hit: named & {*hit.answer_item_ids},
        )
        if verdict.continues:
            return Derived(
                decision="continuation",
                reason="answer_echoed",
                parent_id=verdict.nearest.call_id,
                candidates=len(found),
                evidence={"flags": ["reasoning_dropped"] if verdict.dropped else []},
            )
        evidence: dict[str, JsonValue] = {
            "nearest_call": str(verdict.nearest.call_id),
            "first_difference": echo_of[verdict.nearest.call_id].start,
        }
        return _root("reasoning_dropped" if verdict.dropped else "reasoning_edited", evidence, len(found))

    def _explained(self, call: CallCompleted, whole: Sequence[ItemTrace], cut: int) -> Derived:
        recent = [
            TracedCall(
                call_id=self.calls[place].call_id,
                sequence=self.sequences[place],
                render_hash=self.calls[place].render_hash,
                tools_digest=self.calls[place].tools_digest,
                request=self.whole(place),
                answer=self.calls[place].answer_items,
            )
            for place in range(max(0, cut - RECENT), cut)
        ]
        items = [_item(trace) for trace in whole]
        root = explain(items, call.render_hash, call.tools_digest, recent)
        return _root(root.reason, root.evidence)

    def _request_hash(self, at: int, start: int) -> bytes:
        """Of the items before a start; a call's own items follow its parent's request."""
        call = self.calls[at]
        whole = self.whole(at)
        before = len(whole) - len(call.request_items)
        if call.parent_id is not None and start >= before:
            return hashing.request_hash(
                self.calls[self.place[call.parent_id]].request_hash, (trace.digest for trace in whole[before:start])
            )
        return hashing.request_hash(call.render_hash, (trace.digest for trace in whole[:start]))


def _root(reason: str, evidence: Mapping[str, JsonValue], candidates: int = 0) -> Derived:
    told = {part: value for part, value in evidence.items() if part not in _NOT_DERIVED}
    return Derived(decision="root", reason=reason, parent_id=None, candidates=candidates, evidence=told)


def _echo(kept: Any) -> _Echo:
    start, key, reasoning = kept
    return _Echo(
        start=int(start),
        answer_key=bytes.fromhex(key),
        reasoning=None if reasoning is None else bytes.fromhex(reasoning),
    )


def _item(trace: ItemTrace) -> Item:
    """An item as far as the rule looks at one."""
    return Item(kind=_KINDS.get(trace.role, "message"), role=cast("Role", trace.role), digest=trace.digest)


def _known(sequence: int, call: CallCompleted) -> KnownCall:
    return KnownCall(
        call_id=call.call_id,
        rollout_id=call.rollout_id,
        parent_id=call.parent_id,
        root_id=call.root_id,
        depth=call.depth,
        sequence=sequence,
        chain_len=call.chain_len,
        hash_version=call.hash_version,
        summary_hash=call.summary_hash,
        chain_hash=call.chain_hash,
        reasoning_digest=call.reasoning_digest,
        response_id=call.response_id,
        answer_item_ids=call.answer_item_ids,
    )
