"""Images through the real server: what the engine saw is what the log keeps, what is sent again is stored once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rich.console import Console

from replay.rowset import build
from store import tensors
from store.database import read
from store.events import MediaShown
from store.lineage import chain_tokens
from tests.pictured.pictures import data_uri, frames, patches, pixels, png
from tests.pictured.server import VisionServer, answered, chat, ids, image_part, ten_turns, user
from tests.scripted import player
from tests.scripted.player import CHAT, MESSAGES, RESPONSES, Fields
from turnlog.show import load, tree

RECORDINGS = Path(__file__).parents[2] / "../shared/recordings"


def tokens_of(server: VisionServer, call_id: Any) -> np.ndarray:
    with read(server.database) as connection:
        return chain_tokens(connection, call_id)


def tensors_of(server: VisionServer, shown: MediaShown) -> dict[str, tensors.Tensor]:
    return tensors.unpack(server.media.get(shown.sha256))


def test_ten_turns_with_an_image_each_are_one_chain_whose_images_are_the_engines(vision: VisionServer) -> None:
    """Exactness: prefix, placeholders, pixels. The log-probabilities are in test_rows.py."""
    pictures = ten_turns(vision)
    calls = vision.calls("ten")
    assert [call.decision for call in calls] == ["root"] + ["continuation"] * 9
    assert {call.evidence["path"] for call in calls[1:]} == {"marker"}
    assert [len(vision.new(call)) for call in calls] == [1] * 10
    assert [call.media_count for call in calls] == [*range(1, 11)]
    image_pad = ids(vision)[0]
    shown = vision.shown(calls[-1])
    chain = tokens_of(vision, calls[-1].call_id)
    for place, each in enumerate(shown):
        call = calls[place]
        assert call.prev_len <= each.start < each.start + each.length <= call.prompt_len
        assert (chain[each.start : each.start + each.length] == image_pad).all()
        height, width = pictures[place].shape[:2]
        grid = [1, height // vision.patch, width // vision.patch]
        assert each.geometry == {"image_grid_thw": grid, "height": height, "width": width}
        assert each.tokens == each.length == grid[1] * grid[2] // 4
        kept = tensors_of(vision, each)
        assert np.frombuffer(kept["image_grid_thw"].data, np.int64).tolist() == grid
        expected = patches(pictures[place], patch=vision.patch)
        if vision.name == "qwen2_5_vl":
            assert kept["pixel_values"].dtype == "U8"
            assert kept["pixel_values"].data == expected.tobytes()
        else:
            assert kept["pixel_values"].dtype == "F32"
            found = np.frombuffer(kept["pixel_values"].data, np.float32).reshape(kept["pixel_values"].shape)
            assert np.abs(found - (expected / 255 - 0.5) / 0.5).max() < 1e-6
    assert int((chain == image_pad).sum()) == sum(each.tokens for each in shown)


def test_the_designs_example_stores_each_image_where_it_is_new_and_gives_three_rows(vision: VisionServer) -> None:
    pictures = [image_part(data_uri(png(pixels(100 + turn)))) for turn in range(1, 6)]
    before = {each.address for each in vision.media.objects()}
    for rollout in ("example", "example-again"):
        five_turns(vision, rollout, pictures)
        calls = vision.calls(rollout)
        assert [call.decision for call in calls] == ["root", "continuation", "root", "continuation", "root"]
        assert [call.reason for call in calls[2::2]] == ["item_edited", "item_edited"]
        hashes = [each.item_hash for call in calls for each in vision.new(call)]
        assert [len(vision.new(call)) for call in calls] == [1, 1, 1, 1, 1]
        assert len(set(hashes)) == 5
        found = build(vision.database, rollouts=[rollout])
        assert [row.call_numbers for row in found.rows] == [(1, 2), (3, 4), (5,)]
        shown = [each for call in calls for each in vision.new(call)]
        rows = [[handle.sha256 for handle in row.media] for row in found.rows]
        assert rows == [[each.sha256 for each in shown[:2]], [each.sha256 for each in shown[2:4]], [shown[4].sha256]]
        with read(vision.database) as connection:
            drawn = Console(width=300)
            with drawn.capture() as said:
                drawn.print(tree(load(connection, rollout)))
        lines = said.get().splitlines()[1:]
        assert ["row begins" in line for line in lines] == [True, False, True, False, True]
        for line, each in zip(lines, shown, strict=True):
            assert f"image {each.geometry['width']}×{each.geometry['height']} of {each.tokens} tokens" in line
            assert each.sha256.hex()[:8] in line
        for row in found.rows:
            for handle in row.media:
                assert {*row.token_ids[handle.start : handle.start + handle.length].tolist()} == {ids(vision)[0]}
    after = {each.address for each in vision.media.objects()}
    assert len(after - before) == 5  # five images in two rollouts


def five_turns(server: VisionServer, rollout: str, pictures: list[Fields]) -> None:
    """A rewrite after every two actions, which keeps the newest image alone."""
    messages: list[Fields] = []
    for turn, picture in enumerate(pictures, 1):
        if turn in (3, 5):
            messages = [
                {**each, "content": each["content"][-1:]} if isinstance(each["content"], list) else each
                for each in messages
            ]
        messages.append(user(f"Observation {turn}", picture))
        messages.append(answered(chat(server, rollout, messages, seed=turn)))


def asked_in(dialect: str, picture: str, text: str) -> tuple[str, Fields]:
    """A first request with an image and its path."""
    if dialect == "chat":
        return CHAT, {"messages": [user(text, image_part(picture))]}
    if dialect == "responses":
        parts = [{"type": "input_image", "image_url": picture}, {"type": "input_text", "text": text}]
        return RESPONSES, {"input": [{"type": "message", "role": "user", "content": parts}]}
    source = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    return MESSAGES, {"messages": [{"role": "user", "content": content}]}


def went_on(dialect: str, body: Fields, answer: Fields, picture: str, text: str) -> Fields:
    """The next request: the answer, and another image."""
    _, more = asked_in(dialect, picture, text)
    if dialect == "chat":
        return {"messages": [*body["messages"], answer["choices"][0]["message"], *more["messages"]]}
    if dialect == "responses":
        return {"input": [*body["input"], *answer["output"], *more["input"]]}
    said = {"role": "assistant", "content": answer["content"]}
    return {"messages": [*body["messages"], said, *more["messages"]]}


def script(server: VisionServer, rollout: str, *answers: Fields) -> None:
    queued = httpx.post(f"{server.address}/scripted/{rollout}", json={"answers": answers}, timeout=60)
    assert queued.status_code == 200, queued.text


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_an_image_is_captured_and_continued_in_every_dialect(qwen2_5_vl: VisionServer, dialect: str) -> None:
    rollout = f"in-{dialect}"
    script(qwen2_5_vl, rollout, {"text": "A red one."}, {"text": "A blue one."})
    pictures = [pixels(seed, height=56, width=84) for seed in (201, 202)]
    one, two = (data_uri(png(picture)) for picture in pictures)
    path, body = asked_in(dialect, one, "Look.")
    url = f"{qwen2_5_vl.address}/rollouts/{rollout}{path}"
    asked = {"model": "demo", "max_tokens": 64} if dialect != "responses" else {"model": "demo", "store": False}
    first = httpx.post(url, json={**asked, **body}, timeout=60)
    assert first.status_code == 200, first.text
    second = httpx.post(url, json={**asked, **went_on(dialect, body, first.json(), two, "And this?")}, timeout=60)
    assert second.status_code == 200, second.text
    calls = qwen2_5_vl.calls(rollout)
    assert [call.decision for call in calls] == ["root", "continuation"]
    assert [len(qwen2_5_vl.new(call)) for call in calls] == [1, 1]
    kept = [tensors_of(qwen2_5_vl, each)["pixel_values"].data for each in qwen2_5_vl.shown(calls[1])]
    assert kept == [patches(picture, patch=14).tobytes() for picture in pictures]
    (row,) = build(qwen2_5_vl.database, rollouts=[rollout]).rows
    assert len(row.media) == 2


def test_an_image_in_a_tool_result_is_captured(qwen2_5_vl: VisionServer) -> None:
    script(qwen2_5_vl, "tool", {"tool_calls": [{"name": "look", "arguments": {"at": "x"}}]}, {"text": "A cat."})
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages: list[Fields] = [{"role": "user", "content": "Look at x"}]
    messages.append(answered(chat(qwen2_5_vl, "tool", messages, tools=[tool], max_tokens=64, min_tokens=0)))
    call_id = messages[-1]["tool_calls"][0]["id"]
    result = [{"type": "text", "text": "here"}, image_part(data_uri(png(pixels(210))))]
    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    answered(chat(qwen2_5_vl, "tool", messages, tools=[tool], max_tokens=64, min_tokens=0))
    calls = qwen2_5_vl.calls("tool")
    assert [call.decision for call in calls] == ["root", "continuation"]
    assert [len(qwen2_5_vl.new(call)) for call in calls] == [0, 1]


def test_video_frames_are_captured_and_continued(vision: VisionServer) -> None:
    film = {"type": "video_url", "video_url": {"url": frames([pixels(300 + at) for at in range(4)])}}
    messages: list[Fields] = [user("What happens?", film)]
    messages.append(answered(chat(vision, "video", messages)))
    messages.append(user("And here?", image_part(data_uri(png(pixels(310))))))
    messages.append(answered(chat(vision, "video", messages)))
    another = {"type": "video_url", "video_url": {"url": frames([pixels(320 + at) for at in range(4)])}}
    messages.append(user("And then?", another))
    answered(chat(vision, "video", messages))
    calls = vision.calls("video")
    assert [call.decision for call in calls] == ["root", "continuation", "continuation"]
    assert [call.evidence["path"] for call in calls[1:]] == ["marker", "full"]
    shown = vision.shown(calls[-1])
    assert [each.modality for each in shown] == ["video", "image", "video"]
    chain, video_pad = tokens_of(vision, calls[-1].call_id), ids(vision)[1]
    (row,) = build(vision.database, rollouts=["video"]).rows
    for each in (row.media[0], row.media[2]):
        place = chain[each.start : each.start + each.length]
        assert (place[each.embeds] == video_pad).all()
        assert int(each.embeds.sum()) == each.tokens


def test_one_image_that_many_rollouts_show_at_once_is_stored_once(qwen2_5_vl: VisionServer) -> None:
    """They meet in vLLM's processor cache, which leaves out what another request is only about to send."""
    picture = image_part(data_uri(png(pixels(400, height=256, width=256))))

    async def rollout(client: httpx.AsyncClient, name: str) -> None:
        messages: list[Fields] = [user("Look.", picture)]
        for _ in range(6):
            body = {"model": "demo", "messages": messages, "max_tokens": 2, "min_tokens": 2}
            response = await client.post(f"/rollouts/{name}{CHAT}", json=body)
            messages += [answered(response), user("Again.")]

    async def group() -> None:
        async with httpx.AsyncClient(base_url=qwen2_5_vl.address, timeout=120) as client:
            await asyncio.gather(*(rollout(client, f"at-once-{number}") for number in range(8)))

    before = {each.address for each in qwen2_5_vl.media.objects()}
    asyncio.run(group())
    assert len({each.address for each in qwen2_5_vl.media.objects()} - before) == 1
    for number in range(8):
        calls = qwen2_5_vl.calls(f"at-once-{number}")
        assert [call.decision for call in calls] == ["root"] + ["continuation"] * 5
        assert [len(qwen2_5_vl.new(call)) for call in calls] == [1, 0, 0, 0, 0, 0]


