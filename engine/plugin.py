"""The entry point that vLLM loads, and `install` for whoever builds an engine by hand.

Knows vLLM's plug-in contract (`vllm.endpoint_plugins`) and puts the parts together; holds no rule of its own. Law: a
server that could not keep the contract does not start: wrong engine, wrong flag, missing or unknown schema, or a place
for media that cannot be written each stop it with an error that names the remedy.
"""

from __future__ import annotations

import logging
import os
import socket
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from sqlalchemy import Engine

from engine import metrics
from engine.access import Access, hide_secrets
from engine.dialects.routes import DIALECTS
from engine.errors import EngineMismatch
from engine.gateway import Gateway
from engine.journal import Journal
from engine.rollouts import Service, router
from engine.settings import Settings
from engine.worker import Worker
from store import partitions
from store.database import database_url, open_database, shown_url
from store.media import open_media
from store.migrate import await_current
from store.patience import Patience
from store.spool import Spool, default_folder, left_over

logger = logging.getLogger("turnlog")


class Plugin:
    """vLLM's endpoint plug-in `turnlog`: routes when the application is built, wrappers when its engine is ready."""

    name = "turnlog"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._app: FastAPI | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the rollout API; called by vLLM before the engine exists."""
        self._app = app
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Wrap the engine and the application; called by vLLM before the first request. Raises what stops the start."""
        assert self._app is not None, "vLLM attaches routes before it initialises state"
        settings = Settings.from_environment(os.environ)
        rank = getattr(engine_client.vllm_config.parallel_config, "_api_process_rank", 0)
        worker = settings.worker or f"{socket.gethostname()}:{args.port}"
        keys = args.api_key or [os.environ.get("VLLM_API_KEY")]
        await _settle(state)
        service = await install(
            self._app,
            engine_client,
            settings,
            worker=f"{worker}/{rank}" if rank else worker,
            api_keys=[key for key in keys if key],
        )
        state.turnlog = service


async def install(
    app: FastAPI, engine: Any, settings: Settings, *, worker: str, api_keys: Sequence[str] = ()
) -> Service:
    """Capture what this engine does for this application, into the log that the settings name.

    `worker` is a stable name: the next start under the same name marks as lost what this one leaves unfinished.
    """
    _speak_like_the_server()
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise EngineMismatch("VLLM_USE_RUST_FRONTEND", "set, which bypasses the Python server", remedy="unset it")
    url = database_url(settings.url)
    database = open_database(url, durability=settings.durability)
    await_current(database)
    if (said := partitions.reminder(database, datetime.now(UTC))) is not None:
        logger.warning("%s", said)
    media = open_media(settings.media, url)
    _keep_secrets(settings, api_keys)
    journal = _journal(database, settings, worker)
    lost = journal.start()
    metrics.of_process().durable(lost)
    for end in lost:
        logger.warning("rollout %s: call %s is lost: %s", end.rollout_id, end.call_id, end.reason)
    engine_worker = Worker(engine, journal, media, reasoning=settings.reasoning)
    for shape, path in (await engine_worker.install()).items():
        logger.info("splice of %s: %s", shape, path)
    # Outermost, around the stack that vLLM has built already: its API-key check must see the path that is served.
    stack = app.middleware_stack or app.build_middleware_stack()
    access = Access(
        journal,
        token=None if settings.token is None else settings.token.get_secret_value(),
        api_keys=api_keys,
        require_open=settings.require_open,
    )
    app.middleware_stack = Gateway(stack, journal=journal, access=access)
    logger.info(
        "turnlog writes to %s as worker %s, reasoning %s; %d calls of an earlier run marked lost",
        shown_url(database.url), worker, settings.reasoning, len(lost),
    )  # fmt: skip
    return Service(journal=journal, worker=engine_worker, access=access)


def _journal(database: Engine, settings: Settings, worker: str) -> Journal:
    """The way to the log as the settings want it. What an earlier run of this worker left in a spool is taken over."""
    if settings.durability == "relaxed":
        logger.warning("TURNLOG_DURABILITY is relaxed: what was answered last can be missing after a power cut")
    file = database.url.database if database.dialect.name == "sqlite" else None
    folder = default_folder(file) if settings.spool is None else Path(settings.spool)
    patience = Patience()
    if settings.on_log_failure == "spool":
        spool = Spool(folder, worker, limit=settings.spool_limit)
        patience.attempt(lambda: spool.take_over(database))
        return Journal(database, worker=worker, spool=spool, watcher=metrics.of_process())
    if left_over(folder, worker):
        with closing(Spool(folder, worker)) as spool:
            patience.attempt(lambda: spool.take_over(database))
    return Journal(database, worker=worker, watcher=metrics.of_process())


def _keep_secrets(settings: Settings, api_keys: Sequence[str]) -> None:
    """Refuse what would show a rollout's secret or stand in its way, and hide it where a request is logged first."""
    if settings.require_open and api_keys:
        raise EngineMismatch(
            "--api-key", "set beside --require-open, whose token guards all that it would", remedy="leave it out"
        )
    variable = "VLLM_DEBUG_LOG_API_SERVER_RESPONSE"
    if settings.require_open and os.environ.get(variable, "").lower() == "true":
        raise EngineMismatch(variable, "set, which logs the secrets that rollouts are opened with", remedy="unset it")
    logging.getLogger("uvicorn.asgi").addFilter(hide_secrets)


async def _settle(state: Any) -> None:
    """Have done what the server would otherwise do during its first requests.

    Its Messages API renders a probe of its own when thinking is first switched off, which inside a request would look
    like that request; the clients' event types take a second to import.
    """
    probe = getattr(getattr(state, "anthropic_serving_messages", None), "_get_disabled_thinking_effort", None)
    if probe is not None:
        await probe()
    for dialect in DIALECTS:
        dialect.StreamedResponse()


def _speak_like_the_server() -> None:
    """Send our log lines where vLLM's go, unless the operator has configured them."""
    if not logger.handlers:
        logger.handlers = logging.getLogger("vllm").handlers
        logger.setLevel(logging.INFO)
