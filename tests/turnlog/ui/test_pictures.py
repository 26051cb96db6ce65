"""Images on the pages: made of the very tensors that the model saw."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from sqlalchemy import Engine

from engine.media import Made, Shown, events
from store.database import write
from store.log import append
from store.media import MediaStore, open_media
from store.tensors import Tensor, pack
from tests.pictured.pictures import patches, pixels
from tests.turnlog.ui.conftest import Visit, told
from turnlog.ui.pictures import picture

PATCH = 14


def tensors(values: npt.NDArray[Any], dtype: str, grid: tuple[int, int, int]) -> dict[str, Tensor]:
    return {
        "pixel_values": Tensor(dtype=dtype, shape=values.shape, data=values.tobytes()),
        "image_grid_thw": Tensor(dtype="I64", shape=(1, 3), data=np.array(grid, "<i8").tobytes()),
    }


def of(seed: int) -> tuple[npt.NDArray[np.uint8], dict[str, Tensor]]:
    """A picture of 4 x 6 patches, and what the processor makes of it."""
    seen = pixels(seed, height=4 * PATCH, width=6 * PATCH)
    return seen, tensors(patches(seen, patch=PATCH), "U8", (1, 4, 6))


def read(png: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(png)))


def test_the_bytes_that_the_model_saw_are_the_picture() -> None:
    seen, made = of(1)
    png = picture(made, tokens=6, height=4 * PATCH)
    assert png is not None
    assert np.array_equal(read(png), seen)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_normalised_pixels_are_stretched(dtype: str) -> None:
    seen = pixels(2, height=4 * PATCH, width=6 * PATCH)
    floats = (patches(seen, patch=PATCH).astype("<f4") - 100) / 50
    if dtype == "BF16":
        made = tensors((floats.view("<u4") >> 16).astype("<u2"), dtype, (1, 4, 6))
    else:
        made = tensors(floats, dtype, (1, 4, 6))
    png = picture(made, tokens=6, height=4 * PATCH)
    assert png is not None
    low, high = int(seen.min()), int(seen.max())
    expected = (seen.astype(float) - low) * 255 / (high - low)
    assert np.abs(read(png) - expected).max() <= (1 if dtype == "F32" else 4)


@pytest.mark.parametrize(("tokens", "height"), [(5, 4 * PATCH), (6, 4 * PATCH + 1), (0, 4 * PATCH), (6, 0)])
def test_what_does_not_fit_is_no_picture(tokens: int, height: int) -> None:
    assert picture(of(1)[1], tokens=tokens, height=height) is None


@pytest.fixture
def media(database: Engine, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> MediaStore:
    monkeypatch.setenv("TURNLOG_MEDIA", str(tmp_path / "media"))
    return open_media(None, "")


def shown(media: MediaStore, call: Any, *seeds: int) -> list[Any]:
    found: list[Shown] = []
    for number, seed in enumerate(seeds):
        data = pack(of(seed)[1])
        media.put(data)
        made = Made.of(of(seed)[1], data, {"image_grid_thw": [1, 4, 6], "height": 4 * PATCH, "width": 6 * PATCH})
        start = call.prev_len + number * 6
        found.append(Shown(modality="image", made=made, mm_hash=f"h{seed}", start=start, length=6, tokens=6))
    return events(found, call.call_id, call.rollout_id, call.completed_at)


def test_a_call_shows_its_images_and_a_row_those_before_it(
    database: Engine, media: MediaStore, chain_maker: Any, visit: Visit
) -> None:
    first, second = chain_maker([(20, 4), (12, 4)])
    root = told(chain_maker([(30, 4)])[0], "item_edited", second)
    with write(database) as connection:
        append(connection, [first, second, root])
        append(connection, shown(media, first, 1) + shown(media, second, 2) + shown(media, root, 2))
    one, two = ("/pictures/" + media.put(pack(of(seed)[1])).hex() + ".png" for seed in (1, 2))
    client = visit(database)
    answer = client.get(one)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
    assert np.array_equal(read(answer.content), of(1)[0])
    assert one in client.get(f"/calls/{first.call_id}").text
    page = client.get(f"/calls/{root.call_id}").text
    before, now = page.split("<h3>Images</h3>")[1].split("<h4>Now</h4>")
    assert one in before
    assert two in before
    assert one not in now
    assert two in now


def test_a_picture_that_cannot_be_shown_says_why(
    database: Engine, media: MediaStore, chain_maker: Any, visit: Visit, tmp_path: Any
) -> None:
    (call,) = chain_maker([(20, 4)])
    with write(database) as connection:
        append(connection, [call, *shown(media, call, 1)])
    address = media.put(pack(of(1)[1])).hex()
    client = visit(database)
    assert client.get("/pictures/" + "0" * 64 + ".png").status_code == 404
    assert client.get("/pictures/..%2Fstyle.css.png").status_code in (404, 422)
    (tmp_path / "media" / address[:2] / address).unlink()
    gone = client.get(f"/pictures/{address}.png")
    assert gone.status_code == 404
    assert "there is no picture of" in gone.text
