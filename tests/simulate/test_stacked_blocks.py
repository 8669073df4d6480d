"""The blocks of simulated caches: the simulator's rows with them and with the live pool are the same."""

from __future__ import annotations

import numpy as np
import pytest

from epd.kv.block_pool import BlockPool
from epd.profiles.files import load_profile
from epd.simulate import Deployment, JobMaker, Simulation, SimulationResult
from epd.simulate.stacked_blocks import StackedBlocks
from epd.topology import parse_topology
from epd.workload.config import load_workload

PROFILE = load_profile("qwen2.5-vl-7b@a100-80gb")


def simulated(topology: str) -> SimulationResult:
    """Returns a run in which answers are preempted: the caches have room for few."""
    mix = [{"images": "1..3", "text_tokens": "20..200", "output_tokens": "20..300", "image_size": "448x448"}]
    workload = load_workload(None, {"rate": 20, "num_requests": 120, "mix": mix}).resolve()
    deployment = Deployment(parse_topology(topology), kv_tokens=4096)
    return Simulation(PROFILE, deployment).run(JobMaker(PROFILE).jobs(workload.requests(3)))


@pytest.mark.parametrize("topology", ["1e1p1d", "2epd"])
def test_rows_are_those_of_the_live_pool(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = simulated(topology)
    monkeypatch.setattr("epd.simulate.language.StackedBlocks", BlockPool)
    live = simulated(topology)
    np.testing.assert_array_equal(ours.rows, live.rows)
    assert ours.num_preempted == live.num_preempted > 0


def test_every_block_has_one_holder() -> None:
    pool = StackedBlocks(4)
    first, second = pool.take(3), pool.take(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="1 blocks are needed, 0 are free"):
        pool.take(1)
    pool.release(*first)
    pool.check_integrity()
    assert (pool.num_free, pool.references(first[0]), pool.references(second[0])) == (3, 0, 1)
    with pytest.raises(ValueError, match="free already"):
        pool.release(first[0])
    with pytest.raises(ValueError, match="second holder"):
        pool.share(second[0])
