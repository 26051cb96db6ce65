"""Each writer's own count: a hole shows an event that was lost, a repeat one that was copied.

Knows counts; does not know calls otherwise, nor deleted ones, which the tally names. Law: a count is used once. A call
that failed behind its count leaves a hole that is none of the log's, and one that is not appended yet may, so holes are
excused by as many calls of the writer's worker that failed or stand open.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from uuid import UUID

from turnlog.audit.findings import Findings
from turnlog.audit.source import RolloutEvents


@dataclass(slots=True)
class Writers:
    """What was seen of all writers; eight bytes a call."""

    counts: dict[UUID, array[int]] = field(default_factory=dict[UUID, "array[int]"])
    worker: dict[UUID, str] = field(default_factory=dict[UUID, str])
    failed: Counter[str] = field(default_factory=Counter[str])
    """Calls that failed or were lost, by worker."""
    open: Counter[str] = field(default_factory=Counter[str])

    def add(self, rollout: RolloutEvents) -> None:
        """Take in one rollout."""
        intents = {intent.call_id: intent for intent in rollout.intents}
        ended = {each.key[0] for each in rollout.stored if each.place.kind in ("call_completed", "call_ended")}
        for _, call in rollout.calls:
            self.counts.setdefault(call.writer_id, array("q")).append(call.writer_seq)
            if call.call_id in intents:
                self.worker[call.writer_id] = intents[call.call_id].worker
        for end in rollout.ends:
            if end.state in ("failed", "lost") and end.call_id in intents:
                self.failed[intents[end.call_id].worker] += 1
        for call_id, intent in intents.items():
            self.open[intent.worker] += call_id not in ended

    def check(self, findings: Findings) -> None:
        """Look for holes and repeats, when all rollouts were taken in."""
        for writer_id, counts in self.counts.items():
            findings.checked["writer"] += len(counts)
            event = f"writer {writer_id}"
            ordered = sorted(counts)
            for one, other in pairwise(ordered):
                if one == other:
                    findings.differs("writer", None, event, stored=f"count {one} twice", derived="once")
            worker = self.worker.get(writer_id, "")
            holes = [*_holes(ordered)]
            missing = sum(high - low + 1 for low, high in holes)
            if missing and missing <= self.failed[worker] + self.open[worker]:
                findings.note("writer_failures", f"{event}: {missing} counts")
                continue
            for low, high in holes:
                shown = str(low) if low == high else f"{low} to {high}"
                findings.differs("writer", None, event, stored=f"no count {shown}", derived="one call each")


def _holes(ordered: list[int]) -> Iterator[tuple[int, int]]:
    """First and last count of each hole; a writer begins at 0."""
    due = 0
    for count in ordered:
        if count > due:
            yield due, count - 1
        due = count + 1
