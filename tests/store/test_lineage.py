"""Finding a call and walking to its root: right, by index, and whole or not at all."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

from store import lineage, log, partitions
from store.database import read, write
from store.errors import BrokenLink
from store.events import CallCompleted, RolloutOpened, token_array, uuid7
from store.exclusive import exclusively
from store.statements import statements


def append(database: Engine, *events) -> None:
    with write(database) as connection:
        log.append(connection, events)


def tokens_of(chain) -> list[int]:
    return [token for call in chain for token in token_array(call.token_ids).tolist()]


def test_a_call_is_found_by_its_summary_hash_in_its_own_rollout_only(database, chain_maker):
    chain = chain_maker()
    append(database, *chain, *chain_maker(rollout_id="r2"))
    with read(database) as connection:
        (found,) = lineage.find_by_summary(connection, "r1", [bytes(32), chain[1].summary_hash, bytes(31) + b"1"])
        assert lineage.find_by_summary(connection, "r2", [chain[1].summary_hash]) == []
        assert lineage.find_by_summary(connection, "r1", [bytes(32)]) == []
        assert lineage.find_by_summary(connection, "r1", []) == []
    assert found.sequence > 0
    assert found == lineage.KnownCall(
        call_id=chain[1].call_id,
        rollout_id="r1",
        parent_id=chain[0].call_id,
        root_id=chain[0].call_id,
        depth=1,
        sequence=found.sequence,
        chain_len=chain[1].chain_len,
        hash_version=chain[1].hash_version,
        summary_hash=chain[1].summary_hash,
        chain_hash=chain[1].chain_hash,
        reasoning_digest=chain[1].reasoning_digest,
        response_id=chain[1].response_id,
    )


def test_every_call_with_the_same_summary_hash_is_found_in_order(database, chain_maker):
    root, first = chain_maker([(5, 5), (5, 5)])
    other = {"reasoning_digest": None, "answer_item_ids": ("msg_1", "fc_1")}
    retry = first.model_copy(update={"call_id": uuid7(9, bytes(10)), "writer_seq": 99, **other})
    append(database, root, first, retry)
    with read(database) as connection:
        found = lineage.find_by_summary(connection, "r1", [root.summary_hash, first.summary_hash])
    assert [known.call_id for known in found] == [root.call_id, first.call_id, retry.call_id]
    assert [known.reasoning_digest for known in found] == [root.reasoning_digest, first.reasoning_digest, None]
    assert [known.answer_item_ids for known in found] == [(), (), ("msg_1", "fc_1")]


def test_a_chain_of_2000_calls_comes_back_token_for_token(database, chain_maker):
    chain = chain_maker([(30, 20)] + [(6, 4)] * 1999)
    append(database, *chain)
    with read(database) as connection:
        assert lineage.chain_tokens(connection, chain[-1].call_id).tolist() == tokens_of(chain)
        assert lineage.chain_tokens(connection, chain[1000].call_id).tolist() == tokens_of(chain[:1001])


def test_each_branch_has_its_own_chain(database, chain_maker):
    trunk = chain_maker([(20, 10), (8, 5)])
    left, right = chain_maker([(4, 4), (3, 3)], parent=trunk[1]), chain_maker([(7, 7)], parent=trunk[1])
    append(database, *trunk, *left, *right)
    with read(database) as connection:
        assert lineage.chain_tokens(connection, left[-1].call_id).tolist() == tokens_of([*trunk, *left])
        assert lineage.chain_tokens(connection, right[-1].call_id).tolist() == tokens_of([*trunk, *right])


def test_a_call_that_is_not_in_the_log_has_no_chain(database):
    with pytest.raises(BrokenLink, match=r"is not in the log"), read(database) as connection:
        lineage.chain_tokens(connection, UUID(int=1))


@pytest.mark.parametrize(
    "damage",
    [
        "delete from model_call where depth = 0",
        "delete from model_call where depth = 1",
        "update model_call set parent_id = (select call_id from model_call where depth = 3) where depth = 1",
        "update model_call set prev_len = 29, prompt_len = prompt_len - 1 where depth = 1",
        "update model_call set prompt_len = prompt_len + 1 where depth = 1",
        "update model_call set token_ids = (select token_ids from model_call where depth = 2) where depth = 1",
        "update model_call set chain_hash = digest where depth = 0",
        "update model_call set depth = 7 where depth = 3",
        "update model_call set depth = 2 where depth = 3",
    ],
)
def test_a_chain_that_was_tampered_with_is_refused(database, chain_maker, damage):
    chain = chain_maker([(20, 10), (8, 5), (8, 5), (8, 5)])
    append(database, *chain)
    with write(database) as connection:
        without_guards(connection)
        connection.execute(text(damage))
    with pytest.raises(BrokenLink, match="does not fit what the log holds above it"), read(database) as connection:
        lineage.chain_tokens(connection, chain[3].call_id)


def without_guards(connection: Connection) -> None:
    """What somebody with enough rights can do to a log, and what reading it must then find."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("alter table model_call disable trigger all"))
        for check in ("arrays", "parent"):
            connection.execute(text(f"alter table model_call drop constraint model_call_{check}"))
    else:
        connection.execute(text("pragma ignore_check_constraints = on"))
        connection.execute(text("drop trigger model_call_no_update"))
        connection.execute(text("drop trigger model_call_no_delete"))


