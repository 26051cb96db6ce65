"""`turnlog db` as a user types it: the schema up and down, partitions and roles."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from store import log, migrate
from store.database import write
from store.events import RolloutOpened


def db(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turnlog", "db", *arguments]
    return subprocess.run(command, input=answer, capture_output=True, text=True, check=False)


def test_a_downgrade_asks_first_and_refuses_to_lose_a_secret(sqlite_database, sqlite_url):
    assert db("downgrade", "0001", "--db", sqlite_url, answer="n\n").returncode != 0
    assert migrate.current(sqlite_database) == migrate.head()
    assert db("downgrade", "0001", "--db", sqlite_url, answer="y\n").returncode == 0
    assert migrate.current(sqlite_database) == "0001"
    assert "(ran 0002, " in db("upgrade", "--db", sqlite_url).stdout
    with write(sqlite_database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=1, secret_hash=bytes(32))])
    refused = db("downgrade", "0001", "--db", sqlite_url)
    assert refused.returncode == 1
    assert "loses the secret hashes of 1 rollouts" in refused.stderr
    assert "--yes" in refused.stderr
    assert db("downgrade", "0001", "--db", sqlite_url, "--yes").returncode == 0


def test_history_says_where_the_log_is(sqlite_database, sqlite_url):
    found = json.loads(db("history", "--db", sqlite_url, "--json").stdout)
    revisions = [each.name for each in migrate.history()]
    assert [(each["revision"], each["here"]) for each in found] == [(name, name == revisions[-1]) for name in revisions]


@pytest.mark.parametrize("command", ["partition", "partitions", "grant"])
def test_what_only_postgresql_has_is_refused_on_sqlite(sqlite_database, sqlite_url, command):
    found = db(command, "--db", sqlite_url)
    assert found.returncode == 1
    assert "a SQLite log has no" in found.stderr


@pytest.mark.postgres
def test_partitions_are_made_and_listed(postgres_url):
    made = db("partition", "--db", postgres_url, "--every", "month", "--ahead", "8")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("made 8 partitions")  # two months beyond those of the upgrade, of four tables
    listed = json.loads(db("partitions", "--db", postgres_url, "--json").stdout)
    assert len([each for each in listed if each["table"] == "model_call"]) == 10
    words = db("partition", "--db", postgres_url, "--ahead", "9", "--sql").stdout
    assert words.count("select make_partition('") == 4


@pytest.mark.postgres
def test_a_grant_is_shown_as_sql_for_the_roles_that_are_asked_for(postgres_url):
    words = db("grant", "--db", postgres_url, "--auditor", "looks", "--sql").stdout
    assert (
        'grant select on rollout_state, row_boundary, chain, row_token_count, declared_vs_found, drift to "looks"'
        in words
    )
    assert "turnlog_worker" not in words
