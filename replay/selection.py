"""Which completed calls count: named, versioned rules, and what each selected.

Knows the narrow columns of calls and the latest outcome; does not know tokens, chains or databases.
Law: a rule is a pure function of one rollout. A changed rule is a new version, and an old version keeps its meaning.

Rules:

- `completed` 1: every completed call, except a retry that a later sibling supersedes. Siblings are calls of the same
  parent (roots: of the same rollout), the same request and the same choice; an earlier one is superseded unless a
  completed call continues it, for then the harness used its answer.
- `output` 1: the calls whose answers the harness's output holds, see `replay.output`.
- `declared` 1: the calls whose call id or response id the latest outcome lists. An id that names no completed call, or
  a response id that names several choices, refuses the rollout: nothing is guessed.

Both leave out calls whose role is excluded. Failed, refused, abandoned and pending calls are not completed calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue, TypeAdapter

from replay import output
from replay.errors import UnknownRule
from replay.piece import Flags, Piece, Rollout, flags
from replay.queries import query
from store.columns import traces


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

    @property
    def reads_answers(self) -> bool:
        """Whether the rule compares what calls answered, so that a piece must hold it."""
        return self.rule == "output"

    def as_json(self) -> dict[str, JsonValue]:
        """The selection as a JSON object, the same for equal selections."""
        return {"rule": self.rule, "version": self.version, "excluded_roles": [*sorted(self.excluded_roles)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSelectable:
    """Why the rule cannot say what counts in a rollout."""

    reason: str
    """`nothing_declared`, `accepted_unknown`, `accepted_ambiguous`, or one of `replay.output.Unmatched`."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selected:
    """What a selection made of a piece."""

    counts: Flags  # [N]
    """Whether each call counts; none of a rollout that is not selectable does."""
    left_out: Mapping[str, int]
    """How many completed calls were not selected, by reason: `superseded`, `not_accepted`, `not_in_output`,
    `excluded_role`."""
    not_selectable: Mapping[int, NotSelectable]
    """By the place of the rollout in the piece."""


def select(selection: Selection, piece: Piece) -> Selected:
    """Apply the selection to each rollout of the piece."""
    counts = np.ones(len(piece.calls), np.bool_)
    reason, rule = _RULES[selection.rule, selection.version]
    not_selectable = rule(piece, counts)
    for place in not_selectable:
        counts[piece.first[place] : piece.first[place + 1]] = False
    answered = np.ones(len(counts), np.bool_)
    answered[np.isin(piece.rollout, [*not_selectable])] = False
    excluded = np.zeros(len(counts), np.bool_)
    if selection.excluded_roles:
        named = pc.is_in(piece.roles(), pa.array(sorted(selection.excluded_roles), pa.string()))
        excluded = flags(named) & answered
    left_out = {
        "excluded_role": int(np.count_nonzero(excluded)),
        reason: int(np.count_nonzero(~counts & ~excluded & answered)),
    }
    counts &= ~excluded
    return Selected(
        counts=counts,
        left_out={name: count for name, count in left_out.items() if count},
        not_selectable=not_selectable,
    )


def _completed(piece: Piece, counts: Flags) -> dict[int, NotSelectable]:
    if pc.count_distinct(piece.column("request_hash")).as_py() == len(counts):
        return {}  # no request was made twice
    model_call = piece.calls.select(["call_id", "parent_id", "request_hash", "choice"])
    for name, column in (
        ("call", np.arange(len(counts))),
        ("rollout", piece.rollout),
        ("number", piece.number),
    ):
        model_call = model_call.append_column(name, pa.array(column))
    with duckdb.connect(":memory:") as engine:
        engine.register("model_call", model_call)
        superseded = engine.sql(query("superseded")).to_arrow_table()
    counts[superseded["call"].to_numpy()] = False
    return {}


def _declared(piece: Piece, counts: Flags) -> dict[int, NotSelectable]:
    refused: dict[int, NotSelectable] = {}
    call_ids, response_ids = piece.column("call_id"), piece.column("response_id")
    for place, rollout in enumerate(piece.rollouts):
        low, high = piece.first[place], piece.first[place + 1]
        names: dict[str, list[int]] = {}
        for call in range(low, high):
            names.setdefault(str(UUID(bytes=call_ids[call].as_py())), []).append(call)
            if (response_id := response_ids[call].as_py()) is not None:
                names.setdefault(response_id, []).append(call)
        accepted = _accepted(rollout, names)
        if isinstance(accepted, NotSelectable):
            refused[place] = accepted
        else:
            counts[low:high] = False
            counts[accepted] = True
    return refused


def _accepted(rollout: Rollout, names: Mapping[str, list[int]]) -> list[int] | NotSelectable:
    if rollout.accepted is None:
        return NotSelectable(
            reason="nothing_declared",
            detail="its latest outcome lists no accepted calls: post an outcome that does, or select by `completed`",
        )
    accepted: list[int] = []
    for name in rollout.accepted:
        calls = names.get(name, [])
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
        accepted += calls
    return accepted


def _output(piece: Piece, counts: Flags) -> dict[int, NotSelectable]:
    refused: dict[int, NotSelectable] = {}
    for place, rollout in enumerate(piece.rollouts):
        low, high = int(piece.first[place]), int(piece.first[place + 1])
        calls, given = _answered(piece, low, high)
        found = output.match(rollout.output, calls, given=given)
        if isinstance(found, output.Unmatched):
            refused[place] = NotSelectable(reason=found.reason, detail=found.detail)
        else:
            counts[low:high] = False
            counts[[low + number - 1 for number in found.numbers]] = True
    return refused


def _answered(piece: Piece, low: int, high: int) -> tuple[list[output.Answered], list[bytes]]:
    """What a rollout's calls answered, and what stood in the request of the first as the model's."""
    if piece.answers is None:
        raise ValueError("the piece was read without what its calls answered: read it for this selection")
    lines = piece.answers.slice(low, high - low).to_pylist()
    narrow = piece.calls.select(["call_id", "parent_id", "response_id"]).slice(low, high - low).to_pylist()
    calls = [
        output.Answered(
            number=number,
            call_id=UUID(bytes=facts["call_id"]),
            parent_id=facts["parent_id"] and UUID(bytes=facts["parent_id"]),
            response_id=facts["response_id"],
            answer_item_ids=_NAMES.validate_json(line["answer_item_ids"]),
            answer_roles=_NAMES.validate_json(line["answer_roles"]),
            answer_digests=line["answer_digests"],
            answer_key=line["answer_key"],
            reasoning_digest=line["reasoning_digest"],
            hash_version=line["hash_version"],
        )
        for number, (facts, line) in enumerate(zip(narrow, lines, strict=True), start=1)
    ]
    if not lines:
        return calls, []
    asked = traces(_NAMES.validate_json(lines[0]["request_roles"]), lines[0]["request_digests"])
    return calls, [item.digest for item in asked if item.role in _MODEL_ROLES]


_NAMES: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])
_MODEL_ROLES = ("assistant", "reasoning", "tool_call", "hosted")
_Rule = Callable[[Piece, Flags], dict[int, NotSelectable]]
"""Takes from `counts` the calls that do not count; returns the rollouts that it cannot answer for."""
_RULES: Mapping[tuple[str, int], tuple[str, _Rule]] = {
    ("completed", 1): ("superseded", _completed),
    ("declared", 1): ("not_accepted", _declared),
    ("output", 1): ("not_in_output", _output),
}
"""By name and version: why the rule leaves a call out, and the rule."""
