"""`turnlog audit`: a whole log is clean on both databases; a changed one is not, and the audit says where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, Table, make_url, select, text
from typer.testing import CliRunner

from replay.archive import open_archive
from replay.dropping import drop_archived
from replay.errors import ArchiveDamaged, PositionAhead
from replay.sealing import seal
from store import codec, copy, hashing, log, migrate, partitions, schema
from store.columns import PLACES, event_of, row_of
from store.database import open_database, read, write
from store.events import (
    CallAdmitted,
    CallCompleted,
    CallEnded,
    Event,
    MediaShown,
    MediaStored,
    RolloutOpened,
    RolloutScored,
    logprob_bytes,
    token_bytes,
    uuid7,
)
from store.exclusive import exclusively
from store.lineage import chain_tokens
from store.media import open_media
from store.settled import Position
from tests.conftest import _postgres_database as postgres_database
from tests.turnlog.played import played_log
from turnlog.audit.findings import NOTES, RULES
from turnlog.audit.run import Audited, audit
from turnlog.boundary import context
from turnlog.cli import app


class Copies:
    """Logs that are made once and copied for each test: the whole one, and a small one with events in every table."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._made: dict[tuple[str, str], str] = {}
        self.opened = ExitStack()

    @contextmanager
    def __call__(self, which: str, kind: str) -> Generator[Engine]:
        """A fresh copy in `sqlite` or `postgres`."""
        source = self._source(which, kind)
        with ExitStack() as used:
            if kind == "sqlite":
                shutil.copy(source, self._folder / "fresh.db")
                url = f"sqlite:///{self._folder / 'fresh.db'}"
            else:
                url = used.enter_context(self._postgres(make_url(source).database or ""))
            database = open_database(url)
            try:
                yield database
            finally:
                database.dispose()

    def _source(self, which: str, kind: str) -> str:
        if (which, kind) in self._made:
            return self._made[which, kind]
        if kind == "postgres":
            url = self.opened.enter_context(self._postgres(self._request.getfixturevalue("postgres_template")()))
            with self(which, "sqlite") as source:
                target = open_database(url)
                copy.copy(source, target)
                target.dispose()
            self._made[which, kind] = url
        else:
            (self._folder / which).mkdir()
            database = played_log(self._folder / which)
            made = self._folder / which / "played.db"
            if which == "small":
                made = self._folder / which / "small.db"
                keep_some(database, f"sqlite:///{made}")
            database.dispose()
            self._made[which, kind] = str(made)
        return self._made[which, kind]

    def _postgres(self, template: str) -> AbstractContextManager[str]:
        server = self._request.getfixturevalue("postgres_server")
        return contextmanager(postgres_database)(server, template)


@pytest.fixture(scope="module")
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    """Copies of the played log."""
    made = Copies(request, tmp_path_factory.mktemp("copies"))
    yield made
    made.opened.close()


def differences(found: Audited) -> list[str]:
    return [str(each) for each in found.findings.shown]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def played(request: pytest.FixtureRequest, copies: Copies) -> Iterator[Engine]:
    """The recordings as they were played, in both databases."""
    with copies("whole", request.param) as database:
        yield database


def test_the_log_of_the_recordings_is_clean(played: Engine) -> None:
    found = audit(played)
    assert differences(found) == []
    assert found.clean
    with read(played) as connection:
        calls = connection.scalar(text("select count(*) from model_call"))
        rows = connection.scalar(text("select count(*) from trained_row"))
    for rule in ("decision", "parent", "lengths", "chain_hash", "mask", "root", "writer"):
        assert found.findings.checked[rule] == calls
    assert found.findings.checked["trained_row"] == rows > 0
    assert found.findings.checked["declared_rewrite"] > 5
    assert found.findings.notes["open"] == 1
    assert found.findings.notes["echo_not_kept"] == 0
    assert found.findings.notes.keys() <= NOTES.keys()
    assert found.findings.checked.keys() <= RULES.keys()
    assert found.tokens > 100_000


