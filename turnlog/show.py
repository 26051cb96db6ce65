"""One rollout of the log as people read it: which call continues which, where rows begin, and why.

Knows how to lay out events; does not know how they are stored, and derives nothing that the log does not say. Law:
every call that was admitted is shown, whatever became of it.

Completed calls carry the number that rows use: 1 for the first of its rollout in the order of the log. A chain is drawn
as a flat list under its root, and grows a level only where two calls continue the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from pydantic import JsonValue
from rich.markup import escape
from rich.tree import Tree
from sqlalchemy import Connection

from replay.errors import UnknownRollout
from store import log
from store.events import CallAdmitted, CallCompleted, CallEnded, MediaShown, RolloutOpened, RolloutScored

State = Literal["completed", "pending", "failed", "refused", "abandoned", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """One call of a rollout, whatever became of it."""

    call_id: UUID
    number: int | None
    """Place among the completed calls of the rollout, from 1; None for a call that did not complete."""
    state: State
    decision: str | None
    """None when the call was refused before its decision was logged."""
    reason: str
    """Why it is a root or a continuation."""
    parent_id: UUID | None
    at: int
    end: str | None = None
    """How the call ended: its finish reason, or why it failed."""
    prompt_tokens: int = 0
    """What the model saw."""
    stored_tokens: int = 0
    """What the log keeps of it: the delta on top of the parent."""
    sampled_tokens: int = 0
    media: tuple[MediaShown, ...] = ()
    """Images and the like that are new in it."""
    evidence: dict[str, JsonValue] | None = None
    response_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """A rollout, its calls in the order they were admitted, and its latest outcome."""

    opened: RolloutOpened
    calls: tuple[ShownCall, ...]
    outcome: RolloutScored | None

    def number(self, call_id: UUID | None) -> int | None:
        """Number of a completed call; None for any other."""
        return next((call.number for call in self.calls if call.call_id == call_id), None)


def load(connection: Connection, rollout_id: str) -> ShownRollout:
    """Read one rollout from the log. Raises UnknownRollout."""
    opened = log.rollout(connection, rollout_id)
    if opened is None:
        raise UnknownRollout(rollout_id)
    outcomes = log.outcomes(connection, rollout_id)
    return ShownRollout(
        opened=opened,
        calls=arrange(
            log.calls(connection, rollout_id),
            log.intents(connection, rollout_id),
            log.ends(connection, rollout_id),
            log.media(connection, rollout_id),
        ),
        outcome=outcomes[-1] if outcomes else None,
    )


def arrange(
    completed: Sequence[CallCompleted],
    intents: Sequence[CallAdmitted],
    ends: Sequence[CallEnded],
    media: Sequence[MediaShown] = (),
) -> tuple[ShownCall, ...]:
    """Bring a rollout's events together, one entry a call, in the order the calls were admitted."""
    shown: dict[UUID, list[MediaShown]] = {}
    for each in media:
        shown.setdefault(each.call_id, []).append(each)
    found = {
        call.call_id: _completed(number, call, tuple(shown.get(call.call_id, ())))
        for number, call in enumerate(completed, start=1)
    }
    ended = {end.call_id: end for end in ends}
    for intent in intents:
        if intent.call_id not in found:
            found[intent.call_id] = _unanswered(intent, ended.get(intent.call_id))
    for end in ends:
        if end.call_id not in found:
            found[end.call_id] = _refused(end)
    return tuple(sorted(found.values(), key=lambda call: (call.at, call.number or 0, call.call_id)))


def _completed(number: int, call: CallCompleted, media: tuple[MediaShown, ...]) -> ShownCall:
    return ShownCall(
        call_id=call.call_id,
        number=number,
        state="completed",
        decision=call.decision,
        reason=call.reason,
        parent_id=call.parent_id,
        at=call.started_at,
        end=call.finish_reason,
        prompt_tokens=call.prompt_len,
        stored_tokens=call.delta_len,
        sampled_tokens=call.sampled_len,
        media=media,
        evidence=call.evidence,
        response_id=call.response_id,
    )


def _unanswered(intent: CallAdmitted, end: CallEnded | None) -> ShownCall:
    return ShownCall(
        call_id=intent.call_id,
        number=None,
        state="pending" if end is None else end.state,
        decision=intent.decision,
        reason=intent.reason,
        parent_id=intent.parent_id,
        at=intent.at,
        end=None if end is None else end.reason,
        sampled_tokens=0 if end is None else len(end.token_ids) // 4,
    )


def _refused(end: CallEnded) -> ShownCall:
    return ShownCall(
        call_id=end.call_id,
        number=None,
        state=end.state,
        decision=None,
        reason=end.reason,
        parent_id=None,
        at=end.at,
        sampled_tokens=len(end.token_ids) // 4,
    )


