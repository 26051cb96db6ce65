"""Spans of what turnlog does in a request, for OpenTelemetry: the call, and in it decision, splice and commit.

Knows OpenTelemetry's interface, where it is installed; does not know what is traced, who exports spans, or vLLM. Law:
without a provider that records (vLLM sets one up with `--otlp-traces-endpoint`) nothing is made and nothing imported
but once; a span never holds text, tokens or a secret.

A call is one tree: it belongs to the trace that the request's `traceparent` header names, or begins one, and the server
behind it is told so by that header, so that its own spans of the request stand beside turnlog's.

>>> class Door:
...     @traced("turnlog.open", lambda found: {"width": found})
...     async def open(self) -> int:
...         return 90
>>> import asyncio
>>> asyncio.run(Door().open())
90
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Never, Protocol, TypeVar, cast

from engine.metrics import label

_Method = TypeVar("_Method", bound=Callable[..., Awaitable[object]])
Attributes = Mapping[str, str | int]
Headers = Sequence[tuple[bytes, bytes]]


class Decided(Protocol):
    """A decision, as far as a span tells of it."""

    @property
    def reason(self) -> str:
        """Why it is a root or a continuation."""
        ...

    @property
    def candidates(self) -> int:
        """Earlier calls that were found."""
        ...


def decided(decision: Decided) -> Attributes:
    """What a span tells of a decision."""
    return {
        "turnlog.decision": type(decision).__name__.lower(),
        "turnlog.reason": label(decision.reason),
        "turnlog.candidates": decision.candidates,
    }


def spliced(found: object) -> Attributes:
    """What a span tells of a suffix: how it was rendered, or that none could be."""
    token_ids = getattr(found, "token_ids", None)
    if token_ids is None:
        return {"turnlog.path": "none"}
    return {"turnlog.path": str(getattr(found, "path", "")), "turnlog.suffix_tokens": len(token_ids)}


def traced(name: str, said: Callable[[Never], Attributes] | None = None) -> Callable[[_Method], _Method]:
    """Put a span around a coroutine method; `said` tells attributes of what it returns."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        async def run(*arguments: object, **options: object) -> object:
            tracer = _tracer()
            if tracer is None:
                return await method(*arguments, **options)
            # An error is told by its kind alone: its message may quote what a harness sent.
            with tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as span:
                try:
                    result = await method(*arguments, **options)
                except Exception as error:
                    span.set_attribute("error.type", type(error).__name__)
                    raise
                if said is not None:
                    span.set_attributes(cast("Callable[[object], Attributes]", said)(result))
                return result

        return cast("_Method", run)

    return wrap


@contextmanager
def request(headers: Headers) -> Generator[None]:
    """Let the spans made inside belong to the trace that a request's headers name."""
    if _tracer() is None:
        yield
        return
    from opentelemetry import context

    token = context.attach(_named_by(headers))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def call(headers: Headers, rollout_id: str) -> Generator[Headers]:
    """A span of a whole call; the value is the request's headers, by which the spans of who reads them belong to it."""
    tracer = _tracer()
    if tracer is None:
        yield headers
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    with tracer.start_as_current_span(
        "turnlog.call",
        context=_named_by(headers),
        kind=SpanKind.SERVER,
        attributes={"turnlog.rollout_id": rollout_id},
        record_exception=False,
        set_status_on_exception=False,
    ):
        ours: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(ours)  # the only headers that vLLM reads
        told = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in ours.items()]
        yield [*((name, value) for name, value in headers if name.decode("latin-1").lower() not in ours), *told]


def _named_by(headers: Headers) -> Any:
    """The context of the trace that the headers name; an empty one where they name none."""
    from opentelemetry.propagate import extract

    return extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers})


@functools.cache
def _tracer() -> Any:
    """The process's tracer; None where nobody records. Asked once, for providers are set up before requests come."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider.get_tracer("turnlog") if isinstance(provider, TracerProvider) else None
