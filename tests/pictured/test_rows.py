"""Rows with images: what a trainer's model computes of them is what the engine recorded; what is missing is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from replay.dataset import tensors
from replay.export import write_parquet
from replay.media import MediaSource
from replay.media_tensors import normalised, packed, token_types
from replay.row import Row
from replay.rowset import build
from replay.run import Run, Steps
from store.database import read, write
from store.events import RolloutScored
from store.log import append
from store.media_check import faults
from tests.pictured.model import DEVIATION, MEAN
from tests.pictured.pictures import data_uri, pixels, png
from tests.pictured.server import VisionServer, answered, bias, chat, ends, image_part, ten_turns, user


def forward(server: VisionServer, row: Row) -> np.ndarray:
    """[T] log-probabilities of the row's tokens by the model in float32, as the engine computed them: biased alike."""
    kind = {
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    }[server.name]
    transformers.utils.logging.disable_progress_bar()
    model = kind.from_pretrained(server.model, dtype=torch.float32).eval()
    media = packed([row.media], 1, MediaSource(server.url))
    tokens = torch.from_numpy(row.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(
            input_ids=tokens[None],
            attention_mask=torch.ones_like(tokens)[None],
            mm_token_type_ids=token_types(row.media, row.length)[None],
            pixel_values=normalised(media["pixel_values"].values, MEAN[server.name], DEVIATION[server.name]),
            image_grid_thw=media["image_grid_thw"].values,
        ).logits[0]
    for mark, by in bias(server).items():
        logits[:, int(mark)] += by
    logits[:, ends(server)] = -torch.inf  # as `min_tokens` has it
    scores = torch.log_softmax(logits.float(), -1)
    found = np.zeros(len(tokens), np.float32)
    found[1:] = scores[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    return found


def test_a_forward_of_the_trainers_model_on_a_row_gives_the_engines_log_probabilities(vision: VisionServer) -> None:
    ten_turns(vision)
    (row,) = build(vision.database, rollouts=["ten"]).rows
    assert len(row.media) == 10
    difference = np.abs(forward(vision, row) - row.logprobs)[row.loss_mask]
    print(f"{vision.name}: largest difference {difference.max():.2e} over {len(difference)} tokens")
    assert len(difference) == 120
    assert difference.max() < 2e-5


def test_a_pack_has_the_tensors_of_its_rows_and_nothing_of_rows_of_text(vision: VisionServer) -> None:
    pictures = [image_part(data_uri(png(pixels(700 + at)))) for at in range(3)]
    rollouts = ["pack-one", "pack-text", "pack-two"]
    for rollout, parts in zip(rollouts, (pictures[:1], [], pictures[1:]), strict=True):
        answered(chat(vision, rollout, [user("Look.", *parts)]))
    found = build(vision.database, rollouts=rollouts)
    counts = {row.rollout_id: len(row.media) for row in found.rows}
    assert counts == {"pack-one": 1, "pack-text": 0, "pack-two": 2}
    fields = packed([row.media for row in found.rows], 3, MediaSource(vision.url))
    assert {*fields} == {"pixel_values", "image_grid_thw"}
    grid, values = fields["image_grid_thw"], fields["pixel_values"]
    assert grid.values.shape == (3, 3)
    assert grid.lengths.tolist() == [counts[row.rollout_id] for row in found.rows]
    patches = grid.values.prod(1)
    assert values.lengths.tolist() == [part.sum().item() for part in patches.split(grid.lengths.tolist())]
    assert values.values.dtype == (torch.uint8 if vision.name == "qwen2_5_vl" else torch.float32)
    with write(vision.database) as connection:
        append(connection, [RolloutScored(outcome_id=UUID(int=7), rollout_id="pack-two", reward=1.0, at=1)])
    position = build(vision.database, rollouts=rollouts).position
    run = Run(name="pack", position=position, steps=1, rollouts_per_step=1, token_budget=4096)
    (placed,) = Steps.of(vision.database, run).packs(vision.database, 0)
    media = tensors(placed)["media"]
    assert media["image_grid_thw"].lengths.tolist() == [2]
    drawn = {row.rollout_id: row for row in found.rows}["pack-two"]
    kept = packed([drawn.media], 1, MediaSource(vision.url))
    assert media["pixel_values"].values.equal(kept["pixel_values"].values)


def test_an_export_carries_handles(qwen2_5_vl: VisionServer, tmp_path: Path) -> None:
    answered(chat(qwen2_5_vl, "export", [user("Look.", image_part(data_uri(png(pixels(720)))))]))
    found = build(qwen2_5_vl.database, rollouts=["export"])
    write_parquet(found, tmp_path / "rows.parquet")
    ((handle,),) = pq.read_table(tmp_path / "rows.parquet")["media"].to_pylist()
    (kept,) = found.rows[0].media
    assert handle == kept.as_json()
    assert bytes.fromhex(handle["sha256"]) == kept.sha256
    assert json.loads(handle["geometry"])["image_grid_thw"] == [1, 4, 6]


@contextmanager
def file_of(server: VisionServer, sha256: bytes, content: bytes | None) -> Iterator[None]:
    """The object's file, for a while with other content, or gone."""
    name = sha256.hex()
    path = Path(str(server.database.url.database)).with_suffix(".media") / name[:2] / name
    whole = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("content", "reason", "words", "seed"),
    [
        (None, "media_missing", "is not in", 740),
        (b"blank", "media_damaged", "holds other bytes than were stored", 760),
    ],
)
def test_media_that_are_gone_or_damaged_refuse_their_rollout_alone(
    qwen2_5_vl: VisionServer, content: bytes | None, reason: str, words: str, seed: int
) -> None:
    rollouts = [f"gone-{reason}", f"whole-{reason}"]
    for at, rollout in enumerate(rollouts):
        answered(chat(qwen2_5_vl, rollout, [user("Look.", image_part(data_uri(png(pixels(seed + at)))))]))
    (call,) = qwen2_5_vl.calls(rollouts[0])
    (shown,) = qwen2_5_vl.new(call)
    with file_of(qwen2_5_vl, shown.sha256, content):
        found = build(qwen2_5_vl.database, rollouts=rollouts)
        (refusal,) = found.refusals.rollouts
        assert (refusal.rollout_id, refusal.call_id, refusal.reason) == (rollouts[0], call.call_id, reason)
        assert words in refusal.detail
        assert shown.sha256.hex() in refusal.detail
        assert [row.rollout_id for row in found.rows] == rollouts[1:]
        with read(qwen2_5_vl.database) as connection:
            (fault,) = faults(connection, qwen2_5_vl.media)
        assert (fault.sha256, fault.reason) == (shown.sha256, reason)
        assert [each.call_id for each in fault.shown] == [call.call_id]
    assert len(build(qwen2_5_vl.database, rollouts=rollouts).rows) == 2


def test_orphans_are_listed_and_deleted_only_when_asked(qwen2_5_vl: VisionServer) -> None:
    orphan = qwen2_5_vl.media.put(b"of a call that failed")

    def orphans(*flags: str) -> dict[str, object]:
        command = [sys.executable, "-m", "turnlog", "media", "orphans", "--db", qwen2_5_vl.url, "--json", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    assert orphans() == {"deleted": False, "orphans": []}  # it is younger than a day
    listed = orphans("--older-than", "0")
    (found,) = listed["orphans"]  # type: ignore[misc]
    assert found["sha256"] == orphan.hex()
    assert qwen2_5_vl.media.get(orphan) == b"of a call that failed"
    assert orphans("--older-than", "0", "--delete")["deleted"] is True
    assert orphans("--older-than", "0")["orphans"] == []
