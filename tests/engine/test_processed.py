"""What is read of vLLM's processed items, and which of them are believed to be in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from engine.errors import EngineMismatch, LogDown
from engine.processed import Processed, Read
from replay.media_tensors import tensor_of
from store import tensors
from store.media import MediaStore, open_media

PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def item_of(pixels: torch.Tensor, grid: list[int]) -> MultiModalKwargsItem:
    flat = MultiModalFlatField(slices=[slice(0, len(pixels))])
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=pixels, field=flat),
            "image_grid_thw": MultiModalFieldElem(data=torch.tensor(grid), field=MultiModalBatchedField()),
        }
    )


def prompt_of(item: MultiModalKwargsItem | None, *, embeds: torch.Tensor | None = None) -> dict[str, Any]:
    place = PlaceholderRange(offset=2, length=6, is_embed=embeds)
    return {
        "type": "multimodal",
        "prompt_token_ids": [1, 2, 9, 9, 9, 9, 9, 9],
        "mm_kwargs": {"image": [item]},
        "mm_hashes": {"image": ["h"]},
        "mm_placeholders": {"image": [place]},
    }


class Cache:
    """Stands in for vLLM's memory of what it has sent."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def invalidate(self, mm_hash: str) -> None:
        self.forgotten.append(mm_hash)


@pytest.fixture
def media() -> MediaStore:
    return open_media("memory://processed", "")


def read(processed: Processed, prompt: Mapping[str, Any], again: MultiModalKwargsItem | None = None) -> Read:
    async def alone(part: Mapping[str, object]) -> Any:
        assert part == PART
        assert again is not None, "nothing had to be processed again"
        return prompt_of(again)

    shown = prompt.get("mm_placeholders", {"image": []})["image"]
    return asyncio.run(processed.shown(prompt, [PART] * len(shown), alone))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_tensors_are_kept_bit_for_bit_whatever_their_type(media: MediaStore, dtype: torch.dtype) -> None:
    pixels = torch.randint(0, 256, (24, 12), dtype=torch.uint8)
    pixels = pixels if dtype == torch.uint8 else (pixels.float() / 255 - 0.4814).to(dtype)
    processed = Processed(media, None, patch=14)
    found = read(processed, prompt_of(item_of(pixels, [1, 4, 6])))
    (shown,) = found.shown
    asyncio.run(processed.store(found, found.shown))
    kept = {name: tensor_of(each) for name, each in tensors.unpack(media.get(shown.made.stored.sha256)).items()}
    assert kept["pixel_values"].dtype == dtype
    assert kept["pixel_values"].view(torch.uint8).equal(pixels.view(torch.uint8))
    assert kept["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert shown.made.geometry == {"image_grid_thw": [1, 4, 6], "height": 56, "width": 84}
    assert (shown.start, shown.length, shown.tokens) == (2, 6, 6)


def test_an_item_that_was_left_out_is_believed_only_once_the_engine_had_it(media: MediaStore) -> None:
    item = item_of(torch.ones(24, 12, dtype=torch.uint8), [1, 4, 6])
    processed = Processed(media, Cache(), patch=14)
    first = read(processed, prompt_of(item))
    asyncio.run(processed.store(first, first.shown))
    left_out = prompt_of(None)
    assert read(processed, left_out, again=item).shown == first.shown  # the first prompt may still be on its way
    assert left_out["mm_kwargs"]["image"] == [item]
    processed.reached(["h"])
    left_out = prompt_of(None)
    assert read(processed, left_out).shown == first.shown
    assert left_out["mm_kwargs"]["image"] == [None]


def test_an_image_that_a_prompt_shows_twice_is_read_once(media: MediaStore) -> None:
    prompt = prompt_of(item_of(torch.ones(24, 12, dtype=torch.uint8), [1, 4, 6]))
    prompt["mm_kwargs"]["image"].append(None)
    prompt["mm_hashes"]["image"].append("h")
    prompt["mm_placeholders"]["image"].append(PlaceholderRange(offset=20, length=6))
    found = read(Processed(media, None, patch=14), prompt)
    assert [each.start for each in found.shown] == [2, 20]
    assert len(found.data) == 1
    assert prompt["mm_kwargs"]["image"][1] is None


def test_an_item_that_vllm_keeps_itself_is_read_once(media: MediaStore) -> None:
    item = item_of(torch.ones(24, 12, dtype=torch.uint8), [1, 4, 6])
    processed = Processed(media, None, patch=14)
    first = read(processed, prompt_of(item))
    asyncio.run(processed.store(first, first.shown))
    again = read(processed, prompt_of(item))
    assert (again.shown, again.data) == (first.shown, {})
    other = read(processed, prompt_of(item_of(torch.zeros(24, 12, dtype=torch.uint8), [1, 4, 6])))
    assert other.shown[0].made.stored.sha256 != first.shown[0].made.stored.sha256  # under the same name


def test_an_item_of_a_refused_prompt_is_forgotten_by_the_cache(media: MediaStore) -> None:
    item, cache = item_of(torch.ones(24, 12, dtype=torch.uint8), [1, 4, 6]), Cache()
    processed = Processed(media, cache, patch=14)
    processed.reached(["h"])
    processed.refused(["h"])
    assert cache.forgotten == ["h"]
    left_out = prompt_of(None)
    assert len(read(processed, left_out, again=item).shown) == 1
    assert left_out["mm_kwargs"]["image"] == [item]


def test_the_tokens_of_a_placeholder_that_are_no_image_are_told(media: MediaStore) -> None:
    item = item_of(torch.ones(8, 12, dtype=torch.uint8), [1, 2, 4])
    embeds = torch.tensor([False, True, True, False, True, False])
    (shown,) = read(Processed(media, None, patch=None), prompt_of(item, embeds=embeds)).shown
    assert shown.tokens == 3
    assert shown.made.geometry["embeds"] == [[1, 3], [4, 5]]


def test_a_media_store_that_cannot_be_written_stops_the_call(tmp_path: Any) -> None:
    media = open_media(str(tmp_path / "media"), "")
    (tmp_path / "media").rmdir()
    (tmp_path / "media").write_text("no folder")
    processed = Processed(media, None, patch=None)
    found = read(processed, prompt_of(item_of(torch.ones(8, 12), [1, 2, 4])))
    with pytest.raises(LogDown, match="cannot be written"):
        asyncio.run(processed.store(found, found.shown))


@pytest.mark.parametrize("modality", ["vision_chunk", "audio"])
def test_media_that_the_request_does_not_show_so_are_refused_by_name(media: MediaStore, modality: str) -> None:
    prompt = prompt_of(item_of(torch.ones(24, 12, dtype=torch.uint8), [1, 4, 6]))
    prompt["mm_placeholders"][modality] = prompt["mm_placeholders"]["image"]
    with pytest.raises(EngineMismatch, match=f"showing 1 of {modality} where the request has 0: send text alone"):
        read(Processed(media, None, patch=14), prompt)


def test_a_prompt_of_text_shows_nothing(media: MediaStore) -> None:
    assert read(Processed(media, None, patch=None), {"type": "token", "prompt_token_ids": [1]}).shown == []
