"""Sealed events as replay reads them: by rollout, as of a position, with the arrays of calls from whole files.

Knows an archive's files and where each call lies in them; does not know the log, nor how both are read as one
(`replay.source`). Law: arrays come from files whose hash is that of their seal, so that what was proven when it was
sealed is what is read; `proven` gives arrays of which that includes the chain hash (decision 0034).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from replay.archive import Archive, SealedFile
from replay.piece import flags
from replay.stretches import Ints, Stretches

_WHERE = pa.schema({"rollout_id": pa.string(), "sequence": pa.int64()})
_ARRAYS = pa.schema({"sequence": pa.int64(), "token_ids": pa.binary(), "logprobs": pa.binary()})

_BLOCKS = 3
"""Files whose arrays are held: that of the rollouts at hand, the one before, in which the first of these may begin, and
the next one, which is read meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """The arrays of a file of calls, in its order."""

    sequence: Ints  # [N]
    token_ids: npt.NDArray[np.uint8]
    token_edges: npt.NDArray[np.int32]  # [N + 1] line n has the bytes from edge n to edge n + 1
    logprobs: npt.NDArray[np.uint8]
    logprob_edges: npt.NDArray[np.int32]  # [N + 1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proven:
    """The arrays of some calls, whose tokens gave their chain hashes when they were sealed."""

    token_ids: Stretches
    logprobs: Stretches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Where:
    """Where every sealed call lies."""

    sequence: Ints
    """[N] of each call, files end to end."""
    first: Ints
    """[files + 1] where each file begins in it."""
    ascending: Ints
    """[N] the calls by ascending sequence, as places in `sequence`."""
    names: pa.StringArray
    """[rollouts]"""
    rollout: Ints
    """[S] calls of one rollout that lie end to end in one file: its place in `names`. All stretches give all calls."""
    file: Ints  # [S]
    start: Ints
    """[S] lines of the file."""
    end: Ints  # [S]


