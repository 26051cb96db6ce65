"""Spans, in a process of its own: a provider can be set once, and is there before the first request."""

import json
import subprocess
import sys

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