def test_an_image_that_was_encoded_anew_is_a_root_of_its_own_kind(qwen2_5_vl: VisionServer) -> None:
    picture = pixels(500)
    messages = [user("Look.", image_part(data_uri(png(picture))))]
    messages.append(answered(chat(qwen2_5_vl, "anew", messages)))
    again = [user("Look.", image_part(data_uri(png(picture, level=0)))), *messages[1:], user("And?")]
    answered(chat(qwen2_5_vl, "anew", again))
    _, call = qwen2_5_vl.calls("anew")
    assert (call.decision, call.reason, call.evidence["kind"]) == ("root", "item_edited", "image")
    assert call.evidence["first_difference"] == 0


class Shelf(BaseHTTPRequestHandler):
    """Serves one picture at every path, which tests exchange."""

    picture = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "image/png")
        self.end_headers()
        self.wfile.write(type(self).picture)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def shelf() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/picture.png"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("change", ["pixels", "geometry"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_kept_image_that_is_another_now_is_refused_and_leaves_nothing(
    qwen2_5_vl: VisionServer, shelf: str, dialect: str, change: str
) -> None:
    rollout = f"changed-{dialect}-{change}"
    script(qwen2_5_vl, rollout, {"text": "One."}, {"text": "Two."})
    Shelf.picture = png(pixels(600))
    path, body = asked_in(dialect, shelf, "Look.")
    if dialect == "messages":
        body["messages"][0]["content"][0]["source"] = {"type": "url", "url": shelf}
    url = f"{qwen2_5_vl.address}/rollouts/{rollout}{path}"
    asked = {"model": "demo", "max_tokens": 64} if dialect != "responses" else {"model": "demo", "store": False}
    first = httpx.post(url, json={**asked, **body}, timeout=60)
    assert first.status_code == 200, first.text
    more = {**asked, **went_on(dialect, body, first.json(), data_uri(png(pixels(601))), "And?")}
    objects = {each.address for each in qwen2_5_vl.media.objects()}
    Shelf.picture = png(pixels(602)) if change == "pixels" else png(pixels(600, height=96, width=64 + 64))
    refused = httpx.post(url, json=more, timeout=60)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("retained_media_changed: image 1 of this conversation ")
    assert "send what was sent before" in error["message"]
    if dialect != "messages":
        assert error["code"] == "retained_media_changed"
        assert error["param"] == ("input" if dialect == "responses" else "messages")
    else:
        assert refused.json()["type"] == "error"
    assert {each.address for each in qwen2_5_vl.media.objects()} == objects
    assert len(qwen2_5_vl.calls(rollout)) == 1
    (end,) = qwen2_5_vl.ends_soon(rollout)
    assert (end.state, end.token_ids) == ("refused", b"")
    Shelf.picture = png(pixels(600))
    again = httpx.post(url, json=more, timeout=60)
    assert again.status_code == 200, again.text
    assert [call.decision for call in qwen2_5_vl.calls(rollout)] == ["root", "continuation"]


