"""Prometheus metrics of the HTTP front: what it measured itself, and what the service says of its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.observability.record import RequestRecord, seconds_by_stage
from serve_app.service import RetentionStatus, ServiceStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class FrontMetrics:
    """Counts finished requests. One for each app: no registry is shared."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._workers = _Workers(own_counters=frozenset(_AMOUNTS))
        registry.register(self._workers)
        self._requests = Counter(
            "epd_requests", "Finished requests.", ["status", "stream"], registry=registry
        )
        self._errors = Counter(
            "epd_request_errors", "Finished requests by what went wrong.", ["error"], registry=registry
        )
        self.in_flight = Gauge("epd_requests_in_flight", "Requests being answered.", registry=registry)
        self._ttft_s = Histogram(
            "epd_time_to_first_token_seconds", "From arrival.", buckets=_SECONDS, registry=registry
        )
        self._tpot_s = Histogram(
            "epd_time_per_output_token_seconds",
            "Mean of a request.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._total_s = Histogram(
            "epd_request_seconds", "Arrival to end.", buckets=_SECONDS, registry=registry
        )
        self._stage_s = Histogram(
            "epd_stage_seconds", "Service time of a request.", ["stage"], buckets=_SECONDS, registry=registry
        )
        self._queued_s = Histogram(
            "epd_stage_queue_seconds", "Waiting of a request.", ["stage"], buckets=_SECONDS, registry=registry
        )
        self._amounts = {
            name: Counter(f"epd_{name}", f"{text}, of finished requests.", registry=registry)
            for name, text in _AMOUNTS.items()
        }

    def observe(self, record: RequestRecord) -> None:
        """Adds a finished request."""
        self._requests.labels(str(record.status), str(record.is_stream).lower()).inc()
        if record.error:
            self._errors.labels(record.error).inc()
        if record.status != HTTPStatus.OK or record.end is None:
            return
        self._total_s.observe(record.total_s)
        if record.ttft_s is not None:
            self._ttft_s.observe(record.ttft_s)
        if record.tpot_s is not None:
            self._tpot_s.observe(record.tpot_s)
        for histogram, timings in ((self._stage_s, record.end.timings), (self._queued_s, record.end.queued)):
            for stage, seconds in seconds_by_stage(timings).items():
                histogram.labels(stage).observe(seconds)
        for name, amount in _amounts_of(record).items():
            self._amounts[name].inc(amount)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge, asked for its value whenever it is shown."""
        Gauge(f"epd_{name}", text, registry=self._registry).set_function(value)

    def render(self, status: ServiceStatus) -> bytes:
        """The text that Prometheus scrapes."""
        self._workers.status = status
        return generate_latest(self._registry)


_AMOUNTS = {
    "frames": "Frames looked at",
    "substituted_frames": "Frames that could not be decoded and showed a neighbour",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that were not computed again",
    "completion_tokens": "Tokens of answers",
    "visual_tokens": "Visual tokens in prompts",
    "visual_tokens_dropped": "Visual tokens dropped by reduction",
    "request_retries": "Pieces of work that were done again elsewhere",
}
# What workers and the orchestrator count, see `ServiceStatus.counters`; others are shown as well.
SERVICE_COUNTERS = {
    "computed_tokens": "Tokens that went through the language model.",
    "encode_batches": "Passes through the encoder.",
    "encoded_groups": "Groups of frames and images that were encoded.",
    "encoded_patches": "Patches of those, also where a unit was skipped.",
    "encoder_cache_hits": "Groups whose embeddings were there already.",
    "encoder_cache_misses": "Groups whose embeddings were not there.",
    "generated_tokens": "Tokens that were sampled, those that nobody got too.",
    "preemptions": "Requests that gave their KV blocks back and were computed again.",
    "prefix_cached_tokens": "Tokens of prompts whose keys and values were there already.",
    "refused": "Requests that found no room in time.",
    "retries": "Tries of requests that were lost with a worker.",
    "units_skipped": "Units of videos that were not encoded, since they did not change.",
    "workers_lost": "Workers that died or hung.",
    "stalls": "Attempts at requests of which nothing came any more, and which were ended.",
    "event_failures": "Reports of workers that a bug kept from being taken.",
    "loop_failures": "Failures of loops that the service needs, which were started again.",
}


def _amounts_of(record: RequestRecord) -> dict[str, int]:
    end = record.end
    if end is None:
        return {}
    return {
        "frames": end.usage.num_frames,
        "substituted_frames": end.usage.num_substituted_frames,
        "prompt_tokens": end.usage.prompt_tokens,
        "cached_tokens": end.cached_tokens,
        "completion_tokens": end.usage.completion_tokens,
        "visual_tokens": end.usage.visual_tokens,
        "visual_tokens_dropped": end.usage.visual_tokens_before - end.usage.visual_tokens,
        "request_retries": end.num_retries,
    }


class _Workers(Collector):
    """The last status of the service as metrics. own_counters: names it may not use, the front has them."""

    def __init__(self, own_counters: frozenset[str]) -> None:
        self._own_counters = own_counters
        self.status = ServiceStatus(is_ready=False, topology="")

    def collect(self) -> Iterator[Metric]:
        workers = self.status.workers
        yield GaugeMetricFamily("epd_ready", "Every role has a worker.", value=float(self.status.is_ready))
        topology = GaugeMetricFamily("epd_topology_info", "As in 2e1p1d; always 1.", labels=["topology"])
        topology.add_metric([self.status.topology], 1)
        yield topology
        yield self._gauge("up", "The worker lives.", [float(worker.is_alive) for worker in workers])
        yield self._gauge("waiting", "Work queued at it.", [worker.num_waiting for worker in workers])
        yield self._gauge("running", "Work it does.", [worker.num_running for worker in workers])
        yield self._gauge("kv_usage", "Share of KV blocks in use.", [worker.kv_usage for worker in workers])
        yield self._gauge(
            "encoder_cache_usage",
            "Share of its encoder cache in use.",
            [worker.encoder_cache_usage for worker in workers],
        )
        switches = CounterMetricFamily("epd_role_switches", "Since it started.", labels=["worker"])
        for worker in workers:
            switches.add_metric([worker.name], worker.num_role_switches)
        yield switches
        yield from _switch_metrics(self.status)
        yield from _retention_metrics(self.status.retention)
        waiting = "Requests that no worker has taken yet."
        yield GaugeMetricFamily("epd_queue_length", waiting, value=self.status.num_waiting)
        for name, total in self.status.counters.items():
            if name not in self._own_counters:
                text = SERVICE_COUNTERS.get(name, "Told by the service.")
                yield CounterMetricFamily(f"epd_{name}", text, value=total)

    def _gauge(self, name: str, text: str, values: list[float | None] | list[float] | list[int]) -> Metric:
        gauge = GaugeMetricFamily(f"epd_worker_{name}", text, labels=["worker", "roles"])
        for worker, value in zip(self.status.workers, values, strict=True):
            if value is not None:
                gauge.add_metric([worker.name, worker.roles], value)
        return gauge


def _retention_metrics(retention: RetentionStatus | None) -> Iterator[Metric]:
    """Nothing where it does not follow the load."""
    if retention is not None:
        level = "Share of the visual tokens that the load allows."
        yield GaugeMetricFamily("epd_retention_level", level, value=retention.level)
        yield CounterMetricFamily("epd_retention_changes", "Of that level.", value=retention.num_changes)


def _switch_metrics(status: ServiceStatus) -> Iterator[Metric]:
    """Changes of roles by kind, and where their time went."""
    total = CounterMetricFamily(
        "epd_role_switch", "Changes of roles by kind, as in e->p.", labels=["kind", "outcome"]
    )
    seconds = CounterMetricFamily(
        "epd_role_switch_seconds", "Of changes of roles that worked.", labels=["kind", "phase"]
    )
    for each in status.switch_totals:
        total.add_metric([each.kind, "done"], each.num_done)
        total.add_metric([each.kind, "rolled_back"], each.num_failed)
        for phase in ("offload", "migrate", "onload", "announce"):
            seconds.add_metric([each.kind, phase], getattr(each, f"{phase}_s"))
    yield total
    yield seconds
