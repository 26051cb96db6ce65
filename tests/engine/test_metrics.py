"""What is counted for Prometheus, against what SQL counts in the log that was written meanwhile."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, text

from engine.metrics import Metrics, label
from store.database import read
from store.errors import EventConflict
from store.events import CallAdmitted, CallCompleted, CallEnded, Event
from store.writer import Writer

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "turnlog.json"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(shown: str) -> Samples:
    """turnlog's own numbers in a scrape, by name and labels; not when a series began."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
        if sample.name.startswith("turnlog_") and not sample.name.endswith("_created")
    }


def one(found: Samples, name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


def of_log(database: Engine) -> Samples:
    """The same numbers, as the log has them."""
    found = Counter[tuple[str, frozenset[tuple[str, str]]]]()

    def add(name: str, number: float, **labels: str) -> None:
        found[name, frozenset(labels.items())] += number  # type: ignore[assignment]

    with read(database) as connection:
        for decision, reason, number in connection.execute(
            text("select decision, reason, count(*) from call_intent group by decision, reason")
        ):
            add("turnlog_decisions_total", number, decision=decision, reason=label(reason))
        for state, number in connection.execute(text("select state, count(*) from call_end group by state")):
            add("turnlog_calls_total", number, state=state)
        calls = connection.execute(
            text("select count(*), sum(prev_len), sum(prompt_len - prev_len), sum(sampled_len) from model_call")
        ).one()
        add("turnlog_calls_total", calls[0], state="completed")
        for kind, number in zip(("carried", "interstitial", "sampled"), calls[1:], strict=True):
            add("turnlog_tokens_total", float(number or 0), kind=kind)
        for candidates, number in connection.execute(
            text("select candidates, count(*) from model_call group by candidates")
        ):
            add("turnlog_candidates_sum", candidates * number)
            add("turnlog_candidates_count", number)
        for (evidence,) in connection.execute(text("select evidence from model_call")):
            if isinstance(path := json.loads(evidence).get("path"), str):
                add("turnlog_splices_total", 1, path=path)
    return dict(found)


def intent_of(call: CallCompleted) -> CallAdmitted:
    return CallAdmitted(
        call_id=call.call_id,
        rollout_id=call.rollout_id,
        decision=call.decision,
        reason=call.reason,
        parent_id=call.parent_id,
        worker="w",
        at=call.started_at,
    )


def admitted(call_id: UUID) -> CallAdmitted:
    return CallAdmitted(
        call_id=call_id, rollout_id="secret-rollout", decision="root", reason="cannot_splice:template:no such thing",
        parent_id=None, worker="w", at=1,
    )  # fmt: skip


def ended(call_id: UUID, state: Any) -> CallEnded:
    return CallEnded(call_id=call_id, rollout_id="secret-rollout", state=state, reason="so it was", at=2)


def test_what_is_counted_is_what_the_log_holds(database: Engine, chain_maker: Any) -> None:
    registry = CollectorRegistry()
    calls = [*chain_maker([(20, 10), (8, 5), (6, 4)]), *chain_maker([(9, 0)], rollout_id="r2")]
    calls = [call.model_copy(update={"evidence": {"path": "marker"}}) if call.parent_id else call for call in calls]
    left = [uuid4() for _ in range(4)]
    with Writer(database, watcher=Metrics(registry)) as writer:
        for call in calls:
            writer.submit([intent_of(call)]).result()
            writer.submit([call]).result()
        writer.submit([admitted(call_id) for call_id in left[:3]]).result()
        writer.submit([ended(left[0], "failed"), ended(left[1], "abandoned")]).result()
        writer.submit([ended(left[3], "refused")]).result()  # one that was never admitted
        commits = writer.counters.commits
    found = samples(generate_latest(registry).decode())
    expected = of_log(database)
    assert len(expected) > 10
    assert {key: found.get(key, 0.0) for key in expected} == expected
    assert one(found, "turnlog_decisions_total", decision="root", reason="cannot_splice:template") == 3
    assert one(found, "turnlog_tokens_total", kind="carried") == 30 + 43
    assert one(found, "turnlog_pending_calls") == 1
    assert one(found, "turnlog_commit_seconds_count") == one(found, "turnlog_commit_events_count") == commits
    assert one(found, "turnlog_commit_events_sum") == 2 * len(calls) + 6
    assert one(found, "turnlog_queue_depth") == 0


def test_no_label_says_which_rollout_or_what_a_harness_wrote(sqlite_database: Engine, chain_maker: Any) -> None:
    registry = CollectorRegistry()
    call = chain_maker([(20, 10)], rollout_id="secret-rollout")[0]
    with Writer(sqlite_database, watcher=Metrics(registry)) as writer:
        writer.submit([intent_of(call), call, admitted(left := uuid4()), ended(left, "failed")]).result()
    shown = generate_latest(registry).decode()
    values = {value for _, labels in samples(shown) for _, value in labels}
    assert "secret" not in shown
    assert "no such thing" not in shown
    assert "so it was" not in shown
    assert all(re.fullmatch(r"[a-z_]+(:[a-z_]+)?|[0-9.]+|\+Inf", value) for value in values), values


def test_a_submission_that_fails_is_counted_as_such_and_nothing_else(sqlite_database: Engine, chain_maker: Any) -> None:
    registry = CollectorRegistry()
    call = chain_maker([(20, 10)])[0]
    with Writer(sqlite_database, watcher=Metrics(registry)) as writer:
        writer.submit([call]).result()
        with pytest.raises(EventConflict):
            writer.submit([call.model_copy(update={"model": "another"})]).result()
    found = samples(generate_latest(registry).decode())
    assert one(found, "turnlog_log_missed_total", what="failed") == 1
    assert one(found, "turnlog_calls_total", state="completed") == 1


def test_counting_that_breaks_costs_no_event(
    sqlite_database: Engine, chain_maker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Metrics):
        def durable(self, events: Sequence[Event]) -> None:
            raise RuntimeError("out of numbers")

    calls = chain_maker([(20, 10), (8, 5)])
    with Writer(sqlite_database, watcher=Broken(CollectorRegistry())) as writer:
        for call in calls:
            writer.submit([call]).result()
    assert of_log(sqlite_database)["turnlog_calls_total", frozenset({("state", "completed")})] == 2
    assert "out of numbers" in caplog.text


def test_several_processes_of_one_server_add_up(tmp_path: Path) -> None:
    counts = (
        "import sys; from engine.metrics import of_process; from store.events import CallCompleted; "
        "found = of_process(); found.durable([CallCompleted.example()] * int(sys.argv[1])); "
        "found.committed(0.1, 3, 2)"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", counts, number], env=environment) for number in ("2", "3")]
    assert [process.wait(60) for process in both] == [0, 0]
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))  # as vLLM's endpoint does for several servers
    found = samples(generate_latest(registry).decode())
    assert one(found, "turnlog_calls_total", state="completed") == 5
    assert one(found, "turnlog_tokens_total", kind="sampled") == 10
    assert one(found, "turnlog_commit_seconds_count") == 2


