"""A fleet with a simulated clock that starts and stops workers as the live policies advise.

A request takes 1 s of one encoder, 0.1 s of prefill and 20 steps of 5 ms of decode. Encoders share one queue;
what comes after them is never short.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from epd.control.elasticity.assignment import replacement_for
from epd.control.elasticity.cluster import ClusterTraffic, Roles, StageSample, WorkerSample
from epd.control.elasticity.estimator import TrafficEstimator
from epd.control.elasticity.replicas import ReplicaAdvice, ReplicaConfig, StageReplicas
from epd.control.recent import RequestWork
from epd.topology import Stage, parse_topology

REQUEST = RequestWork(num_patches=1000, num_prompt_tokens=300, max_tokens=20)
ENCODE_S, PREFILL_S, STEP_S = 1.0, 0.1, 0.005
ENCODE: Roles = frozenset({"encode"})
_BUSY_S: dict[Stage, float] = {"prefill": PREFILL_S, "decode": 20 * STEP_S}
_UNITS: dict[Stage, float] = {"prefill": 300.0, "decode": 20.0}
_ROUNDS: dict[Stage, int] = {"prefill": 1, "decode": 20}


@dataclass
class _Worker:
    name: str
    roles: Roles
    ready_s: float
    done: StageSample = field(default_factory=StageSample)


class ClosedLoop:
    """Runs second by second. rate: requests per second at a time. start_s: that a new replica takes."""

    def __init__(
        self, topology: str, config: ReplicaConfig, rate: Callable[[float], float], start_s: float = 15.0
    ) -> None:
        self.wanted = parse_topology(topology)
        self.workers = [_Worker(each.name, each.roles, 0.0) for each in self.wanted.workers()]
        self.policy = StageReplicas(config, self.wanted)
        self.estimator = TrafficEstimator()
        self.rate, self.start_s = rate, start_s
        self.waits_s: list[float] = []
        self.advice: list[ReplicaAdvice] = []
        self.num_encoders: list[int] = []
        self._queue: deque[float] = deque()  # times of arrival
        self._random = random.Random(0)
        self._num_made = 0

    def run(self, seconds: int) -> None:
        for second in range(seconds):
            now_s = second + 1.0
            self._arrive(float(second), now_s)
            num_done = self._encode(now_s)
            for stage in _BUSY_S:
                self._work(stage, num_done)
            traffic = self.estimator.observe(
                now_s, [self._sample(each, now_s) for each in self._ready(now_s)]
            )
            self.advice.append(self.policy.advise(traffic))
            self._scale(now_s, self.advice[-1].num_replicas, traffic)
            self.num_encoders.append(len(self._encoders(now_s)))

    @property
    def changes(self) -> list[int]:
        """The seconds in which the advised number changed."""
        numbers = [each.num_replicas for each in self.advice]
        return [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1]]

    # Work

    def _arrive(self, start_s: float, end_s: float) -> None:
        """Poisson arrivals."""
        rate = self.rate(start_s)
        at_s = start_s + (self._random.expovariate(rate) if rate else 2.0)
        while at_s < end_s:
            self.estimator.arrived(at_s, REQUEST)
            self._queue.append(at_s)
            at_s += self._random.expovariate(rate)

    def _encode(self, now_s: float) -> int:
        """A second of all encoders, each on one request; returns how many requests ended."""
        encoders = self._encoders(now_s)
        num_at_work = min(len(encoders), len(self._queue))
        for worker in encoders[:num_at_work]:
            self._add(worker, 1000.0, 1, ENCODE_S)
        for _ in range(num_at_work):
            self.waits_s.append(now_s - self._queue.popleft())
        return num_at_work

    def _work(self, stage: Stage, num: int) -> None:
        workers = [each for each in self.workers if stage in each.roles]
        for number in range(num):
            self._add(workers[number % len(workers)], _UNITS[stage], _ROUNDS[stage], _BUSY_S[stage])
            if stage == "decode":
                self.estimator.finished(0.0)

    @staticmethod
    def _add(worker: _Worker, units: float, rounds: int, busy_s: float) -> None:
        old = worker.done
        worker.done = StageSample(
            0, 0.0, old.done_units + units, old.num_rounds + rounds, old.busy_s + busy_s
        )

    def _ready(self, now_s: float) -> list[_Worker]:
        return [each for each in self.workers if each.ready_s <= now_s]

    def _encoders(self, now_s: float) -> list[_Worker]:
        return [each for each in self._ready(now_s) if each.roles == ENCODE]

    def _sample(self, worker: _Worker, now_s: float) -> WorkerSample:
        """Encoders have an equal part of the queue each."""
        (stage,) = worker.roles
        done = worker.done
        if stage == "encode":
            share = len(self._queue) / len(self._encoders(now_s))
            done = StageSample(round(share), 1000.0 * share, done.done_units, done.num_rounds, done.busy_s)
        return WorkerSample(worker.name, worker.roles, worker.ready_s, {stage: done})

    # Replicas, as Serve starts and stops them

    def _scale(self, now_s: float, num: int, traffic: ClusterTraffic) -> None:
        while len(self.workers) < num:
            self._num_made += 1  # beyond the topology, so that the controller of roles makes it an encoder
            self.workers.append(_Worker(f"new{self._num_made}", ENCODE, now_s + self.start_s))
        while len(self.workers) > num:
            gone = self.workers[-1]
            switch = replacement_for(traffic.workers, {gone.name})
            for each in self.workers:
                if switch is not None and each.name == switch.worker:
                    each.roles, each.done = switch.roles, StageSample()
            self.workers.remove(gone)