def test_two_audits_at_one_position_say_the_same_while_the_log_grows(played: Engine, chain_maker: Any) -> None:
    before = audit(played)
    with write(played) as connection:
        log.append(connection, chain_maker(rollout_id="new"))
    again = audit(played, position=before.position)
    assert (again.position, again.events, again.findings.checked) == (
        before.position,
        before.events,
        before.findings.checked,
    )
    assert again.clean
    now = audit(played)
    assert now.events["call_completed"] == before.events["call_completed"] + 3
    assert not now.clean  # nobody opened or admitted them
    with pytest.raises(PositionAhead):
        audit(played, position=Position(calls=10**9))


def test_a_call_without_an_end_is_a_difference_once_nothing_runs(played: Engine) -> None:
    found = audit(played, finished=True)
    (said,) = differences(found)
    assert "open_call: stored no end" in said


@dataclass(frozen=True, kw_only=True)
class Tampering:
    """What somebody does to a log by hand, and the rules that must say so."""

    change: Callable[[Connection, CallCompleted], None]
    rules: frozenset[str]
    fits: Callable[[CallCompleted], bool] = lambda _: True
    """Calls that it can be done to."""


def rewrite(connection: Connection, call: CallCompleted, **columns: Any) -> None:
    """Put other values into the columns of a stored call, past everything."""
    connection.execute(schema.model_call.update().where(schema.model_call.c.call_id == call.call_id).values(**columns))


