"""Some rollouts and their completed calls as replay needs them: narrow columns, apart from their tokens.

Knows which columns there are and how calls are numbered; does not know databases, selection rules or rows.
Law: a piece is what the log holds, unchecked (`replay.chain` checks it), and holds its rollouts whole. Its order is
that of the rollouts it was given and, within one, of the log, so which other calls were read along changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue, TypeAdapter

from replay.media import Occurrences
from store.events import PolicySpan

ID = pa.binary(16)
CALLS = pa.schema(
    {
        "sequence": pa.int64(),
        "rollout_id": pa.string(),
        "call_id": ID,
        "parent_id": ID,
        "root_id": ID,
        "depth": pa.int64(),
        "request_hash": pa.binary(),
        "chain_hash": pa.binary(),
        "digest": pa.binary(),
        "hash_version": pa.int64(),
        "prev_len": pa.int64(),
        "prompt_len": pa.int64(),
        "sampled_len": pa.int64(),
        "choice": pa.int64(),
        "media_count": pa.int64(),
        "response_id": pa.string(),
        "policy_spans": pa.string(),
        "hints": pa.string(),
        "completed_at": pa.int64(),
    }
)
"""Columns of completed calls under their names in the log."""
ANSWERS = pa.schema(
    {
        "sequence": pa.int64(),
        "rollout_id": pa.string(),
        "answer_key": pa.binary(),
        "reasoning_digest": pa.binary(),
        "hash_version": pa.int64(),
        "answer_item_ids": pa.string(),
        "answer_roles": pa.string(),
        "answer_digests": pa.binary(),
        "request_roles": pa.string(),
        "request_digests": pa.binary(),
    }
)
"""Columns that say what calls were asked and answered; only some selection rules read them."""

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_ONE_SPAN = r'^\[\{"end":(?P<end>\d+),"policy_version":(?P<version>-?\d+),"start":0\}\]$'
_SPANS: TypeAdapter[tuple[PolicySpan, ...]] = TypeAdapter(tuple[PolicySpan, ...])
_HINTS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


def flags(column: pa.Array) -> Flags:
    """A column of booleans without nulls as a numpy array."""
    found: Flags = column.to_numpy(zero_copy_only=False)
    return found


class Rollout(NamedTuple):
    """One rollout as of a position: what it was and what it got. A tuple, since processes are handed many of them."""

    rollout_id: str
    group_id: str | None
    task: str | None
    harness: str | None
    opened_at: int
    """Unix time in microseconds; 0 when the log does not say."""
    reward: float | None
    """Of its latest outcome; None when it has none yet."""
    accepted: tuple[str, ...] | None
    """Call or response ids that its latest outcome lists; None when it does not say."""
    output: JsonValue
    """What its latest outcome says of the harness's output."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """The policy spans of all calls: call `at[s]` sampled its tokens [start[s], end[s]) under `version[s]`."""

    at: Ints
    start: Ints
    end: Ints
    version: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Rollouts and their calls, a line a call; a call is known here by its place, 0 to N - 1."""

    rollouts: tuple[Rollout, ...]
    calls: pa.Table
    """The columns of `CALLS`, N lines ordered by rollout, then by sequence."""
    answers: pa.Table | None = None
    """The columns of `ANSWERS`, line by line those of `calls`; None when no rule reads them."""
    media: Occurrences | None = None
    """What the calls show beside tokens; None when they show nothing."""

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        calls: pa.Table,
        answers: pa.Table | None = None,
        media: pa.Table | None = None,
    ) -> Piece:
        """Order the calls of these rollouts; lines of other rollouts are left out."""
        names = pa.array([rollout.rollout_id for rollout in rollouts], pa.string())
        calls = _ordered(calls, names)
        return cls(
            rollouts=tuple(rollouts),
            calls=calls,
            answers=None if answers is None else _ordered(answers, names),
            media=None if media is None else Occurrences.of(media, calls["call_id"].combine_chunks()),
        )

    def ints(self, name: str) -> Ints:
        """[N] a column of integers."""
        found: Ints = self.calls[name].to_numpy()
        return found

    def column(self, name: str) -> pa.Array:
        """[N] a column as one Arrow array."""
        column = self.calls[name]
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    @cached_property
    def rollout(self) -> npt.NDArray[np.int32]:
        """[N] the place of each call's rollout among `rollouts`."""
        names = pa.array([rollout.rollout_id for rollout in self.rollouts], pa.string())
        found: npt.NDArray[np.int32] = pc.index_in(self.calls["rollout_id"], names).to_numpy()
        return found

    @cached_property
    def first(self) -> Ints:
        """[rollouts + 1] the place of each rollout's first call, and N."""
        return np.searchsorted(self.rollout, np.arange(len(self.rollouts) + 1))

    @cached_property
    def number(self) -> Ints:
        """[N] 1 for the first completed call of its rollout, 2 for the next, ..."""
        return np.arange(len(self.rollout)) - self.first[self.rollout] + 1

    @cached_property
    def chain_len(self) -> Ints:
        """[N] tokens from the root's first to the call's last; a child's `prev_len`."""
        return self.ints("prompt_len") + self.ints("sampled_len")

    @cached_property
    def delta_len(self) -> Ints:
        """[N] tokens that the call adds to its parent's chain."""
        return self.chain_len - self.ints("prev_len")

    @cached_property
    def spans(self) -> Spans:
        """The policy spans of all calls, in their order."""
        text = self.column("policy_spans")
        each = text.dictionary_encode()  # few texts are said again and again
        single = pc.extract_regex(each.dictionary, _ONE_SPAN)
        single = single.take(each.indices)
        end, version = (pc.struct_field(single, name).cast(pa.int64()) for name in ("end", "version"))
        several = np.flatnonzero(flags(pc.is_null(single)))
        at = np.delete(np.arange(len(text)), several)
        parts = [np.stack([at, np.zeros_like(at), end.drop_null().to_numpy(), version.drop_null().to_numpy()])]
        for call in several.tolist():
            listed = _SPANS.validate_json(text[call].as_py())
            lines = [(call, span.start, span.end, span.policy_version) for span in listed]
            parts.append(np.array(lines, np.int64).reshape(-1, 4).T)
        found = np.concatenate(parts, axis=1)
        found = found[:, np.lexsort((found[1], found[0]))] if len(several) else found
        return Spans(at=found[0], start=found[1], end=found[2], version=found[3])

    def roles(self) -> pa.Array:
        """[N] what the harness says each call is for (`hints["role"]`), such as `title`; null when it does not say."""
        hints = self.column("hints").dictionary_encode()
        told = [_HINTS.validate_json(text).get("role") for text in hints.dictionary.to_pylist()]
        roles = pa.array([role if isinstance(role, str) else None for role in told], pa.string())
        return roles.take(hints.indices)

    def call_id(self, call: int) -> UUID:
        """The id of one call."""
        return UUID(bytes=self.column("call_id")[call].as_py())


def _ordered(lines: pa.Table, rollout_ids: pa.Array) -> pa.Table:
    """The lines of these rollouts, by rollout, then by sequence."""
    place = pc.index_in(lines["rollout_id"], rollout_ids)
    ours = pc.is_valid(place)
    if not pc.all(ours, min_count=0).as_py():
        lines, place = lines.filter(ours), place.filter(ours)
    return lines.take(np.lexsort((lines["sequence"].to_numpy(), place.to_numpy()))).combine_chunks()
