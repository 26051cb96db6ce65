"""What an audit finds: differences, each by name, and how much of each rule was looked at.

Knows rules by their names; does not know how they are checked. Law: a difference says which event, which rule, what is
stored and what was derived; what could not be derived is counted under a name of its own, never passed over.

>>> findings = Findings(kept=1)
>>> for stored in ("aa", "bb"):
...     findings.differs("digest", "r1", "call_completed 7", stored=stored, derived="cc")
>>> findings.checked["digest"] += 2
>>> findings.differences["digest"], [str(each) for each in findings.shown]
(2, ['rollout r1: call_completed 7: digest: stored aa, derived cc'])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

RULES: Mapping[str, str] = MappingProxyType(
    {
        "guard": "the triggers that refuse a change are there",
        "tally": "each event that was appended is in the log or its archive, and each event there was appended once",
        "readable": "each event reads back as one",
        "digest": "each event gives the digest that it was stored with",
        "archive": "sealed files are those that were sealed, and an event that is logged too is the same in both",
        "opening": "each rollout with events was opened",
        "intent": "each completed call was admitted as what it became, and ended once",
        "parent": "each parent is an earlier call of the rollout with the same render",
        "lengths": "prefix, prompt and sampled lengths add up along each parent link, and with the tokens",
        "mask": "each sampled token has a log-probability and a policy version, and trains in exactly one row",
        "chain_hash": "chain hashes follow from the tokens",
        "request_hash": "request and summary hashes follow from item digests, render hash and answer key",
        "root": "stored root and depth are those that the recursive query finds",
        "decision": "each decision, parent and reason follows again from what the log held then",
        "trained_row": "each row that trained is built again, byte for byte",
        "media": "each object that was shown has its event, and its bytes give its address",
        "writer": "no writer's count has a hole or a repeat",
        "declared_rewrite": "what harnesses declare and what was found agree, both ways",
        "open_call": "each admitted call ended (asked for by --finished)",
    }
)
"""What holds in a whole log, by the rule's name."""
NOTES: Mapping[str, str] = MappingProxyType(
    {
        "unanswered": "decisions of calls that did not complete: their items are not kept",
        "open": "calls admitted and not ended yet",
        "log_unavailable": "roots made while the log was away: what a look-up would have found then is not known",
        "not_spliced": "continuations that could not be spliced: the parent was derived, the splice not tried again",
        "overlapping": "decisions that hold only if a call that ended meanwhile was not durable yet",
        "echo_not_kept": "decisions of older releases, whose events do not keep the keys of the echo",
        "other_version": "decisions made by another version of the rule",
        "same_tokens": "roots whose prompt begins with all tokens of the nearest call: they may be false rewrites",
        "unexplained_links": "calls above which one is missing or cannot be read: nothing is derived from above",
        "writer_failures": "holes in a writer's count where calls of its worker failed or have not ended",
        "gaps": "tables with sequences that were given to no event: rolled back, or deleted before revision 0005",
        "archived": "events that were archived and left with their partition: name the archive with --archive",
        "media_not_checked": "media objects whose bytes were not looked for: name their place with --media",
        "media_not_captured": "calls with media that the log does not hold",
    }
)
"""What was seen and is no difference, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that does not follow from the rest of the log."""

    rule: str
    rollout_id: str | None
    event: str
    """Kind and id, such as `call_completed 0198...`."""
    stored: str
    derived: str

    def __str__(self) -> str:
        where = "" if self.rollout_id is None else f"rollout {self.rollout_id}: "
        return f"{where}{self.event}: {self.rule}: stored {self.stored}, derived {self.derived}"


@dataclass(slots=True, kw_only=True)
class Findings:
    """All that an audit has found so far; of the differences only the first are kept whole, all are counted."""

    kept: int = 1000
    shown: list[Difference] = field(default_factory=list[Difference])
    differences: Counter[str] = field(default_factory=Counter[str])
    """How many, by rule."""
    checked: Counter[str] = field(default_factory=Counter[str])
    """How many events, links, decisions or rows were looked at, by rule."""
    notes: Counter[str] = field(default_factory=Counter[str])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The first events of each note."""

    def differs(self, rule: str, rollout_id: str | None, event: str, *, stored: object, derived: object) -> None:
        """Note a difference."""
        self.differences[rule] += 1
        if len(self.shown) < self.kept:
            self.shown.append(
                Difference(rule=rule, rollout_id=rollout_id, event=event, stored=_told(stored), derived=_told(derived))
            )

    def note(self, name: str, event: str) -> None:
        """Count something that is no difference."""
        self.notes[name] += 1
        examples = self.examples.setdefault(name, [])
        if len(examples) < 5:
            examples.append(event)


def _told(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
