"""Exports Prometheus metrics: of finished requests, measured by the HTTP server, and of the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd.serve_app.observability.record import AMOUNTS, RequestRecord, seconds_by_stage
from epd.serve_app.service_status import RetentionStatus, ServiceStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ServerMetrics:
    """Counts finished requests. Each app has its own registry."""

    def __init__(self, front: str = "") -> None:
        """Starts at zero. front: the label of all samples, where other fronts have the same address."""
        self._front = front
        self._registry = registry = CollectorRegistry()
        self._workers = _Workers(own_counters=frozenset(each.metric for each in AMOUNTS))
        registry.register(self._workers)
        self._requests = Counter(
            "epd_requests", "Finished requests.", ["status", "stream"], registry=registry
        )
        self._errors = Counter(
            "epd_request_errors", "Failed requests by error.", ["error"], registry=registry
        )
        self._client_requests = Counter(
            "epd_client_requests",
            "Finished requests of a name in the file of keys.",
            ["client", "status"],
            registry=registry,
        )
        self._client_tokens = Counter(
            "epd_client_tokens", "Tokens of these, of prompts and answers.", ["client"], registry=registry
        )
        self.in_flight = Gauge("epd_requests_in_flight", "Requests in flight.", registry=registry)
        self._ttft_s = Histogram(
            "epd_time_to_first_token_seconds",
            "Time to first token, from arrival.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._tpot_s = Histogram(
            "epd_time_per_output_token_seconds",
            "Mean time per output token of a request, after its first.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._total_s = Histogram(
            "epd_request_seconds",
            "Request duration, from arrival to end.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._stage_s = _by_stage("epd_stage_seconds", "Time a stage worked on a request.", registry)
        self._queued_s = _by_stage("epd_stage_queue_seconds", "Time a request waited for a stage.", registry)
        self._amounts = {
            each: Counter(f"epd_{each.metric}", f"{each.help}, of finished requests.", registry=registry)
            for each in AMOUNTS
        }

    def observe(self, record: RequestRecord) -> None:
        """Counts a finished request."""
        self._requests.labels(str(record.status), str(record.is_stream).lower()).inc()
        if record.client:
            self._client_requests.labels(record.client, str(record.status)).inc()
            self._client_tokens.labels(record.client).inc(record.num_tokens)
        if record.error:
            self._errors.labels(record.error).inc()
        if record.status != HTTPStatus.OK or record.end is None:
            return
        self._total_s.observe(record.total_s)
        if record.ttft_s is not None:
            self._ttft_s.observe(record.ttft_s)
        if record.tpot_s is not None:
            self._tpot_s.observe(record.tpot_s)
        for histograms, timings in ((self._stage_s, record.end.timings), (self._queued_s, record.end.queued)):
            for stage, seconds in seconds_by_stage(timings).items():
                histograms[stage].observe(seconds)
        for amount, counter in self._amounts.items():
            counter.inc(amount.value(record.end))

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a gauge that calls `value` at every scrape."""
        Gauge(f"epd_{name}", text, registry=self._registry).set_function(value)

    def render(self, status: ServiceStatus) -> bytes:
        """Returns the text that Prometheus scrapes."""
        self._workers.status = status
        return generate_latest(_OfFront(self._registry, self._front) if self._front else self._registry)


class _OfFront(Collector):
    """Shows what a registry has with the label `front`."""

    def __init__(self, registry: CollectorRegistry, front: str) -> None:
        self._registry = registry
        self._label = {"front": front}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [each._replace(labels={**self._label, **each.labels}) for each in metric.samples]
            yield metric


def _by_stage(name: str, text: str, registry: CollectorRegistry) -> _ByStage:
    return _ByStage(Histogram(name, text, ["stage"], buckets=_SECONDS, registry=registry))


class _ByStage(dict[str, Histogram]):
    """Holds the histogram of each stage from its first observation on: finding it by its label takes long."""

    def __init__(self, whole: Histogram) -> None:
        self._whole = whole

    def __missing__(self, stage: str) -> Histogram:
        self[stage] = self._whole.labels(stage)
        return self[stage]