def test_what_the_servers_own_endpoint_shows_is_what_sql_counts(server: Any) -> None:
    address = server.address

    def both() -> tuple[Samples, Samples]:
        """What the endpoint and the log say, once nothing is under way."""
        for _ in range(100):
            before = of_log(server.database)
            found = samples(httpx.get(f"{address}/metrics", timeout=60).raise_for_status().text)
            if one(found, "turnlog_pending_calls") == 0 and before == of_log(server.database):
                return found, before
            time.sleep(0.1)
        raise AssertionError(found)

    def ask(messages: list[dict[str, str]], **fields: Any) -> httpx.Response:
        body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
        body["chat_template_kwargs"] = {"enable_thinking": False}
        return httpx.post(f"{address}/rollouts/metrics/v1/chat/completions", json=body, timeout=120)

    shown, logged = both()
    said = [{"role": "user", "content": "Count the files."}]
    for text_ in ("And now?", "Once more."):
        answer = ask(said).raise_for_status().json()["choices"][0]["message"]["content"] or ""
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": text_}]
    ask([{"role": "user", "content": "Something else."}], n=2, temperature=1).raise_for_status()
    assert ask([{"role": "user", "content": "word " * 20_000}]).status_code == 400
    shown_then, logged_then = both()
    grown = {key: number - logged.get(key, 0.0) for key, number in logged_then.items()}
    grown = {key: number for key, number in grown.items() if number}
    assert {key: shown_then[key] - shown.get(key, 0.0) for key in grown} == grown
    assert grown["turnlog_calls_total", frozenset({("state", "completed")})] == 4
    assert grown["turnlog_calls_total", frozenset({("state", "refused")})] == 1
    assert one(shown_then, "turnlog_commit_seconds_count") > one(shown, "turnlog_commit_seconds_count")


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.committed(0.1, 1, 0)
    metrics.durable([CallCompleted.example(), intent_of(CallCompleted.example())])
    known = {name for name, _ in samples(generate_latest(registry).decode())}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    named = {name for query in asked for name in re.findall(r"\bturnlog_\w+", query)}
    assert len(asked) > 8
    assert named <= known
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known} <= {
        re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named
    }, "a metric that no panel shows"
