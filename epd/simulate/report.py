"""Reports a simulation: as tables for people, one record for machines, a plot, or a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from epd.picture import picture
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.records import SimulationResult
from epd.workload.chrome_trace import Event, complete, dumps, named
from epd.workload.metrics import SLO, Latency

_TICKS_PER_US = 10**6
_SPANS = (
    ("wait", "due", "placed"),
    ("read media", "placed", "media_read"),
    ("encode", "media_read", "encoded"),
    ("prefill", "encoded", "first_token"),
    ("decode", "first_token", "end"),
)
_STAGES = (
    ("wait for room", "due", "placed"),
    ("read media", "placed", "media_read"),
    ("encode, rest", "media_read", "encoded"),
    ("prefill, rest", "encoded", "first_token"),
    ("hand-over", "first_token", "adopted"),
)


def latencies(result: SimulationResult) -> dict[str, Latency | None]:
    """Returns TTFT, TPOT and E2E, and the stages that make up TTFT, which follow one another."""
    figures = {"TTFT": result.ttft_s, "TPOT": result.tpot_s, "E2E": result.e2e_s}
    figures |= {name: result.seconds(start, stop) for name, start, stop in _STAGES}
    return {name: Latency.of(map(float, values)) for name, values in figures.items()}


def result_record(result: SimulationResult, slo: SLO) -> dict[str, Any]:
    """Returns the record that `--json` prints. Seconds; without an objective no share keeps it."""
    duration_s = float(result.rows["end"].max()) / 1e12
    good = None if slo.is_empty else result.attainment(slo)
    return {
        "num_requests": len(result.rows),
        "num_refused": int(result.rows["is_refused"].sum()),
        "num_preempted": result.num_preempted,
        "num_prompt_tokens": int(result.rows["prompt_tokens"].sum()),
        "num_cached_tokens": int(result.rows["cached_tokens"].sum()),
        "num_groups": result.num_groups,
        "num_groups_encoded": result.num_encoded,
        "duration_s": duration_s,
        "slo_attainment": good,
        "goodput_per_s": None if good is None else good * len(result.rows) / duration_s,
        "latencies": {
            name: {"mean_s": each.mean_s, "p50_s": each.p50_s, "p90_s": each.p90_s, "p99_s": each.p99_s}
            for name, each in latencies(result).items()
            if each is not None
        },
        "switches": [
            {"at_s": at_s, "worker": worker, "roles": roles} for at_s, worker, roles in result.switches
        ],
    }


def print_result(result: SimulationResult, slo: SLO, console: Console) -> None:
    table = Table("seconds", box=None, pad_edge=False)
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, each in latencies(result).items():
        if each is not None:
            values = (each.mean_s, each.p50_s, each.p90_s, each.p99_s)
            table.add_row(name, *(f"{value:.4g}" for value in values))
    console.print(table)
    record = result_record(result, slo)
    kept = "no objective is given, so none is kept or missed"
    if record["slo_attainment"] is not None:
        kept = f"{record['slo_attainment']:.1%} kept the objectives, {record['goodput_per_s']:.3g} a second"
    console.print(
        f"{record['num_requests']} requests in {record['duration_s']:.1f} s simulated; "
        f"{record['num_refused']} refused, {record['num_preempted']} times one gave way; {kept}"
    )
    if result.rows["cached_tokens"].any():
        share = record["num_cached_tokens"] / record["num_prompt_tokens"]
        console.print(
            f"caches had {share:.0%} of the prompts' tokens; {record['num_groups_encoded']} of "
            f"{record['num_groups']} groups of media were encoded"
        )
    for switch in record["switches"]:
        console.print(f"at {switch['at_s']:.1f} s {switch['worker']} became {switch['roles']}")


def plot_simulation(result: SimulationResult, path: Path) -> None:
    """Writes one picture: the distributions of TTFT and TPOT, and TTFT over time."""
    with picture(path, 16.5, 4.2) as figure:
        axes = figure.subplots(1, 3)
        for axis, name, values in ((axes[0], "TTFT", result.ttft_s), (axes[1], "TPOT", result.tpot_s)):
            shares = np.arange(1, len(values) + 1) / max(1, len(values))
            axis.step(np.sort(values), shares, where="post")
            axis.set(xlabel=f"{name}, s", ylabel="share of requests")
        rows = result.rows[~result.rows["is_refused"]]
        axes[2].plot(rows["due"] / TICKS_PER_S, (rows["first_token"] - rows["due"]) / TICKS_PER_S, ".")
        axes[2].set(xlabel="arrival, s", ylabel="TTFT, s")


def chrome_trace(result: SimulationResult) -> str:
    """Returns JSON. Process 1: a row for each worker. Process 2: a row for each request, by stage."""
    return dumps([*_worker_events(result), *_request_events(result)])


def _worker_events(result: SimulationResult) -> Iterator[Event]:
    rows = {name: row for row, name in enumerate(dict.fromkeys(span.worker for span in result.spans))}
    for name, row in rows.items():
        yield named("thread_name", row, name)
    for span in result.spans:
        yield complete(span.name, rows[span.worker], span.start / _TICKS_PER_US, span.ticks / _TICKS_PER_US)


def _request_events(result: SimulationResult) -> Iterator[Event]:
    for row in result.rows:
        for name, start, stop in _SPANS:
            if 0 <= row[start] < row[stop]:
                start_us = int(row[start]) / _TICKS_PER_US
                duration_us = int(row[stop] - row[start]) / _TICKS_PER_US
                yield complete(name, int(row["index"]), start_us, duration_us, process=2)