def with_token(connection: Connection, call: CallCompleted) -> None:
    tokens = np.frombuffer(call.token_ids, "<i4").copy()
    tokens[len(tokens) // 2] += 1
    packed = codec.pack(token_bytes(tokens))
    rewrite(connection, call, codec=packed.codec, token_ids=packed.data)


def with_token_and_digest(connection: Connection, call: CallCompleted) -> None:
    """By somebody who knows how digests are made."""
    tokens = np.frombuffer(call.token_ids, "<i4").copy()
    tokens[0] += 1
    other = call.model_copy(update={"token_ids": token_bytes(tokens)})
    row = row_of(other)
    rewrite(connection, call, codec=row["codec"], token_ids=row["token_ids"], digest=row["digest"])


def with_logprob(connection: Connection, call: CallCompleted) -> None:
    logprobs = np.frombuffer(call.logprobs, "<f4").copy()
    logprobs[-1] -= 0.25
    rewrite(connection, call, logprobs=logprob_bytes(logprobs))


def with_parent(connection: Connection, call: CallCompleted) -> None:
    others = [
        each for each in log.calls(connection, call.rollout_id) if each.call_id not in (call.call_id, call.parent_id)
    ]
    other = call.model_copy(update={"parent_id": others[0].call_id})
    rewrite(connection, call, parent_id=other.parent_id, digest=other.digest())


def with_digest(connection: Connection, call: CallCompleted) -> None:
    rewrite(connection, call, digest=bytes(32))


def with_depth(connection: Connection, call: CallCompleted) -> None:
    other = call.model_copy(update={"depth": call.depth + 1})
    rewrite(connection, call, depth=other.depth, digest=other.digest())


def with_reason(connection: Connection, call: CallCompleted) -> None:
    """A root is explained away, in the call and in its intent."""
    other = call.model_copy(update={"reason": "context_replaced"})
    rewrite(connection, call, reason=other.reason, digest=other.digest())
    (intent,) = [each for each in log.intents(connection, call.rollout_id) if each.call_id == call.call_id]
    changed = intent.model_copy(update={"reason": other.reason})
    table = schema.call_intent
    connection.execute(
        table.update().where(table.c.call_id == call.call_id).values(reason=changed.reason, digest=changed.digest())
    )


def with_item(connection: Connection, call: CallCompleted) -> None:
    digests = b"".join(item.digest for item in call.request_items)
    changed = bytes([digests[0] ^ 1]) + digests[1:]
    fields = {"request_digests": changed, "request_roles": [item.role for item in call.request_items]}
    row = {**row_of(call), **fields, "sequence": 1}
    rewrite(connection, call, request_digests=changed, digest=event_of(CallCompleted, row).digest())


def without_call(connection: Connection, call: CallCompleted) -> None:
    connection.execute(schema.model_call.delete().where(schema.model_call.c.call_id == call.call_id))


def without_opening(connection: Connection, call: CallCompleted) -> None:
    connection.execute(schema.rollout.delete().where(schema.rollout.c.rollout_id == call.rollout_id))


def without_intent(connection: Connection, call: CallCompleted) -> None:
    connection.execute(schema.call_intent.delete().where(schema.call_intent.c.call_id == call.call_id))


def without_bytes(connection: Connection, call: CallCompleted) -> None:
    rewrite(connection, call, codec=codec.ZSTD, token_ids=b"no frame at all")


def with_swapped_blobs(connection: Connection, call: CallCompleted) -> None:
    """The tokens of two calls change places, so that each is whole in itself."""
    calls = [each for rollout_id in KEPT for each in log.calls(connection, rollout_id)]
    other = next(each for each in calls if each.call_id != call.call_id and compressed(each))
    here, there = row_of(call), row_of(other)
    for one, blob in ((call, there), (other, here)):
        rewrite(connection, one, codec=blob["codec"], token_ids=blob["token_ids"])


def compressed(call: CallCompleted) -> bool:
    """Whether its tokens are stored compressed: the table itself checks the length of those that are not."""
    return row_of(call)["codec"] == codec.ZSTD


def with_another_end(connection: Connection, call: CallCompleted) -> None:
    end = CallEnded(call_id=call.call_id, rollout_id=call.rollout_id, state="lost", reason="gone", at=1)
    row = row_of(end)
    values = {column.name: row[column.name] for column in schema.call_end.c if column.name != "sequence"}
    connection.execute(schema.call_end.insert().inline().values(values))


TAMPERINGS = {
    "one token": Tampering(change=with_token, rules=frozenset({"digest", "chain_hash"})),
    "one token, and its digest made good": Tampering(change=with_token_and_digest, rules=frozenset({"chain_hash"})),
    "one log-probability": Tampering(change=with_logprob, rules=frozenset({"digest"})),
    "one parent, and its digest made good": Tampering(
        change=with_parent, rules=frozenset({"chain_hash", "intent"}), fits=lambda call: call.parent_id is not None
    ),
    "one digest": Tampering(change=with_digest, rules=frozenset({"digest"})),
    "one depth, and its digest made good": Tampering(
        change=with_depth, rules=frozenset({"root"}), fits=lambda call: call.depth > 0
    ),
    "one reason, and all digests made good": Tampering(
        change=with_reason,
        rules=frozenset({"decision"}),
        fits=lambda call: call.decision == "root" and call.reason != "context_replaced",
    ),
    "one item's digest, and the event's made good": Tampering(change=with_item, rules=frozenset({"request_hash"})),
    "one deleted call": Tampering(change=without_call, rules=frozenset({"open_call"})),
    "one deleted opening": Tampering(change=without_opening, rules=frozenset({"opening"})),
    "one deleted intent": Tampering(change=without_intent, rules=frozenset({"intent"})),
    "one array of other bytes": Tampering(change=without_bytes, rules=frozenset({"readable"})),
    "two arrays that changed places": Tampering(
        change=with_swapped_blobs, rules=frozenset({"readable"}), fits=lambda call: compressed(call)
    ),
    "one call ended twice": Tampering(change=with_another_end, rules=frozenset({"intent"})),
}


def unguarded(connection: Connection) -> None:
    """Drop every trigger, as somebody who means it would."""
    if connection.dialect.name == "sqlite":
        for guard in schema.guards("sqlite"):
            connection.execute(text(f"drop trigger if exists {guard}"))
    else:
        for table in (*schema.metadata.tables, schema.tally.name):
            connection.execute(text(f"alter table {table} disable trigger all"))


KEPT = ("codex", "claude-code-subagents", "nemo-gym-aviary", "pi")
"""Rollouts of the small log: a compaction with windows, calls side by side, rewrites, a declared rewrite."""


def keep_some(database: Engine, url: str) -> None:
    """Their events in a log of their own, and some of the kinds that nobody recorded."""
    events: list[Event] = []
    with read(database) as connection:
        for place in PLACES:
            if "rollout_id" in place.table.c:
                mine = select(place.table).where(place.table.c.rollout_id.in_(KEPT)).order_by(place.table.c.sequence)
                events += [event_of(place.event, row) for row in connection.execute(mine).mappings()]
    call = next(event for event in events if isinstance(event, CallCompleted))
    intent = next(event for event in events if isinstance(event, CallAdmitted))
    for number in range(3):
        failed = intent.model_copy(update={"call_id": UUID(int=intent.call_id.int ^ (number + 1))})
        sha256 = bytes([number] * 32)
        events += [
            failed,
            CallEnded(call_id=failed.call_id, rollout_id=failed.rollout_id, state="failed", reason="x", at=failed.at),
            MediaStored.example().model_copy(update={"sha256": sha256}),
            MediaShown.example().model_copy(
                update={"call_id": call.call_id, "rollout_id": call.rollout_id, "place": number, "sha256": sha256}
            ),
        ]
    small = open_database(url)
    migrate.upgrade(small)
    with write(small) as connection:
        log.append(connection, events)
    small.dispose()


def rules_of(found: Audited) -> set[str]:
    """Rules that differ but for the guards, and the counts of calls that were left out of the small log."""
    return {each.rule for each in found.findings.shown if each.rule not in ("guard", "writer")}


def test_the_small_log_is_clean(copies: Copies) -> None:
    with copies("small", "sqlite") as database:
        assert rules_of(audit(database, finished=True)) == set()


@pytest.mark.parametrize(
    ("kind", "examples"), [("sqlite", 24), pytest.param("postgres", 6, marks=pytest.mark.postgres)]
)
def test_every_tampering_is_caught_and_named(copies: Copies, kind: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None)
    @given(data=st.data())
    def caught(data: st.DataObject) -> None:
        with copies("small", kind) as database:
            one_tampering(database, data)

    caught()


def one_tampering(database: Engine, data: st.DataObject) -> None:
    what = data.draw(st.sampled_from(sorted(TAMPERINGS)))
    tampering = TAMPERINGS[what]
    with read(database) as connection:
        calls = [call for rollout_id in KEPT for call in log.calls(connection, rollout_id) if tampering.fits(call)]
    call = data.draw(st.sampled_from(calls))
    with write(database) as connection:
        unguarded(connection)
        tampering.change(connection, call)
    found = audit(database, finished=True)
    assert rules_of(found) >= tampering.rules, (what, differences(found))
    named = [str(each) for each in found.findings.shown if each.rule in tampering.rules]
    assert any(str(call.call_id) in each or f"rollout {call.rollout_id}: the rollout" in each for each in named)


def test_guards_that_are_gone_are_named(played: Engine) -> None:
    with write(played) as connection:
        unguarded(connection)
    found = audit(played)
    assert found.findings.differences["guard"] >= len(schema.guards(played.dialect.name))
    assert {each.rule for each in found.findings.shown} == {"guard"}


def test_a_call_that_was_counted_and_never_came_leaves_a_hole_in_its_writers_count(
    database: Engine, chain_maker: Any
) -> None:
    calls = [chain_maker([(4, 2)], rollout_id=rollout_id)[0] for rollout_id in "abc"]
    with write(database) as connection:
        log.append(connection, [calls[0], calls[2]])
    assert any("no count 1" in each for each in differences(audit(database)))
    failing = CallAdmitted(
        call_id=calls[1].call_id,
        rollout_id="b",
        decision="root",
        reason="first_call",
        parent_id=None,
        worker="w",
        at=0,
    )
    with write(database) as connection:
        others = [failing.model_copy(update={"call_id": call.call_id, "rollout_id": call.rollout_id}) for call in calls]
        log.append(connection, others)
    assert not any("no count" in each for each in differences(audit(database))), "it may still come"
    with write(database) as connection:
        log.append(connection, [CallEnded(call_id=failing.call_id, rollout_id="b", state="failed", reason="x", at=1)])
    found = audit(database)
    assert not any("no count" in each for each in differences(found)), "it failed"
    assert found.findings.notes["writer_failures"] == 1


def test_a_repeated_count_is_named(database: Engine, chain_maker: Any) -> None:
    one, two = chain_maker([(4, 2)], rollout_id="a")[0], chain_maker([(4, 2)], rollout_id="b")[0]
    two = two.model_copy(update={"writer_seq": one.writer_seq})
    with write(database) as connection:
        log.append(connection, [one, two])
    assert any("count 0 twice" in each for each in differences(audit(database)))


@pytest.mark.parametrize(
    ("kind", "examples"), [("sqlite", 24), pytest.param("postgres", 8, marks=pytest.mark.postgres)]
)
def test_a_deleted_event_is_missed_whichever_it_is(copies: Copies, kind: str, examples: int) -> None:
    """Of any table, the last one too, while calls may be running."""

    @settings(max_examples=examples, deadline=None, database=None)
    @given(table=st.sampled_from([*schema.metadata.tables.values()]), data=st.data())
    def missed(table: Table, data: st.DataObject) -> None:
        with copies("small", kind) as database:
            with read(database) as connection:
                sequences = [*connection.scalars(select(table.c.sequence).order_by(table.c.sequence.desc()))]
            gone = data.draw(st.sampled_from(sequences))
            with write(database) as connection:
                unguarded(connection)
                connection.execute(table.delete().where(table.c.sequence == gone))
            found = audit(database)
            said = f"{table.name} {gone}: tally: stored no event, derived the one that was appended"
            assert [str(each) for each in found.findings.shown if each.rule == "tally"] == [said]

    missed()


@pytest.mark.parametrize("table", [*schema.metadata.tables])
def test_a_deleted_last_event_is_missed(copies: Copies, table: str) -> None:
    with copies("small", "sqlite") as database:
        assert audit(database).findings.differences["tally"] == 0
        with write(database) as connection:
            unguarded(connection)
            last = connection.scalar(text(f"select max(sequence) from {table}"))
            connection.execute(text(f"delete from {table} where sequence = {last}"))
        shown = CliRunner().invoke(app, ["audit", "--db", str(database.url)], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert shown.exit_code == 1
        assert f"{table} {last}: tally: stored no event" in shown.stdout


def test_a_line_of_the_tally_that_is_deleted_is_missed_too(played: Engine) -> None:
    with write(played) as connection:
        unguarded(connection)
        connection.execute(text("delete from tally where table_name = 'rollout_outcome'"))
    said = [each for each in differences(audit(played)) if ": tally: " in each]
    assert said
    assert all("stored an event, derived none, since it is not in the tally" in each for each in said)


def test_a_row_that_trained_and_is_not_what_it_was_is_named(played: Engine) -> None:
    with read(played) as connection:
        trained = connection.execute(text("select rollout_id, row_id from trained_row order by sequence")).first()
        assert trained is not None
        call = log.calls(connection, trained.rollout_id)[0]
    with write(played) as connection:
        unguarded(connection)
        with_logprob(connection, call)
    found = audit(played)
    assert {each.rule for each in found.findings.shown if each.rollout_id == trained.rollout_id} == {
        "digest",
        "trained_row",
    }


def test_declarations_that_are_not_true_are_named(database: Engine, chain_maker: Any) -> None:
    chain = chain_maker([(4, 2), (3, 2)])
    cut = chain_maker([(4, 2)])[0].model_copy(update={"reason": "item_edited"})
    scored = RolloutScored(
        outcome_id=uuid7(1, bytes(10)), rollout_id="r1", reward=1, declared_rewrites=({"at": 2}, {"at": 9}), at=1
    )
    with write(database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=0), *chain, cut, scored])
    said = [each for each in differences(audit(database)) if "declared_rewrite" in each]
    assert [
        part in each
        for part, each in zip(("its outcome", "declared by the harness", "not declared"), said, strict=True)
    ] == [True] * 3


