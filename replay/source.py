"""The log as replay reads it, as of a position, in pieces of whole rollouts.

Knows which named queries say what, and how to read a part of the log cheaply; does not know drivers, selection rules or
chains. Law: what is read is a function of the position and the events alone. Which database holds them, how it is cut
into pieces and in which order independent rollouts arrived change nothing: rollouts come in the order of their opening
times and ids, the calls of a rollout in the order of its log.

Narrow columns are read through an index, by rollout; arrays as one stretch of the log where all of it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue, TypeAdapter

from replay.chain import Chains
from replay.errors import BadPosition, PositionAhead, UnknownRollout
from replay.media import MEDIA
from replay.piece import ANSWERS, CALLS, Ints, Piece, Rollout
from replay.reader import FirstReader, Payloads, Reader
from replay.sealed import Proven
from store import codec, hashing

_EXTENTS = pa.schema({"rollout_id": pa.string(), "calls": pa.int64(), "high": pa.int64()})
_OPENINGS = pa.schema(
    {
        "rollout_id": pa.string(),
        "group_id": pa.string(),
        "task": pa.string(),
        "harness": pa.string(),
        "opened_at": pa.int64(),
    }
)
_OUTCOMES = pa.schema(
    {
        "sequence": pa.int64(),
        "rollout_id": pa.string(),
        "reward": pa.float64(),
        "accepted": pa.string(),
        "output": pa.string(),
    }
)
_WHOLE = 2**62
_SOLID = 1.25
"""Arrays of a stretch of the log are read whole when it holds at most so many calls for each wanted one."""
_PART_OF_FILES = 2_000
"""Sealed calls of a part, at least: where rollouts of many files lie among each other."""
_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
_NAMES: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How much of the log counts: the highest sequence of each kind of event that rows or their choice depend on.

    >>> str(Position(calls=60, outcomes=5, rollouts=5, trained=0)), Position.parse("60.5.5.0").calls
    ('60.5.5.0', 60)
    """

    calls: int
    outcomes: int
    rollouts: int
    trained: int

    def __str__(self) -> str:
        return f"{self.calls}.{self.outcomes}.{self.rollouts}.{self.trained}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote; raises BadPosition for anything else."""
        parts = text.split(".")
        if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts):
            raise BadPosition(text)
        calls, outcomes, rollouts, trained = map(int, parts)
        return cls(calls=calls, outcomes=outcomes, rollouts=rollouts, trained=trained)


def reached(reader: FirstReader) -> Position:
    """The newest position: all that the reader's snapshot has and nothing can be added to."""
    return Position(**reader.reached)


