"""Which completed calls of a rollout count: named, versioned rules, and what each selected.

Knows the narrow values of calls and the latest outcome; does not know tokens, chains or databases.
Law: a rule is a pure function of one rollout. A changed rule is a new version, and an old version keeps its meaning.

Rules:

- `completed` 1: every completed call, except a retry that a later sibling supersedes. Siblings are calls of the same
  parent (roots: of the same rollout), the same request and the same choice; an earlier one is superseded unless a
  completed call continues it, for then the harness used its answer.
- `declared` 1: the calls whose call id or response id the latest outcome lists. An id that names no completed call, or
  a response id that names several choices, refuses the rollout: nothing is guessed.

Both leave out calls whose role is excluded. Failed, refused, abandoned and pending calls are not completed calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from pydantic import JsonValue

from replay.call import Call, Rollout
from replay.errors import UnknownRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A selection rule as a value: stored beside what it selected.

    >>> Selection().as_json()
    {'rule': 'completed', 'version': 1, 'excluded_roles': []}
    """

    rule: str = "completed"
    version: int = 1
    excluded_roles: frozenset[str] = field(default_factory=frozenset[str])
    """Roles that the harness gives in its hints, such as `title`; calls without a role always count."""

    def __post_init__(self) -> None:
        if (self.rule, self.version) not in _RULES:
            raise UnknownRule(self.rule, self.version, (f"{rule} {version}" for rule, version in _RULES))

    def as_json(self) -> dict[str, JsonValue]:
        """The selection as a JSON object, the same for equal selections."""
        return {"rule": self.rule, "version": self.version, "excluded_roles": [*sorted(self.excluded_roles)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What a selection made of one rollout."""

    call_ids: frozenset[UUID]
    left_out: Mapping[str, int]
    """How many completed calls were not selected, by reason: `superseded`, `not_accepted`, `excluded_role`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSelectable:
    """Why the rule cannot say what counts in this rollout."""

    reason: str
    """`nothing_declared`, `accepted_unknown` or `accepted_ambiguous`."""
    detail: str


def select(selection: Selection, rollout: Rollout) -> Selected | NotSelectable:
    """Apply the selection to one rollout.

    >>> empty = Rollout(rollout_id="r", group_id=None, reward=None, accepted=None, calls=())
    >>> select(Selection(rule="declared"), empty).reason
    'nothing_declared'
    """
    reasons = _RULES[selection.rule, selection.version](rollout)
    if isinstance(reasons, NotSelectable):
        return reasons
    for call in rollout.calls:
        if call.role is not None and call.role in selection.excluded_roles:
            reasons[call.call_id] = "excluded_role"
    return Selected(
        call_ids=frozenset(call.call_id for call in rollout.calls if call.call_id not in reasons),
        left_out=Counter(reasons.values()),
    )


def _completed(rollout: Rollout) -> dict[UUID, str] | NotSelectable:
    continued = {call.parent_id for call in rollout.calls}
    latest: dict[tuple[UUID | None, bytes, int], Call] = {}
    reasons: dict[UUID, str] = {}
    for call in rollout.calls:
        request = (call.parent_id, call.request_hash, call.choice)
        earlier = latest.get(request)
        if earlier is not None and earlier.call_id not in continued:
            reasons[earlier.call_id] = "superseded"
        latest[request] = call
    return reasons


def _declared(rollout: Rollout) -> dict[UUID, str] | NotSelectable:
    if rollout.accepted is None:
        return NotSelectable(
            reason="nothing_declared",
            detail="its latest outcome lists no accepted calls: post an outcome that does, or select by `completed`",
        )
    named: dict[str, list[UUID]] = {}
    for call in rollout.calls:
        named.setdefault(str(call.call_id), []).append(call.call_id)
        if call.response_id is not None:
            named.setdefault(call.response_id, []).append(call.call_id)
    accepted: set[UUID] = set()
    for name in rollout.accepted:
        calls = named.get(name, [])
        if not calls:
            return NotSelectable(
                reason="accepted_unknown",
                detail=f"its outcome accepts {name!r}, which is no completed call of it: accept call or response ids",
            )
        if len(calls) > 1:
            return NotSelectable(
                reason="accepted_ambiguous",
                detail=f"its outcome accepts {name!r}, which names {len(calls)} calls: accept them by their call ids",
            )
        accepted.update(calls)
    return {call.call_id: "not_accepted" for call in rollout.calls if call.call_id not in accepted}


_RULES: Mapping[tuple[str, int], Callable[[Rollout], dict[UUID, str] | NotSelectable]] = {
    ("completed", 1): _completed,
    ("declared", 1): _declared,
}