def test_media_whose_bytes_changed_are_named(database: Engine, chain_maker: Any, tmp_path: Path) -> None:
    media = open_media(str(tmp_path / "media"), "sqlite:///none.db")
    address = media.put(b"pixels")
    gone = media.put(b"others")
    call = chain_maker([(4, 2)])[0]
    stored = [MediaStored.example().model_copy(update={"sha256": each}) for each in (address, gone)]
    shown = [
        MediaShown.example().model_copy(
            update={"sha256": each.sha256, "call_id": call.call_id, "rollout_id": "r1", "place": place}
        )
        for place, each in enumerate(stored)
    ]
    with write(database) as connection:
        log.append(connection, [*stored, *shown, call])
    (file,) = [path for path in (tmp_path / "media").rglob("*") if path.is_file() and path.read_bytes() == b"others"]
    file.write_bytes(b"swapped")
    found = audit(database, media=media)
    assert found.findings.checked["media"] == 2
    (said,) = [each for each in differences(found) if ": media: " in each]
    assert gone.hex() in said
    assert audit(database).findings.notes["media_not_checked"] == 2


def test_a_root_made_while_the_log_was_away_is_counted_and_not_guessed(database: Engine, chain_maker: Any) -> None:
    call = chain_maker([(4, 2)])[0].model_copy(update={"reason": "log_unavailable"})
    intent = CallAdmitted(
        call_id=call.call_id,
        rollout_id="r1",
        decision="root",
        reason="log_unavailable",
        parent_id=None,
        worker="w",
        at=0,
    )
    with write(database) as connection:
        log.append(connection, [RolloutOpened(rollout_id="r1", opened_at=0), intent, call])
    found = audit(database)
    assert (differences(found), found.findings.notes["log_unavailable"]) == ([], 1)