def test_recent_requests_are_whole_and_the_newest_comes_last(database, chain_maker):
    first, second = chain_maker([(5, 5)] * 4), chain_maker([(5, 5)] * 3)
    fork = chain_maker([(5, 5)], parent=first[1])
    append(database, *first, *second, *chain_maker(rollout_id="r2"), *fork)
    with read(database) as connection:
        recent = lineage.recent_requests(connection, "r1", 5)
        everything = lineage.recent_requests(connection, "r1")
        assert lineage.recent_requests(connection, "r3") == []
    assert [call.call_id for call in recent] == [call.call_id for call in (first[3], *second, fork[0])]
    assert [call.call_id for call in everything] == [call.call_id for call in (*first, *second, *fork)]
    made = {call.call_id: call for call in (*first, *second, *fork)}
    for traced in [*recent, *everything]:
        assert traced.request == chain_maker.requests[traced.call_id]
        assert traced.answer == made[traced.call_id].answer_items
        assert traced.render_hash == made[traced.call_id].render_hash
        assert traced.tools_digest == made[traced.call_id].tools_digest
    assert [call.sequence for call in everything] == sorted(call.sequence for call in everything)


NOW = 1_700_000_100_000_000
"""Somewhat after the calls of a `ChainMaker`."""


@pytest.mark.parametrize(
    ("name", "values", "indexes"),
    [
        (
            "find_by_summary",
            {"rollout_id": "'r1'", "key": "x'61'"},
            {"model_call_summary"},
        ),
        ("chain", {"call_id": "x'00'"}, {"model_call_id_key"}),
        ("recent_requests", {"rollout_id": "'r1'", "calls": "32"}, {"model_call_rollout", "model_call_root"}),
    ],
)
def test_hot_statements_go_through_an_index_on_sqlite(sqlite_database, chain_maker, name, values, indexes):
    append(
        sqlite_database,
        *chain_maker([(5, 5)] * 50),
        *(call for at in range(500) for call in chain_maker(rollout_id=f"x{at}")),
    )
    text_of = {**statements("lineage"), **statements("lineage.sqlite")}[name]
    between = {"low": f"x'{'00' * 16}'", "high": f"x'{'ff' * 16}'"}
    words = re.sub(r":(\w+)", lambda found: (values | between)[found[1]], text_of)
    with read(sqlite_database) as connection:
        plan = [str(row.detail) for row in connection.exec_driver_sql("explain query plan " + words)]
    plan = [step.replace("sqlite_autoindex_model_call_1", "model_call_id_key") for step in plan]
    assert not [step for step in plan if step.startswith("SCAN model_call")], plan
    assert set(re.findall(r"\bmodel_call_[a-z]\w*", " ".join(plan))) == indexes, plan


def partitioned(database: Engine, chain_maker) -> list[CallCompleted]:
    """A chain of 50 calls among many in the partition of November 2023, one of twenty."""
    with exclusively(database) as connection:
        months = partitions.wanted(datetime(2022, 11, 1, tzinfo=UTC), "month", 20)
        assert partitions.make(connection, months) == []
    chain = chain_maker([(5, 5)] * 50)
    at = 1_700_000_000_000_000
    append(database, RolloutOpened(rollout_id="r1", opened_at=at, task="t"), *chain)
    append(database, *(call for number in range(500) for call in chain_maker(rollout_id=f"x{number}")))
    with write(database) as connection:
        connection.exec_driver_sql("analyze model_call")
    database.dispose()  # what these sessions have read so far is not of interest
    return chain


def touched(connection: Connection) -> set[tuple[str, bool]]:
    """The partitions of calls that this session has just read, and whether it was through an index only."""
    counted = text(
        "select relname, coalesce(seq_scan, 0) = 0 from pg_stat_xact_user_tables"
        " where relname like 'model_call%' and coalesce(seq_scan, 0) + coalesce(idx_scan, 0) > 0"
    )
    return {(row[0], row[1]) for row in connection.execute(counted)}