def require_reached(reader: FirstReader, position: Position) -> None:
    """Refuse a position that the log has not reached."""
    now = reached(reader)
    if any(getattr(position, name) > high for name, high in reader.reached.items()):
        raise PositionAhead(asked=str(position), reached=str(now))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """The rollouts to read, in their order, and where the calls of each lie in the log."""

    rollouts: tuple[Rollout, ...]
    logged: Ints  # [rollouts]
    """How many of each one's completed calls are read from the log; sealed ones are among them when new ones are."""
    sealed: Ints  # [rollouts]
    """How many are read from the archive."""
    file: Ints  # [rollouts]
    """Which file of the archive holds its calls, or the first of them; -1 when none is sealed."""

    @property
    def calls(self) -> Ints:
        """[rollouts] about how many completed calls each has."""
        return np.maximum(self.logged, self.sealed)

    def cut(self, *, calls: int) -> list[Contents]:
        """In parts of about so many calls, each with its rollouts whole; at least one part.

        What is sealed is cut where its files end, since a file is read whole: one that lies in two parts is read twice.
        """
        return [
            Contents(
                rollouts=self.rollouts[start:end],
                logged=self.logged[start:end],
                sealed=self.sealed[start:end],
                file=self.file[start:end],
            )
            for start, end in pairwise(self._edges(calls))
        ]

    def _edges(self, calls: int) -> list[int]:
        begun = np.cumsum(self.calls) - self.calls
        if (self.file < 0).all():
            return [0, *(np.flatnonzero(np.diff(begun // calls)) + 1).tolist(), len(self.rollouts)]
        changes = np.append(np.flatnonzero(np.diff(self.file)) + 1, len(self.file))
        edges = [0]
        while (start := edges[-1]) < len(self.file):
            least = calls if self.file[start] < 0 else min(calls, _PART_OF_FILES)
            end = max(start + 1, int(np.searchsorted(begun, begun[start] + least)))
            edges.append(end if self.file[end - 1] < 0 else int(changes[np.searchsorted(changes, end)]))
        return edges


def contents(reader: Reader, position: Position, only: Sequence[str] | None = None) -> Contents:
    """The rollouts of the log as of the position.

    Args:
        reader: of the log.
        position: what counts.
        only: ids of the rollouts; None for all. Raises UnknownRollout for one that the log does not hold.
    """
    parts = asdict(position)

    def ask(name: str, schema: pa.Schema, part: str, table: str | None = None) -> pa.Table:
        if only is None:
            found = reader.table(name, schema, **{part: parts[part]})
        else:
            listed = hashing.canonical_json([*dict.fromkeys(only)]).decode()
            found = reader.table(f"{name}_of", schema, only=listed, **{part: parts[part]})
        if reader.sealed is None or table is None:
            return found
        return pa.concat_tables([reader.sealed.table(table, schema, parts[part], only), found])

    calls = {each: rest for each, *rest in _lines(ask("extents", _EXTENTS, "calls"))}
    sealed = {} if reader.sealed is None else reader.sealed.extents(position.calls, only)
    openings = {each: rest for each, *rest in _lines(ask("openings", _OPENINGS, "rollouts", "rollout"))}
    scored = ask("outcomes", _OUTCOMES, "outcomes", "rollout_outcome").sort_by("sequence")
    outcomes = {each: rest for _, each, *rest in _lines(scored)}
    known: set[str] = openings.keys() | calls.keys() | sealed.keys()
    for rollout_id in only or ():
        if rollout_id not in known:
            raise UnknownRollout(rollout_id)
    unopened, unscored = (None, None, None, 0), (None, None, None)
    rollouts: list[Rollout] = []
    for each in known:
        group_id, task, harness, opened_at = openings.get(each, unopened)
        reward, accepted, output = outcomes.get(each, unscored)
        rollouts.append(
            Rollout(
                rollout_id=each,
                group_id=group_id,
                task=task,
                harness=harness,
                opened_at=opened_at,
                reward=reward,
                accepted=None if accepted is None else _NAMES.validate_json(accepted),
                output=None if output is None else _JSON.validate_json(output),
            )
        )
    rollouts.sort(key=lambda each: (each.opened_at, each.rollout_id))
    logged, high = np.array([calls.get(each.rollout_id, (0, 0)) for each in rollouts], np.int64).reshape(-1, 2).T
    held = np.array([sealed.get(each.rollout_id, (0, 0, -1)) for each in rollouts], np.int64).reshape(-1, 3)
    return Contents(
        rollouts=tuple(rollouts),
        # A seal has all calls of its rollouts up to the position that it was made at, so what it lacks is newer.
        logged=np.where(high > held[:, 1], logged, 0),
        sealed=held[:, 0],
        file=held[:, 2],
    )


def _lines(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def tokens_a_call(reader: Reader) -> int:
    """About how many tokens a call adds: a mean of the newest ones, at least 1."""
    lengths = reader.table("newest_lengths", pa.schema({"tokens": pa.int64()}))["tokens"]
    return max(1, int(pc.mean(lengths).as_py() or 0))


def piece(reader: Reader, found: Contents, position: Position, *, answers: bool = False) -> Piece:
    """The rollouts with their completed calls; with what these answered, if asked."""
    narrow = _calls(reader, found, position, "calls_of", CALLS)
    told = _calls(reader, found, position, "answers_of", ANSWERS) if answers else None
    return Piece.of(found.rollouts, narrow, told, _media(reader, narrow))


def _media(reader: Reader, calls: pa.Table) -> pa.Table | None:
    """What these calls show beside tokens; None when they show nothing. It is settled when its call is."""
    showing = calls.filter(pc.greater(calls["media_count"], 0))
    if not showing.num_rows:
        return None
    names = pc.unique(showing["rollout_id"]).to_pylist()
    logged = reader.table("media_of", MEDIA, only=hashing.canonical_json(names).decode())
    if reader.sealed is None:
        return logged
    return pa.concat_tables([reader.sealed.table("call_media", MEDIA, _WHOLE, names), logged])


def _calls(reader: Reader, found: Contents, position: Position, name: str, schema: pa.Schema) -> pa.Table:
    """Columns of the calls of some rollouts, each call once."""
    logged, held = (
        [found.rollouts[place].rollout_id for place in np.flatnonzero(count)] for count in (found.logged, found.sealed)
    )
    listed = hashing.canonical_json(logged).decode()
    lines = reader.table(name, schema, only=listed, calls=position.calls) if logged else schema.empty_table()
    if reader.sealed is None:
        return lines
    if lines.num_rows:
        lines = lines.filter(pa.array(~reader.sealed.holds(lines["sequence"].to_numpy())))
    return pa.concat_tables([reader.sealed.calls(held, schema, position.calls), lines])


def proven(reader: Reader, chains: Chains) -> Proven | None:
    """The arrays of the calls of these chains, line by line, where seals prove them all."""
    if reader.sealed is None:
        return None
    return reader.sealed.proven(chains.piece.ints("sequence")[chains.call])


def payloads(reader: Reader, sequences: Ints) -> Iterator[Payloads]:
    """The heavy columns of the completed calls at these ascending sequences, and of others that lie among them."""
    if not len(sequences):
        return
    held = np.zeros(0, np.bool_) if reader.sealed is None else reader.sealed.holds(sequences)
    if reader.sealed is None or not held.any():
        yield from _logged_payloads(reader, sequences)
        return
    columns: tuple[list[Any], ...] = (
        sequences[held].tolist(),
        [codec.RAW] * int(held.sum()),
        *reader.sealed.arrays(sequences[held]),
    )
    if held.all():
        yield Payloads(*columns)
        return
    for batch in _logged_payloads(reader, sequences[~held]):
        places = np.flatnonzero(np.isin(batch.sequence, sequences[~held])).tolist()
        for column, more in zip(columns, batch, strict=True):
            column += [more[place] for place in places]
    order = np.argsort(columns[0]).tolist()
    yield Payloads(*([column[place] for place in order] for column in columns))


def _logged_payloads(reader: Reader, sequences: Ints) -> Iterator[Payloads]:
    if not len(sequences):
        return iter(())
    low, high = int(sequences[0]), int(sequences[-1])
    if high - low < _SOLID * len(sequences):
        return reader.payloads("payloads_between", low=low, high=high)
    return reader.payloads("payloads_at", only=hashing.canonical_json(sequences.tolist()).decode())