def as_root(database: Engine, tip: CallCompleted) -> CallCompleted:
    """The same call as a server would have logged it had it missed the parent: whole in itself, and its digest too."""
    with read(database) as connection:
        calls = {call.call_id: call for call in log.calls(connection, tip.rollout_id)}
        tokens = token_bytes(chain_tokens(connection, tip.call_id))
    whole = context(calls, tip.call_id).request
    echo = tip.evidence["echo"]
    return tip.model_copy(
        update={
            "parent_id": None,
            "root_id": tip.call_id,
            "depth": 0,
            "decision": "root",
            "reason": "context_replaced",
            "candidates": 0,
            "evidence": {"echo": echo},
            "prev_len": 0,
            "request_items": whole,
            "token_ids": tokens,
            "chain_hash": hashing.chain_hash(None, tokens),
        }
    )


def test_a_false_root_that_is_whole_in_itself_is_named(played: Engine) -> None:
    with read(played) as connection:
        calls = log.calls(connection, "codex")
        (intent,) = [each for each in log.intents(connection, "codex") if each.call_id == calls[-1].call_id]
    false = as_root(played, calls[-1])
    admitted = intent.model_copy(update={"decision": "root", "reason": false.reason, "parent_id": None})
    with write(played) as connection:
        unguarded(connection)
        for table, event in ((schema.model_call, false), (schema.call_intent, admitted)):
            row = row_of(event)
            values = {column.name: row[column.name] for column in table.c if column.name != "sequence"}
            connection.execute(table.update().where(table.c.call_id == event.call_id).values(values))
    found = audit(played)
    said = [each for each in found.findings.shown if each.rule not in ("guard", "trained_row")]
    assert [each.rule for each in said] == ["decision", "declared_rewrite"]  # Codex would have counted its window up
    assert f"derived continuation of {calls[-1].parent_id}, answer_echoed" in str(said[0])


