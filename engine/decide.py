"""The decision whether a request continues an earlier call or starts a new context.

Knows canonical items and what the log says about earlier calls; does not know how either was come by, and reads no
clock, database or wire. Law: the same request, hits and policy always give the same decision, and a root's reason is
evidence for people that changes no verdict (design §6).

Three pure steps, with the look-ups between them left to the caller (`decide` is the three in a row):

1. `candidate_keys`: an answer comes back as the last run of model-authored items, with at least one item after it. The
   run may be longer than the answer (a summary put in front of it), so each start in it gives one key: the summary
   hash that an earlier call has if it was sent everything before that start and served the rest of the run.
2. `choose`: of the calls that those keys found, those whose reasoning came back as served, or did not come back at all
   if the policy restores it; of those, the ones whose item ids came back; then the deepest, then the latest.
3. `explain`: when nothing was found, what differs from the nearest earlier call.

Two calls later the harness rewrites its context, so the third is a root:

>>> from uuid import UUID
>>> system, task = Item.message("system", ["Be brief."]), Item.message("user", ["Count the files."])
>>> look, files = Item.tool_call("c1", "ls", "{}"), Item.tool_result("c1", ["a.txt b.txt"])
>>> keys = candidate_keys([system, task, look, files], b"render")
>>> first_call = hashing.request_hash(b"render", [system.digest, task.digest])
>>> keys.starts == {hashing.summary_hash(first_call, answer_key([look])): 2}
True
>>> candidate_keys([system, task], b"render").starts  # nothing that a model wrote: nothing to look up
{}
>>> hidden = Item.tool_result("c1", ["[hidden]"])
>>> earlier = TracedCall(call_id=UUID(int=2), sequence=2, render_hash=b"render", tools_digest=b"tools",
...     request=traces([system, task, look, files]), answer=traces([Item.tool_call("c2", "wc", "{}")]))
>>> request = [system, task, look, hidden, Item.tool_call("c2", "wc", "{}"), Item.tool_result("c2", ["2"])]
>>> root = explain(request, b"render", b"tools", [earlier])
>>> root.reason, root.evidence["first_difference"], root.evidence["role_here"]
('item_edited', 3, 'tool_result')
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import JsonValue

from engine.items import Item, Media, answer_key, reasoning_digest, traces
from engine.remembered import NOT_IN_THE_LOG_YET
from store import hashing
from store.events import ItemTrace, MediaShown, ReasoningPolicy
from store.lineage import KnownCall, TracedCall

ECHOED = 8
"""Bytes of a key and of a digest that the log keeps of an echo: enough that no two of a rollout are alike by chance."""
Flag = Literal["reasoning_dropped"]
"""What a continuation tolerated: the served reasoning did not come back, and its tokens are kept in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The call extends nothing known."""

    reason: str
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    candidates: int = 0
    """How many calls the keys found; more than none when their reasoning did not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The call extends `parent`: items up to `start` were the parent's request, those up to `suffix` are its answer."""

    parent: KnownCall
    start: int
    suffix: int
    candidates: int
    flags: tuple[Flag, ...] = ()
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """The counterpart of a root's reason: the parent's answer came back."""
        return "answer_echoed"

    def spliced(self, path: str, suffix_tokens: int) -> Continuation:
        """The same, with how its prompt was made."""
        return replace(self, evidence={**self.evidence, "path": path, "suffix_tokens": suffix_tokens})

    def unspliced(self, why: str) -> Root:
        """The root that it is served as when its prompt cannot be made from the parent's tokens (design §6.7)."""
        evidence: dict[str, JsonValue] = {"nearest_call": str(self.parent.call_id), "first_difference": self.start}
        return Root(reason=f"cannot_splice:{why}", evidence=evidence, candidates=self.candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What to look up, and where in the request each key's answer starts."""

    starts: Mapping[bytes, int]
    """Summary hash to the index of the answer's first item; empty when there is nothing to look up."""
    last: int | None
    """Index of the last model-authored item; None when there is none."""
    request_hash: bytes
    """Of the whole request."""


def candidate_keys(items: Sequence[Item], render_hash: bytes) -> Keys:
    """Steps 1 to 3 of the rule: the summary hashes under which this request's parent would be in the log.

    The request's hashes are chained in one pass; answers are hashed once per start, over the last run alone. A request
    with a hosted item has no keys: what of it the prompt shows is not known, so it is never like another.
    """
    chain = [render_hash]
    for item in items:
        chain.append(hashing.extend_request_hash(chain[-1], item.digest))
    starts = {hashing.summary_hash(chain[start], answer_key(run)): start for start, run in _runs(items)}
    return Keys(starts=starts, last=_last(items), request_hash=chain[-1])


def echoes(items: Sequence[Item]) -> list[JsonValue]:
    """What the log keeps of a request's answer-like end, so that its decision can be derived again from the log.

    One list for each start that `candidate_keys` looks up: the index, the answer key and the digest of the reasoning
    from there on (null without any), the first 8 bytes of each in hex. Item digests alone would not do: an answer
    that came back trimmed, or without its thoughts, has other digests than the one that was served.
    """
    return [
        [
            start,
            answer_key(run)[:ECHOED].hex(),
            None if (digest := reasoning_digest(run)) is None else digest[:ECHOED].hex(),
        ]
        for start, run in _runs(items)
    ]


def choose(
    items: Sequence[Item], keys: Keys, hits: Sequence[KnownCall], policy: ReasoningPolicy
) -> Continuation | Root | None:
    """Steps 4 and 5: the parent among the calls that the keys found; None when there is none, for `explain`.

    A hit of another hash version never counts. Reasoning that came back changed (or out of nothing) rules a hit out;
    reasoning that did not come back rules it out under `strict`. A root says so only when no hit is left. Item ids
    rule nothing out, for most harnesses drop them: they prefer the hits whose ids they name.
    """
    if (hosted := _hosted(items)) is not None:
        evidence: dict[str, JsonValue] = {"items": len(items), **_difference(hosted, items, None)}
        return Root(reason=f"hosted_item:{items[hosted].text}", evidence=evidence)
    if keys.last is not None and keys.last + 1 == len(items):
        return Root(
            reason="ends_with_model_item", evidence={"items": len(items), **_difference(len(items) - 1, items, None)}
        )
    found = [hit for hit in hits if hit.hash_version == hashing.HASH_VERSION and hit.summary_hash in keys.starts]
    if keys.last is None or not found:
        return None
    suffix = keys.last + 1
    reasoning = {start: reasoning_digest(items[start:suffix]) for start in {*keys.starts.values()}}

    def ids_back(hit: KnownCall) -> set[str]:
        return {item.item_id for item in items[keys.starts[hit.summary_hash] : suffix] if item.item_id is not None} & {
            *hit.answer_item_ids
        }

    verdict = parent_among(found, lambda hit: reasoning[keys.starts[hit.summary_hash]], policy, ids_back)
    start = keys.starts[verdict.nearest.summary_hash]
    if not verdict.continues:
        evidence = {
            "nearest_call": str(verdict.nearest.call_id),
            "nearest_sequence": verdict.nearest.sequence if verdict.nearest.sequence < NOT_IN_THE_LOG_YET else None,
            "first_difference": start,
            "role_here": items[start].role,
            "role_there": None if verdict.nearest.reasoning_digest is None else "reasoning",
            "reasoning_here": _hex(reasoning[start]),
            "reasoning_there": _hex(verdict.nearest.reasoning_digest),
        }
        reason = "reasoning_dropped" if verdict.dropped else "reasoning_edited"
        return Root(reason=reason, evidence=evidence, candidates=len(found))
    flags: tuple[Flag, ...] = ("reasoning_dropped",) if verdict.dropped else ()
    return Continuation(
        parent=verdict.nearest,
        start=start,
        suffix=suffix,
        candidates=len(found),
        flags=flags,
        evidence={"flags": [*flags], **({"named": [*verdict.named]} if verdict.named else {})},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which of the calls that the keys found is continued, or comes nearest to that."""

    nearest: KnownCall
    continues: bool
    dropped: bool
    """The nearest call's reasoning did not come back."""
    named: tuple[str, ...] = ()
    """Item ids that came back, where they decided between several calls."""


def parent_among(
    found: Sequence[KnownCall],
    reasoning_back: Callable[[KnownCall], bytes | None],
    policy: ReasoningPolicy,
    ids_back: Callable[[KnownCall], Collection[str]],
) -> Verdict:
    """Steps 4 and 5 on what is known of the echo of each call found, at least one.

    Args:
        found: calls whose keys were found.
        reasoning_back: digest, or its beginning, of the reasoning that came back where that call's answer would stand.
        policy: what reasoning that did not come back means.
        ids_back: which of the call's item ids came back.
    """
    equal: list[KnownCall] = []
    dropped: list[KnownCall] = []
    for hit in found:
        back = reasoning_back(hit)
        if back is None:
            (equal if hit.reasoning_digest is None else dropped).append(hit)
        elif hit.reasoning_digest is not None and hit.reasoning_digest[: len(back)] == back:
            equal.append(hit)
    allowed = [*equal, *dropped] if policy == "restore" else equal
    if not allowed:
        return Verdict(nearest=_preferred(dropped or found), continues=False, dropped=bool(dropped))
    named = [hit for hit in allowed if ids_back(hit)]
    nearest = _preferred(named or allowed)
    return Verdict(
        nearest=nearest,
        continues=True,
        dropped=nearest in dropped,
        named=tuple(sorted({each for hit in named for each in ids_back(hit)})) if len(allowed) > 1 else (),
    )


def explain(items: Sequence[Item], render_hash: bytes, tools_digest: bytes, recent: Sequence[TracedCall]) -> Root:
    """Step 6: why nothing was found, from the rollout's latest completed calls with their whole requests.

    The nearest call is the one with the most items in common, then with the longest common start, then with the same
    render, then the latest. Its items are its request, then the answer it was served. The first rule that holds:

    - `first_call`: the rollout has no completed call.
    - `fresh_context`: the request has nothing that a model wrote, or there is no call to compare with but those whose
      request it repeats (`repeats_call`: a retry, or new items behind a dropped answer; they miss what it misses).
    - The whole request of the nearest call comes first. `tools_changed`: its tools were others. `options_changed`: its
      tools were these, but something else that shapes the prompt was not. `item_inserted`: its answer came back, then
      something as if from a model that this rollout never served; or its answer came back later, behind other items.
      `answered_meanwhile`: its answer came back before the log had it. `answer_edited`: what came back is another.
    - `context_replaced`: nothing but leading system and developer messages is left of it, or the stretch that differs
      became a shorter or longer one and less than half of its items are left. A compaction reads like this.
    - `item_removed`, `item_inserted`: items are missing, or new ones stand between, and then it goes on as before.
    - `item_edited`: as many items as before, or most of the rest unchanged, but not the same: a hidden tool result, a
      reminder that moved, a system prompt with today's rules file.

    Evidence (here: this request; there: the nearest call): `nearest_call`, `nearest_sequence`, `items`,
    `nearest_items`, `items_shared`, `same_tools`, `same_options`, and where there is a first difference
    `first_difference` (its index in this request), `role_here`, `digest_here`, `role_there`, `digest_there`,
    `items_new` and `items_gone` (how many items differ here and there before both go on alike).

    Worked case, a compaction that keeps the last round (S system, U user, a answers, t tool results):

        there   S U a1 t1 a2 t2 | a3     here   S U' a3 t3       (U': the summary)
        common start: S. Then U' for U a1 t1 a2 t2, then a3 in both: 1 item for 5, and of 6 items behind S one is left.
        context_replaced, first_difference 1, role_here user, role_there user, items_new 1, items_gone 5
    """
    if not recent:
        return Root(reason="first_call", evidence={"items": len(items)})
    here = traces(items)
    compared = [_compare(here, render_hash, tools_digest, call) for call in recent]
    repeated = [other for other in compared if other.is_repeated_by(items)]
    others = [other for other in compared if not other.is_repeated_by(items)]
    nearest = max(others or compared, key=_Compared.nearness)
    if not others or not any(item.model_authored for item in items):
        root = Root(reason="fresh_context", evidence=nearest.evidence(here))
    elif nearest.whole_request:
        root = _explain_extension(items, nearest)
    else:
        root = _explain_rewrite(here, nearest)
    if not repeated:
        return root
    return replace(root, evidence={**root.evidence, "repeats_call": str(repeated[-1].call.call_id)})


def with_kind(root: Root, items: Sequence[Item], shown: Sequence[MediaShown]) -> Root:
    """The same root, with `kind` in its evidence when the first difference is nothing but an image or another medium.

    `shown` are the media in the nearest call's prompt: the item here with some of them in the places of its own is the
    one there. So an image that was encoded anew reads as `item_edited`, kind `image`.
    """
    at, there = root.evidence.get("first_difference"), root.evidence.get("digest_there")
    if not isinstance(at, int) or not isinstance(there, str) or not items[at : at + 1] or not items[at].media:
        return root
    item = items[at]
    known = [Media(kind=each.modality, address=f"sha256:{each.item_hash.hex()}") for each in shown]
    count = len(item.media)
    for begin in range(len(known) - count + 1):
        if item.digest_with(known[begin : begin + count]).hex() == there:
            return replace(root, evidence={**root.evidence, "kind": item.media[0].kind})
    return root


def decide(
    items: Sequence[Item],
    render_hash: bytes,
    tools_digest: bytes,
    policy: ReasoningPolicy,
    *,
    look_up: Callable[[Sequence[bytes]], Sequence[KnownCall]],
    recent: Callable[[], Sequence[TracedCall]],
) -> Root | Continuation:
    """The three steps in a row, for callers that may block: `look_up` and `recent` ask the log about this rollout."""
    keys = candidate_keys(items, render_hash)
    decision = choose(items, keys, look_up(list(keys.starts)) if keys.starts else [], policy)
    return explain(items, render_hash, tools_digest, recent()) if decision is None else decision


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """An earlier call beside the request."""

    call: TracedCall
    items: tuple[ItemTrace, ...]
    """Its request, then its answer without reasoning that did not come back."""
    common: int
    """Items at the start that are the same."""
    shared: int
    """Items that are in both, wherever."""
    same_tools: bool
    same_options: bool

    @property
    def whole_request(self) -> bool:
        return self.common >= len(self.call.request)

    def nearness(self) -> tuple[int, int, bool, int]:
        return self.shared, self.common, self.same_options, self.call.sequence

    def is_repeated_by(self, items: Sequence[Item]) -> bool:
        """Whether the request is this call's, or that with nothing from a model behind it."""
        behind = items[len(self.call.request) :]
        return self.same_options and self.whole_request and not any(item.model_authored for item in behind)

    def evidence(self, here: Sequence[ItemTrace]) -> dict[str, JsonValue]:
        return {
            "nearest_call": str(self.call.call_id),
            "nearest_sequence": self.call.sequence,
            "items": len(here),
            "nearest_items": len(self.call.request),
            "items_shared": self.shared,
            "same_tools": self.same_tools,
            "same_options": self.same_options,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """How many items differ, here and there, before both go on alike."""

    here: int
    there: int


def _compare(here: Sequence[ItemTrace], render_hash: bytes, tools_digest: bytes, call: TracedCall) -> _Compared:
    digests = {trace.digest for trace in here}
    # Served reasoning that did not come back is no difference: the policy, not this comparison, says what it means.
    answer = [trace for trace in call.answer if trace.role != "reasoning" or trace.digest in digests]
    there = (*call.request, *answer)
    common = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a.digest != b.digest), None)
    both = Counter(trace.digest for trace in here) & Counter(trace.digest for trace in there)
    return _Compared(
        call=call,
        items=there,
        common=min(len(here), len(there)) if common is None else common,
        shared=both.total(),
        same_tools=call.tools_digest == tools_digest,
        same_options=call.render_hash == render_hash,
    )


def _explain_extension(items: Sequence[Item], nearest: _Compared) -> Root:
    """The nearest call's whole request comes first, and still its answer was not found."""
    here = traces(items)
    evidence = nearest.evidence(here)
    if not nearest.same_options:
        return Root(reason="options_changed" if nearest.same_tools else "tools_changed", evidence=evidence)
    start = len(nearest.call.request)
    end = next((i for i in range(start, len(items)) if not items[i].model_authored), len(items))
    # Reasoning is left out: whether it came back is no difference here, else the call would have been found.
    echoed = [i for i in range(start, end) if items[i].kind != "reasoning"]
    served = [trace for trace in nearest.call.answer if trace.role != "reasoning"]
    same = 0
    while same < min(len(echoed), len(served)) and here[echoed[same]].digest == served[same].digest:
        same += 1
    if same == len(echoed) == len(served):
        made_up = next((i for i in range(end, len(items)) if items[i].model_authored), None)
        if made_up is None:
            return Root(reason="answered_meanwhile", evidence=evidence)
        return Root(reason="item_inserted", evidence={**evidence, **_difference(made_up, here, None)})
    there = served[same] if same < len(served) else None
    if start == end and there is not None and any(trace.digest == there.digest for trace in here[start:]):
        return Root(reason="item_inserted", evidence={**evidence, **_difference(start, here, there)})
    position = echoed[same] if same < len(echoed) else end
    return Root(reason="answer_edited", evidence={**evidence, **_difference(position, here, there)})


def _explain_rewrite(here: Sequence[ItemTrace], nearest: _Compared) -> Root:
    """The request and the nearest call part ways inside the nearest call's request."""
    head = next((i for i, trace in enumerate(nearest.items) if trace.role not in ("system", "developer")), 0)
    prompt = Counter(trace.digest for trace in nearest.items[:head])
    left = nearest.shared - (Counter(trace.digest for trace in here) & prompt).total()
    most_left = 2 * left >= len(nearest.items) - head
    gap = _gap(here[nearest.common :], nearest.items[nearest.common :])
    if left == 0:
        reason = "context_replaced"
    elif gap.here == 0:
        reason = "item_removed"
    elif gap.there == 0:
        reason = "item_inserted"
    else:
        reason = "item_edited" if gap.here == gap.there or most_left else "context_replaced"
    there = nearest.items[nearest.common]
    changed: dict[str, JsonValue] = {"items_new": gap.here, "items_gone": gap.there}
    return Root(
        reason=reason, evidence={**nearest.evidence(here), **_difference(nearest.common, here, there), **changed}
    )


def _gap(here: Sequence[ItemTrace], there: Sequence[ItemTrace]) -> _Gap:
    """The shortest stretch after which both have the same item; all that is left when they never have.

    One pass: the nearest place there is known for each digest, and a stretch longer than the best is not looked at.
    """
    places: dict[bytes, int] = {}
    for position, trace in enumerate(there):
        places.setdefault(trace.digest, position)
    best = _Gap(here=len(here), there=len(there))
    for i, trace in enumerate(here):
        if i > best.here + best.there:
            break
        j = places.get(trace.digest)
        if j is not None and (i + j, abs(i - j)) < (best.here + best.there, abs(best.here - best.there)):
            best = _Gap(here=i, there=j)
    return best


def _difference(position: int, here: Sequence[ItemTrace | Item], there: ItemTrace | None) -> dict[str, JsonValue]:
    item = here[position] if position < len(here) else None
    return {
        "first_difference": position,
        "role_here": None if item is None else item.role,
        "digest_here": None if item is None else item.digest.hex(),
        "role_there": None if there is None else there.role,
        "digest_there": None if there is None else there.digest.hex(),
    }


def _last(items: Sequence[Item]) -> int | None:
    """Index of the last model-authored item."""
    return next((i for i in reversed(range(len(items))) if items[i].model_authored), None)


def _runs(items: Sequence[Item]) -> Iterator[tuple[int, Sequence[Item]]]:
    """Every start in the last run of model-authored items, with what is from there on; none with nothing behind it."""
    last = _last(items)
    if last is None or last + 1 == len(items) or _hosted(items) is not None:
        return
    first = last
    while first > 0 and items[first - 1].model_authored:
        first -= 1
    for start in range(first, last + 1):
        yield start, items[start : last + 1]


def _hosted(items: Sequence[Item]) -> int | None:
    """Index of the first hosted item."""
    return next((i for i, item in enumerate(items) if item.kind == "hosted"), None)


def _preferred(hits: Sequence[KnownCall]) -> KnownCall:
    return max(hits, key=lambda hit: (hit.depth, hit.sequence))


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()
