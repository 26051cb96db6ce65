"""What must hold for each event of a rollout, and between an event and those that it names.

Knows events and their hashes; does not know decisions, rows or where events were read. Law: everything that an event
says twice is derived once more from the other saying; an event that cannot be read is one difference, not many.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import numpy as np

from store import hashing
from store.events import CallCompleted, logprob_array
from turnlog.audit.findings import Findings
from turnlog.audit.source import RolloutEvents


def check(rollout: RolloutEvents, findings: Findings, *, finished: bool = False) -> None:
    """Every event of the rollout by itself, then the links between them.

    Args:
        rollout: with its events.
        findings: to add to.
        finished: nothing is running any more, so each admitted call must have ended.
    """
    for each in rollout.stored:
        findings.checked["readable"] += 1
        if each.event is None:
            findings.differs(
                "readable", rollout.rollout_id, each.name, stored=f"sequence {each.sequence}", derived=each.fault
            )
        else:
            findings.checked["digest"] += 1
            if (derived := each.event.digest()) != each.digest:
                findings.differs("digest", rollout.rollout_id, each.name, stored=each.digest, derived=derived)
        if each.sealed is not None:
            findings.checked["archive"] += 1
            if each.sealed != each.digest:
                findings.differs("archive", rollout.rollout_id, each.name, stored=each.digest, derived=each.sealed)
    findings.checked["opening"] += 1
    if rollout.opening is None and not any(each.place.table.name == "rollout" for each in rollout.stored):
        findings.differs(
            "opening", rollout.rollout_id, "the rollout", stored="no opening", derived="one before its calls"
        )
    calls = {call.call_id: (sequence, call) for sequence, call in rollout.calls}
    unreadable = {each.key[0] for each in rollout.stored if each.event is None and each.place.kind == "call_completed"}
    for sequence, call in calls.values():
        _hashes(rollout.rollout_id, call, findings)
        _arrays(rollout.rollout_id, call, findings)
        if call.parent_id in unreadable:
            findings.note("unexplained_links", name(call))
        else:
            _link(rollout.rollout_id, sequence, call, calls, findings)
    _ends(rollout, calls, findings, finished=finished)


def name(call: CallCompleted) -> str:
    """Kind and id of a call's event."""
    return f"call_completed {call.call_id}"


def _hashes(rollout_id: str, call: CallCompleted, findings: Findings) -> None:
    findings.checked["request_hash"] += 1
    summary = hashing.summary_hash(call.request_hash, call.answer_key)
    if call.summary_hash != summary:
        findings.differs(
            "request_hash", rollout_id, f"{name(call)}: summary", stored=call.summary_hash, derived=summary
        )


def _arrays(rollout_id: str, call: CallCompleted, findings: Findings) -> None:
    """Counts and arrays; that spans cover the sampled tokens was checked when the event was read."""
    findings.checked["mask"] += 1
    logprobs = logprob_array(call.logprobs)
    if len(logprobs) and float(np.max(logprobs)) > 0:
        at = int(np.argmax(logprobs))
        findings.differs(
            "mask", rollout_id, f"{name(call)}: log-probability {at}", stored=float(logprobs[at]), derived="at most 0"
        )


def _link(
    rollout_id: str,
    sequence: int,
    call: CallCompleted,
    calls: Mapping[UUID, tuple[int, CallCompleted]],
    findings: Findings,
) -> None:
    """The call on top of its parent."""
    findings.checked["parent"] += 1
    above = None if call.parent_id is None else calls.get(call.parent_id)
    if call.parent_id is not None and above is None:
        findings.differs("parent", rollout_id, name(call), stored=call.parent_id, derived="no call of the rollout")
        return
    parent = None if above is None else above[1]
    if above is not None and parent is not None:
        if above[0] > sequence:
            findings.differs("parent", rollout_id, name(call), stored=parent.call_id, derived="a call that came later")
        for part in ("render_hash", "tools_digest"):
            if getattr(parent, part) != getattr(call, part):
                findings.differs(
                    "parent",
                    rollout_id,
                    f"{name(call)}: {part}",
                    stored=getattr(call, part),
                    derived=getattr(parent, part),
                )
    findings.checked["lengths"] += 1
    prev_len = 0 if parent is None else parent.chain_len
    if call.prev_len != prev_len:
        findings.differs("lengths", rollout_id, f"{name(call)}: prev_len", stored=call.prev_len, derived=prev_len)
    findings.checked["chain_hash"] += 1
    chain_hash = hashing.chain_hash(None if parent is None else parent.chain_hash, call.token_ids)
    if call.chain_hash != chain_hash:
        findings.differs("chain_hash", rollout_id, name(call), stored=call.chain_hash, derived=chain_hash)
    request_hash = hashing.request_hash(
        call.render_hash if parent is None else parent.request_hash, (item.digest for item in call.request_items)
    )
    if call.request_hash != request_hash:
        findings.differs("request_hash", rollout_id, name(call), stored=call.request_hash, derived=request_hash)


def _ends(
    rollout: RolloutEvents, calls: Mapping[UUID, tuple[int, CallCompleted]], findings: Findings, *, finished: bool
) -> None:
    """Each call was admitted, as what it became, and ended once."""
    intents = {intent.call_id: intent for intent in rollout.intents}
    ends = {end.call_id: end for end in rollout.ends}
    of_kind = {kind: {each.key[0] for each in rollout.stored if each.place.kind == kind} for kind in _KINDS}
    for _, call in calls.values():
        findings.checked["intent"] += 1
        if call.call_id in ends:
            findings.differs(
                "intent", rollout.rollout_id, name(call), stored=f"also {ends[call.call_id].state}", derived="one end"
            )
        intent = intents.get(call.call_id)
        if intent is None:
            if call.call_id not in of_kind["call_admitted"]:
                findings.differs("intent", rollout.rollout_id, name(call), stored="no intent", derived="one before it")
            continue
        admitted = (intent.decision, intent.reason, intent.parent_id)
        if admitted != (call.decision, call.reason, call.parent_id):
            findings.differs(
                "intent",
                rollout.rollout_id,
                name(call),
                stored=(call.decision, call.reason, str(call.parent_id)),
                derived=(intent.decision, intent.reason, str(intent.parent_id)),
            )
    for end in ends.values():
        findings.checked["intent"] += 1
        if end.state != "refused" and end.call_id not in of_kind["call_admitted"]:  # refused before it was admitted
            findings.differs(
                "intent", rollout.rollout_id, f"call_ended {end.call_id}", stored="no intent", derived="one before it"
            )
        findings.note("unanswered", f"call_ended {end.call_id}")
    if finished:
        findings.checked["open_call"] += len(of_kind["call_admitted"])
    for call_id in sorted(of_kind["call_admitted"] - of_kind["call_completed"] - of_kind["call_ended"], key=str):
        event = f"call_admitted {call_id}"
        findings.note("open", f"{event} of rollout {rollout.rollout_id}")
        if finished:
            findings.differs("open_call", rollout.rollout_id, event, stored="no end", derived="one, since nothing runs")


_KINDS = ("call_admitted", "call_completed", "call_ended")
