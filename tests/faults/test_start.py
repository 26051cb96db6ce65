"""A server starts while its database is not there: one that recovers is waited for, one that does not come is told."""

from __future__ import annotations

import asyncio
import logging
import time
from threading import Timer
from typing import Any

import pytest
from fastapi import FastAPI

from engine.plugin import install
from engine.settings import Settings
from store.database import open_database
from store.errors import LogUnavailable
from store.migrate import await_current


@pytest.mark.postgres
def test_a_start_waits_for_a_database_that_recovers(
    own_postgres: Any, small_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own_postgres.recover()
    recovery = Timer(1.5, own_postgres.recovered)
    recovery.start()
    began = time.monotonic()
    settings = Settings(url=own_postgres.url, media="memory://start")
    with caplog.at_level(logging.WARNING, "turnlog"):
        service = asyncio.run(install(FastAPI(), small_engine, settings, worker="w"))
    recovery.join()
    try:
        assert 1 < time.monotonic() - began < 10
        (said,) = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
        assert "not accepting connections" in said
        assert "waiting for it, 10 seconds at most" in said
    finally:
        service.journal.close()
        service.journal.database.dispose()


def test_a_database_that_does_not_come_is_told_at_once_and_stops_the_start(caplog: pytest.LogCaptureFixture) -> None:
    database = open_database("postgresql://me:secret@127.0.0.1:1/log")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "turnlog"), pytest.raises(LogUnavailable, match="check TURNLOG_URL"):
        await_current(database, patience=0.5)
    assert 0.5 <= time.monotonic() - began < 5
    (said,) = caplog.messages
    assert said.startswith("postgresql+psycopg://me:***@127.0.0.1:1/log: ")
    assert said.endswith("; waiting for it, 0.5 seconds at most")
