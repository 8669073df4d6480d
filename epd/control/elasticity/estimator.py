"""Estimates the load of a cluster from the metrics of its workers, both live and simulated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from epd.control.elasticity.cluster import (
    ClusterTraffic,
    StageNeed,
    StageSample,
    StageTraffic,
    WorkerSample,
    WorkerStanding,
    damped,
    divided,
)
from epd.control.elasticity.rates import StageCosts
from epd.control.recent import Arrivals, DecayedMean, RequestWork
from epd.profiles.cost import StageCost
from epd.topology import STAGES, Stage

# Answers are longer than the gaps between requests; their lengths are remembered longer by this factor.
_ANSWER_MEMORY = 3.0
_NUM_HALVES = 5  # after which a fading peak is forgotten
_LEAST_KV_USAGE = 0.05  # usage below which a worker does not show how many requests would fit
_NOTHING = StageSample()

# How far ahead utilisation is predicted, and after which time data has lost most of its weight.
_HORIZON_S, _MEMORY_S = 30.0, 20.0
# How long the peak of a demand is remembered in full, and how long a demand lasts to count as one.
_PEAK_S, _LASTING_S = 180.0, 60.0
# Share of a peak of any length that is no noise: 2.5 standard deviations of two arrivals a second.
_SURE_SHARE = 0.78
# Requests before a load counts as known.
_MIN_ARRIVALS = 5


class RateTrend:
    """Estimates events per second. memory_s: memory of the level; the trend remembers twice as long."""

    def __init__(self, memory_s: float) -> None:
        self.memory_s = memory_s
        self.rate = 0.0
        self.slope = 0.0  # of the rate, per second
        self._seen_s = 0.0

    @property
    def is_settled(self) -> bool:
        """Returns whether the rate has seen more time than it remembers."""
        return self._seen_s > self.memory_s

    def add(self, num_events: float, seconds: float) -> None:
        """Adds the number of events in an interval that has just ended; intervals of length 0 are ignored."""
        if seconds <= 0:
            return
        self._seen_s += seconds
        # At first the level is the plain mean, so that one early burst does not become a trend.
        weight = max(1 - math.exp(-seconds / self.memory_s), seconds / self._seen_s)
        old = self.rate
        expected = max(0.0, self.rate + self.slope * seconds)
        self.rate = expected + weight * (num_events / seconds - expected)
        if self.is_settled:
            trend_weight = 1 - math.exp(-seconds / (2 * self.memory_s))
            self.slope += trend_weight * ((self.rate - old) / seconds - self.slope)


class Peak:
    """Keeps the largest value of the last window_s that lasted: single looks are mostly noise.

    lasting_s: time over which the smallest value counts, once so much has been seen
    fades: older values count too, but half as much with each window_s
    """

    def __init__(self, window_s: float, lasting_s: float = 0.0, *, fades: bool = False) -> None:
        self._window_s = window_s
        self._lasting_s = lasting_s
        self._kept_s = (_NUM_HALVES + 1) * window_s if fades else window_s
        self._first_s: float | None = None
        self._now_s = 0.0
        self._rising: deque[tuple[float, float]] = deque()  # each is smaller than all that came after it
        self._falling: deque[tuple[float, float]] = deque()  # each is larger than all that came after it

    def add(self, now_s: float, value: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
        while self._rising and self._rising[-1][1] >= value:
            self._rising.pop()
        self._rising.append((now_s, value))
        while self._rising[0][0] < now_s - self._lasting_s:
            self._rising.popleft()
        self._now_s = now_s
        if now_s - self._first_s >= self._lasting_s:
            self._note(now_s, self._rising[0][1])

    def _note(self, now_s: float, value: float) -> None:
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now_s, value))
        while self._falling[0][0] < now_s - self._kept_s:
            self._falling.popleft()

    @property
    def value(self) -> float:
        """Returns the peak, 0 before the first value that lasted."""
        return max((value * self._weight(at_s) for at_s, value in self._falling), default=0.0)

    def _weight(self, at_s: float) -> float:
        return math.exp2(min(0.0, 1 - (self._now_s - at_s) / self._window_s))


class Traffic:
    """Counts every request and every end of an answer; `look` ends an interval."""

    def __init__(self, memory_s: float) -> None:
        """memory_s is the time after which data has lost most of its weight."""
        self.trend = RateTrend(memory_s)
        self.num_arrived = 0
        self._patches, self._prompt_tokens = DecayedMean(memory_s), DecayedMean(memory_s)
        self._media, self._max_tokens = DecayedMean(memory_s), DecayedMean(memory_s)
        self._expected_tokens = DecayedMean(memory_s)
        self._answers = DecayedMean(_ANSWER_MEMORY * memory_s)
        self._num_new = self._num_finished = 0
        self._looked_s: float | None = None
        self._arrived_s: float | None = None

    def arrived(self, now_s: float, work: RequestWork) -> None:
        self.num_arrived += 1
        self._num_new += 1
        if self._looked_s is None:
            self._looked_s = now_s
        elapsed_s = 0.0 if self._arrived_s is None else max(0.0, now_s - self._arrived_s)
        self._arrived_s = now_s
        self._media.add(bool(work.num_patches), 1, elapsed_s)
        self._patches.add(work.num_patches, bool(work.num_patches), elapsed_s)
        self._prompt_tokens.add(work.num_prompt_tokens, 1, elapsed_s)
        self._max_tokens.add(work.max_tokens, 1, elapsed_s)
        self._expected_tokens.add(work.expected_tokens or work.max_tokens, 1, elapsed_s)

    def finished(self) -> None:
        self._num_finished += 1

    def look(self, now_s: float, num_output_tokens: float) -> float:
        """Ends an interval in which that number of tokens was decoded and returns its length in seconds."""
        elapsed_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        self.trend.add(self._num_new, elapsed_s)
        self._answers.add(num_output_tokens, self._num_finished, elapsed_s)
        self._num_new = self._num_finished = 0
        return elapsed_s

    @property
    def media_share(self) -> float:
        """Returns the share of requests that bring media."""
        return self._media.value or 0.0

    @property
    def patches(self) -> float:
        """Returns the mean patches of a request that has media; 0 before the first."""
        return self._patches.value or 0.0

    @property
    def prompt_tokens(self) -> float:
        """Returns the mean prompt tokens of a request; 0 before the first."""
        return self._prompt_tokens.value or 0.0

    @property
    def output_tokens(self) -> float:
        """Returns the tokens that an answer still has to produce, however many it has.

        Answers are assumed to end at random: all generated tokens, unfinished answers included, are divided
        by the number that ended; at most the requests' limit. Before the first ends, their estimate counts.
        """
        learned = self._answers.value
        if learned is None:
            return max(1.0, self._expected_tokens.value or 1.0)
        return max(1.0, min(self._max_tokens.value or 1.0, learned))


class TrafficEstimator:
    """Estimates load: call `arrived` and `finished`, or `follow`, and `observe` every second or two."""

    def __init__(self, costs: Mapping[Stage, StageCost] | None = None) -> None:
        """costs holds prior costs of a round, by units; measurements replace them as they come."""
        self._traffic = Traffic(_MEMORY_S)
        self._costs = StageCosts(_MEMORY_S, costs or {})
        self._peaks = {stage: Peak(_PEAK_S) for stage in STAGES}
        self._lasting = {stage: Peak(_PEAK_S, _LASTING_S, fades=True) for stage in STAGES}
        self._short = {stage: Peak(_PEAK_S, fades=True) for stage in STAGES}
        self._last: dict[str, WorkerSample] = {}
        self._num_followed = self._num_ended = 0  # of arrivals and of ended answers, by `follow`

    def arrived(self, now_s: float, work: RequestWork) -> None:
        """Counts a request that has arrived and was not refused."""
        self._traffic.arrived(now_s, work)

    def finished(self, _now_s: float) -> None:
        """Counts an answer that has ended."""
        self._traffic.finished()

    def follow(self, now_s: float, arrivals: Arrivals) -> None:
        """Counts the requests and the ended answers that have come since the last call."""
        for at_s, work in arrivals.newest(arrivals.num_arrived - self._num_followed):
            self.arrived(at_s, work)
        for _ in range(arrivals.num_finished - self._num_ended):
            self.finished(now_s)
        self._num_followed, self._num_ended = arrivals.num_arrived, arrivals.num_finished

    def observe(
        self, now_s: float, workers: Sequence[WorkerSample], *, num_waiting: int = 0
    ) -> ClusterTraffic:
        """Returns the load now. workers: all live. num_waiting: requests without a worker yet.

        A worker whose totals have shrunk has restarted.
        """
        done = {stage: [self._done(worker, stage) for worker in workers] for stage in STAGES}
        for stage, samples in done.items():
            for sample in samples:
                self._costs.add(stage, sample)
        elapsed_s = self._traffic.look(now_s, sum(sample.done_units for sample in done["decode"]))
        self._last = {worker.name: worker for worker in workers}
        needs = self._needs(workers)
        self._note_peaks(now_s, needs)
        stages = {}
        known = {stage: needs.get(stage, StageNeed()) for stage in STAGES}
        num_workers = divided(
            (each.roles for each in workers),
            {stage: need.share * need.request_s for stage, need in known.items()},
        )
        for stage in STAGES:
            busy_s = sum(sample.busy_s for sample in done[stage])
            busy = busy_s / elapsed_s if elapsed_s else 0.0
            stages[stage] = self._stage(stage, workers, needs, num_workers[stage], busy)
        trend = self._traffic.trend
        return ClusterTraffic(
            now_s, trend.rate, trend.slope, trend.memory_s, num_waiting, stages,
            tuple(self._standing(worker, needs) for worker in workers),
            len(needs) == len(STAGES) and self._traffic.num_arrived >= _MIN_ARRIVALS,
        )  # fmt: skip

    def _note_peaks(self, now_s: float, needs: Mapping[Stage, StageNeed]) -> None:
        """Records peaks of the smoothed rate; early looks are mostly noise."""
        if self._traffic.trend.is_settled:
            for stage, need in needs.items():
                demand = self._traffic.trend.rate * need.share * need.request_s
                self._peaks[stage].add(now_s, demand)
                self._lasting[stage].add(now_s, demand)
                self._short[stage].add(now_s, demand)

    def _done(self, worker: WorkerSample, stage: Stage) -> StageSample:
        """Returns the work of the worker at a stage since the last look."""
        now = worker.stages.get(stage, _NOTHING)
        before = self._last.get(worker.name)
        old = before.stages.get(stage, _NOTHING) if before is not None else now
        if now.done_units < old.done_units or now.num_rounds < old.num_rounds or now.busy_s < old.busy_s:
            old = _NOTHING
        return StageSample(
            done_units=now.done_units - old.done_units,
            num_rounds=now.num_rounds - old.num_rounds,
            busy_s=now.busy_s - old.busy_s,
        )

    # From metrics to load

    def _needs(self, workers: Sequence[WorkerSample]) -> dict[Stage, StageNeed]:
        """Returns needs by stage, without stages that are not known yet."""
        traffic, line = self._traffic, self._costs.decode
        needs: dict[Stage, StageNeed | None] = {
            "encode": self._unit_need("encode", traffic.patches, traffic.media_share),
            "prefill": self._unit_need("prefill", traffic.prompt_tokens, 1.0),
            "decode": line and StageNeed(1.0, traffic.output_tokens, *line, _max_batch(workers)),
        }
        return {stage: need for stage, need in needs.items() if need is not None}

    def _unit_need(self, stage: Stage, units: float, share: float) -> StageNeed | None:
        if not units:
            return StageNeed()
        unit_s = self._costs.unit_s(stage, units)
        return None if unit_s is None else StageNeed(share, part_s=units * unit_s)

    def _stage(
        self,
        stage: Stage,
        workers: Sequence[WorkerSample],
        needs: Mapping[Stage, StageNeed],
        num_workers: float,
        busy: float,
    ) -> StageTraffic:
        """Returns the load of a stage. busy: mean number of workers at work on it since the last look."""
        need = needs.get(stage, StageNeed())
        num_requests, queued_s = self._queued(stage, workers, needs)
        trend = self._traffic.trend
        ahead = damped(trend.rate, trend.slope, trend.memory_s, _HORIZON_S)
        demand = ahead * need.share * need.request_s
        utilisation = min(_ratio(busy, num_workers), 1.0)
        peak = max(demand, self._peaks[stage].value)
        lasting = max(self._lasting[stage].value, _SURE_SHARE * self._short[stage].value)
        return StageTraffic(
            stage, need, num_workers, num_requests, queued_s, utilisation, demand, peak, lasting
        )

    def _queued(
        self, stage: Stage, workers: Sequence[WorkerSample], needs: Mapping[Stage, StageNeed]
    ) -> tuple[float, float]:
        """Returns the requests at a stage and their seconds of work."""
        samples = [worker.stages[stage] for worker in workers if stage in worker.stages]
        queued_s = sum(self._queued_s(stage, sample, needs) for sample in samples)
        if stage == "encode":
            # Encoders share requests: the remaining patches give their number.
            return _ratio(sum(sample.queued_units for sample in samples), self._traffic.patches), queued_s
        return float(sum(sample.num_requests for sample in samples)), queued_s

    def _queued_s(self, stage: Stage, sample: StageSample, needs: Mapping[Stage, StageNeed]) -> float:
        """Returns the seconds until a worker has finished its work at a stage."""
        if stage == "decode":
            need, num = needs.get(stage, StageNeed()), sample.num_requests
            return need.num_parts * (need.round_s + need.part_s * num) if num else 0.0
        traffic = self._traffic
        typical = traffic.patches if stage == "encode" else traffic.prompt_tokens
        return sample.queued_units * (self._costs.unit_s(stage, typical) or 0.0)

    def _standing(self, worker: WorkerSample, needs: Mapping[Stage, StageNeed]) -> WorkerStanding:
        return WorkerStanding(
            worker.name, worker.roles, worker.since_s,
            {stage: self._queued_s(stage, sample, needs) for stage, sample in worker.stages.items()},
            sum(sample.num_requests for sample in worker.stages.values()),
            worker.kv_usage, worker.is_switching,
        )  # fmt: skip


def _max_batch(workers: Sequence[WorkerSample]) -> float | None:
    """Returns the requests whose keys and values fit one decode worker, from the usage of busy ones."""
    decoders = [worker for worker in workers if worker.kv_usage is not None and "decode" in worker.stages]
    usage = sum(worker.kv_usage or 0.0 for worker in decoders)
    num_requests = sum(worker.stages["decode"].num_requests for worker in decoders)
    if not num_requests or usage < _LEAST_KV_USAGE * len(decoders):
        return None
    return max(1.0, num_requests / usage)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
