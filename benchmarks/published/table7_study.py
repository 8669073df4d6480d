"""Asks what would have to be true for DistServe's rows of table 7, whose goodput is simulated twice as high.

One assumption is changed at a time; costs of clips and of prefill passes stay those of `table7`:

    slower workers        by the factor of `figure6_study`, fitted to a cut of TTFT; no row of table 7 is used
    assigned in turns     requests go to workers one after the other, as in the paper's public code
    assigned by chance    requests go to any worker
    copies                what `dispatch` says, with decode steps of table 6's fit; the copy of a clip is
                          fitted to the row of DistServe in `table7.FITTED_ROWS`, and EPD is simulated with it

Where requests are assigned, each worker has a decode worker of its own, which is never busy enough to matter.
All rows had been seen when these assumptions were made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from benchmarks.published.dispatch import Calls, stalled_tpot_s
from benchmarks.published.figure6_study import FITTED_FACTOR
from benchmarks.published.paper import Experiment, paper_deployment, paper_profile
from benchmarks.published.table7 import (
    ATTAINMENT,
    FITTED_ROWS,
    LAYOUTS,
    NUM_CLIPS,
    NUM_ROUNDS,
    OBJECTIVES,
    POSITIONS,
    SHAPES,
    TPOT_S,
    TTFT_S,
    attainment,
    audio_profile,
)
from benchmarks.published.tables import TABLE_7, TABLE_7_GOODPUT, Row
from epd.simulate.records import SimulationResult
from epd.simulate.simulation import Simulation

# Seconds of copying a clip. From .0018 to .003 the rows are the same: less delays no answer too much, more
# delays those of EPD.
COPY_S = 0.002
_NUM_WORKERS, _HALVINGS, _MOST_PER_S = 3, 7, 1.3
_Share = Callable[[float], float]  # of the rate


@dataclass(frozen=True, slots=True)
class Assumption:
    """Describes what is changed. share: of requests within the objectives. fitted: (system, rate) of rows."""

    name: str
    system: str
    share: _Share
    fitted: frozenset[tuple[str, float]] = frozenset()

    def rows(self) -> Iterator[Row]:
        name = f"{self.system}, {self.name}"
        for rate, published in TABLE_7[self.system].items():
            is_fitted = (self.system, rate) in self.fitted
            yield Row(name, f"{rate:g} requests/s", "share in SLO", self.share(rate), published, is_fitted)
        found = self.goodput()
        yield Row(name, f"{ATTAINMENT:.0%} in SLO", "goodput 1/s", found, TABLE_7_GOODPUT[self.system])

    def goodput(self) -> float:
        """Returns the highest rate whose share is large enough, from below."""
        low, high = 0.0, _MOST_PER_S
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.share(middle) >= ATTAINMENT else (low, middle)
        return low


def slower_share(factor: float, rate_per_s: float) -> float:
    """Returns DistServe's share where encode and prefill take so many times as long."""
    profile = audio_profile()
    slower = replace(profile, encode=profile.encode.times(factor), prefill=profile.prefill.times(factor))
    return attainment(slower, "DistServe", rate_per_s)


def assigned_share(assign: Callable[[int, int], Sequence[int]], rate_per_s: float) -> float:
    """Returns DistServe's share where each request has a worker. assign: by number of requests and round."""
    profile, deployment = audio_profile(), paper_deployment("1ep1d", "local")
    kept = []
    for each in range(NUM_ROUNDS):
        jobs = list(Experiment(LAYOUTS["DistServe"], rate_per_s, SHAPES).jobs(profile, each))
        places = assign(len(jobs), each)
        for worker in range(_NUM_WORKERS):
            its_jobs = [job for job, place in zip(jobs, places, strict=True) if place == worker]
            result = Simulation(profile, deployment).run(its_jobs)
            kept.append(result.attainment(OBJECTIVES) * len(its_jobs))
    return float(sum(kept)) / (NUM_ROUNDS * len(SHAPES))


def in_turns(num_requests: int, _round: int) -> list[int]:
    return [index % _NUM_WORKERS for index in range(num_requests)]


def by_chance(num_requests: int, round_index: int) -> list[int]:
    draw = random.Random(round_index)
    return [draw.randrange(_NUM_WORKERS) for _ in range(num_requests)]


def copied_share(system: str, copy_s: float, rate_per_s: float) -> float:
    """Returns a system's share where decoding stands still while clips are copied."""
    return float(np.mean([_kept(result, calls, copy_s) for result, calls in _runs(system, rate_per_s)]))


@cache
def _runs(system: str, rate_per_s: float) -> list[tuple[SimulationResult, Calls]]:
    """Simulates rounds of a hundred requests, and lists the calls that had clips."""
    profile = replace(audio_profile(), decode=paper_profile().decode)
    experiment = Experiment(LAYOUTS[system], rate_per_s, SHAPES)
    results = [experiment.run(profile, each, has_spans=True) for each in range(NUM_ROUNDS)]
    if system == "EPD":
        return [(result, Calls.of_encoders(result, profile, POSITIONS)) for result in results]
    return [(result, Calls.of_requests(result, NUM_CLIPS)) for result in results]


def _kept(result: SimulationResult, calls: Calls, copy_s: float) -> float:
    tpot_s = stalled_tpot_s(result, calls, copy_s)
    return float(np.mean((result.ttft_s <= TTFT_S) & (tpot_s <= TPOT_S)))


_COPIES = f"a clip is copied in {1000 * COPY_S:g} ms"
ASSUMPTIONS: Mapping[str, Assumption] = {
    "slower": Assumption(
        f"workers take {FITTED_FACTOR} times as long", "DistServe", partial(slower_share, FITTED_FACTOR)
    ),
    "turns": Assumption("requests assigned in turns", "DistServe", partial(assigned_share, in_turns)),
    "chance": Assumption("requests assigned by chance", "DistServe", partial(assigned_share, by_chance)),
    "copies": Assumption(_COPIES, "DistServe", partial(copied_share, "DistServe", COPY_S), FITTED_ROWS),
    "copies, EPD": Assumption(_COPIES, "EPD", partial(copied_share, "EPD", COPY_S)),
}


def table_7_study() -> list[Row]:
    """Returns table 7's rows of a system under each assumption."""
    return [row for assumption in ASSUMPTIONS.values() for row in assumption.rows()]
