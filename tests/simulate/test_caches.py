"""Media that come again: what the caches of encoders and receivers save, by the live classes.

Modules: `epd/simulate/receiving.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from epd.control.elasticity.controller import Switch
from epd.encode.encoder_cache import EncoderCacheManager
from epd.profiles.profile import Profile
from epd.simulate import Deployment, Job, JobMaker, Simulation, SimulationResult
from epd.simulate.clock import EventPriority, ticks_of
from epd.simulate.placement import Elasticity
from epd.topology import parse_topology
from epd.workload.requests import PlannedRequest, RequestShape, Resolution
from tests.simulate.test_simulation import PROFILE, jobs, plain_profile

IMAGE = Resolution(448, 448)  # 1024 patches: a second to encode, half of one to read


def asked(profile: Profile, questions: list[tuple[float, int]], num_images: int = 1) -> list[Job]:
    """Returns a request for each (time, medium), with a question and an answer of 2 tokens."""
    shape = RequestShape(16, 2, (IMAGE,) * num_images)
    planned = [
        PlannedRequest(i, due_s, shape, medium, 1000 + i) for i, (due_s, medium) in enumerate(questions)
    ]
    return list(JobMaker(profile).jobs(planned))


def run(
    profile: Profile, topology: str, work: list[Job], **settings: object
) -> tuple[SimulationResult, Simulation]:
    deployment = Deployment(parse_topology(topology), enable_prefix_caching=True, **settings)  # type: ignore[arg-type]
    simulation = Simulation(profile, deployment, has_spans=True)
    result = simulation.run(work)
    for worker in simulation._workers.values():
        assert not worker.has_work()
        for cache in caches_of(simulation, worker.name):
            cache.check_integrity()
            assert cache.num_held == 0
    return result, simulation


def caches_of(simulation: Simulation, name: str) -> list[EncoderCacheManager]:
    worker = simulation._workers[name]
    sides = (worker.encoder, worker.receiver)
    return [side.cache for side in sides if side is not None and side.cache is not None]


def num_encoded(simulation: Simulation) -> int:
    """Counts groups that encoders have made room for, each of them encoded once."""
    sides = [worker.encoder for worker in simulation._workers.values()]
    return sum(side.cache.counts.misses for side in sides if side is not None and side.cache is not None)


def test_an_encoder_sends_what_it_has_to_another_prefill_worker() -> None:
    """Two requests about one image, prefilled apart: the second waits for its embeddings, 0.25 s, alone."""
    profile = plain_profile()
    # The first worker is busy with a long prompt when the second question comes.
    busy = replace(
        profile, prefill=replace(profile.prefill, cost=replace(profile.prefill.cost, per_unit_s=0.1))
    )
    work = asked(busy, [(0.0, 7), (2.0, 7)])
    result, simulation = run(busy, "1e2p1d", work)
    assert num_encoded(simulation) == 1
    assert result.rows["media_read"][1] == result.rows["placed"][1]
    assert result.seconds("placed", "encoded")[1] == pytest.approx(0.25)


def test_what_is_on_its_way_is_waited_for_and_not_read_again() -> None:
    profile = plain_profile()
    result, simulation = run(profile, "1e1p1d", asked(profile, [(0.0, 7), (0.1, 7), (0.2, 8)]))
    assert num_encoded(simulation) == 2
    assert result.rows["encoded"][0] == result.rows["encoded"][1]
    [receiver] = [worker.receiver for worker in simulation._workers.values() if worker.receiver is not None]
    assert (receiver.cache.counts.misses, receiver.cache.counts.hits) == (2, 3)


def test_a_cache_without_room_forgets_what_was_idle_longest() -> None:
    """Room for two images: of 7, 8, 9 the first is encoded again, and the last is not."""
    profile = plain_profile()
    times = [(30.0 * index, medium) for index, medium in enumerate((7, 8, 9, 7, 9))]
    work = asked(profile, times)
    tokens = work[0].num_visual_tokens
    options = {
        "num_embeddings": 2 * tokens,
        "kv_tokens": 2 * tokens,
    }  # no keys and values of another image stay
    _, simulation = run(profile, "1e1p1d", work, **options)
    assert num_encoded(simulation) == 4


def test_groups_wait_for_room_and_all_come() -> None:
    """A request of eight images, room for two: groups are granted as others are prefilled."""
    profile = plain_profile()
    work = asked(profile, [(0.0, 7), (0.0, 8)], num_images=8)
    tokens = work[0].groups[0].media.num_tokens
    result, simulation = run(profile, "2e1p1d", work, num_embeddings=2 * tokens)
    assert num_encoded(simulation) == 16
    assert not result.rows["is_refused"].any()


@pytest.mark.parametrize("topology", ["1epd", "2e2p1d", "2ep1d", "1e2pd"])
@pytest.mark.parametrize("options", [{}, {"num_embeddings": 4096}, {"encode_beside": False}], ids=str)
def test_each_medium_is_encoded_once_where_there_is_room(topology: str, options: dict[str, object]) -> None:
    work = jobs(PROFILE, 80, rate=3.0, repeat_rate=0.5, images="1..2")
    result, simulation = run(PROFILE, topology, work, **options)
    groups = Counter((job.media_key, group) for job in work for group in range(len(job.groups)))
    assert num_encoded(simulation) >= len(groups)
    if not options:
        assert num_encoded(simulation) < sum(groups.values()) - 0.8 * (sum(groups.values()) - len(groups))
    assert len(result.rows) == 80


@pytest.mark.parametrize("at_s", [0.3, 0.8, 1.6])
def test_a_request_that_moves_brings_its_groups_to_the_new_worker(at_s: float) -> None:
    """Its prefill worker becomes an encoder while the first of two images is read, encoded or prefilled."""
    profile = plain_profile()
    work = asked(profile, [(0.0, 7)], num_images=2)
    deployment = Deployment(parse_topology("1e2p1d"), enable_prefix_caching=True, max_batch_patches=1)
    simulation = Simulation(profile, deployment, elasticity=Elasticity())
    switch = Switch("p0", frozenset({"encode"}))
    simulation.events.push(ticks_of(at_s), EventPriority.POLICY, lambda: simulation._begin_switch(switch))
    result = simulation.run(work)
    assert [(name, roles) for _, name, roles in result.switches][:1] == [("p0", "e")]
    assert result.num_encoded == 2
    for name in simulation._workers:
        for cache in caches_of(simulation, name):
            cache.check_integrity()
            assert cache.num_held == 0
