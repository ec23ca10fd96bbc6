"""W3C trace context, if OpenTelemetry is installed (`pip install longshore[otel]`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = None  # type: ignore[assignment,unused-ignore]


def outgoing_headers() -> dict[str, str]:
    """The `traceparent` header of the current span, if there is one."""
    if trace is None:
        return {}
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    value = carrier.get("traceparent")
    return {"traceparent": value} if value else {}


def is_active() -> bool:
    return trace is not None


@contextmanager
def span(kind: str, job_id: str, attempt: int, traceparent: str | None) -> Iterator[Any]:
    """A span for one attempt, as a child of the span that enqueued the job."""
    if trace is None:
        yield None
        return
    parent = propagate.extract({"traceparent": traceparent}) if traceparent else None
    tracer = trace.get_tracer("longshore")
    attributes: dict[str, Any] = {"longshore.job_id": job_id, "longshore.kind": kind, "longshore.attempt": attempt}
    with tracer.start_as_current_span(
        f"run {kind}", context=parent, kind=trace.SpanKind.CONSUMER, attributes=attributes
    ) as current:
        yield current
