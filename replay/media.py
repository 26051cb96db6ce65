"""The media of calls and rows: where each stands, and whether its bytes are there, whole.

Knows occurrences as the log has them and objects by their addresses; does not know images, models or torch. Law: a
row's media stand at the places of its own tokens, in their order, and it is given only when every object that it shows
was read and gave its address again: nothing stands in for one that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue, TypeAdapter

from store import tensors
from store.errors import MediaUnavailable
from store.media import MediaStore, open_media
from store.media_check import fault_of

MEDIA = pa.schema(
    {
        "sequence": pa.int64(),
        "rollout_id": pa.string(),
        "call_id": pa.binary(16),
        "place": pa.int64(),
        "modality": pa.string(),
        "sha256": pa.binary(),
        "start": pa.int64(),
        "length": pa.int64(),
        "tokens": pa.int64(),
        "geometry": pa.string(),
    }
)
"""Columns of occurrences under their names in the log."""

Ints = npt.NDArray[np.int64]
_GEOMETRY: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaHandle:
    """An image, a video or a sound in a row: its address, and the tokens of the row that stand for it."""

    modality: str
    sha256: bytes
    start: int
    """Its placeholder's first token in the row."""
    length: int
    tokens: int
    """How many of these the model sees as the media."""
    geometry: str
    """Canonical JSON: grid, height and width in pixels, and which tokens of the placeholder, if not all."""

    @property
    def embeds(self) -> npt.NDArray[np.bool_]:
        """[length] which tokens of the placeholder the model sees as the media."""
        found = _GEOMETRY.validate_json(self.geometry).get("embeds")
        here = np.full(self.length, found is None)
        if isinstance(found, list):
            for begin, end in np.array(found, np.int64).reshape(-1, 2).tolist():
                here[begin:end] = True
        return here

    def as_json(self) -> dict[str, JsonValue]:
        """What an export says of it."""
        return {
            "modality": self.modality,
            "sha256": self.sha256.hex(),
            "start": self.start,
            "length": self.length,
            "tokens": self.tokens,
            "geometry": self.geometry,
        }


_HANDLE = tuple(each.name for each in fields(MediaHandle))


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """The media of some calls, a line an occurrence, by the places of their calls."""

    call: Ints  # [M] ascending
    table: pa.Table
    """The columns of `MEDIA`, line by line."""

    @classmethod
    def of(cls, table: pa.Table, call_ids: pa.Array) -> Occurrences:
        """Those of these calls, each once, by call and place."""
        place = pc.index_in(table["call_id"], call_ids)
        known = pc.is_valid(place)
        table, place = table.filter(known), place.filter(known)
        order = np.lexsort((table["place"].to_numpy(), place.to_numpy()))
        call, table = place.to_numpy().astype(np.int64)[order], table.take(order)
        if len(call):
            rank = table["place"].to_numpy()
            first = np.append(True, (call[1:] != call[:-1]) | (rank[1:] != rank[:-1]))
            call, table = call[first], table.filter(pa.array(first))
        return cls(call, table.combine_chunks())

    def count(self, calls: int) -> Ints:
        """[calls] how many are new in each."""
        return np.bincount(self.call, minlength=calls).astype(np.int64)

    def misplaced(self, prev_len: Ints, prompt_len: Ints) -> Ints:
        """The calls of which one does not lie in what they add to the prompt, or is not the next in order."""
        start, length = (self.table[name].to_numpy() for name in ("start", "length"))
        rank, first = self.table["place"].to_numpy(), np.searchsorted(self.call, self.call)
        wrong = (start < prev_len[self.call]) | (start + length > prompt_len[self.call])
        wrong |= rank != np.arange(len(self.call)) - first
        return np.unique(self.call[wrong])

    def handles(self, calls: Sequence[int]) -> tuple[MediaHandle, ...]:
        """Those of a chain's calls in their order."""
        found: list[MediaHandle] = []
        for call in calls:
            low, high = np.searchsorted(self.call, [call, call + 1]).tolist()
            lines = self.table.slice(low, high - low).to_pylist()
            found += (MediaHandle(**{name: line[name] for name in _HANDLE}) for line in lines)
        return tuple(sorted(found, key=lambda each: each.start))


def faults(shown: Occurrences, calls: Ints, source: MediaSource) -> dict[int, tuple[str, str]]:
    """Reason and detail of each of these calls that shows an object which is missing or damaged."""
    found: dict[int, tuple[str, str]] = {}
    lines = np.flatnonzero(np.isin(shown.call, calls))
    for call, sha256 in zip(shown.call[lines].tolist(), shown.table["sha256"].take(lines).to_pylist(), strict=True):
        if (fault := source.fault(sha256)) is not None:
            found.setdefault(call, fault)
    return found


class MediaSource:
    """Where a log's media lie; opened when the first one is asked for, and each object checked once."""

    def __init__(self, database_url: str, url: str | None = None) -> None:
        """At `url`, else where the log's servers put them by default: `store.media.open_media`."""
        self._database_url = database_url
        self._url = url
        self._store: MediaStore | None = None
        self._faults: dict[bytes, tuple[str, str] | None] = {}

    def fault(self, sha256: bytes) -> tuple[str, str] | None:
        """Reason and detail when an object is missing or damaged; raises MediaUnreadable when that cannot be known."""
        if sha256 not in self._faults:
            try:
                self._faults[sha256] = fault_of(self._opened(), sha256)
            except MediaUnavailable as error:  # no place is named: the log's media are nowhere
                self._faults[sha256] = ("media_missing", str(error))
        return self._faults[sha256]

    def tensors(self, sha256: bytes) -> Mapping[str, tensors.Tensor]:
        """An object's tensors. Raises MediaMissing, MediaDamaged, MediaUnreadable, DamagedTensors."""
        return tensors.unpack(self._opened().get(sha256))

    def __getstate__(self) -> dict[str, object]:
        """Without what belongs to this process."""
        return {**self.__dict__, "_store": None}

    def _opened(self) -> MediaStore:
        if self._store is None:
            self._store = open_media(self._url, self._database_url, writable=False)
        return self._store
