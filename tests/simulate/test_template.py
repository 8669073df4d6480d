"""The template that all prompts begin with: computed while media are encoded, and once where it is cached."""

from __future__ import annotations

import pytest

from epd.control.placement import Placement
from epd.control.routing import Router
from epd.profiles.analytic import analytic_profile
from epd.profiles.media import MediaWork
from epd.simulate import Deployment, Job
from epd.simulate.clock import ticks_of
from epd.simulate.requests import GroupWork, RequestState
from epd.simulate.simulation import Simulation
from epd.topology import parse_topology

LEAD, TEXT = 20, 30
PROFILE = analytic_profile("a100-80gb", "minicpm-v-2.6")


def jobs(lead_tokens: int) -> list[Job]:
    """Returns requests about images that no other has, one after the other."""
    groups = (GroupWork(MediaWork(1024, 64), 0),)
    return [
        Job(number, ticks_of(10.0 * number), groups, TEXT + LEAD, 4, number, 1000 * number, lead_tokens)
        for number in range(3)
    ]


@pytest.mark.parametrize("topology", ["1epd", "1e1p1d"])
def test_the_template_is_computed_once_where_it_is_cached(topology: str) -> None:
    deployment = Deployment(parse_topology(topology), enable_prefix_caching=True)
    rows = Simulation(PROFILE, deployment).run(jobs(LEAD)).rows
    assert [int(row["cached_tokens"]) for row in rows] == [0, LEAD, LEAD]


def test_the_template_may_be_computed_before_any_media_are_encoded() -> None:
    state = RequestState(jobs(LEAD)[0], Placement(Router(), TEXT + LEAD))
    state.missing = {0}
    assert state.num_ready == LEAD
    state.missing.clear()
    assert state.num_ready == state.job.num_prompt_tokens == LEAD + 64 + TEXT
