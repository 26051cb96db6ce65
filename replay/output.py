"""Rule `output` 1: which calls wrote what a harness returned; whole calls only, and never a guess.

Knows the passages of an output and what the log holds of each call's answer; does not know wires, rows or databases.
Law: an output is taken when there is exactly one way to read all of it as whole answers of completed calls, in the
order of the log, each call once. What is not proven is refused, with the place, the ids and the calls in question.

What is evidence:

- *Content.* Passages next to each other are a call's answer when their digests are those of its items, or when the
  answer key is its key (white space around a text, or a text in several passages, is then the same). Tool results may
  stand between the passages of an answer, nothing else. Reasoning may be absent; if it is there, it is the call's own.
- *Ids.* An item or response id that the log knows excludes every other call. One that the log does not know, as a proxy
  gives out, says nothing. Ids that the harness listed beside its output name all calls of it.
- *Order.* Later passages are answered by later calls; the last passage is therefore the last call that counts.
- *Ancestors.* A call that every reading has is certain. What it continues counts too, or its row could not be built:
  readings that leave an ancestor of a certain call out are none.
- *Given.* Passages in front that no call answered and that stood in the prompt of the rollout's first call, before
  anything was answered, are examples or an earlier conversation. They are not the model's and do not count.

One answer was rejected and sampled again, with the same words; the call that continues the second one tells which:

>>> def call(number, words, parent=None):
...     return Answered(number=number, call_id=UUID(int=number), parent_id=parent and UUID(int=parent),
...         response_id=None, answer_item_ids=(), answer_roles=("assistant",), answer_digests=words * 32,
...         answer_key=words * 32, reasoning_digest=None)
>>> calls = [call(1, b"a"), call(2, b"a"), call(3, b"b", parent=2)]
>>> def output(*words):
...     return {"version": 1, "hash_version": 1, "form": "chat", "source": "00" * 32, "passages": [
...         {"at": f"output[{at}]", "roles": ["assistant"], "digests": [(w * 32).hex()], "keys": [(w * 32).hex()]}
...         for at, w in enumerate(words)]}
>>> match(output(b"a", b"b"), calls).numbers
(2, 3)
>>> match(output(b"a"), calls).reason
'output_ambiguous'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from pydantic import JsonValue, ValidationError

from replay import readings
from replay.readings import Reading
from store import hashing
from store.output import HarnessOutput, Passage

_NAMED = 4
"""Calls that a refusal names at most, of each kind."""
_REMEDY = "post the output as it was answered, or accept calls by their ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the log holds of one completed call's answer."""

    number: int
    """1 for the first completed call of its rollout by sequence, 2 for the next, ..."""
    call_id: UUID
    parent_id: UUID | None
    response_id: str | None
    answer_item_ids: Sequence[str]
    answer_roles: Sequence[str]
    answer_digests: bytes
    """Digests of its items end to end, as the log has them."""
    answer_key: bytes
    reasoning_digest: bytes | None
    hash_version: int = hashing.HASH_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """The calls whose answers an output is."""

    call_ids: tuple[UUID, ...]
    """In the order of the log; the last one is the output's last answer."""
    numbers: tuple[int, ...]
    places: tuple[str, ...]
    """Where in the output each call's answer begins."""
    given: tuple[str, ...]
    """Places in front that were no answers, but stood in the first call's prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """Why an output does not say which calls count.

    Reasons: `no_output` (the outcome has none), `output_unreadable` (kept by another version), `output_empty` (no model
    wrote any of it), `output_unknown` (no call answered this), `output_edited` (ids or parts tell the call, but it
    answered something else), `output_id_elsewhere` (the ids are those of another call), `output_out_of_order` (only
    calls that came earlier, or count already), `output_ambiguous` (several calls, and no evidence which),
    `output_gap` (a call that another one continues is missing); and of the ids listed beside it `reference_unknown`,
    `reference_ambiguous` and `reference_missing` (they leave out a call whose answer it holds).
    """

    reason: str
    detail: str


def match(output: JsonValue, calls: Sequence[Answered], *, given: Iterable[bytes] = ()) -> Matched | Unmatched:
    """Which calls wrote the output that an outcome holds.

    `calls` are all completed calls of the rollout, in the order of the log; `given` are the digests of what stood in
    the request of the first of them as the model's, in order.
    """
    if output is None:
        why = "its latest outcome holds no output: post an outcome that does, or select by `completed`"
        return Unmatched(reason="no_output", detail=why)
    try:
        read = HarnessOutput.model_validate(output)
    except ValidationError:
        why = "its output was kept in another form than this release reads: post the outcome again"
        return Unmatched(reason="output_unreadable", detail=why)
    if read.hash_version not in hashing.DERIVED:
        why = f"its output was digested by version {read.hash_version} of the rules: post the outcome again"
        return Unmatched(reason="output_unreadable", detail=why)
    if not read.passages:
        why = f"its output holds nothing that a model writes: {_REMEDY}"
        return Unmatched(reason="output_empty", detail=why)
    return _Matching(read, calls).match(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A call's answer as passages are compared with it."""

    content: tuple[str, ...]
    """Digests of its items but for reasoning."""
    hosted: tuple[str, ...]
    thoughts: tuple[str, ...]
    reasoning: str | None
    key: str

    @classmethod
    def of(cls, call: Answered) -> _Answer:
        digests = [call.answer_digests[32 * at : 32 * at + 32].hex() for at in range(len(call.answer_roles))]
        items = [*zip(call.answer_roles, digests, strict=True)]
        return cls(
            content=tuple(digest for role, digest in items if role != "reasoning"),
            hosted=tuple(digest for role, digest in items if role == "hosted"),
            thoughts=tuple(digest for role, digest in items if role == "reasoning"),
            reasoning=None if call.reasoning_digest is None else call.reasoning_digest.hex(),
            key=call.answer_key.hex(),
        )

    def thinks(self, thoughts: tuple[str, ...], trimmed: Sequence[str]) -> bool:
        """Whether reasoning with these digests, as it is and trimmed, is this answer's, or there is none."""
        return not trimmed or thoughts == self.thoughts or [*trimmed] == [self.reasoning]