@pytest.mark.postgres
def test_a_look_up_probes_the_partition_of_its_rollout_and_no_other(postgres_database, chain_maker):
    chain = partitioned(postgres_database, chain_maker)
    with read(postgres_database) as connection:
        for _ in range(8):  # also once the driver has prepared it, and PostgreSQL could plan it for any value
            (found,) = lineage.find_by_summary(connection, "r1", [chain[7].summary_hash], now=NOW)
        assert found.call_id == chain[7].call_id
        assert touched(connection) == {("model_call_20231101", True)}
    postgres_database.dispose()
    with read(postgres_database) as connection:
        assert len(lineage.recent_requests(connection, "r1", now=NOW)) == 32
        assert touched(connection) == {("model_call_20231101", True)}


@pytest.mark.postgres
def test_an_opening_is_asked_for_once_and_one_that_is_not_there_is_not_kept(postgres_database, chain_maker):
    (call,) = chain_maker([(5, 5)])
    openings: dict[str, int] = {}
    with write(postgres_database) as connection:
        log.append(connection, [call])
        lineage.find_by_summary(connection, "r1", [call.summary_hash], openings=openings)
        assert openings == {}
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=call.started_at)])
        lineage.find_by_summary(connection, "r1", [call.summary_hash], openings=openings)
        assert openings == {"r1": call.started_at}
        connection.exec_driver_sql("alter table rollout rename to elsewhere")
        (found,) = lineage.find_by_summary(connection, "r1", [call.summary_hash], openings=openings)
        connection.rollback()
    assert found.call_id == call.call_id


@pytest.mark.postgres
def test_a_chain_and_a_parent_probe_the_partitions_of_their_calls_and_no_other(postgres_database, chain_maker):
    chain = partitioned(postgres_database, chain_maker)
    with read(postgres_database) as connection:
        assert len(lineage.chain_tokens(connection, chain[-1].call_id)) == chain[-1].chain_len
        assert touched(connection) == {("model_call_20231101", True)}
    postgres_database.dispose()
    child = chain_maker([(5, 5)], parent=chain[-1])
    with write(postgres_database) as connection:
        log.append(connection, child)
        assert touched(connection) == {("model_call_20231101", True)}


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("name", "indexes"),
    [
        ("find_by_summary", {"model_call_summary"}),
        ("chain", {"model_call_pkey"}),
        ("recent_requests", {"model_call_rollout", "model_call_root"}),
    ],
)
def test_hot_statements_go_through_their_index_on_postgres(postgres_database, chain_maker, name, indexes):
    chain = partitioned(postgres_database, chain_maker)
    between = {"low": uuid7(NOW // 1000 - 86_400_000, bytes(10)), "high": uuid7(NOW // 1000, bytes(10))}
    key = rf"\x{chain[1].summary_hash.hex()}"
    values = {"key": key, **between, "rollout_id": "r1", "calls": 32, "call_id": chain[-1].call_id}
    text_of = {**statements("lineage"), **statements("lineage.postgresql")}[name]
    words = re.sub(r":(\w+)", lambda found: f"'{values[found[1]]}'", text_of)
    with read(postgres_database) as connection:
        plan = list(connection.exec_driver_sql("explain (analyze, timing off) " + words).scalars())
        used = re.findall(r"using (\w+) on model_call", " ".join(step for step in plan if "never executed" not in step))
        parents = text(
            "select inhparent::regclass::text from pg_inherits where inhrelid = any(cast(:used as regclass[]))"
        )
        assert set(connection.scalars(parents, {"used": used})) == indexes, plan


@pytest.mark.postgres
def test_a_look_up_that_is_planned_before_its_partition_was_analysed_probes_its_index_and_no_other(
    postgres_database, chain_maker
):
    """A plan is kept for as long as its connection or the partition's statistics."""
    append(postgres_database, *(call for at in range(300) for call in chain_maker(rollout_id=f"x{at}")))
    places = {"rollout_id": "$1", "key": "$2", "low": "$3", "high": "$4"}
    words = re.sub(r":(\w+)", lambda found: places[found[1]], statements("lineage")["find_by_summary"])
    with read(postgres_database) as connection:
        plan = " ".join(connection.exec_driver_sql("explain (generic_plan) " + words).scalars())
    used = set(re.findall(r"(?:using|Index Scan on) model_call_\w+?_(pkey|rollout_id_\w+)", plan))
    assert used == {"rollout_id_summary_hash_idx"}, plan


@pytest.mark.postgres
def test_a_call_of_a_clock_that_was_a_day_wrong_is_found_still(postgres_database, chain_maker):
    """Its id lies before its rollout's opening, and after the clock that asks."""
    chain = partitioned(postgres_database, chain_maker)
    at = chain[0].started_at
    with write(postgres_database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r9", opened_at=at + lineage.SLACK // 2)])
        log.append(connection, late := chain_maker(rollout_id="r9"))
    with read(postgres_database) as connection:
        for now in (at - lineage.SLACK // 2, at, None):
            (found,) = lineage.find_by_summary(connection, "r9", [late[1].summary_hash], now=now)
            assert found.call_id == late[1].call_id