def tree(rollout: ShownRollout) -> Tree:
    """Draw the rollout: roots on the first level, each with the calls that continue it."""
    drawn = Tree(_headline(rollout), guide_style="dim")
    children: dict[UUID | None, list[ShownCall]] = {}
    known = {call.call_id for call in rollout.calls}
    for call in rollout.calls:
        children.setdefault(call.parent_id if call.parent_id in known else None, []).append(call)
    # A worklist, not recursion: a chain may be thousands of calls long.
    work = [(drawn, call, True, True) for call in reversed(children.get(None, []))]
    while work:
        parent, call, begins, nests = work.pop()
        node = parent.add(_line(rollout, call, begins=begins))
        following = children.get(call.call_id, [])
        branches = len(following) > 1
        answered = [child for child in following if child.state == "completed"]
        place = node if nests or branches else parent
        work.extend((place, child, child in answered[1:], branches) for child in reversed(following))
    return drawn


def _headline(rollout: ShownRollout) -> str:
    opened = rollout.opened
    parts = [f"[bold]{escape(opened.rollout_id)}[/]"]
    if opened.group_id is not None:
        slot = "" if opened.slot is None else f" slot {opened.slot}"
        parts.append(f"group {escape(opened.group_id)}{slot}")
    if opened.task:
        parts.append(f"task {escape(repr(opened.task))}")
    parts.append("no outcome yet" if rollout.outcome is None else f"reward {rollout.outcome.reward:.3f}")
    return " · ".join(parts)


def _line(rollout: ShownRollout, call: ShownCall, *, begins: bool) -> str:
    if call.state != "completed":
        said = f": {escape(call.end)}" if call.end else ""
        sampled = f" · {call.sampled_tokens} tokens sampled until then" if call.sampled_tokens else ""
        return f"[yellow]✗ {call.state}[/] {escape(call.reason)}{said}{sampled} [dim]{call.call_id}[/]"
    total = call.prompt_tokens + call.sampled_tokens
    tokens = f"stores {call.stored_tokens} of {total} tokens, {call.sampled_tokens} sampled{_media(call)}"
    decision = f"continues {rollout.number(call.parent_id)}" if call.parent_id else "root"
    why = escape(call.reason if call.parent_id else f"{call.reason}{_difference(rollout, call)}")
    mark = "[green]▶ row begins[/] " if begins else ""
    return f"{mark}[bold]{call.number}[/] {decision} · {why} · [dim]{tokens} · {escape(call.end or '')}[/]"


def _media(call: ShownCall) -> str:
    """What is new beside tokens, in words: how large, and by which address."""
    return "".join(
        f", {each.modality} {_size(each.geometry)}of {each.tokens} tokens {each.sha256.hex()[:8]}"
        for each in call.media
    )


def _size(geometry: Mapping[str, JsonValue]) -> str:
    width, height = geometry.get("width"), geometry.get("height")
    return "" if width is None else f"{width}×{height} "


def _difference(rollout: ShownRollout, call: ShownCall) -> str:
    """Where a root parts from the nearest earlier call, in words; empty when there is nothing to compare."""
    evidence = call.evidence or {}
    nearest, place = evidence.get("nearest_call"), evidence.get("first_difference")
    if not isinstance(nearest, str) or place is None:
        return ""
    here, there = evidence.get("role_here"), evidence.get("role_there")
    roles = f"{here}" if here == there else f"{here or 'nothing'} for {there or 'nothing'}"
    return f" at item {place} ({roles}) against call {rollout.number(UUID(nearest)) or nearest}"


def facts(rollout: ShownRollout) -> dict[str, JsonValue]:
    """The same as one JSON object, for `--json`."""
    calls: list[JsonValue] = [_facts_of_call(rollout, call) for call in rollout.calls]
    return {
        "rollout": rollout.opened.model_dump(mode="json", exclude={"kind", "secret_hash"}),
        "calls": calls,
        "outcome": None if rollout.outcome is None else rollout.outcome.model_dump(mode="json", exclude={"kind"}),
    }


def _facts_of_call(rollout: ShownRollout, call: ShownCall) -> dict[str, JsonValue]:
    return {
        "number": call.number,
        "call_id": str(call.call_id),
        "state": call.state,
        "decision": call.decision,
        "reason": call.reason,
        "parent": rollout.number(call.parent_id),
        "parent_id": None if call.parent_id is None else str(call.parent_id),
        "prompt_tokens": call.prompt_tokens,
        "stored_tokens": call.stored_tokens,
        "sampled_tokens": call.sampled_tokens,
        "media": [each.model_dump(mode="json", exclude={"kind", "call_id", "rollout_id", "at"}) for each in call.media],
        "end": call.end,
        "response_id": call.response_id,
        "evidence": call.evidence,
        "started_at": call.at,
    }


def summaries(connection: Connection, rollouts: Iterable[RolloutOpened]) -> list[dict[str, JsonValue]]:
    """One JSON object a rollout, for the list of rollouts."""
    found: list[dict[str, JsonValue]] = []
    for opened in rollouts:
        shown = load(connection, opened.rollout_id)
        completed = [call for call in shown.calls if call.state == "completed"]
        found.append(
            {
                "rollout_id": opened.rollout_id,
                "group_id": opened.group_id,
                "task": opened.task,
                "calls": len(completed),
                "roots": sum(call.decision == "root" for call in completed),
                "other_calls": len(shown.calls) - len(completed),
                "sampled_tokens": sum(call.sampled_tokens for call in completed),
                "reward": None if shown.outcome is None else shown.outcome.reward,
            }
        )
    return found
