"""What harnesses say about their own rewrites, beside the boundaries that were found.

Knows the two ways in which a harness says so; never a verdict (`engine.hints`). Law: of a harness that declares, every
rewrite it names was found, and every one that was found was named; of one that never declares nothing is asked.

An outcome's `declared_rewrites` name the first call of each new context: an id, `{"call": ID}` with a call or response
id, or `{"at": N}`, its number among the rollout's completed calls. Codex counts its windows up when it compacts.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from store.events import CallCompleted
from turnlog.audit.events import name
from turnlog.audit.findings import Findings
from turnlog.audit.source import RolloutEvents

SIDE_CALLS = ("title", "summary")
"""Roles of calls that are contexts of their own."""


def check(rollout: RolloutEvents, findings: Findings) -> None:
    """Compare both ways."""
    calls = [call for _, call in rollout.calls]
    outcome = rollout.outcome
    declarations = () if outcome is None else outcome.declared_rewrites
    declared = _by_windows(calls)
    for said in declarations:
        place = _named(calls, said)
        if place is None:
            findings.differs(
                "declared_rewrite",
                rollout.rollout_id,
                "its outcome",
                stored=said,
                derived="no completed call of that name",
            )
        else:
            declared.add(place)
    if not declarations and not any("window" in call.hints for call in calls):
        return
    for at, call in enumerate(calls):
        rewritten = call.decision == "root" and call.reason not in ("first_call", "fresh_context")
        if at in declared or rewritten:
            findings.checked["declared_rewrite"] += 1
        if at in declared and call.decision != "root":
            findings.differs(
                "declared_rewrite",
                rollout.rollout_id,
                name(call),
                stored="declared by the harness",
                derived=call.reason,
            )
        elif rewritten and at not in declared and call.hints.get("role") not in SIDE_CALLS:
            findings.differs(
                "declared_rewrite",
                rollout.rollout_id,
                name(call),
                stored="not declared by the harness",
                derived=call.reason,
            )


def _by_windows(calls: Sequence[CallCompleted]) -> set[int]:
    """Calls with which a window's number went up, in their thread."""
    last: dict[JsonValue, int] = {}
    found: set[int] = set()
    for at, call in enumerate(calls):
        window, thread = call.hints.get("window"), str(call.hints.get("thread"))
        if isinstance(window, int):
            if window > last.get(thread, window):
                found.add(at)
            last[thread] = window
    return found


def _named(calls: Sequence[CallCompleted], said: JsonValue) -> int | None:
    """The call that a declaration names."""
    named = said.get("call") if isinstance(said, dict) else said
    at = said.get("at") if isinstance(said, dict) else None
    if isinstance(at, int) and 1 <= at <= len(calls):
        return at - 1
    if not isinstance(named, str):
        return None
    return next((at for at, call in enumerate(calls) if named in (call.response_id, str(call.call_id))), None)
