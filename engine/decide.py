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
>>> from engine.items import traces
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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import JsonValue

from engine.items import Item, Media, answer_key, reasoning_digest
from engine.reason import difference, why_none
from engine.remembered import NOT_IN_THE_LOG_YET
from store import hashing
from store.events import MediaShown, ReasoningPolicy
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
    hosted: int | None
    """Index of the first hosted item; None when there is none."""
    echo: Sequence[JsonValue]
    """What the log keeps of the request's answer-like end, so that its decision can be derived again from the log.

    One list for each start: the index, the answer key and the digest of the reasoning from there on (null without any),
    the first 8 bytes of each in hex. Item digests alone would not do: an answer that came back trimmed, or without its
    thoughts, has other digests than the one that was served.
    """


def candidate_keys(items: Sequence[Item], render_hash: bytes) -> Keys:
    """Steps 1 to 3 of the rule: the summary hashes under which this request's parent would be in the log.

    The request's hashes are chained in one pass; answers are hashed once per start, over the last run alone. A request
    with a hosted item has no keys: what of it the prompt shows is not known, so it is never like another.
    """
    chain = [render_hash]
    for item in items:
        chain.append(hashing.extend_request_hash(chain[-1], item.digest))
    hosted = next((i for i, item in enumerate(items) if item.kind == "hosted"), None)
    last = next((i for i in reversed(range(len(items))) if items[i].model_authored), None)
    starts: dict[bytes, int] = {}
    echo: list[JsonValue] = []
    for start, run in _runs(items, last) if hosted is None else ():
        key, reasoning = answer_key(run), reasoning_digest(run)
        starts[hashing.summary_hash(chain[start], key)] = start
        echo.append([start, key[:ECHOED].hex(), None if reasoning is None else reasoning[:ECHOED].hex()])
    return Keys(starts=starts, last=last, request_hash=chain[-1], hosted=hosted, echo=echo)


def choose(
    items: Sequence[Item], keys: Keys, hits: Sequence[KnownCall], policy: ReasoningPolicy
) -> Continuation | Root | None:
    """Steps 4 and 5: the parent among the calls that the keys found; None when there is none, for `explain`.

    A hit of another hash version never counts. Reasoning that came back changed (or out of nothing) rules a hit out;
    reasoning that did not come back rules it out under `strict`. A root says so only when no hit is left. Item ids
    rule nothing out, for most harnesses drop them: they prefer the hits whose ids they name.
    """
    if (hosted := keys.hosted) is not None:
        evidence: dict[str, JsonValue] = {"items": len(items), **difference(hosted, items, None)}
        return Root(reason=f"hosted_item:{items[hosted].text}", evidence=evidence)
    if keys.last is not None and keys.last + 1 == len(items):
        return Root(
            reason="ends_with_model_item", evidence={"items": len(items), **difference(len(items) - 1, items, None)}
        )
    found = [hit for hit in hits if hit.hash_version in hashing.DERIVED and hit.summary_hash in keys.starts]
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

    The reasons, and what their evidence says, are those of `engine.reason.why_none`.
    """
    why = why_none(items, render_hash, tools_digest, recent)
    return Root(reason=why.reason, evidence=why.evidence)


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


def _runs(items: Sequence[Item], last: int | None) -> Iterator[tuple[int, Sequence[Item]]]:
    """Every start in the run of model-authored items that ends at `last`, with what is from there on.

    None when nothing stands behind it.
    """
    if last is None or last + 1 == len(items):
        return
    first = last
    while first > 0 and items[first - 1].model_authored:
        first -= 1
    for start in range(first, last + 1):
        yield start, items[start : last + 1]


def _preferred(hits: Sequence[KnownCall]) -> KnownCall:
    return max(hits, key=lambda hit: (hit.depth, hit.sequence))


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()
