"""Spans, in a process of its own, for a provider can be set once; and those that the real server sends a collector."""

import json
import subprocess
import sys
import time
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE = "0af7651916cd43dd8448eb211c80319c"
SCRIPT = """
import asyncio, json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
if sys.argv[1] == "records":
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

from engine import tracing
from engine.decide import Root
from engine.journal import Journal
from engine.splice import CannotSplice, Suffix
from store import migrate
from store.database import open_database
from store.events import RolloutOpened

database = open_database("sqlite:///" + sys.argv[2])
migrate.upgrade(database)
journal = Journal(database, worker="w")

class Worker:
    @tracing.traced("turnlog.decide", tracing.decided)
    async def decide(self):
        return Root(reason="cannot_splice:template:secret words", candidates=2)

    @tracing.traced("turnlog.splice", tracing.spliced)
    async def splice(self, found):
        return found

    @tracing.traced("turnlog.fails")
    async def fail(self):
        raise ValueError("secret words")

async def serve():
    with tracing.request([(b"traceparent", b"00-%s-b7ad6b7169203331-01")]):
        await Worker().decide()
        await Worker().splice(Suffix(token_ids=[1, 2], path="marker"))
        await Worker().splice(CannotSplice(why="open_answer"))
        await journal.append([RolloutOpened(rollout_id="r1", opened_at=1)])
        try:
            await Worker().fail()
        except ValueError:
            pass

asyncio.run(serve())
journal.close()
print(json.dumps([json.loads(span.to_json()) for span in exporter.get_finished_spans()]))
""".replace("%s", TRACE)


def spans(mode: str, file: object) -> list[dict[str, object]]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def test_each_step_is_a_span_of_the_requests_trace_and_tells_no_text(tmp_path: object) -> None:
    found = spans("records", f"{tmp_path}/turnlog.db")
    assert [(span["name"], span["attributes"]) for span in found] == [
        (
            "turnlog.decide",
            {"turnlog.decision": "root", "turnlog.reason": "cannot_splice:template", "turnlog.candidates": 2},
        ),
        ("turnlog.splice", {"turnlog.path": "marker", "turnlog.suffix_tokens": 2}),
        ("turnlog.splice", {"turnlog.path": "none"}),
        ("turnlog.commit", {}),
        ("turnlog.fails", {"error.type": "ValueError"}),
    ]
    assert {span["context"]["trace_id"] for span in found} == {f"0x{TRACE}"}  # type: ignore[index]
    assert "secret" not in json.dumps(found)


def test_without_a_provider_there_are_none(tmp_path: object) -> None:
    assert spans("does not", f"{tmp_path}/turnlog.db") == []


def sent(server: Any, rollout: str, *, calls: int) -> list[dict[str, Span]]:
    """The spans of each call of a rollout by name, once they have all come; the second commit is `committed`."""
    tops: list[Span] = []
    below: list[list[Span]] = []
    for _ in range(300):
        messages = [ExportTraceServiceRequest.FromString(message) for message in [*server.collector.messages]]
        spans = [
            span
            for message in messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        tops = [
            span for span in spans if span.name == "turnlog.call" and span.attributes[0].value.string_value == rollout
        ]
        below = [[span for span in spans if span.parent_span_id == top.span_id] for top in tops]
        if len(tops) == calls and all(any(span.name == "llm_request" for span in each) for each in below):
            break
        time.sleep(0.1)
    found = []
    for top, each in sorted(zip(tops, below, strict=True), key=lambda pair: pair[0].start_time_unix_nano):
        by_name: dict[str, Span] = {"turnlog.call": top}
        for span in sorted(each, key=lambda span: span.start_time_unix_nano):
            by_name["committed" if span.name in by_name else span.name] = span
        found.append(by_name)
    return found


def test_a_call_of_a_real_server_is_one_tree_of_its_spans_and_the_servers(server: Any) -> None:
    url = f"{server.address}/rollouts/traced/v1/chat/completions"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    for headers in ({}, {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}):
        body = {"model": server.worker, "messages": messages, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(url, json=body, headers=headers, timeout=60).json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on"}]
    first, second = sent(server, "traced", calls=2)
    assert set(first) == {"turnlog.call", "turnlog.decide", "turnlog.commit", "llm_request", "committed"}
    assert set(second) == {*first, "turnlog.splice"}
    assert {span.trace_id for span in first.values()} == {first["turnlog.call"].trace_id}
    assert {span.trace_id.hex() for span in second.values()} == {TRACE}
    assert (first["turnlog.call"].parent_span_id, second["turnlog.call"].parent_span_id.hex()) == (
        b"",
        "b7ad6b7169203331",
    )
    for spans in (first, second):
        order = ["turnlog.call", "turnlog.decide", "turnlog.splice", "turnlog.commit", "committed"]
        starts = [spans[name].start_time_unix_nano for name in order if name in spans]
        assert starts == sorted(starts)
        assert spans["turnlog.call"].end_time_unix_nano >= spans["committed"].end_time_unix_nano
