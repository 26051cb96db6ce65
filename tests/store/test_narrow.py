"""Calls shown without their arrays: the same as the events say, without reading what is wide."""

from typing import Any

from sqlalchemy import Connection, Engine, event

from store import log, narrow
from store.database import read, write
from store.events import CallEnded, RolloutOpened, logprob_bytes, token_bytes, uuid7


def fill(database: Engine, chain_maker: Any) -> None:
    """A rollout of three calls, and another one's; one call that was abandoned."""
    opened = [RolloutOpened(rollout_id=name, opened_at=1) for name in ("r1", "r2")]
    calls = [*chain_maker(rollout_id="r1"), *chain_maker([(5, 2)], rollout_id="r2")]
    end = CallEnded(
        call_id=uuid7(1, bytes(10)), rollout_id="r1", state="abandoned", reason="the client left", at=2,
        token_ids=token_bytes([1, 2]), logprobs=logprob_bytes([-0.5, -1.5]),
    )  # fmt: skip
    with write(database) as connection:
        log.append(connection, [*opened, *calls, end])


def test_calls_are_shown_as_their_events_say(database: Engine, chain_maker: Any) -> None:
    fill(database, chain_maker)
    with read(database) as connection:
        calls = [call.model_dump(mode="json", exclude={*narrow.WIDE}) for call in log.calls(connection, "r1")]
        ends = [end.model_dump(mode="json", exclude={*narrow.WIDE}) for end in log.ends(connection, "r1")]
        assert (len(calls), len(ends)) == (3, 1)
        assert narrow.calls(connection, "r1") == calls
        assert narrow.ends(connection, "r1") == ends
        assert [[*call] for call in narrow.calls(connection, "r1")] == [[*call] for call in calls]
        assert narrow.calls(connection, "nobody") == []


def test_no_wide_column_is_read(sqlite_database: Engine, chain_maker: Any) -> None:
    fill(sqlite_database, chain_maker)
    statements: list[str] = []

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    with read(sqlite_database) as connection:
        event.listen(sqlite_database, "before_cursor_execute", note)
        narrow.calls(connection, "r1")
        narrow.ends(connection, "r1")
    assert len(statements) == 2
    wide = ("token_ids", "logprobs", "request_digests", "answer_digests", "*")
    assert not [name for statement in statements for name in wide if name in statement]
