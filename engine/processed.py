"""What the model server's processor made of the media in a prompt, kept exactly, and its caches told the truth.

Knows the multimodal fields of vLLM's engine inputs and torch's tensors; does not know calls, decisions or the log. Law:
every item's tensors are read bit for bit when they are first seen, and none is taken to be in the engine that was not
sent there.

vLLM's processor cache leaves out the data of an item that it believes the engine to have. Between a render and the
engine's first output of it that belief may be wrong for every other request, and for ever when the render is refused.
So an item that was left out is believed only if a prompt with its data has reached the engine; any other is processed
once more, beside that cache, and put back in.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from pydantic import JsonValue

from engine.errors import EngineMismatch, LogDown
from engine.media import Made, Modality, Shown, item_hash, modality_of, placed
from store import tensors
from store.errors import MediaUnavailable
from store.events import MediaShown
from store.media import MediaStore

Alone = Callable[[Mapping[str, object]], Awaitable[Any]]
"""Renders a prompt of one media part beside the cache."""

_KEPT = 65_536
"""Items remembered by their hash: 40 MB."""
_SMALL = 16
"""Values up to which an integer tensor is shown as geometry, too."""
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class _Place(NamedTuple):
    """An item of a prompt: the n-th of its modality."""

    modality: str
    number: int


class Processed:
    """One engine's processed media: their addresses by vLLM's hashes, and which the engine has for certain."""

    def __init__(self, media: MediaStore, cache: Any, *, patch: int | None) -> None:
        """For a media store and vLLM's processor cache, None when it has none; `patch` is the side of a patch."""
        self._media = media
        self._cache = cache
        self._patch = patch
        self._made = OrderedDict[str, Made]()
        self._items = OrderedDict[str, ReferenceType[Any]]()
        """Where vLLM hands out its own copy each time: that it is the one that was read."""
        self._sent = OrderedDict[str, None]()

    async def shown(self, prompt: Mapping[str, Any], parts: Sequence[Mapping[str, object]], alone: Alone) -> Read:
        """Every occurrence in a rendered prompt, in its order; the prompt's items are completed where they must be.

        Args:
            prompt: as the renderer returned it; nothing of it has been sent.
            parts: the media parts of the messages that were rendered, in their order.
            alone: renders one part beside the cache.
        """
        if prompt.get("type") != "multimodal":
            return Read(shown=[], data={})
        data: dict[bytes, bytes] = {}
        here_too: dict[str, Made] = {}
        found: list[tuple[int, Shown]] = []
        by_modality: dict[str, list[Mapping[str, object]]] = {}
        for part in parts:
            by_modality.setdefault(modality_of(part), []).append(part)
        for modality, places in prompt["mm_placeholders"].items():
            if len(places) != (sent := len(by_modality.get(modality, ()))):
                raise EngineMismatch(
                    "the processor",
                    f"showing {len(places)} of {modality} where the request has {sent}",
                    remedy="send text alone, what such a model or option makes of media cannot be kept",
                )
        for place in _places(prompt):
            here = prompt["mm_placeholders"][place.modality][place.number]
            mm_hash = prompt["mm_hashes"][place.modality][place.number]
            if mm_hash not in here_too:  # a prompt may show one image twice: the first brings its data
                part = by_modality[place.modality][place.number]
                here_too[mm_hash] = await self._made_of(prompt, place, mm_hash, part, alone, data)
            made = here_too[mm_hash]
            found.append(
                (
                    here.offset,
                    Shown(
                        modality=cast("Modality", place.modality),
                        made=dataclasses.replace(made, geometry={**made.geometry, **_embedded(here)}),
                        mm_hash=mm_hash,
                        start=here.offset,
                        length=here.length,
                        tokens=here.get_num_embeds(),
                    ),
                )
            )
        found.sort(key=lambda each: each[0])
        return Read(shown=[each for _, each in found], data=data)

    async def store(self, read: Read, shown: Sequence[Shown]) -> None:
        """Make the bytes of these occurrences durable. Raises LogDown."""
        wanted = {each.made.stored.sha256 for each in shown}
        new = [data for sha256, data in read.data.items() if sha256 in wanted]
        try:
            for data in new:
                await asyncio.to_thread(self._media.put, data)
        except MediaUnavailable as error:
            raise LogDown(str(error)) from error
        for each in shown:
            geometry = {name: value for name, value in each.made.geometry.items() if name != "embeds"}
            _remember(self._made, each.mm_hash, dataclasses.replace(each.made, geometry=geometry))

    def reached(self, hashes: Sequence[str]) -> None:
        """The engine has answered a prompt with these items, so it has them."""
        for mm_hash in hashes:
            _remember(self._sent, mm_hash, None)

    def refused(self, hashes: Sequence[str]) -> None:
        """A prompt with these items will never reach the engine: the cache must not believe that it did."""
        for mm_hash in hashes:
            self._sent.pop(mm_hash, None)
            if hasattr(self._cache, "invalidate"):
                self._cache.invalidate(mm_hash)

    async def _made_of(
        self,
        prompt: Mapping[str, Any],
        place: _Place,
        mm_hash: str,
        part: Mapping[str, object],
        alone: Alone,
        data: dict[bytes, bytes],
    ) -> Made:
        item = prompt["mm_kwargs"][place.modality][place.number]
        known = self._made.get(mm_hash)
        if not _has_data(item):
            if mm_hash in self._sent and known is not None:
                self._made.move_to_end(mm_hash)
                return known
            other = await alone(part)
            item = other["mm_kwargs"][place.modality][0]
            if not _has_data(item) or other["mm_hashes"][place.modality][0] != mm_hash:
                raise EngineMismatch(
                    "the processor", "not giving an image's tensors twice", remedy="use --mm-processor-cache-gb 0"
                )
            items = [*prompt["mm_kwargs"][place.modality]]
            items[place.number] = item
            prompt["mm_kwargs"][place.modality] = items
        if known is not None and (read := self._items.get(mm_hash)) is not None and read() is item:
            return known
        made, packed = await asyncio.to_thread(self._read, item)
        _remember(self._items, mm_hash, ref(item))
        data[made.stored.sha256] = packed
        return made

    def _read(self, item: Mapping[str, Any]) -> tuple[Made, bytes]:
        found = dict(_tensors(item))
        packed = tensors.pack({name: _kept(tensor) for name, tensor in found.items()})
        kept = tensors.unpack(packed)
        return Made.of(kept, packed, self._geometry(found)), packed

    def _geometry(self, found: Mapping[str, torch.Tensor]) -> dict[str, JsonValue]:
        """Small integer tensors as they are, and what a grid of patches is in pixels."""
        geometry: dict[str, JsonValue] = {}
        for name, tensor in found.items():
            if tensor.numel() <= _SMALL and not tensor.is_floating_point():
                geometry[name] = tensor.flatten().tolist()
            if name.endswith("_grid_thw") and self._patch is not None and tensor.numel() == 3:
                _, height, width = tensor.flatten().tolist()
                geometry |= {"height": height * self._patch, "width": width * self._patch}
        return geometry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What was read of a prompt."""

    shown: list[Shown]
    data: Mapping[bytes, bytes]
    """Files of tensors that are not stored yet for certain, by address."""

    def new(self, parts: Sequence[Mapping[str, object]], start: int = 0) -> list[Shown]:
        """The occurrences from a token on, with the hashes of what the harness sent for each."""
        by_modality: dict[str, Iterator[Mapping[str, object]]] = {}
        for modality in {modality_of(part) for part in parts}:
            by_modality[modality] = iter([part for part in parts if modality_of(part) == modality])
        found: list[Shown] = []
        for each in self.shown:
            part = next(by_modality[each.modality])
            if each.start >= start:
                found.append(dataclasses.replace(each, item_hash=item_hash(part)))
        return found


def hashes_of(prompt: Mapping[str, Any]) -> list[str]:
    """The hashes that vLLM has for all items of a prompt."""
    return [mm_hash for hashes in prompt.get("mm_hashes", {}).values() for mm_hash in hashes]


def starts_of(
    shown: Mapping[str, Any], kept: Sequence[MediaShown], before: int, suffix: Sequence[int]
) -> dict[str, list[int]] | None:
    """Where each item of a prompt of media alone stands in the spliced one, by modality; None when one does not.

    What the chain shows keeps its place, what is new is where the suffix has its tokens.
    """
    starts: dict[str, list[int]] = {}
    for modality, found in shown["mm_placeholders"].items():
        known = [each.start for each in kept if each.modality == modality]
        tokens = [shown["prompt_token_ids"][each.offset : each.offset + each.length] for each in found]
        new = placed(suffix, tokens[len(known) :])
        if new is None or len(known) > len(tokens):
            return None
        starts[modality] = [*known, *(before + at for at in new)]
    return starts


def _places(prompt: Mapping[str, Any]) -> list[_Place]:
    return [
        _Place(modality, number)
        for modality, found in prompt["mm_placeholders"].items()
        for number in range(len(found))
    ]


def _has_data(item: Mapping[str, Any] | None) -> bool:
    """Whether an item brings its tensors: a cache in shared memory leaves an address in their place."""
    return item is not None and "address" not in item


def _embedded(place: Any) -> dict[str, JsonValue]:
    """Where in a placeholder the model sees the media, when that is not everywhere: [begin, end) from its start on."""
    if place.is_embed is None or bool(place.is_embed.all()):
        return {}
    edges = torch.diff(place.is_embed.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1))
    begins, ends = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return {"embeds": [[begin, end] for begin, end in zip(begins, ends, strict=True)]}


def _tensors(item: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """An item's fields by name; one of several tensors gives each a number."""
    for name, field in item.items():
        if isinstance(field.data, torch.Tensor):
            # One value an item becomes a list of one, so that the items of a row go end to end.
            batched = type(field.field).__name__ == "MultiModalBatchedField"
            yield name, field.data.unsqueeze(0) if batched else field.data
        elif isinstance(field.data, list | tuple):
            for number, part in enumerate(field.data):
                yield f"{name}.{number}", torch.as_tensor(part)
        elif field.data is not None:
            yield name, torch.as_tensor(field.data)


def _kept(tensor: torch.Tensor) -> tensors.Tensor:
    """A tensor bit for bit."""
    kind = _TYPES.get(tensor.dtype)
    if kind is None:
        raise EngineMismatch(
            "the processor", f"giving tensors of {tensor.dtype}, which cannot be kept", remedy="serve text alone"
        )
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensors.Tensor(dtype=kind, shape=tuple(tensor.shape), data=raw)


def _remember(kept: OrderedDict[str, Any], key: str, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _KEPT:
        kept.popitem(last=False)
