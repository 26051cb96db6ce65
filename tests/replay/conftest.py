"""Fixtures of the replay tests: recorded calls without a database, forests of calls, and fresh logs by the dozen."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from replay.call import Call, Payload, Rollout
from store import log, migrate
from store.database import open_database, write
from store.events import CallCompleted, Event, logprob_array, token_array

# Programs: they replace parts of torch and want processes of their own.
collect_ignore = ["megatron_checks.py", "parallel_checks.py"]

Recorded = tuple[Rollout, dict[UUID, Payload]]


@pytest.fixture(scope="session")
def remember() -> Callable[[Engine, Iterable[Event]], None]:
    """Append events to a log, in one transaction."""

    def append(database: Engine, events: Iterable[Event]) -> None:
        with write(database) as connection:
            log.append(connection, events)

    return append


@pytest.fixture(scope="session")
def recorded() -> Callable[..., Recorded]:
    """Completed calls as replay would read them, without a database: a rollout and its payloads, to tamper with."""

    def record(calls: Sequence[CallCompleted], **facts: Any) -> Recorded:
        rollout = Rollout(
            **{
                "rollout_id": calls[0].rollout_id,
                "group_id": None,
                "reward": None,
                "accepted": None,
                "calls": tuple(_call(number, call) for number, call in enumerate(calls, 1)),
                **facts,
            }
        )
        payloads = {
            call.call_id: Payload(token_ids=token_array(call.token_ids), logprobs=logprob_array(call.logprobs))
            for call in calls
        }
        return rollout, payloads

    return record


@pytest.fixture(scope="session")
def grow() -> Callable[..., list[CallCompleted]]:
    """A forest of one rollout: `grow(maker, [None, 0, 0])` is a root and two calls that continue it."""

    def forest(
        maker: Any, parents: Sequence[int | None], *, lengths: Sequence[tuple[int, int]] = (), rollout_id: str = "r1"
    ) -> list[CallCompleted]:
        calls: list[CallCompleted] = []
        for index, parent in enumerate(parents):
            interstitial, sampled = lengths[index] if lengths else (5 + index, 3 + index)
            above = None if parent is None else calls[parent]
            calls.append(maker.call(interstitial, sampled, rollout_id=rollout_id, parent=above))
        return calls

    return forest


@pytest.fixture(scope="session")
def fresh_log(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """`with fresh_log() as database`: an empty SQLite log, for property tests that need many."""
    folder = tmp_path_factory.mktemp("fresh")
    template = folder / "template.db"
    database = open_database(f"sqlite:///{template}")
    migrate.upgrade(database)
    database.dispose()
    made = iter(range(1_000_000))

    @contextmanager
    def fresh() -> Iterator[Engine]:
        file = folder / f"{next(made)}.db"
        shutil.copyfile(template, file)
        database = open_database(f"sqlite:///{file}")
        try:
            yield database
        finally:
            database.dispose()
            for leftover in folder.glob(f"{file.name}*"):
                leftover.unlink()

    return fresh


def _call(number: int, call: CallCompleted) -> Call:
    role = call.hints.get("role")
    return Call(
        number=number,
        call_id=call.call_id,
        rollout_id=call.rollout_id,
        parent_id=call.parent_id,
        root_id=call.root_id,
        depth=call.depth,
        request_hash=call.request_hash,
        chain_hash=call.chain_hash,
        hash_version=call.hash_version,
        prev_len=call.prev_len,
        prompt_len=call.prompt_len,
        sampled_len=call.sampled_len,
        policy_spans=call.policy_spans,
        response_id=call.response_id,
        choice=call.choice,
        role=role if isinstance(role, str) else None,
        media_count=call.media_count,
    )