def test_a_root_that_repeats_all_tokens_of_the_nearest_call_is_a_suspect(database: Engine, chain_maker: Any) -> None:
    one = chain_maker([(6, 4)])[0]
    two = chain_maker([(12, 3)])[0]
    tokens = one.token_ids + two.token_ids[len(one.token_ids) :]
    two = two.model_copy(
        update={
            "token_ids": tokens,
            "chain_hash": hashing.chain_hash(None, tokens),
            "evidence": {"nearest_call": str(one.call_id)},
            "reason": "item_edited",
        }
    )
    with write(database) as connection:
        log.append(connection, [one, two])
    found = audit(database)
    assert found.findings.notes["same_tokens"] == 1
    assert str(two.call_id) in found.findings.examples["same_tokens"][0]


def test_log_and_archive_are_audited_as_one(copies: Copies, tmp_path: Path) -> None:
    with copies("whole", "sqlite") as database:
        alone = audit(database, archive="")
        archive = open_archive(str(tmp_path / "archive"), new=True)
        seal(database, archive, before=2**62, name="a")
        with write(database) as connection:  # what is sealed leaves the log
            unguarded(connection)
            connection.execute(text("delete from model_call where rollout_id < 'm'"))
        both = audit(database, archive=str(tmp_path / "archive"))
        assert {each.rule for each in both.findings.shown} == {"guard"}
        assert both.events["call_completed"] == alone.events["call_completed"]
        assert both.findings.checked["decision"] == alone.findings.checked["decision"]
        (file,) = (tmp_path / "archive" / "model_call").rglob("*.parquet")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(ArchiveDamaged, match=r"holds other bytes than were sealed|cannot be read"):
            audit(database, archive=str(tmp_path / "archive"))