# Counted by workers and the orchestrator, see `ServiceStatus.counters`; other counters are exported too.
SERVICE_COUNTERS = {
    "computed_tokens": "Tokens computed by the language model.",
    "encode_batches": "Encoder forward passes.",
    "encode_fallbacks": "Times that a worker that prefills began to encode, since no other did.",
    "encoded_groups": "Encoded groups of frames and images.",
    "encoded_patches": "Patches of encoded groups, including those of skipped units.",
    "encoder_cache_hits": "Groups whose embeddings were in the encoder cache.",
    "encoder_cache_misses": "Groups whose embeddings were not in the encoder cache.",
    "generated_tokens": "Sampled tokens, including those discarded by retries.",
    "preemptions": "Requests preempted: their KV blocks were freed and computed again.",
    "prefix_cached_tokens": "Prompt tokens whose keys and values were in the prefix cache.",
    "redirects": "Prompts sent to another decode worker after theirs was lost.",
    "refused": "Requests refused because workers had no capacity in time.",
    "retries": "Request attempts aborted because a worker was lost.",
    "store_failures": "Pieces in cache_dir that were damaged or gone.",
    "store_left_tokens": "Tokens kept in cache_dir that were quicker to compute than to read.",
    "store_read_bytes": "Bytes read from cache_dir.",
    "store_read_objects_bytes": "Bytes of them that were read from cache_objects.",
    "store_read_embeddings": "Embeddings read from cache_dir.",
    "store_read_tokens": "Prompt tokens whose keys and values were read from cache_dir.",
    "store_written_bytes": "Bytes written to cache_dir.",
    "store_written_objects_bytes": "Bytes written to cache_objects.",
    "units_skipped": "Video units not encoded because they equal the unit before.",
    "workers_lost": "Workers lost: died or hung.",
    "spec_decode_num_drafts": "Drafts: passes in which tokens were drafted for a request.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "stalls": "Request attempts ended because they made no progress.",
    "event_failures": "Worker reports that could not be processed because of a bug.",
    "loop_failures": "Background loops of the service that failed and were restarted.",
}


class _Workers(Collector):
    """Exports the last status of the service as metrics. own_counters: names that other metrics use."""

    def __init__(self, own_counters: frozenset[str]) -> None:
        self._own_counters = own_counters
        self.status = ServiceStatus(is_ready=False, topology="")

    def collect(self) -> Iterator[Metric]:
        workers = self.status.workers
        yield GaugeMetricFamily(
            "epd_ready", "1 if every role has a worker.", value=float(self.status.is_ready)
        )
        topology = GaugeMetricFamily(
            "epd_topology_info", "The topology, as in 2e1p1d; always 1.", labels=["topology"]
        )
        topology.add_metric([self.status.topology], 1)
        yield topology
        yield self._gauge("up", "1 if the worker is alive.", [float(worker.is_alive) for worker in workers])
        yield self._gauge(
            "waiting", "Requests or groups waiting at the worker.", [worker.num_waiting for worker in workers]
        )
        yield self._gauge(
            "running", "Requests or groups running at the worker.", [worker.num_running for worker in workers]
        )
        yield self._gauge("kv_usage", "Share of KV blocks in use.", [worker.kv_usage for worker in workers])
        yield self._gauge(
            "encoder_cache_usage",
            "Share of the encoder cache in use.",
            [worker.encoder_cache_usage for worker in workers],
        )
        switches = CounterMetricFamily(
            "epd_role_switches", "Role changes of the worker since it started.", labels=["worker"]
        )
        for worker in workers:
            switches.add_metric([worker.name], worker.num_role_switches)
        yield switches
        yield from _switch_metrics(self.status)
        yield from _retention_metrics(self.status.retention)
        waiting = "Requests waiting to be placed on a worker."
        yield GaugeMetricFamily("epd_queue_length", waiting, value=self.status.num_waiting)
        for name, total in self.status.counters.items():
            if name not in self._own_counters:
                text = SERVICE_COUNTERS.get(name, "Counted by the service.")
                yield CounterMetricFamily(f"epd_{name}", text, value=total)

    def _gauge(self, name: str, text: str, values: list[float | None] | list[float] | list[int]) -> Metric:
        gauge = GaugeMetricFamily(f"epd_worker_{name}", text, labels=["worker", "roles"])
        for worker, value in zip(self.status.workers, values, strict=True):
            if value is not None:
                gauge.add_metric([worker.name, worker.roles], value)
        return gauge


def _retention_metrics(retention: RetentionStatus | None) -> Iterator[Metric]:
    """Yields metrics of retention, none if it does not follow the load."""
    if retention is not None:
        level = "Share of the visual tokens kept at the current load."
        yield GaugeMetricFamily("epd_retention_level", level, value=retention.level)
        yield CounterMetricFamily(
            "epd_retention_changes", "Changes of the retention level.", value=retention.num_changes
        )


def _switch_metrics(status: ServiceStatus) -> Iterator[Metric]:
    """Yields metrics of role changes by kind, and of the time of their phases."""
    total = CounterMetricFamily(
        "epd_role_switch", "Role changes by kind, as in e->p.", labels=["kind", "outcome"]
    )
    seconds = CounterMetricFamily(
        "epd_role_switch_seconds", "Time of successful role changes, by phase.", labels=["kind", "phase"]
    )
    for each in status.switch_totals:
        total.add_metric([each.kind, "done"], each.num_done)
        total.add_metric([each.kind, "rolled_back"], each.num_failed)
        for phase in ("offload", "migrate", "onload", "announce"):
            seconds.add_metric([each.kind, phase], getattr(each, f"{phase}_s"))
    yield total
    yield seconds
