"""The calls that this worker completed, as a look-up in the log would find them.

Knows events and the look-up's answer; does not know the log. Law: it answers only with calls that are on the disk, and
never with one of another rollout or another summary hash: what it has forgotten makes a root, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

from store.events import CallCompleted
from store.lineage import KnownCall

NOT_IN_THE_LOG_YET = 2**62
"""Sequences from here on only say in which order this worker completed calls that the log has no sequence for."""


class Remembered:
    """The latest calls of one worker, at most `kept` of them (about a kilobyte each).

    >>> remembered = Remembered(kept=10)
    >>> remembered.add(CallCompleted.example())
    >>> [call.depth for call in remembered.find("example", [CallCompleted.example().summary_hash])]
    [0]
    >>> remembered.find("other", [CallCompleted.example().summary_hash])
    []
    """

    def __init__(self, kept: int = 20_000) -> None:
        self._kept = kept
        self._order = count(NOT_IN_THE_LOG_YET)
        self._calls: OrderedDict[tuple[str, bytes], list[KnownCall]] = OrderedDict()
        self._size = 0

    def add(self, call: CallCompleted) -> None:
        """Note a call that has become durable."""
        key = (call.rollout_id, call.summary_hash)
        self._calls.setdefault(key, []).append(
            KnownCall(
                call_id=call.call_id,
                rollout_id=call.rollout_id,
                parent_id=call.parent_id,
                root_id=call.root_id,
                depth=call.depth,
                sequence=next(self._order),
                chain_len=call.chain_len,
                hash_version=call.hash_version,
                summary_hash=call.summary_hash,
                chain_hash=call.chain_hash,
                reasoning_digest=call.reasoning_digest,
                response_id=call.response_id,
                answer_item_ids=call.answer_item_ids,
            )
        )
        self._calls.move_to_end(key)
        self._size += 1
        while self._size > self._kept and len(self._calls) > 1:
            _, dropped = self._calls.popitem(last=False)
            self._size -= len(dropped)

    def find(self, rollout_id: str, keys: Iterable[bytes]) -> list[KnownCall]:
        """The calls of the rollout that have one of these summary hashes, in the order they were completed."""
        found = (call for key in dict.fromkeys(keys) for call in self._calls.get((rollout_id, key), ()))
        return sorted(found, key=lambda call: call.sequence)
