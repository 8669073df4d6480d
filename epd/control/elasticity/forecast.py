"""Forecasts a load over the next seconds, with the present workers or with others: a fluid model.

    arrivals --share--> encode --> prefill --> decode -->
             ------- text ------^

Requests flow like water. A worker of the first two stages serves one after another; answers share a worker,
which gets slower with their number. The cost is the time that all requests together spend in the system: by
Little's law the mean latency times the number of arrivals. Requests count to their end, past the horizon too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd.control.elasticity.cluster import ClusterTraffic, StageNeed
from epd.topology import Stage

_NUM_STEPS = 30
# Usable share of a worker's time, before random arrivals make queues: a fluid has no randomness.
USABLE = 0.85


@dataclass(frozen=True, slots=True)
class Phase:
    """Sets the capacity, workers by stage, until `until_s` from now."""

    until_s: float
    capacity: Mapping[Stage, float]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Holds a forecast.

    spent_s: time that all requests together spend, to the end of those that came in the horizon
    most_waiting: requests at a stage beyond one per worker, at the worst moment
    """

    spent_s: float
    most_waiting: Mapping[Stage, float]


@dataclass(slots=True)
class _Line:
    """Models a stage that serves one request after another."""

    num_requests: float
    work_s: float

    def take(self, num_requests: float, need: StageNeed) -> None:
        self.num_requests += num_requests
        self.work_s += num_requests * need.request_s

    def serve(self, num_workers: float, step_s: float) -> float:
        """Returns the number of requests that finish."""
        at_work = min(num_workers * USABLE, self.num_requests)
        if self.work_s <= at_work * step_s:
            done, self.num_requests, self.work_s = self.num_requests, 0.0, 0.0
            return done
        share = at_work * step_s / self.work_s
        done = share * self.num_requests
        self.num_requests -= done
        self.work_s -= at_work * step_s
        return done

    def left_s(self, num_workers: float) -> float:
        """Returns the time that the remaining requests will spend, if none come after them: a triangle."""
        return self.num_requests * self.work_s / (2 * USABLE * num_workers) if num_workers else math.inf


@dataclass(slots=True)
class _Answers:
    """Models a stage that serves all its requests concurrently; each token may be the last of an answer."""

    num_requests: float
    need: StageNeed

    def _batch(self, num_workers: float) -> float:
        batch = max(1.0, self.num_requests / num_workers)
        return batch if self.need.max_batch is None else min(batch, self.need.max_batch)

    def _answer_s(self, batch: float) -> float:
        return self.need.num_parts * (self.need.round_s + self.need.part_s * batch)

    def serve(self, num_workers: float, step_s: float) -> None:
        if not num_workers:
            return
        batch = self._batch(num_workers)
        answer_s = self._answer_s(batch)
        running = min(self.num_requests, num_workers * batch)
        self.num_requests -= running * (1 - math.exp(-step_s / answer_s)) if answer_s > 0 else running

    def left_s(self, num_workers: float) -> float:
        """Returns the same as a line does: with fewer requests, each is faster."""
        if not num_workers:
            return math.inf
        batch = self._batch(num_workers)
        rounds = max(1.0, self.num_requests / (num_workers * batch))
        return self.num_requests * self._answer_s(batch) * rounds / 2


def look_ahead(
    traffic: ClusterTraffic,
    phases: Sequence[Phase],
    horizon_s: float,
    lost_s: Mapping[Stage, float] | None = None,
) -> Forecast:
    """Forecasts `traffic`.

    phases: in order, the last without an end
    lost_s: work of one worker to repeat, by stage
    """
    need = {stage: each.need for stage, each in traffic.stages.items()}
    encode, prefill = (
        _Line(traffic.stages[stage].num_requests, traffic.stages[stage].queued_s)
        for stage in ("encode", "prefill")
    )
    encode.work_s += (lost_s or {}).get("encode", 0.0)
    prefill.work_s += (lost_s or {}).get("prefill", 0.0)
    decode = _Answers(traffic.stages["decode"].num_requests, need["decode"])
    step_s, spent_s, arriving = horizon_s / _NUM_STEPS, 0.0, float(traffic.num_waiting)
    waiting = dict.fromkeys(traffic.stages, 0.0)
    for step in range(_NUM_STEPS):
        start_s = step * step_s
        capacity = next((each for each in phases if start_s < each.until_s), phases[-1]).capacity
        arriving += traffic.arrivals_at(start_s) * step_s
        encode.take(arriving * need["encode"].share, need["encode"])
        encoded = encode.serve(capacity["encode"], step_s)
        prefill.take(encoded + arriving * (1 - need["encode"].share), need["prefill"])
        decode.num_requests += prefill.serve(capacity["prefill"], step_s)
        decode.serve(capacity["decode"], step_s)
        arriving = 0.0
        held = {
            "encode": encode.num_requests,
            "prefill": prefill.num_requests,
            "decode": decode.num_requests,
        }
        spent_s += sum(held.values()) * step_s
        for stage in waiting:
            waiting[stage] = max(waiting[stage], held[stage] - capacity[stage])
    last = phases[-1].capacity
    left_s = encode.left_s(last["encode"]) + prefill.left_s(last["prefill"]) + decode.left_s(last["decode"])
    return Forecast(spent_s + left_s, waiting)
