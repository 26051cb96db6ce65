"""Why a request continues nothing: what differs from the nearest earlier call.

Knows canonical items and the traces of earlier calls; does not know how a parent is found, and reads no clock, database
or wire. Law: a reason is evidence for people and SQL; it changes no verdict (design §6.6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import JsonValue

from engine.items import Item, traces
from store.events import ItemTrace
from store.lineage import TracedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """A reason and its evidence."""

    reason: str
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)


def why_none(items: Sequence[Item], render_hash: bytes, tools_digest: bytes, recent: Sequence[TracedCall]) -> Why:
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
        return Why(reason="first_call", evidence={"items": len(items)})
    here = traces(items)
    compared = [_compare(here, render_hash, tools_digest, call) for call in recent]
    repeated = [other for other in compared if other.is_repeated_by(items)]
    others = [other for other in compared if not other.is_repeated_by(items)]
    nearest = max(others or compared, key=_Compared.nearness)
    if not others or not any(item.model_authored for item in items):
        root = Why(reason="fresh_context", evidence=nearest.evidence(here))
    elif nearest.whole_request:
        root = _explain_extension(items, nearest)
    else:
        root = _explain_rewrite(here, nearest)
    if not repeated:
        return root
    return replace(root, evidence={**root.evidence, "repeats_call": str(repeated[-1].call.call_id)})


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


def _explain_extension(items: Sequence[Item], nearest: _Compared) -> Why:
    """The nearest call's whole request comes first, and still its answer was not found."""
    here = traces(items)
    evidence = nearest.evidence(here)
    if not nearest.same_options:
        return Why(reason="options_changed" if nearest.same_tools else "tools_changed", evidence=evidence)
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
            return Why(reason="answered_meanwhile", evidence=evidence)
        return Why(reason="item_inserted", evidence={**evidence, **difference(made_up, here, None)})
    there = served[same] if same < len(served) else None
    if start == end and there is not None and any(trace.digest == there.digest for trace in here[start:]):
        return Why(reason="item_inserted", evidence={**evidence, **difference(start, here, there)})
    position = echoed[same] if same < len(echoed) else end
    return Why(reason="answer_edited", evidence={**evidence, **difference(position, here, there)})


def _explain_rewrite(here: Sequence[ItemTrace], nearest: _Compared) -> Why:
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
    return Why(reason=reason, evidence={**nearest.evidence(here), **difference(nearest.common, here, there), **changed})


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


def difference(position: int, here: Sequence[ItemTrace | Item], there: ItemTrace | None) -> dict[str, JsonValue]:
    """Evidence of the first item that differs; None for one that is not there."""
    item = here[position] if position < len(here) else None
    return {
        "first_difference": position,
        "role_here": None if item is None else item.role,
        "digest_here": None if item is None else item.digest.hex(),
        "role_there": None if there is None else there.role,
        "digest_there": None if there is None else there.digest.hex(),
    }