def test_media_that_cannot_be_stored_stop_the_call_before_a_token(qwen2_5_vl: VisionServer) -> None:
    folder = Path(qwen2_5_vl.media.url)
    aside = folder.rename(folder.with_suffix(".aside"))
    folder.write_text("no folder")
    try:
        refused = chat(qwen2_5_vl, "unwritable", [user("Look.", image_part(data_uri(png(pixels(800)))))])
    finally:
        folder.unlink()
        aside.rename(folder)
    assert refused.status_code == 503, refused.text
    assert refused.headers["retry-after"] == "5"
    assert "cannot be written" in refused.json()["error"]["message"]
    assert qwen2_5_vl.calls("unwritable") == qwen2_5_vl.ends("unwritable") == []
    answered(chat(qwen2_5_vl, "unwritable", [user("Look.", image_part(data_uri(png(pixels(800)))))]))
    assert len(qwen2_5_vl.calls("unwritable")) == 1


@pytest.mark.parametrize(
    "name", ["nemo-gym-simple-chunked", "nemo-gym-simple-rolling", "ldp-hide-env-states-images", "claude-code"]
)
def test_recordings_with_images_are_decided_as_they_should_be_and_give_rows(
    qwen2_5_vl: VisionServer, name: str
) -> None:
    """As they were recorded, with their images; the verdicts are those of the harness."""
    folder = RECORDINGS / name
    played = asyncio.run(player.play(player.read(folder), qwen2_5_vl.address, name, pictured=True))
    assert {each.status for each in played} == {200}
    calls = {call.response_id: call for call in qwen2_5_vl.calls(name)}
    by_seq = {each.call.seq: calls[each.said.response_id] for each in played if each.said is not None}
    for entry in json.loads((folder / "expected.json").read_text())["calls"]:
        call = by_seq[entry["seq"]]
        assert call.decision == entry["kind"]
        assert call.parent_id == (None if entry["parent"] is None else by_seq[entry["parent"]].call_id)
    pictured = [call for call in calls.values() if call.media_count]
    assert pictured
    for call in pictured:
        assert len(qwen2_5_vl.shown(call)) == call.media_count
    found = build(qwen2_5_vl.database, rollouts=[name])
    assert not found.refusals.rollouts
    assert any(row.media for row in found.rows)
