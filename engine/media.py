"""Pure: the media of a prompt as the processor made them and as the log has them in, events and refusals out.

Knows what an occurrence is, where its placeholder goes in a spliced prompt, and what of a kept one must not change;
does not know vLLM, tensors or the media store. Law: a kept image is the one that was stored: the same object by its
address, under a placeholder of the same length and geometry; anything else is refused before a token is generated.

Placeholders of a spliced prompt: what the parent's chain shows keeps its place, and what is new stands where the suffix
shows the same tokens. Two images of three tokens, the second one new:

>>> placed([7, 9, 9, 9, 8], [[9, 9, 9]]), placed([7, 9, 9], [[9, 9, 9]])
([1], None)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from uuid import UUID

from pydantic import JsonValue

from engine.errors import RetainedMediaChanged
from engine.items import Media, MediaKind
from store import hashing, tensors
from store.events import Event, MediaShown, MediaStored

Modality = Literal["image", "video", "audio"]
_KINDS: Mapping[str, MediaKind] = {
    "image_url": "image", "input_image": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What the processor made of an image, a video or a sound."""

    stored: MediaStored
    geometry: Mapping[str, JsonValue]

    @classmethod
    def of(cls, found: Mapping[str, tensors.Tensor], data: bytes, geometry: Mapping[str, JsonValue]) -> Made:
        """From its tensors and the bytes of their file."""
        stored = MediaStored(
            sha256=hashlib.sha256(data).digest(),
            media_type=tensors.MEDIA_TYPE,
            size=len(data),
            tensors=tensors.described(found),
        )
        return cls(stored=stored, geometry=geometry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An occurrence in a prompt."""

    modality: Modality
    made: Made
    mm_hash: str
    start: int
    length: int
    tokens: int
    item_hash: bytes = bytes(32)
    """Known of what is new."""

    def moved(self, start: int) -> Shown:
        """The same, elsewhere in a prompt."""
        return replace(self, start=start)

    def event(self, call_id: UUID, rollout_id: str, *, place: int, at: int) -> MediaShown:
        """As the log keeps it."""
        return MediaShown(
            call_id=call_id,
            rollout_id=rollout_id,
            place=place,
            modality=self.modality,
            sha256=self.made.stored.sha256,
            item_hash=self.item_hash,
            mm_hash=self.mm_hash,
            start=self.start,
            length=self.length,
            tokens=self.tokens,
            geometry=dict(self.made.geometry),
            at=at,
        )


def events(shown: Sequence[Shown], call_id: UUID, rollout_id: str, at: int) -> list[Event]:
    """What a call's new media add to the log: each object, then each occurrence."""
    stored: dict[bytes, Event] = {each.made.stored.sha256: each.made.stored for each in shown}
    return [
        *stored.values(),
        *(each.event(call_id, rollout_id, place=place, at=at) for place, each in enumerate(shown)),
    ]


def require_retained(kept: Sequence[MediaShown], now: Sequence[Shown]) -> None:
    """Compare what the chain shows with what the processor made of it now. Raises RetainedMediaChanged."""
    for place, (before, here) in enumerate(zip(kept, now, strict=True)):
        if before.modality != here.modality:
            raise RetainedMediaChanged(place, before.modality, f"is one of kind {here.modality} now")
        if (before.length, before.tokens) != (here.length, here.tokens):
            why = f"takes {here.tokens} tokens now and took {before.tokens}"
            raise RetainedMediaChanged(place, before.modality, why)
        if before.geometry != here.made.geometry:
            raise RetainedMediaChanged(place, before.modality, "has another geometry now")
        if before.sha256 != here.made.stored.sha256:
            raise RetainedMediaChanged(place, before.modality, "has other pixels for the model now")


def placed(token_ids: Sequence[int], placeholders: Sequence[Sequence[int]]) -> list[int] | None:
    """Where each placeholder's tokens begin, one behind the other; None when one is not there."""
    found: list[int] = []
    at = 0
    for placeholder in placeholders:
        size, first = len(placeholder), placeholder[0]
        while at + size <= len(token_ids) and not (
            token_ids[at] == first and [*token_ids[at : at + size]] == [*placeholder]
        ):
            at += 1
        if at + size > len(token_ids):
            return None
        found.append(at)
        at += size
    return found


def media_parts(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """The parts of chat messages that are no text, in their order."""
    contents = (message.get("content") for message in messages)
    return [
        part
        for content in contents
        if not isinstance(content, str) and isinstance(content, Sequence)
        for part in content
        if isinstance(part, Mapping) and part.get("type") in _KINDS
    ]


def modality_of(part: Mapping[str, object]) -> str:
    """What a part is, as the processor calls it."""
    return _KINDS[str(part["type"])]


def item_hash(part: Mapping[str, object]) -> bytes:
    """SHA-256 of what the harness sent, where it sent bytes; else the tagged digest of where it said they are.

    >>> part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    >>> item_hash(part) == hashlib.sha256(bytes(1)).digest()
    True
    """
    kind = _KINDS[str(part["type"])]
    said = part.get(str(part["type"]))
    if isinstance(said, Mapping):
        media = (
            Media.from_base64(kind, str(said["data"])) if "data" in said else Media.from_url(kind, str(said.get("url")))
        )
    else:
        media = Media.from_url(kind, str(said))
    form, _, value = media.address.partition(":")
    return bytes.fromhex(value) if form == "sha256" else hashing.tagged_digest("media", media.address.encode())
