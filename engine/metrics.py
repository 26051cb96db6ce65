"""What a server counts for Prometheus: decisions, splices, tokens, commits, and what is under way.

Knows events, and the metrics that vLLM's own `/metrics` shows; does not know HTTP, vLLM or how events are appended.
Law: events are counted when they are durable, so that SQL counts the same; no rollout, call, task or secret is ever a
label, and what a harness or a template put into a reason is not either.

Nothing is asked while the metrics are read: several API processes of one server keep their numbers in files then, which
vLLM's endpoint adds up.

>>> label("cannot_splice:template:jinja is not happy"), label("hosted_item:web_search"), label("item_edited")
('cannot_splice:template', 'hosted_item', 'item_edited')
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, get_args
from uuid import UUID

from store.events import CallAdmitted, CallCompleted, CallEnded, Event
from store.writer import Missed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_COMMIT_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_GROUP_EVENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CANDIDATES = (0, 1, 2, 3, 5, 10, 20)


class Metrics:
    """What a writer is watched for, as metrics of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._decisions = Counter(
            "turnlog_decisions", "Calls admitted, by decision and reason.", ["decision", "reason"], registry=registry
        )
        self._candidates = Histogram(
            "turnlog_candidates",
            "Earlier calls that a request's summary hashes found.",
            buckets=_CANDIDATES,
            registry=registry,
        )
        self._splices = Counter(
            "turnlog_splices", "Continuations, by how their suffix was rendered.", ["path"], registry=registry
        )
        self._calls = Counter(
            "turnlog_calls", "Calls that ended, by what became of them.", ["state"], registry=registry
        )
        tokens = Counter(
            "turnlog_tokens",
            "Tokens of completed calls: carried over from the parent, or stored as interstitial or sampled.",
            ["kind"],
            registry=registry,
        )
        self._pending = Gauge(
            "turnlog_pending_calls", "Calls admitted and not ended yet.", multiprocess_mode="livesum", registry=registry
        )
        self._commit_seconds = Histogram(
            "turnlog_commit_seconds", "What a transaction took.", buckets=_COMMIT_SECONDS, registry=registry
        )
        self._commit_events = Histogram(
            "turnlog_commit_events", "Events that a transaction appended.", buckets=_GROUP_EVENTS, registry=registry
        )
        self._queue = Gauge(
            "turnlog_queue_depth",
            "Submissions that waited for the next commit when the last one was done.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._missed = Counter(
            "turnlog_log_missed",
            "While the log was away: commits tried again, submissions spooled, drained and failed.",
            ["what"],
            registry=registry,
        )
        self._open: set[UUID] = set()
        # Series that are there from the start read as 0 where nothing happened yet, and rates of them are right.
        self._carried, self._interstitial, self._sampled = map(tokens.labels, ("carried", "interstitial", "sampled"))
        for state in ("completed", "failed", "refused", "abandoned", "lost"):
            self._calls.labels(state)
        for path in ("marker", "full"):
            self._splices.labels(path)
        for what in get_args(Missed):
            self._missed.labels(what)

    def durable(self, events: Sequence[Event]) -> None:
        """Count events that are in the log, or in the spool."""
        for event in events:
            if isinstance(event, CallAdmitted):
                self._decisions.labels(event.decision, label(event.reason)).inc()
                self._open.add(event.call_id)
            elif isinstance(event, CallCompleted):
                self._calls.labels("completed").inc()
                self._candidates.observe(event.candidates)
                if isinstance(path := event.evidence.get("path"), str):
                    self._splices.labels(path).inc()
                self._carried.inc(event.prev_len)
                self._interstitial.inc(event.prompt_len - event.prev_len)
                self._sampled.inc(event.sampled_len)
                self._open.discard(event.call_id)
            elif isinstance(event, CallEnded):
                self._calls.labels(event.state).inc()
                self._open.discard(event.call_id)
        self._pending.set(len(self._open))

    def committed(self, seconds: float, events: int, waiting: int) -> None:
        """Count a transaction."""
        self._commit_seconds.observe(seconds)
        self._commit_events.observe(events)
        self._queue.set(waiting)

    def missed(self, what: Missed, times: int) -> None:
        """Count what happened while the log was away."""
        self._missed.labels(what).inc(times)


@cache
def of_process() -> Metrics:
    """The metrics that vLLM's `/metrics` shows: those of prometheus_client's default registry, made once."""
    from prometheus_client import REGISTRY

    return Metrics(REGISTRY)


def label(reason: str) -> str:
    """A reason without what a template or a harness put into it."""
    head, _, why = reason.partition(":")
    return f"{head}:{why.partition(':')[0]}" if head == "cannot_splice" else head
