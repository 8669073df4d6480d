"""Plots the latencies of a benchmark: their distributions, and TTFT over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.bench.bench import BenchResult
from epd.picture import picture
from epd.workload.metrics import ClientRecord

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
