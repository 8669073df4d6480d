"""Sends traces to an OpenTelemetry collector: a span per request, with a child per stage and group.

The exporter, a separate package, is imported only if an endpoint is configured. Attributes follow
OpenTelemetry's semantic conventions for generative AI where these define names; others begin with `epd.`.
"""

from __future__ import annotations

import importlib

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epd.errors import RequestError
from serve_app.observability.record import RequestTrace
from serve_app.service import StageSpan

_NS_PER_S = 1_000_000_000
_TRACES_PATH = "/v1/traces"
_PACKAGE = "opentelemetry-exporter-otlp-proto-http"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


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


def otlp_export(endpoint: str) -> OtelExport:
    """Returns an export to the OTLP/HTTP collector at a base URL, as in http://localhost:4318.

    Raises RequestError if the required packages are not installed.
    """
    try:
        module = importlib.import_module(_EXPORTER)
    except ImportError as error:
        raise RequestError(
            f"received the trace endpoint {endpoint}; allowed with the package {_PACKAGE}, which is "
            f"not installed ({error.name} is missing); install it, or use --trace-dir"
        ) from error
    url = endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
    return OtelExport(module.OTLPSpanExporter(endpoint=url))


def _attributes(span: StageSpan) -> dict[str, str | int]:
    place = {"epd.worker": span.worker, "epd.item": span.item, "epd.group": span.group}
    return {name: value for name, value in place.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * _NS_PER_S)