@pytest.mark.postgres
def test_what_left_with_its_partition_is_looked_for_in_the_archive(copies: Copies, tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    with copies("small", "postgres") as database:
        seal(database, open_archive(url, new=True), before=2**62, name="a")
        with read(database) as connection:
            period = partitions.time_of(log.calls(connection, KEPT[0])[0].call_id)
        with exclusively(database) as connection:
            assert not partitions.adopt(connection, period)
            name = next(
                each.name
                for each in partitions.listed(connection)
                if each.table == "model_call"
                and each.low is not None
                and connection.scalar(text(f"select count(*) from {each.name}"))
            )
            dropped = drop_archived(connection, open_archive(url), name)
            connection.commit()
        assert dropped.events > 50
        gone_is_archived(database, url)
        with write(database) as connection:
            unguarded(connection)
            last = connection.scalar(text("select max(sequence) from trained_row"))
            connection.execute(text(f"delete from rollout where rollout_id = '{KEPT[0]}'"))
            connection.execute(text(f"delete from trained_row where sequence = {last}"))
        assert rules_of(audit(database, archive=url)) == set(), "the archive has them"
        assert audit(database, archive="").findings.differences["tally"] == 2


def gone_is_archived(database: Engine, archive: str) -> None:
    """What left the log is no difference: with the archive it is there, and without it the tally says where it went."""
    both = audit(database, archive=archive)
    assert rules_of(both) == set()
    assert both.findings.notes["archived"] == 0
    alone = audit(database, archive="")
    assert alone.findings.differences["tally"] == 0
    assert alone.findings.notes["archived"] > 0


@pytest.mark.postgres
def test_so_is_what_left_with_the_default_partition(copies: Copies, postgres_database: Engine, tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    with exclusively(postgres_database) as connection:  # of an owner who made none ahead
        partitions.drop(connection, [each.name for each in partitions.listed(connection) if each.low is not None])
        connection.commit()
    with copies("small", "sqlite") as source:
        copy.copy(source, postgres_database)
    seal(postgres_database, open_archive(url, new=True), before=2**62, name="a")
    with exclusively(postgres_database) as connection:
        assert drop_archived(connection, open_archive(url), "model_call_default").events > 50
        connection.commit()
    with read(postgres_database) as connection:
        assert log.calls(connection, KEPT[0]) == []
    gone_is_archived(postgres_database, url)


def test_the_command_says_what_it_looked_at_and_how_fast(copies: Copies) -> None:
    with copies("whole", "sqlite") as database:
        url = database.url.render_as_string()
        shown = CliRunner().invoke(app, ["audit", "--db", url], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert shown.exit_code == 0
        assert "clean" in shown.stdout
        assert "tokens/s" in shown.stdout
        found = json.loads(CliRunner().invoke(app, ["audit", "--db", url, "--json"]).stdout)
        assert (found["clean"], found["differences"]) == (True, [])
        said = f"the same again: turnlog audit --position {found['position']} --db {url}"
        assert said in shown.stdout.replace("\n", "")
        again = CliRunner().invoke(app, ["audit", "--db", url, "--position", found["position"], "--finished"])
        assert again.exit_code == 1
        assert "open_call: stored no end" in again.stdout
