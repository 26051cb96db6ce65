"""Media in prompts, purely: what is new, where it stands, what of it must not change, and how a difference is named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from engine import decide
from engine.decide import Root
from engine.dialects import chat, messages, responses
from engine.errors import RetainedMediaChanged
from engine.items import Item, Media
from engine.media import Made, Shown, events, item_hash, media_parts, placed, require_retained
from store import tensors
from store.events import MediaShown, MediaStored
from store.hashing import tagged_digest

URI = "data:image/png;base64,AA=="


def made(seed: int = 0, grid: tuple[int, int, int] = (1, 4, 6)) -> Made:
    found = {"pixel_values": tensors.Tensor(dtype="U8", shape=(2, 3), data=bytes([seed]) * 6)}
    return Made.of(found, tensors.pack(found), {"image_grid_thw": [*grid]})


def shown(seed: int = 0, **changes: Any) -> Shown:
    found = Shown(modality="image", made=made(seed), mm_hash="h", start=3, length=6, tokens=6)
    return replace(found, **changes)


CALL = UUID(int=5)


def kept(each: Shown) -> MediaShown:
    return each.event(CALL, "r", place=0, at=1)


def test_what_did_not_change_passes_wherever_the_prompt_was_rendered() -> None:
    require_retained([kept(shown(1)), kept(shown(2))], [shown(1, start=900), shown(2)])


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (lambda each: replace(each, made=made(9)), "has other pixels for the model now"),
        (lambda each: replace(each, made=made(1, (1, 6, 4))), "has another geometry now"),
        (lambda each: replace(each, length=7, tokens=7), "takes 7 tokens now and took 6"),
        (lambda each: replace(each, modality="video"), "is one of kind video now"),
    ],
)
def test_each_change_of_a_kept_image_is_refused_by_name(now: Callable[[Shown], Shown], why: str) -> None:
    with pytest.raises(
        RetainedMediaChanged, match=f"retained_media_changed: image 2 of this conversation {why}"
    ) as told:
        require_retained([kept(shown(0)), kept(shown(1))], [shown(0), now(shown(1))])
    assert told.value.status == 400
    for dialect, where in ((chat, "messages"), (responses, "input")):
        error = dialect.error_body(told.value)["error"]
        assert isinstance(error, dict)
        assert (error["code"], error["type"], error["param"]) == (
            "retained_media_changed", "invalid_request_error", where,
        )  # fmt: skip
    error = messages.error_body(told.value)["error"]
    assert isinstance(error, dict)
    assert error["type"] == "invalid_request_error"


def test_a_calls_events_store_an_object_once_and_count_its_occurrences() -> None:
    found = events([shown(1), shown(2, start=12), shown(1, start=20)], CALL, "r", 7)
    objects = [each for each in found if isinstance(each, MediaStored)]
    occurrences = [each for each in found if isinstance(each, MediaShown)]
    assert len(objects) == 2
    assert [(each.place, each.start) for each in occurrences] == [(0, 3), (1, 12), (2, 20)]
    assert occurrences[0].sha256 == occurrences[2].sha256


def test_placeholders_are_found_in_order_and_whole() -> None:
    one, other = [5, 9, 9, 6], [5, 9, 6]
    assert placed([1, *other, 2, *one, *one], [other, one, one]) == [1, 5, 9]
    assert placed([5, 9, *other], [other]) == [2]  # a piece of one, then one
    assert placed([1, *one], [one, one]) is None
    assert placed([], []) == []


def test_parts_are_those_that_a_processor_reads_and_are_known_by_their_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": URI}}
    sound = {"type": "input_audio", "input_audio": {"data": "AA=="}}
    said = [{"role": "user", "content": [{"type": "text", "text": "x"}, image]}, {"role": "tool", "content": "y"}]
    assert media_parts([*said, {"role": "user", "content": [sound]}]) == [image, sound]
    assert item_hash(image) == item_hash(sound) == hashlib.sha256(b"\0").digest()
    assert item_hash({"type": "input_image", "image_url": URI, "input_image": URI}) == item_hash(image)
    url = {"type": "image_url", "image_url": {"url": "http://h/x.png?key=1"}}
    assert item_hash(url) == tagged_digest("media", b"url:http://h/x.png?key=1")


def test_an_image_that_alone_differs_is_named_and_nothing_else_is() -> None:
    old, new, third = (Media(kind="image", address=f"sha256:{bytes([n]).hex() * 32}") for n in (1, 2, 3))
    there = Item.message("user", ["Look:", old])
    known = [replace(shown(n), item_hash=bytes([n]) * 32) for n in (3, 1)]

    def named(here: Item, before: Item = there) -> object:
        root = Root(reason="item_edited", evidence={"first_difference": 0, "digest_there": before.digest.hex()})
        return decide.with_kind(root, [here], [kept(each) for each in known]).evidence.get("kind")

    assert named(Item.message("user", ["Look:", new])) == "image"
    assert named(Item.message("user", ["See:", new])) is None
    assert named(Item.message("assistant", ["Look:", new])) is None
    assert named(Item.message("user", ["Look:"])) is None
    result = Item.tool_result("c1", ["ok", new], is_error=True)
    assert named(result, Item.tool_result("c1", ["ok", third], is_error=True)) == "image"
    assert named(result, Item.tool_result("c1", ["ok", third])) is None
