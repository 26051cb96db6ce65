"""Roots that look like false rewrites: other digests, the same tokens.

Knows tokens of one rollout; does not know texts. Law: it accuses nobody. A root whose prompt begins with every token of
the nearest earlier call is what a harness would send that changed nothing a model can see, so people should look.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from store.events import CallCompleted
from turnlog.audit.events import name
from turnlog.audit.findings import Findings


def check(rollout_id: str, calls: Sequence[CallCompleted], findings: Findings) -> None:
    """Note every such root."""
    known = {str(call.call_id): call for call in calls}
    ids = {call.call_id: call for call in calls}
    for call in calls:
        nearest = known.get(str(call.evidence.get("nearest_call")))
        if call.decision != "root" or nearest is None or nearest.chain_len > call.prompt_len:
            continue
        if call.token_ids[: 4 * call.prompt_len].startswith(_chain(ids, nearest)):
            findings.note("same_tokens", f"{name(call)} of rollout {rollout_id}, nearest {nearest.call_id}")


def _chain(calls: dict[UUID, CallCompleted], tip: CallCompleted) -> bytes:
    parts: list[bytes] = []
    above: CallCompleted | None = tip
    while above is not None and len(parts) <= len(calls):
        parts.append(above.token_ids)
        above = None if above.parent_id is None else calls.get(above.parent_id)
    return b"".join(reversed(parts))
