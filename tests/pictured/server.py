"""A real server of a tiny vision model, its log and its media."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Engine
from tokenizers import Tokenizer

from store import log, migrate
from store.database import open_database, read
from store.events import CallCompleted, CallEnded, MediaShown
from store.lineage import chain_media
from store.media import MediaStore, open_media
from tests.pictured.model import PATCH, Name, build_vision_model
from tests.pictured.pictures import Pixels, data_uri, pixels, png
from turnlog.demo.server import RunningServer, start_server

CHAT = "/v1/chat/completions"
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|im_start|>")
Fields = dict[str, Any]
MODELS = ("demo", "stub-model", "claude-sonnet-4-5", "gpt-5.1-codex")


@dataclass(frozen=True, kw_only=True)
class VisionServer:
    name: Name
    model: Path
    database: Engine
    running: RunningServer
    log: Path

    @property
    def address(self) -> str:
        return self.running.address

    @property
    def patch(self) -> int:
        return PATCH[self.name]

    @property
    def url(self) -> str:
        return self.database.url.render_as_string(hide_password=False)

    @property
    def media(self) -> MediaStore:
        return open_media(None, self.url)

    def calls(self, rollout: str) -> list[CallCompleted]:
        with read(self.database) as connection:
            return log.calls(connection, rollout)

    def ends(self, rollout: str) -> list[CallEnded]:
        with read(self.database) as connection:
            return log.ends(connection, rollout)

    def ends_soon(self, rollout: str) -> list[CallEnded]:
        """How calls ended, once the log was told: a refusal does not wait for it."""
        give_up = time.monotonic() + 20
        while not (found := self.ends(rollout)) and time.monotonic() < give_up:
            time.sleep(0.05)
        return found

    def shown(self, call: CallCompleted) -> list[MediaShown]:
        """What stands in the call's prompt, and in those above it."""
        with read(self.database) as connection:
            return chain_media(connection, call.call_id)

    def new(self, call: CallCompleted) -> list[MediaShown]:
        """What the log keeps of this call alone."""
        return [each for each in self.shown(call) if each.call_id == call.call_id]


def made(folder: Path, name: Name) -> Engine:
    """The model and an empty log in the folder."""
    build_vision_model(folder / "model", name)
    database = open_database(f"sqlite:///{folder}/turnlog.db")
    migrate.upgrade(database)
    return database


def started(folder: Path, name: Name, database: Engine) -> VisionServer:
    """Start a server over what was made in the folder."""
    model = folder / "model"
    here = Path(__file__).parent
    found_in = [str(here / "site"), str(here.parent / "scripted"), str(Path(sys.prefix) / "vision")]
    # Qwen2.5-VL gets its pixels as bytes, which is vLLM's default; Qwen3-VL as numbers that its processor scaled.
    scaled = ("--no-mm-device-do-normalize",) if name == "qwen3_vl" else ()
    running = start_server(
        model,
        url=database.url.render_as_string(),
        log=folder / "server.log",
        flags=("--reasoning", "restore", "--served-model-name", *MODELS, "--skip-mm-profiling", *scaled),
        environment={
            "PYTHONPATH": os.pathsep.join([*found_in, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_PLUGINS": "scripted",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        },
    )
    return VisionServer(name=name, model=model, database=database, running=running, log=folder / "server.log")


def ids(server: VisionServer, marks: Sequence[str] = MARKS) -> list[int]:
    tokenizer = Tokenizer.from_file(str(server.model / "tokenizer.json"))
    return [tokenizer.token_to_id(mark) for mark in marks]


def ends(server: VisionServer) -> list[int]:
    """Tokens that end an answer."""
    return ids(server, ("<|im_end|>", "<|endoftext|>"))


def bias(server: VisionServer) -> dict[str, int]:
    """Keeps a random model from sampling the marks that stand for images, which no real one does."""
    return {str(mark): -100 for mark in ids(server)}


def image_part(uri: str) -> Fields:
    return {"type": "image_url", "image_url": {"url": uri}}


def user(text: str, *parts: Fields) -> Fields:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def chat(server: VisionServer, rollout: str, messages: list[Fields], **fields: Any) -> httpx.Response:
    body = {
        "model": "demo",
        "messages": messages,
        "max_tokens": 12,
        "min_tokens": 12,
        "logit_bias": bias(server),
        **fields,
    }
    return httpx.post(f"{server.address}/rollouts/{rollout}{CHAT}", json=body, timeout=120)


def answered(response: httpx.Response) -> Fields:
    """The message as a harness sends it back."""
    assert response.status_code == 200, response.text
    message: Fields = response.json()["choices"][0]["message"]
    kept = {name: message[name] for name in ("role", "content", "reasoning", "tool_calls") if message.get(name)}
    return {"content": "", **kept}


def ten_turns(server: VisionServer) -> list[Pixels]:
    """The pictures of rollout `ten`, one a turn, all of them kept; it is played once."""
    pictures = [pixels(turn, height=server.patch * 4, width=server.patch * (4 + 2 * (turn % 2))) for turn in range(10)]
    if server.calls("ten"):
        return pictures
    messages: list[Fields] = []
    for turn, picture in enumerate(pictures):
        messages.append(user(f"Step {turn}: what is there?", image_part(data_uri(png(picture)))))
        messages.append(answered(chat(server, "ten", messages, seed=turn, temperature=1.0)))
    return pictures
