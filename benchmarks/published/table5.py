"""Repeats table 5 of the EPD paper: the search's result, beside the mean of random configurations."""

from __future__ import annotations

import numpy as np

from benchmarks.published.paper import images, paper_deployment, paper_profile
from benchmarks.published.tables import TABLE_5, Row
from epd.planning.goodput import Demand, goodput
from epd.planning.search import Planner, SearchResult
from epd.planning.space import Settings, Space
from epd.profiles.profile import Profile
from epd.simulate.requests import JobMaker
from epd.topology import Topology
from epd.workload.arrivals import poisson_arrivals
from epd.workload.metrics import SLO
from epd.workload.requests import TraceShapes, Workload

_NUM_REQUESTS, _NUM_RANDOM = 100, 10
# Table 9: MiniCPM-V 2.6 with six images.
OBJECTIVES = SLO(ttft_s=3.9, tpot_s=0.06)
_WHOLE = 2**17


def paper_demand(profile: Profile | None = None) -> Demand:
    """Returns requests of six 4K images, and their objectives. profile: of the costs of reading images."""
    workload = Workload(
        "six images", poisson_arrivals(1.0), TraceShapes((images(6),) * _NUM_REQUESTS), _NUM_REQUESTS
    )
    jobs = list(JobMaker(profile or paper_profile(), "frames").jobs(workload.requests(0)))
    return Demand.of(jobs, OBJECTIVES)


def paper_space(*, has_merged_roles: bool = False) -> Space:
    """Returns eight devices; batches in powers of two, as in section 3.3; sharding on and off."""
    return Space(
        8,
        encode_patches=(1,),
        language_seqs=(1, 2),
        decode_seqs=(1, 128),
        chunk_tokens=(_WHOLE,),
        shardings=("groups", "request"),
        has_merged_roles=has_merged_roles,
    )


def paper_planner(*, has_merged_roles: bool = False) -> Planner:
    space = paper_space(has_merged_roles=has_merged_roles)
    return Planner(paper_profile(), paper_demand(), space, paper_deployment("6e1p1d"))


def random_goodputs(seed: int = 0) -> list[float]:
    """Returns goodputs of ten random configurations: a split of the devices, batches and sharding each."""
    rng = np.random.default_rng(seed)
    space, demand, profile = paper_space(), paper_demand(), paper_profile()
    layouts = [each for each in Space(8).topologies() if len(each.groups) == 3]
    found = []
    for _ in range(_NUM_RANDOM):
        topology: Topology = layouts[int(rng.integers(len(layouts)))]
        settings = Settings(
            space.encode_patches[0],
            space.language_seqs[int(rng.integers(len(space.language_seqs)))],
            space.decode_seqs[int(rng.integers(len(space.decode_seqs)))],
            _WHOLE,
            space.shardings[int(rng.integers(len(space.shardings)))],
        )
        deployment = settings.deployment(topology, paper_deployment("6e1p1d"))
        found.append(goodput(profile, deployment, demand))
    return found


def table_5() -> list[Row]:
    """Returns the optimum of the paper's own space, the mean of ten random ones, and the gain over it."""
    result: SearchResult = paper_planner().search()
    optimum, mean = result.winner.goodput, float(np.mean(random_goodputs()))
    case = f"6 images, plan {result.winner.candidate.topology}"
    gain = TABLE_5["optimum"] / TABLE_5["mean of 10 random"]
    return [
        Row("optimum", case, "goodput 1/s", optimum, TABLE_5["optimum"]),
        Row("mean of 10 random", "6 images", "goodput 1/s", mean, TABLE_5["mean of 10 random"]),
        Row("optimum / random", case, "ratio", optimum / mean, gain),
    ]
