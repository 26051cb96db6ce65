"""Keeps each request of a rollout beside the answer it got, as evidence when a harness and the log disagree.

Middleware of the model server (`vllm serve --middleware record.Recorder`), inside of turnlog's gateway: a request is
kept as the gateway hands it on. Knows the wire; does not know what goes over it. Law: it changes no byte and holds none
back.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engine.call import CURRENT


class Recorder:
    """Writes a line of JSON for each request that belongs to a rollout, when it has been answered."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._folder = Path(os.environ["HARNESS_RECORD"])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        call = CURRENT.get() if scope["type"] == "http" else None
        if call is None:
            await self._app(scope, receive, send)
            return
        request, answer, status = bytearray(), bytearray(), 0

        async def received() -> Any:
            message = await receive()
            request.extend(message.get("body", b""))
            return message

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            line = {
                "path": scope["path"],
                "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
                "request": json.loads(request or b"null"),
                "status": status,
                "answer": answer.decode(errors="replace"),
            }
            with (self._folder / f"{call.rollout_id}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
