"""Fixtures of the page's tests: a log of awkward rollouts, and the page over a log as a client sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from store.database import write
from store.events import CallAdmitted, CallCompleted, CallEnded, Event, RolloutOpened, RolloutScored, RowTrained
from store.log import append
from turnlog.ui.app import build

DAY = 24 * 3600 * 1_000_000
FIRST = 1_700_000_000_000_000
"""Opening of the first rollout: 2023-11-14."""
Visit = Callable[..., TestClient]


def admitted(call_id: UUID, rollout: str, at: int, parent: CallCompleted | None = None) -> CallAdmitted:
    return CallAdmitted(
        call_id=call_id,
        rollout_id=rollout,
        decision="continuation" if parent else "root",
        reason="answer_echoed" if parent else "first_call",
        parent_id=parent.call_id if parent else None,
        worker="host:8000",
        at=at,
    )


def told(call: CallCompleted, reason: str, nearest: CallCompleted | None, **more: Any) -> CallCompleted:
    evidence: dict[str, Any] = {"items": 2, **more}
    if nearest is not None:
        evidence |= {"nearest_call": str(nearest.call_id), "first_difference": 3}
    return call.model_copy(update={"reason": reason, "evidence": evidence})


def awkward(chain_maker: Any) -> list[Event]:
    """Rollout `forked` has a branch, a rewrite, a failed call, one that is pending and one that was refused."""
    first, second = chain_maker([(20, 10), (8, 5)], rollout_id="forked")
    (fourth,) = chain_maker([(7, 3)], rollout_id="forked", parent=first)
    third = told(chain_maker([(30, 4)], rollout_id="forked")[0], "item_edited", second, role_here="tool_result")
    after = third.completed_at
    failed, pending, refused = uuid4(), uuid4(), uuid4()
    calls: list[Event] = [first, second, fourth, third]
    return [
        RolloutOpened(
            rollout_id="forked", group_id="g 1", slot=0, harness="codex <b>", opened_at=FIRST, metadata={"seed": 7},
            task="Count the <script>alert(1)</script> files & folders, 100 % of them",
        ),
        *calls,
        admitted(failed, "forked", first.completed_at + 20, second),
        CallEnded(
            call_id=failed, rollout_id="forked", state="failed", reason="the engine <i>said</i> no",
            at=first.completed_at + 90_000, token_ids=bytes(8), logprobs=bytes(8),
        ),
        admitted(pending, "forked", after + 30, third),
        CallEnded(call_id=refused, rollout_id="forked", state="refused", reason="too long", at=after + 40),
        RolloutScored(outcome_id=uuid4(), rollout_id="forked", reward=0.25, at=after + 50),
        RolloutScored(outcome_id=uuid4(), rollout_id="forked", reward=0.5, at=after + 60),
    ]  # fmt: skip


@pytest.fixture
def log_of_rollouts(chain_maker: Any) -> Callable[[Engine], None]:
    """Writes 30 rollouts: 29 small ones, three harnesses in turn, one a day; the newest is `forked`."""

    def fill(database: Engine) -> None:
        events: list[Event] = []
        for number in range(29):
            name = f"r{number:02}"
            calls = chain_maker([(9, 4), (3, 2)], rollout_id=name)
            if number % 4 == 0:
                calls.append(told(chain_maker([(12, 3)], rollout_id=name)[0], "context_replaced", calls[-1]))
            calls = [
                call.model_copy(update={"started_at": FIRST + number * DAY, "completed_at": FIRST + number * DAY + 9})
                for call in calls
            ]
            opening = RolloutOpened(
                rollout_id=name, group_id=f"g{number // 10}", slot=number % 10, opened_at=FIRST + number * DAY,
                harness=("codex", "claude", None)[number % 3], task=f"Task number {number}",
            )  # fmt: skip
            events += [opening, *calls]
            if number % 2:
                events.append(RolloutScored(outcome_id=uuid4(), rollout_id=name, reward=number / 10, at=1))
            if number % 5 == 0:
                events += [
                    RowTrained(
                        run="a/b run", step=number // 5, row_id=f"{name}-{tip.depth}", rollout_id=name,
                        tip_call_id=tip.call_id, selection="completed", selection_version=1, advantage=0.5,
                        trainer_policy_version=4, at=FIRST + number,
                    )
                    for tip in calls[1:]
                ]  # fmt: skip
        with write(database) as connection:
            append(connection, [*events, *awkward(chain_maker)])

    return fill


@pytest.fixture
def filled(database: Engine, log_of_rollouts: Callable[[Engine], None]) -> Engine:
    """That log, in SQLite and in PostgreSQL."""
    log_of_rollouts(database)
    return database


@pytest.fixture
def visit() -> Iterator[Visit]:
    """The page over a log, as a client on this machine sees it."""
    clients: list[TestClient] = []

    def visit(database: Engine, *, host: str = "localhost", **options: Any) -> TestClient:
        page = build(database, shown_log="sqlite:///turnlog.db", **options)
        clients.append(TestClient(page, base_url=f"http://{host}", follow_redirects=False))
        return clients[-1]

    yield visit
    for client in clients:
        client.close()
