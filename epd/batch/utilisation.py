"""Samples how many lines are at work in each stage and are asked at once, in few samples, and plots it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from epd.picture import picture

_MAX_SAMPLES = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds a sample. busy_s: as `Backend` says it, up to time_s. num_in_flight: lines then."""

    time_s: float
    busy_s: Mapping[str, float]
    num_in_flight: int = 0


class Utilisation:
    """Keeps samples of the work in stages; when there are too many, every second one is dropped."""

    def __init__(self, max_samples: int = _MAX_SAMPLES) -> None:
        self.samples: list[Sample] = []
        self._max_samples = max_samples
        self._least_gap_s = 0.0
        self._warm: Sample | None = None

    def add(self, time_s: float, busy_s: Mapping[str, float], num_in_flight: int = 0) -> None:
        """Adds a sample, unless the last is more recent than the gap between those that are kept."""
        if self.samples and time_s - self.samples[-1].time_s < self._least_gap_s:
            return
        self.samples.append(Sample(time_s, dict(busy_s), num_in_flight))
        if len(self.samples) > self._max_samples:
            del self.samples[1::2]
            span_s = self.samples[-1].time_s - self.samples[0].time_s
            self._least_gap_s = span_s / len(self.samples)

    def mark_warm(self, time_s: float, busy_s: Mapping[str, float]) -> None:
        """Leaves out all time before the first call."""
        self._warm = self._warm or Sample(time_s, dict(busy_s))

    def shares(self, time_s: float, busy_s: Mapping[str, float]) -> dict[str, float]:
        """Returns the mean of lines at work in each stage since the run was warm; empty before."""
        return {} if self._warm is None else _shares(self._warm, Sample(time_s, busy_s))

    def recent(self, time_s: float, busy_s: Mapping[str, float], window_s: float = 5.0) -> dict[str, float]:
        """Returns the mean of the last seconds."""
        before = [sample for sample in self.samples if sample.time_s <= time_s - window_s]
        start = before[-1] if before else next(iter(self.samples), None)
        return {} if start is None else _shares(start, Sample(time_s, busy_s))

    def steps(self) -> list[tuple[float, dict[str, float]]]:
        """Returns (time, shares) for each gap between samples, by the time at its end."""
        pairs = zip(self.samples, self.samples[1:], strict=False)
        return [(after.time_s, _shares(before, after)) for before, after in pairs]


def _shares(before: Sample, after: Sample) -> dict[str, float]:
    span_s = after.time_s - before.time_s
    if span_s <= 0:
        return {}
    return {name: (busy_s - before.busy_s.get(name, 0.0)) / span_s for name, busy_s in after.busy_s.items()}


def plot_utilisation(utilisation: Utilisation, path: Path) -> None:
    """Draws the lines at work in each stage, means of stretches of time, and below them those in flight."""
    with picture(path, 10, 6) as figure:
        axes, below = figure.subplots(2, 1, sharex=True)
        steps = utilisation.steps()
        start_s = utilisation.samples[0].time_s if utilisation.samples else 0.0
        names = list(dict.fromkeys(name for _, shares in steps for name in shares))
        times_s = [time_s - start_s for time_s, _ in steps]
        for name in names:
            axes.plot(times_s, [shares.get(name, 0.0) for _, shares in steps], label=name)
        samples = utilisation.samples
        below.step(
            [sample.time_s - start_s for sample in samples],
            [sample.num_in_flight for sample in samples],
            where="post",
        )
        axes.set(ylabel="lines at work", ylim=(0, None))
        below.set(xlabel="s", ylabel="lines in flight", ylim=(0, None))
        for each in (axes, below):
            each.grid(alpha=0.3)
        if names:
            axes.legend()
