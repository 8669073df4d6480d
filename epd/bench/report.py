"""Reports a benchmark: a table or a plot of latencies for people, one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from epd.bench.bench import BenchPlan, BenchResult
from epd.picture import picture
from epd.workload.metrics import SLO, ClientRecord, Latency, Ratio, RunReport

DEFINITIONS = {
    "ttft_s": "from sending a request to the first event that carries text",
    "itl_s": "gaps between such events; an event may carry several tokens",
    "tpot_s": "(E2E - TTFT) / (completion tokens - 1), one number per request; the server counts tokens",
    "e2e_s": "from sending a request to the end of its stream",
    "lateness_s": "from when a request was due to when it was sent, waiting for a place in flight included",
    "percentile": "linear between the two nearest ranks (Hyndman and Fan's type 7)",
    "slo_attainment": "share of all requests, failed ones included, that met every limit",
    "goodput_per_s": "requests per second that met every limit",
    "duration_s": "from the start of a round to its last answer; of several rounds, the sum",
    "ratio": "median over rounds of (figure of the endpoint / figure of the first endpoint)",
}
_LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "E2E": "e2e", "lateness": "lateness"}


def result_record(result: BenchResult, workload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all results as JSON values, without keys and passwords. workload: its resolved description."""
    plan = result.plan
    endpoints = {
        endpoint.name: {
            "url": endpoint.shown_url,
            "model": endpoint.model,
            "pooled": _report_record(result.pooled(place)),
            "kinds": {kind: _report_record(result.pooled(place, kind)) for kind in result.kinds()},
            "rounds": [_report_record(report) for report in result.reports(place)],
        }
        for place, endpoint in enumerate(plan.endpoints)
    }
    return {
        "workload": dict(workload),
        "seed": plan.seed,
        "rounds": plan.rounds,
        "warmup": plan.warmup,
        "max_in_flight": plan.max_in_flight,
        "timeout_s": plan.timeout_s,
        "slo": asdict(plan.slo),
        "definitions": DEFINITIONS,
        "endpoints": endpoints,
        "ratios": [asdict(ratio) for ratio in result.ratios()],
        "ratios_by_kind": {kind: list(map(asdict, result.ratios(kind))) for kind in result.kinds()},
        "requests": [
            {"endpoint": plan.endpoints[run.place].name, "round": run.round_index, **asdict(request)}
            for run in result.runs
            for request in run.records
        ],
    }


def _report_record(report: RunReport) -> dict[str, Any]:
    derived = {
        "requests_per_s": report.requests_per_s,
        "tokens_per_s": report.tokens_per_s,
        "is_late": report.is_late,
    }
    return {**asdict(report), **derived}


def print_result(result: BenchResult, console: Console) -> None:
    """Prints the tables: latencies, also by kind of requests, totals, and ratios of several endpoints."""
    console.print(_headline(result.plan))
    console.print()
    endpoints = [endpoint.name for endpoint in result.plan.endpoints]
    reports = {name: result.pooled(place) for place, name in enumerate(endpoints)}
    console.print(_latency_table(reports))
    console.print()
    if kinds := result.kinds():
        each = product(enumerate(endpoints), kinds)
        of_kinds = {f"{name}, {kind}": result.pooled(place, kind) for (place, name), kind in each}
        console.print(_latency_table(of_kinds))
        console.print()
    console.print(_totals_table(reports, has_slo=result.plan.slo != SLO()))
    if len(endpoints) > 1:
        console.print()
        console.print(_ratio_table(result.ratios()))
        for kind in kinds:
            console.print()
            console.print(_ratio_table(result.ratios(kind), kind))
    for name, report in reports.items():
        for line in _remarks(name, report, result):
            console.print(line)


def _headline(plan: BenchPlan) -> str:
    loop = "open loop" if plan.workload.is_open_loop else f"closed loop, {plan.max_in_flight} in flight"
    rounds = f"{plan.rounds} round{'s' * (plan.rounds > 1)}"
    return f"{plan.workload.name}: {loop}, {rounds}, seed {plan.seed}; percentiles linear between ranks"


def _latency_table(reports: Mapping[str, RunReport]) -> Table:
    has_clock = any(report.lateness for report in reports.values())
    shown = {label: name for label, name in _LATENCIES.items() if has_clock or name != "lateness"}
    table = Table("endpoint", "ms", box=None, pad_edge=False)
    for column in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right")
    for endpoint, report in reports.items():
        for label, name in shown.items():
            table.add_row(endpoint, label, *_milliseconds(getattr(report, name)))
    return table


def _milliseconds(latency: Latency | None) -> list[str]:
    if latency is None:
        return ["-"] * 6
    values_s = (latency.mean_s, latency.p50_s, latency.p90_s, latency.p95_s, latency.p99_s, latency.max_s)
    return [f"{value_s * 1000:.1f}" for value_s in values_s]