class Sealed:
    """The events of an archive."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._files = archive.files["model_call"]
        self._blocks: OrderedDict[int, Future[Block]] = OrderedDict()
        self._next: dict[int, int] = {}
        self._reading = ThreadPoolExecutor(1)

    @property
    def reached(self) -> Mapping[str, int]:
        """The parts of the newest position at which something was sealed."""
        parts = ("calls", "outcomes", "rollouts", "trained")
        return {part: max(getattr(position, part) for position in self.archive.positions()) for part in parts}

    def table(self, table: str, columns: pa.Schema, until: int, only: Sequence[str] | None = None) -> pa.Table:
        """The sealed events of a small table up to a sequence, of some rollouts or of all."""
        asked = pa.schema([pa.field("sequence", pa.int64()), pa.field("rollout_id", pa.string()), *columns])
        wanted = pa.schema({field.name: field for field in asked}.values())
        files = [file for file in self.archive.files[table] if file.low <= until]
        found = pa.concat_tables([self.archive.lines(file, wanted) for file in files] or [wanted.empty_table()])
        counts = pc.less_equal(found["sequence"], until)
        if only is not None:
            counts = pc.and_(counts, pc.is_in(found["rollout_id"], pa.array(only, pa.string())))
        return found.filter(counts).select(columns.names)

    def extents(self, until: int, only: Sequence[str] | None = None) -> dict[str, tuple[int, int, int]]:
        """Of each rollout that has sealed calls up to a sequence: how many, the highest, its first file."""
        where = self._where
        counts = where.sequence <= until
        rollout = np.repeat(where.rollout, where.end - where.start)[counts]
        calls = np.bincount(rollout, minlength=len(where.names))
        high = np.zeros(len(where.names), np.int64)
        np.maximum.at(high, rollout, where.sequence[counts])
        file = where.file[np.unique(where.rollout, return_index=True)[1]]
        asked = calls > 0
        if only is not None:
            asked &= flags(pc.is_in(where.names, pa.array(only, pa.string())))
        facts = (each[asked].tolist() for each in (calls, high, file))
        return dict(zip(where.names.filter(pa.array(asked)).to_pylist(), zip(*facts, strict=True), strict=True))

    def calls(self, rollouts: Sequence[str], columns: pa.Schema, until: int) -> pa.Table:
        """Columns of the sealed calls of these rollouts up to a sequence."""
        where = self._where
        ours = np.isin(where.rollout, pc.index_in(pa.array(rollouts, pa.string()), where.names).drop_null().to_numpy())
        parts: list[pa.Table] = []
        for file in np.unique(where.file[ours]).tolist():
            lines = self.archive.lines(self._files[file], columns)
            start, end = (each[ours & (where.file == file)].tolist() for each in (where.start, where.end))
            if end[-1] - start[0] == sum(end) - sum(start):
                parts.append(lines.slice(start[0], end[-1] - start[0]))
            else:
                parts += [lines.slice(low, high - low) for low, high in zip(start, end, strict=True)]
        found = pa.concat_tables(parts) if parts else columns.empty_table()
        return found.filter(pc.less_equal(found["sequence"], until))

    def expect(self, files: Iterable[int]) -> None:
        """Say in which files, one after the other, the rollouts lie whose arrays will be asked for, -1 for none: each
        is read while the rows of the one before are made. Asking for others is no fault.
        """
        due = [file for file in dict.fromkeys(files) if file >= 0]
        self._next = dict(pairwise(due))
        if due:
            self._begun(due[0])

    def holds(self, sequences: Ints) -> npt.NDArray[np.bool_]:
        """Which of these calls are sealed."""
        held: npt.NDArray[np.bool_] = self._places(sequences) >= 0
        return held

    def arrays(self, sequences: Ints) -> tuple[list[memoryview], list[memoryview]]:
        """Token ids and log-probabilities of these sealed calls, in their order, as views."""
        places = self._places(sequences)
        token_ids: list[memoryview] = [memoryview(b"")] * len(places)
        logprobs = [*token_ids]
        file_of = np.searchsorted(self._where.first, places, side="right") - 1
        for file in np.unique(file_of).tolist():
            block = self.block(file)
            tokens, scores = memoryview(block.token_ids.data), memoryview(block.logprobs.data)
            mine = np.flatnonzero(file_of == file)
            lines = places[mine] - self._where.first[file]
            edges = [
                each[lines + more].tolist() for each in (block.token_edges, block.logprob_edges) for more in (0, 1)
            ]
            for at, low, high, score_low, score_high in zip(mine.tolist(), *edges, strict=True):
                token_ids[at] = tokens[low:high]
                logprobs[at] = scores[score_low:score_high]
        return token_ids, logprobs

    def proven(self, sequences: Ints) -> Proven | None:
        """The same of calls in any order, each as often as it is named; None unless the seals prove all of them.

        A call that is not sealed, or whose file was sealed without its chain hashes, is not proven.
        """
        places = self._places(sequences)
        if not len(places) or places.min() < 0:
            return None
        file_of = np.searchsorted(self._where.first, places, side="right") - 1
        files = np.unique(file_of)
        if not all(self._files[file].chained for file in files):
            return None
        blocks = [self.block(file) for file in files.tolist()]
        array = np.searchsorted(files, file_of).astype(np.int32)
        lines = places - self._where.first[file_of]
        tokens = _stretches([(block.token_ids, block.token_edges) for block in blocks], "<i4", array, lines)
        scores = _stretches([(block.logprobs, block.logprob_edges) for block in blocks], "<f4", array, lines)
        return None if tokens is None or scores is None else Proven(token_ids=tokens, logprobs=scores)

    def block(self, file: int) -> Block:
        """The arrays of a file, which is proven to be the one that was sealed."""
        found = self._begun(file)
        if (due := self._next.get(file)) is not None:
            self._begun(due)
        return found.result()

    def _begun(self, file: int) -> Future[Block]:
        """A file that is being read, or was; kept until others are asked for."""
        if file not in self._blocks:
            self._blocks[file] = self._reading.submit(self._read, self._files[file])
            while len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(file)
        return self._blocks[file]

    def _read(self, sealed: SealedFile) -> Block:
        lines = self.archive.lines(sealed, _ARRAYS, self.archive.whole(sealed))
        token_ids, token_edges = _end_to_end(lines["token_ids"])
        logprobs, logprob_edges = _end_to_end(lines["logprobs"])
        return Block(
            sequence=lines["sequence"].to_numpy(),
            token_ids=token_ids,
            token_edges=token_edges,
            logprobs=logprobs,
            logprob_edges=logprob_edges,
        )

    @cached_property
    def _where(self) -> _Where:
        sequences: list[Ints] = [np.zeros(0, np.int64)]
        stretches: list[Ints] = [np.zeros((3, 0), np.int64)]
        shown = [pa.array([], pa.string())]
        for place, sealed in enumerate(self._files):
            lines = self.archive.lines(sealed, _WHERE)
            sequences.append(lines["sequence"].to_numpy())
            names = lines["rollout_id"].combine_chunks()
            start = np.flatnonzero(np.append(True, flags(pc.not_equal(names[1:], names[:-1]))))
            stretches.append(np.stack([np.full_like(start, place), start, np.append(start[1:], len(names))]))
            shown.append(names.take(pa.array(start)))
        sequence = np.concatenate(sequences)
        named = pa.concat_arrays(shown).dictionary_encode()
        file, start, end = np.concatenate(stretches, axis=1)
        return _Where(
            sequence=sequence,
            first=np.append(0, np.cumsum([file.lines for file in self._files])).astype(np.int64),
            ascending=np.argsort(sequence, kind="stable"),
            names=named.dictionary,
            rollout=named.indices.to_numpy().astype(np.int64),
            file=file,
            start=start,
            end=end,
        )

    def _places(self, sequences: Ints) -> Ints:
        """Where in all files these calls lie; -1 for one that is not sealed."""
        where = self._where
        if not len(where.sequence):
            return np.full(len(sequences), -1)
        at = np.searchsorted(where.sequence, sequences, sorter=where.ascending)
        place = where.ascending[np.minimum(at, len(where.ascending) - 1)]
        return np.where(where.sequence[place] == sequences, place, -1)


def _stretches(
    blocks: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]],
    kind: str,
    array: npt.NDArray[np.int32],
    lines: Ints,
) -> Stretches | None:
    """Where these lines of some blocks lie, in values; None when one of them holds a part of a value."""
    start, length = np.zeros((2, len(lines)), np.int64)
    for number, (_, edges) in enumerate(blocks):
        mine = np.flatnonzero(array == number)
        start[mine], length[mine] = edges[lines[mine]], edges[lines[mine] + 1] - edges[lines[mine]]
    if ((start | length) % 4).any():
        return None
    arrays = [data[: len(data) // 4 * 4].view(kind) for data, _ in blocks]
    return Stretches(arrays=arrays, array=array, start=start // 4, length=length // 4)


def _end_to_end(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """A binary column as one buffer, and where its values begin and end in it."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    _, edges, data = array.buffers()
    whole = np.frombuffer(data if data is not None else b"", np.uint8)
    return whole, np.frombuffer(edges, np.int32)[array.offset : array.offset + len(array) + 1]