class _Matching:
    """One output against one rollout's calls."""

    def __init__(self, output: HarnessOutput, calls: Sequence[Answered]) -> None:
        self.references = output.references
        self.passages = output.passages
        self.calls = calls
        self.index = {call.call_id: at for at, call in enumerate(calls)}
        self.of_item: defaultdict[str, set[int]] = defaultdict(set)
        self.of_response: defaultdict[str | None, set[int]] = defaultdict(set)
        self.of_content: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        self.of_key: defaultdict[str, list[int]] = defaultdict(list)
        self.answers: dict[int, _Answer] = {}
        for at, call in enumerate(calls):
            for item_id in call.answer_item_ids:
                self.of_item[item_id].add(at)
            self.of_response[call.response_id].add(at)
            if call.hash_version in hashing.DERIVED:
                self.answers[at] = answer = _Answer.of(call)
                self.of_content[answer.content].append(at)
                self.of_key[answer.key].append(at)
        self.longest = max((len(call.answer_roles) for call in calls), default=0)

    def match(self, given: Iterable[bytes]) -> Matched | Unmatched:
        required: set[int] = set()
        if self.references is not None:
            named = self.referred(self.references)
            if isinstance(named, Unmatched):
                return named
            required = named
        start = self.behind_given(given)
        found: list[list[Reading]] = [[] for _ in self.passages]
        reached = {start}
        for place in range(start, len(self.passages)):
            if place in reached:
                here = self.readings(place)
                found[place] = [reading for reading in here if self.references is None or reading.call in required]
                reached.update(reading.end for reading in found[place])
        while True:
            possible = readings.possible(found, start, sorted(required))
            if start == len(self.passages) or not any(possible):
                return self.stuck(found, start, required)
            certain = readings.certain(possible)
            gap = self.gap(certain, {reading.call for here in possible for reading in here})
            if gap is not None:
                return gap
            wanted = self.with_ancestors(required, certain)
            if wanted == required:
                return self.settled(possible, start)
            required = wanted

    def by_content(self, start: int) -> list[Reading]:
        """Every call whose whole answer begins here."""
        first = self.passages[start]
        found: set[Reading] = set()
        content: list[str] = []
        thoughts: list[str] = []
        trimmed: list[str] = []
        hosted: list[str] = []
        last = min(start + max(self.longest, len(first.keys)), len(self.passages))
        for end in range(start + 1, last + 1):
            passage = self.passages[end - 1]
            if end > start + 1 and not _continues(first, passage):
                break
            for role, digest in zip(passage.roles, passage.digests, strict=True):
                (thoughts if role == "reasoning" else content).append(digest)
                hosted += [digest] if role == "hosted" else []
            trimmed += [] if passage.reasoning is None else [passage.reasoning]
            same = {*self.of_content.get(tuple(content), ())}
            if end - start <= len(first.keys):
                keyed = self.of_key.get(first.keys[end - start - 1], ())
                same.update(at for at in keyed if self.answers[at].hosted == tuple(hosted))
            found |= {Reading(start, end, at) for at in same if self.answers[at].thinks(tuple(thoughts), trimmed)}
        return sorted(found, key=lambda reading: (reading.end, reading.call))

    def readings(self, start: int) -> list[Reading]:
        """Those of them that the ids of these passages leave: none of another call."""
        return [
            reading
            for reading in self.by_content(start)
            if all(
                reading.call in known for passage in self.passages[start : reading.end] for known in self.known(passage)
            )
        ]

    def known(self, passage: Passage) -> list[set[int]]:
        """For each id of this passage that the log knows, the calls that have it."""
        found = [self.of_item.get(item_id) for item_id in passage.item_ids]
        found += [] if passage.response_id is None else [self.of_response.get(passage.response_id)]
        return [calls for calls in found if calls]

    def behind_given(self, given: Iterable[bytes]) -> int:
        """How many passages in front no call answered, and stood in the first call's prompt in this order."""
        rest = iter([digest.hex() for digest in given])
        for place, passage in enumerate(self.passages):
            if not passage.digests or self.readings(place) or not all(digest in rest for digest in passage.digests):
                return place
        return len(self.passages)

    def referred(self, references: Sequence[str]) -> set[int] | Unmatched:
        """The calls that were listed beside the output."""
        by_id = {str(call.call_id): {at} for at, call in enumerate(self.calls)}
        named: list[int] = []
        for name in references:
            calls = by_id.get(name) or self.of_response.get(name, set())
            if len(calls) != 1:
                reason = "reference_ambiguous" if calls else "reference_unknown"
                what = f"names {len(calls)} calls" if calls else "names no completed call of it"
                return Unmatched(reason=reason, detail=f"its output refers to {name!r}, which {what}: {_REMEDY}")
            (call,) = calls
            if named and call <= named[-1]:
                why = f"its output refers to {self.shown([call])} after {self.shown([named[-1]])}"
                return Unmatched(reason="output_out_of_order", detail=f"{why}, which came later: {_REMEDY}")
            named.append(call)
        return set(named)

    def with_ancestors(self, required: set[int], certain: Iterable[int]) -> set[int]:
        """What must count: these, and all that certain calls continue."""
        found = {*required}
        for call in certain:
            parent = self.calls[call].parent_id
            while parent is not None and (at := self.index.get(parent)) is not None and at not in found:
                found.add(at)
                parent = self.calls[at].parent_id
        return found

    def gap(self, certain: Mapping[int, int], placed: set[int]) -> Unmatched | None:
        """The first call that counts for certain while what it continues is not in the output."""
        for call, place in sorted(certain.items()):
            parent = self.calls[call].parent_id
            if parent is not None and self.index.get(parent) not in placed:
                missing = self.shown([self.index[parent]]) if parent in self.index else f"call {parent}"
                why = f"{self.place(place)} is the answer of {self.shown([call])}, which continues {missing}"
                return Unmatched(reason="output_gap", detail=f"{why}: the answer of that one is not in it; {_REMEDY}")
        return None

    def settled(self, possible: Sequence[Sequence[Reading]], start: int) -> Matched | Unmatched:
        """The one reading that is left; refuses at the first place that has two."""
        path: list[Reading] = []
        place = start
        while place < len(self.passages):
            if len(possible[place]) > 1:
                fits = self.shown(sorted({reading.call for reading in possible[place]}))
                why = f"{self.place(place)} is the answer of {fits} alike, and neither ids nor a later call tell which"
                return Unmatched(reason="output_ambiguous", detail=f"{why}: post item ids with it, or accept by ids")
            path += possible[place]
            place = path[-1].end
        return Matched(
            call_ids=tuple(self.calls[reading.call].call_id for reading in path),
            numbers=tuple(self.calls[reading.call].number for reading in path),
            places=tuple(self.passages[reading.start].at for reading in path),
            given=tuple(passage.at for passage in self.passages[:start]),
        )

    def stuck(self, found: Sequence[Sequence[Reading]], start: int, required: set[int]) -> Unmatched:
        """Why there is no reading: what stands at the first place that cannot be read on from."""
        if start == len(self.passages):
            why = "all of its output that a model may have written stood in its first prompt"
            return Unmatched(reason="output_empty", detail=f"{why}: {_REMEDY}")
        reached = readings.forward(found, start, [])
        if reached[-1]:
            absent = sorted(required - {reading.call for here in found for reading in here}) or sorted(required)
            what = "must count beside what it holds" if self.references is None else "it refers to"
            why = f"no reading of its output has all of {self.shown(absent)}, which {what}"
            return Unmatched(reason="output_gap", detail=f"{why}: {_REMEDY}")
        place = max(at for at, last in enumerate(reached) if last)
        return self.refusal(place, last=reached[place][0], fitting=bool(found[place]))

    def refusal(self, place: int, *, last: int, fitting: bool) -> Unmatched:
        """What is wrong with the passage at this place, which should follow the call `last` (-1 for none)."""
        passage = self.passages[place]
        behind = range(last + 1, len(self.calls))
        expected = [at for at in behind if last >= 0 and self.calls[at].parent_id == self.calls[last].call_id]
        awaited = f"expected {self.shown(expected or behind[:1])}" if behind else "no call is left to expect"
        by_content = sorted({reading.call for reading in self.by_content(place)})
        ids = sorted({call for calls in self.known(passage) for call in calls})
        if fitting:
            after = f" after {self.shown([last])}" if last >= 0 else ""
            reason, what = (
                "output_out_of_order",
                f"is the answer of {self.shown(by_content)}, which cannot count{after}",
            )
        elif by_content and (wrong := [call for call in ids if call not in by_content]):
            reason = "output_id_elsewhere"
            what = f"is the answer of {self.shown(by_content)}, but has ids of {self.shown(wrong)}"
        elif by_content:
            reason, what = "reference_missing", f"is the answer of {self.shown(by_content)}, to which nothing refers"
        elif like := ids or self.alike(passage):
            reason, what = "output_edited", f"is not what {self.shown(like)} answered, whose ids or parts it has"
        else:
            reason, what = "output_unknown", "is the answer of no completed call"
        return Unmatched(reason=reason, detail=f"{self.place(place)} {what} ({awaited}): {_REMEDY}")

    def alike(self, passage: Passage) -> list[int]:
        """Calls that answered a part of this passage, or the same with other reasoning."""
        parts = {*passage.digests}
        return [
            at
            for at, answer in self.answers.items()
            if not parts.isdisjoint((*answer.content, *answer.thoughts)) or answer.key in passage.keys
        ]

    def place(self, place: int) -> str:
        passage = self.passages[place]
        ids = [*passage.item_ids, *passage.tool_call_ids, *filter(None, [passage.response_id])]
        return f"{passage.at} ({', '.join(['+'.join(passage.roles) or 'empty', *ids[:_NAMED]])})"

    def shown(self, calls: Sequence[int]) -> str:
        named = [f"{self.calls[at].number} ({self.calls[at].call_id})" for at in calls[:_NAMED]]
        more = f" and {len(calls) - _NAMED} more" if len(calls) > _NAMED else ""
        return f"call{'s' if len(calls) > 1 else ''} {', '.join(named)}{more}"


def _continues(first: Passage, passage: Passage) -> bool:
    """Whether this passage may belong to the answer that the first one begins."""
    return not (first.whole or passage.whole) and all(between.role == "tool_result" for between in passage.before)
