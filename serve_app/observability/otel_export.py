"""Sends traces to an OpenTelemetry collector: a span per request, with a child per stage and group.

Imported only where an endpoint is configured: OpenTelemetry's SDK and exporter are packages that a server
without one does not need. Attributes follow OpenTelemetry's semantic conventions for generative AI where
these define names; others begin with `epd.`.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epd.serve_app.observability.record import RequestTrace
from epd.serve_app.service import StageSpan

_NS_PER_S = 1_000_000_000


class OtelExport:
    """Passes spans to an exporter in batches, in the background; OTEL_TRACES_SAMPLER selects requests."""

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "epd"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("epd")

    def write(self, trace: RequestTrace) -> None:
        parent = TraceContextTextMapPropagator().extract({"traceparent": trace.traceparent})
        root = self._tracer.start_span(
            "chat_completion",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=trace.attributes,
            start_time=_ns(trace.start_s),
        )
        if trace.first_token_s is not None:
            root.add_event("first token", timestamp=_ns(trace.first_token_s))
        if trace.error:
            root.set_status(Status(StatusCode.ERROR, trace.error))
        below = set_span_in_context(root)
        for span in trace.spans:
            child = self._tracer.start_span(
                span.stage, context=below, attributes=_attributes(span), start_time=_ns(span.start_s)
            )
            child.end(_ns(span.stop_s))
        root.end(_ns(trace.stop_s))

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()


def _attributes(span: StageSpan) -> dict[str, str | int]:
    place = {"epd.worker": span.worker, "epd.item": span.item, "epd.group": span.group}
    return {name: value for name, value in place.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * _NS_PER_S)