def _totals_table(reports: Mapping[str, RunReport], *, has_slo: bool) -> Table:
    table = Table("endpoint", box=None, pad_edge=False)
    for column in ("requests", "ok", "req/s", "tok/s", "tok in", "tok out", "SLO met", "good/s"):
        table.add_column(column, justify="right")
    table.add_column("errors")
    for name, report in reports.items():
        errors = ", ".join(f"{kind}: {num}" for kind, num in report.errors.items())
        table.add_row(
            name,
            str(report.num_requests),
            str(report.num_ok),
            f"{report.requests_per_s:.2f}",
            f"{report.tokens_per_s:.1f}",
            str(report.prompt_tokens),
            str(report.completion_tokens),
            f"{report.slo_attainment:.1%}" if has_slo else "-",
            f"{report.goodput_per_s:.2f}" if has_slo else "-",
            errors or "none",
        )
    return table


def _ratio_table(ratios: Sequence[Ratio], kind: str = "") -> Table:
    table = Table(f"ratio, {kind}" if kind else "ratio", "of", box=None, pad_edge=False)
    for column in ("median", "least", "most", "rounds"):
        table.add_column(column, justify="right")
    for ratio in ratios:
        spread = (f"{ratio.median:.3f}", f"{ratio.low:.3f}", f"{ratio.high:.3f}")
        table.add_row(f"{ratio.name} / {ratio.baseline}", ratio.figure, *spread, str(ratio.num_rounds))
    return table


def _remarks(name: str, report: RunReport, result: BenchResult) -> list[str]:
    """Returns caveats that a reader must know before believing the figures."""
    lines = []
    if report.is_late and report.lateness:
        lines.append(
            f"{name}: the generator was late (95th percentile {report.lateness.p95_s * 1000:.0f} ms): "
            "this was not the requested traffic"
        )
    if report.num_waited:
        lines.append(
            f"{name}: {report.num_waited} requests waited because {result.plan.max_in_flight} were in "
            "flight; raise --max-in-flight or lower the rate"
        )
    if report.num_ok and not report.completion_tokens:
        lines.append(f"{name}: the server does not count tokens, so there is no TPOT")
    return lines


def dump_json(record: Mapping[str, Any]) -> str:
    """Returns one JSON text."""
    return json.dumps(record, ensure_ascii=False, indent=1) + "\n"


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_result(result: BenchResult, path: Path) -> None:
    """Writes one picture: three distributions, and TTFT by the time of sending."""
    with picture(path, 11, 8) as figure:
        axes = figure.subplots(2, 2)
        slo = result.plan.slo
        _plot_shares(axes[0][0], result, "TTFT", lambda record: record.ttft_s, slo.ttft_s)
        _plot_shares(axes[0][1], result, "TPOT", lambda record: record.tpot_s, slo.tpot_s)
        _plot_shares(axes[1][0], result, "E2E", lambda record: record.e2e_s, slo.e2e_s)
        _plot_over_time(axes[1][1], result)


def _plot_shares(
    axes: Axes,
    result: BenchResult,
    label: str,
    value_of: Callable[[ClientRecord], float | None],
    limit_s: float | None,
) -> None:
    """Plots the share of answered requests that took at most the time on the x axis."""
    for place, endpoint in enumerate(result.plan.endpoints):
        values_s = sorted(_values(result.records(place), value_of))
        shares = [(index + 1) / len(values_s) for index in range(len(values_s))]
        axes.step(values_s, shares, where="post", label=endpoint.name)
    if limit_s is not None:
        axes.axvline(limit_s, color="black", linestyle=":", label="SLO")
    axes.set(xlabel=f"{label}, s", ylabel="share of requests", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()


def _values(
    runs: Sequence[Sequence[ClientRecord]], value_of: Callable[[ClientRecord], float | None]
) -> list[float]:
    values: list[Any] = [value_of(record) for run in runs for record in run]
    return [value for value in values if value is not None]


def _plot_over_time(axes: Axes, result: BenchResult) -> None:
    """Plots the TTFT of every answer at the time it was sent; crosses are failures."""
    for place, endpoint in enumerate(result.plan.endpoints):
        records = [record for run in result.records(place) for record in run]
        answered = [record for record in records if record.ttft_s is not None]
        failed = [record.sent_s for record in records if not record.is_ok]
        dots = axes.scatter(
            [record.sent_s for record in answered],
            [record.ttft_s or 0.0 for record in answered],
            s=10,
            label=endpoint.name,
        )
        axes.scatter(failed, [0.0] * len(failed), marker="x", color=dots.get_facecolor()[0])
    axes.set(xlabel="sent, s from the start of its round", ylabel="TTFT, s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
