"""Roles of PostgreSQL: each can do its work as a login of its own, and nothing else."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg
import pytest
from sqlalchemy import Engine, make_url, text

from engine.journal import Journal
from replay.rowset import build
from store import lineage, log, migrate, partitions, roles, schema
from store.database import open_database, read, write
from store.errors import NotOwner, SharedRole, UnknownRole
from store.events import CallAdmitted, CallEnded, RolloutOpened, RolloutScored, RowTrained, uuid7
from store.exclusive import exclusively
from store.roles import Roles
from store.tally import compared
from turnlog.errors import BadSql
from turnlog.sql import ask

pytestmark = pytest.mark.postgres


@dataclass(frozen=True, slots=True, kw_only=True)
class Logins:
    """The log as its owner has it, and its URL as each role logs in."""

    owner: Engine
    worker: str
    trainer: str
    auditor: str


@pytest.fixture
def logins(postgres_database: Engine, postgres_url: str) -> Iterator[Logins]:
    """Group roles of this test alone, each with one login."""
    mark = secrets.token_hex(4)
    names = {kind: f"turnlog_{kind}_{mark}" for kind in ("worker", "trainer", "auditor")}
    with exclusively(postgres_database) as connection:
        roles.grant(connection, Roles(**names))
        for name in names.values():
            connection.execute(text(f"create role {name}_login login in role {name}"))
        connection.commit()
    urls = {kind: str_url(postgres_url, f"{name}_login") for kind, name in names.items()}
    yield Logins(owner=postgres_database, **urls)
    with exclusively(postgres_database) as connection:
        for name in names.values():
            connection.execute(text(f"drop role {name}_login"))
            connection.execute(text(f"drop owned by {name}"))
            connection.execute(text(f"drop role {name}"))
        connection.commit()


def str_url(url: str, user: str) -> str:
    return make_url(url).set(username=user).render_as_string(hide_password=False)


def rollout(chain_maker) -> list[object]:
    """A rollout with a secret, a chain, an end, an intent, and an outcome."""
    intent = CallAdmitted(
        call_id=uuid7(1, bytes(10)),
        rollout_id="r1",
        decision="root",
        reason="first_call",
        parent_id=None,
        worker="w",
        at=1,
    )
    return [
        RolloutOpened(rollout_id="r1", opened_at=1, secret_hash=bytes(range(32))),
        intent,
        CallEnded(call_id=uuid7(2, bytes(10)), rollout_id="r1", state="failed", reason="x", at=1),
        *chain_maker(),
        RolloutScored(outcome_id=uuid7(3, bytes(10)), rollout_id="r1", reward=1.0, at=1),
    ]


TRAINED = RowTrained(
    run="run", step=1, row_id="row", rollout_id="r1", tip_call_id=uuid7(1, bytes(10)), selection="completed",
    selection_version=1, advantage=1.0, trainer_policy_version=1, at=1,
)  # fmt: skip
CHANGES = (
    "update {} set digest = digest",
    "delete from {}",
    "truncate {}",
    "alter table {} add column more text",
    "alter table {} disable trigger all",
    "drop table {}",
)


def refused(url: str, statements: list[str]) -> None:
    """Every statement is one that this login may not run."""
    shown = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    allowed: list[str] = []
    with psycopg.connect(shown, autocommit=True) as connection:
        for statement in statements:
            try:
                connection.execute(statement.encode())
            except psycopg.errors.InsufficientPrivilege:
                continue
            allowed.append(statement)
    assert allowed == []


def of_every_table(*templates: str) -> list[str]:
    tables = ("rollout", "call_intent", "model_call", "call_end", "rollout_outcome", "trained_row")
    return [template.format(table) for table in tables for template in templates]


EVERYONE_MUST_NOT = [
    *of_every_table(*CHANGES),
    *(change.format("model_call_default") for change in CHANGES),
    "select * from model_call_default",
    "insert into call_end_default overriding system value select * from call_end",
    "create table mine (a int)",
    "create function mine() returns int language sql as 'select 1'",
    "create or replace function refuse_change() returns trigger language plpgsql as 'begin return old; end'",
    "drop trigger model_call_no_change on model_call",
    "create trigger mine before insert on model_call for each row execute function refuse_change()",
    "drop view rollout_state",
    "insert into tally values ('model_call', 1, 1, false)",
    "delete from tally",
    "update alembic_version set version_num = '0001'",
    "select make_partition('model_call', 'mine', null, null)",
    "select drop_partition('model_call', 'model_call_default')",
    "alter sequence model_call_sequence_seq restart",
    "select nextval('model_call_sequence_seq')",
    "set session_replication_role = replica",
]


def test_a_worker_serves_and_may_do_no_more(logins, chain_maker):
    database = open_database(logins.worker)
    migrate.require_current(database)
    journal = Journal(database, worker="w")
    chain = chain_maker()

    async def serve() -> None:
        await journal.append(rollout(chain_maker))
        found = await journal.look_up("r1", [chain[1].summary_hash])
        assert "KnownCall" in repr(found)
        assert len(await journal.chain(chain[2].call_id)) == chain[2].chain_len
        assert await journal.recent("r1")

    with write(logins.owner) as connection:
        log.append(connection, chain)
    asyncio.run(serve())
    with read(database) as connection:
        assert [intent.worker for intent in log.pending(connection, worker="w")] == ["w"]
        assert len(log.outcomes(connection, "r1")) == 1
        (found,) = lineage.find_by_summary(connection, "r1", [chain[1].summary_hash])
    assert found.call_id == chain[1].call_id
    journal.close()
    database.dispose()
    refused(
        logins.worker,
        [
            *EVERYONE_MUST_NOT,
            "select * from trained_row",
            "insert into trained_row (run) values ('x')",
            "select * from rollout_state",
        ],
    )


def test_a_trainer_reads_everything_and_appends_what_it_trained(logins, chain_maker):
    with write(logins.owner) as connection:
        log.append(connection, rollout(chain_maker))
    database = open_database(logins.trainer)
    migrate.require_current(database)
    found = build(database)
    assert len(found.rows) == 1
    assert found.digest() == build(logins.owner).digest()
    with write(database) as connection:
        log.append(connection, [TRAINED])
    with read(database) as connection:
        assert connection.scalar(text("select calls from rollout_state")) == 3
        assert connection.scalar(text("select count(*) from row_boundary")) == 1
        for table in (schema.trained_row, schema.model_call):  # what a role appends is tallied without a right to it
            found = compared(connection, table)
            assert found.named
            assert not found.missing
            assert not found.unnamed
    database.dispose()
    inserts = [
        f"insert into {table} (digest) values ('')"
        for table in ("rollout", "call_intent", "model_call", "call_end", "rollout_outcome")
    ]
    refused(logins.trainer, [*EVERYONE_MUST_NOT, *inserts])


def test_an_auditor_reads_the_views_alone(logins, chain_maker):
    with write(logins.owner) as connection:
        log.append(connection, rollout(chain_maker))
    database = open_database(logins.auditor)
    migrate.require_current(database)
    with ask(database, "select rollout_id, calls, roots, failed, pending, reward from rollout_state") as answer:
        assert list(answer.lines) == [("r1", 3, 1, 1, 1, 1.0)]
    with ask(database, "select reason, first_difference from row_boundary") as answer:
        assert list(answer.lines) == [("first_call", None)]
    with ask(database, "select position from chain join row_token_count using (tip_call_id)") as answer:
        assert sorted(answer.lines) == [(0,), (1,), (2,)]
    for view in schema.VIEWS:
        with ask(database, f"select * from {view}") as answer:
            list(answer.lines)
    for table in ("model_call", "rollout", "trained_row", "model_call_default"):
        with pytest.raises(BadSql, match="permission denied"), ask(database, f"select * from {table}") as answer:
            list(answer.lines)
    database.dispose()
    refused(
        logins.auditor,
        [
            *EVERYONE_MUST_NOT,
            *of_every_table("select 1 from {}", "insert into {} (digest) values ('')", "select digest from {}"),
        ],
    )


def test_no_view_shows_tokens_or_secrets(postgres_database, chain_maker):
    with write(postgres_database) as connection:
        log.append(connection, rollout(chain_maker))
    with read(postgres_database) as connection:
        for view in schema.VIEWS:
            for line in connection.execute(text(f"select * from {view}")).mappings():
                assert not {"secret_hash", "token_ids", "logprobs"} & {*line}
                assert bytes(range(32)).hex() not in repr(line)


def test_roles_hold_in_partitions_to_come_and_in_what_an_upgrade_makes(logins, chain_maker, postgres_url):
    with exclusively(logins.owner) as connection:
        partitions.make(connection, partitions.missing(connection, datetime(2023, 11, 1, tzinfo=UTC), "month", 0))
        connection.execute(text("create view later as select 1 as one"))
        connection.commit()
    migrate.upgrade(logins.owner)
    worker, auditor = open_database(logins.worker), open_database(logins.auditor)
    with write(worker) as connection:
        log.append(connection, rollout(chain_maker))
    with ask(auditor, "select calls, one from rollout_state cross join later") as answer:
        assert list(answer.lines) == [(3, 1)]
    worker.dispose()
    auditor.dispose()
    refused(
        logins.worker,
        [
            "select * from model_call_20231101",
            "insert into model_call_20231101 overriding system value select * from model_call",
        ],
    )


def test_what_a_role_has_too_much_goes_when_it_is_granted_again(logins):
    group = make_url(logins.auditor).username.removesuffix("_login")
    with exclusively(logins.owner) as connection:
        connection.execute(text(f"grant select on model_call to {group}"))
        connection.commit()
        roles.grant(connection, Roles(auditor=group))
        connection.commit()
    refused(logins.auditor, ["select 1 from model_call"])


def test_the_sql_of_a_grant_does_the_same_when_somebody_else_runs_it(postgres_database, postgres_url):
    name = f"turnlog_by_hand_{secrets.token_hex(4)}"
    with read(postgres_database) as connection:
        words = roles.as_sql(connection, Roles(auditor=name))
    shown = make_url(postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(shown, autocommit=True) as connection:
        connection.execute(words.encode())
        connection.execute(words.encode())
        may = (
            "select has_table_privilege(%s, 'rollout_state', 'select'), has_table_privilege(%s, 'model_call', 'select')"
        )
        assert connection.execute(may, [name, name]).fetchone() == (True, False)
        connection.execute(f"drop owned by {name}; drop role {name}".encode())


@pytest.mark.parametrize("name", ["postgres", "pg_monitor", "public", 'x"; drop table rollout; --', "", "x" * 64])
def test_a_name_that_cannot_be_a_role_is_refused(postgres_database, name):
    with pytest.raises(UnknownRole, match="take a name of letters"), exclusively(postgres_database) as connection:
        roles.grant(connection, Roles(worker=name))


def test_one_name_for_two_roles_is_refused_and_nothing_is_granted(postgres_database):
    refused = pytest.raises(SharedRole, match="'turnlog_both' is named for worker and trainer")
    with refused, exclusively(postgres_database) as connection:
        roles.grant(connection, Roles(worker="turnlog_both", trainer="turnlog_both", auditor="turnlog_other"))
    with read(postgres_database) as connection:
        made = connection.exec_driver_sql(
            "select count(*) from pg_roles where rolname in ('turnlog_both', 'turnlog_other')"
        )
        assert made.scalar() == 0


def test_whoever_is_not_the_owner_is_told_so(logins):
    database = open_database(logins.trainer)
    with pytest.raises(NotOwner, match=r"may not change the schema .*--sql"), exclusively(database) as connection:
        roles.grant(connection, Roles(auditor="turnlog_theirs"))
    database.dispose()
