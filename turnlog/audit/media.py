"""Media that calls were shown: their objects' events, and the bytes under their addresses.

Knows events of media and the check of the media store; does not know images. Law: each object is looked at once,
however often it was shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from store.events import MediaShown
from store.media import MediaStore
from store.media_check import fault_of
from turnlog.audit.findings import Findings
from turnlog.audit.source import RolloutEvents, Stored


def shown(batch: Sequence[RolloutEvents], seen: set[bytes]) -> dict[bytes, str]:
    """Addresses that these rollouts were shown and none before, each with the first of the rollouts; adds to `seen`."""
    found: dict[bytes, str] = {}
    for rollout in batch:
        for each in rollout.stored:
            if isinstance(each.event, MediaShown) and each.event.sha256 not in seen:
                seen.add(each.event.sha256)
                found[each.event.sha256] = rollout.rollout_id
    return found


def check(
    addresses: Mapping[bytes, str], objects: Mapping[bytes, Stored], media: MediaStore | None, findings: Findings
) -> None:
    """Each object has its event, and its bytes lie in the store, which may be None: then that is counted."""
    for address, rollout_id in addresses.items():
        event = f"media {address.hex()}"
        findings.checked["media"] += 1
        stored = objects.get(address)
        if stored is None:
            findings.differs("media", rollout_id, event, stored="no event of it", derived="one before it was shown")
        elif stored.event is None:
            findings.differs("readable", rollout_id, event, stored=f"sequence {stored.sequence}", derived=stored.fault)
        elif (derived := stored.event.digest()) != stored.digest:
            findings.differs("digest", rollout_id, event, stored=stored.digest, derived=derived)
        if media is None:
            findings.note("media_not_checked", event)
        elif (fault := fault_of(media, address)) is not None:
            findings.differs("media", rollout_id, event, stored=fault[0], derived=fault[1])
