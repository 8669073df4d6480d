"""Reports a simulation in numbers: for people as tables, for machines as one record."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from epd.simulate.records import SimulationResult
from epd.workload.metrics import SLO, Latency

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
    """Returns the record that `--json` prints. Seconds."""
    duration_s = float(result.rows["end"].max()) / 1e12
    good = result.attainment(slo)
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
        "goodput_per_s": good * len(result.rows) / duration_s,
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
    console.print(
        f"{record['num_requests']} requests in {record['duration_s']:.1f} s simulated; "
        f"{record['num_refused']} refused, {record['num_preempted']} times one gave way; "
        f"{record['slo_attainment']:.1%} kept the objectives, {record['goodput_per_s']:.3g} a second"
    )
    if result.rows["cached_tokens"].any():
        share = record["num_cached_tokens"] / record["num_prompt_tokens"]
        console.print(
            f"caches had {share:.0%} of the prompts' tokens; {record['num_groups_encoded']} of "
            f"{record['num_groups']} groups of media were encoded"
        )
    for switch in record["switches"]:
        console.print(f"at {switch['at_s']:.1f} s {switch['worker']} became {switch['roles']}")
