"""Workers that share the cores of one machine, and what the application costs there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd.metrics import SLO
from epd.planning.goodput import Demand, goodput, rate_bound
from epd.profiles import HostCosts, Overhead, Profile, PromptRule, analytic_profile, parse_profile
from epd.profiles.app_costs import Asked, AskedAll, host_costs, prompt_rule
from epd.profiles.files import dump_profile
from epd.simulate import Deployment, JobMaker, Simulation, SimulationResult
from epd.simulate.clock import EventQueue, Rank, ticks_of
from epd.simulate.machine import SharedCores
from epd.topology import parse_topology
from epd.workload_config import load_workload
from tests.planning.test_simulation import jobs, plain_profile

NOTHING = Overhead()
FREE = HostCosts(
    num_cores=2, idle_cores=0.0, request=NOTHING, split=NOTHING, image=NOTHING, video=NOTHING,
    sent=NOTHING, second=NOTHING, token_s=0.0, encode_s=0.0, prefill_s=0.0, decode_s=0.0, sequence_s=0.0,
)  # fmt: skip


def ends_of(costs: HostCosts, tasks: list[tuple[float, float]]) -> list[float]:
    """tasks: (start, seconds alone). When each ends, in the order of the list."""
    events, ends = EventQueue(), [0.0] * len(tasks)
    cores = SharedCores(events, costs)
    for number, (start_s, length_s) in enumerate(tasks):

        def end(number: int = number) -> None:
            ends[number] = events.now / 1e12

        def begin(length_s: float = length_s, end: object = end) -> None:
            cores.run(ticks_of(length_s), end)  # type: ignore[arg-type]

        events.push(ticks_of(start_s), Rank.ARRIVAL, begin)
    while events.step():
        pass
    return ends


def test_tasks_slow_each_other_only_beyond_the_cores() -> None:
    assert ends_of(FREE, [(0, 3), (1, 1)]) == pytest.approx([3, 2])
    # Three on two cores from 1 s on, each at 2/3: the third takes 1.5 s, and the others lose half a second.
    assert ends_of(FREE, [(0, 3), (0, 3), (1, 1)]) == pytest.approx([3.5, 3.5, 2.5])
    one = replace(FREE, num_cores=1)
    assert ends_of(one, [(0, 1), (0, 1), (0, 2)]) == pytest.approx([3, 3, 4])


def test_an_idle_application_takes_its_share() -> None:
    assert ends_of(replace(FREE, num_cores=1, idle_cores=0.2), [(0, 4)]) == pytest.approx([5])
    assert ends_of(replace(FREE, idle_cores=0.5), [(0, 3), (0, 3)]) == pytest.approx([4, 4])


def simulate(profile: Profile, topology: str, num: int = 1, **part: str) -> SimulationResult:
    work = jobs(profile, num, **part)
    return Simulation(profile, Deployment(parse_topology(topology))).run(work)


def test_what_costs_nothing_changes_nothing() -> None:
    profile = plain_profile()
    for topology in ("1e1p1d", "2ep1d"):
        alone = simulate(profile, topology, images="1", image_size="448x448")
        shared = simulate(replace(profile, host=FREE), topology, images="1", image_size="448x448")
        assert shared.ttft_s[0] == pytest.approx(alone.ttft_s[0], abs=1e-9)
        assert shared.e2e_s[0] == pytest.approx(alone.e2e_s[0], abs=1e-9)


def test_every_overhead_has_its_place() -> None:
    """Of one request with one image, alone: see `test_one_request_takes_the_sum_of_its_stages`."""
    costs = replace(
        FREE,
        request=Overhead(0.01, 0.02),
        split=Overhead(0.1, 0.2),
        image=Overhead(1.0),
        sent=Overhead(2.0),
        second=Overhead(0.0, 4.0),
        encode_s=8.0,
        prefill_s=16.0,
        decode_s=0.001,
        sequence_s=0.002,
    )
    profile = replace(plain_profile(), host=costs)
    part = {"images": "1", "image_size": "448x448", "output_tokens": "5"}
    split = simulate(profile, "1e1p1d", **part)
    assert split.ttft_s[0] == pytest.approx(1.85 + 0.03 + 0.3 + 1 + 2 + 8 + 16)
    assert split.e2e_s[0] - split.ttft_s[0] == pytest.approx(0.25 + 4 + 4 * 0.013)
    merged = simulate(profile, "1epd", **part)
    assert merged.ttft_s[0] == pytest.approx(1.6 + 0.03 + 1 + 8 + 16)
    assert merged.e2e_s[0] - merged.ttft_s[0] == pytest.approx(4 * 0.013)


def test_what_is_done_beside_takes_cores_from_others() -> None:
    profile = replace(plain_profile(), host=replace(FREE, num_cores=1))
    part = {"images": "0", "output_tokens": "50"}
    quiet = simulate(profile, "1epd", **part)
    costs = replace(FREE, num_cores=1, request=Overhead(beside_s=0.05), token_s=0.002)
    busy = simulate(replace(profile, host=costs), "1epd", **part)
    assert busy.ttft_s[0] == pytest.approx(quiet.ttft_s[0] + 0.05, abs=1e-6)
    assert busy.tpot_s[0] == pytest.approx(quiet.tpot_s[0] + 0.002, rel=0.05)


def test_prompts_are_longer_than_their_text() -> None:
    profile = replace(analytic_profile("h100", "qwen2.5-vl-7b"), prompt=PromptRule(20.0, 1.5))
    config = load_workload(None, {"num_requests": 1, "mix": [{"text_tokens": "40"}]})
    [job] = JobMaker(profile).jobs(config.resolve().requests(0))
    assert job.num_prompt_tokens == 80


def test_a_profile_with_a_host_survives_its_file() -> None:
    profile = replace(plain_profile(), host=replace(FREE, request=Overhead(0.1, 0.2, 0.3)), num_threads=1)
    assert parse_profile(dump_profile(profile)) == profile


# What an application would report whose costs are known, of a model with these costs.

KNOWN = HostCosts(
    num_cores=2, idle_cores=0.1, request=Overhead(0.02, 0.0, 0.01), split=Overhead(0.004, 0.003),
    image=Overhead(0.005, 0.0, 0.002), video=Overhead(0.009), sent=Overhead(0.006, 0.001),
    second=Overhead(0.0, 0.008), token_s=0.0015, encode_s=0.003, prefill_s=0.002, decode_s=0.004,
    sequence_s=0.0007,
)  # fmt: skip


def asked(profile: Profile, topology: str, **part: object) -> Asked:
    """Of one request, by the simulator."""
    config = load_workload(None, {"rate": 0.1, "num_requests": 1, "mix": [{"text_tokens": 32, **part}]})
    simulation = Simulation(profile, Deployment(parse_topology(topology)))
    rows = simulation.run(JobMaker(profile).jobs(config.resolve().requests(0))).rows[0]
    return Asked(
        ttft_s=float(rows["first_token"] - rows["due"]) / 1e12,
        e2e_s=float(rows["end"] - rows["due"]) / 1e12,
        cpu_s=simulation.work_s,
        encode_s=float(rows["encode_ticks"]) / 1e12,
        prefill_s=float(rows["prefill_ticks"]) / 1e12,
        prompt_tokens=float(rows["prompt_tokens"]),
        cached_tokens=0.0,
    )


def test_costs_that_are_known_are_found_again() -> None:
    """Within what several sequences at once, and hand-overs of many bytes, leave open."""
    base = plain_profile()
    assert base.images is not None
    base = replace(
        base,
        transfer=replace(base.transfer, cost=replace(base.transfer.cost, fixed_s=0.0)),
        images=replace(base.images, cost=replace(base.images.cost, fixed_s=0.001)),
        decode=replace(base.decode, cost=replace(base.decode.cost, per_item_s=0.0)),
    )
    profile = replace(base, host=KNOWN)
    video = {"videos": 1, "video_s": 4, "video_size": "320x192", "output_tokens": 1}
    answer = asked(profile, "1epd", output_tokens=33)
    crowd_s = answer.step_s + 3 * KNOWN.sequence_s + 0.102 * 3 / 32
    all_kinds = AskedAll(
        text=asked(profile, "1epd", output_tokens=1),
        answer=answer,
        answers_at_once=replace(answer, e2e_s=32 * crowd_s, ttft_s=0.0),
        long_text=asked(profile, "1epd", output_tokens=1, text_tokens=96),
        image=asked(profile, "1epd", output_tokens=1, images=1),
        video=asked(profile, "1epd", **video),
        split_answer=asked(profile, "1e1p1d", output_tokens=33),
        split_image=asked(profile, "1e1p1d", output_tokens=1, images=1),
    )
    found = host_costs(base, all_kinds, 2, 0.1)
    for name in ("encode_s", "prefill_s", "decode_s", "sequence_s"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), abs=2e-4), name
    for name in ("request", "image", "video"):
        one, known = getattr(found, name), getattr(KNOWN, name)
        assert (one.work_s, one.beside_s) == pytest.approx((known.work_s, known.beside_s), abs=1e-3), name
    way_s = found.split.work_s + found.split.delay_s
    assert way_s == pytest.approx(KNOWN.split.work_s + KNOWN.split.delay_s, abs=1e-3)
    assert found.second.delay_s == pytest.approx(KNOWN.second.delay_s, abs=1e-3)
    assert found.sent.work_s + found.sent.delay_s == pytest.approx(0.007, abs=1e-3)
    assert found.token_s == pytest.approx(KNOWN.token_s, abs=2e-4)
    assert prompt_rule(all_kinds).num_tokens(50) == 50


def test_cores_that_are_shared_bound_the_rate() -> None:
    """More workers than cores serve no more, and a plan for them says so."""
    profile = replace(plain_profile(), host=replace(FREE, request=Overhead(0.3, 0.0, 0.1)))
    work = jobs(profile, 60, rate=1.0, images="0", output_tokens="11")
    demand = Demand.of(work, SLO(ttft_s=5.0))
    bounds = [
        rate_bound(profile, Deployment(parse_topology(name)), demand) for name in ("1epd", "4epd", "16epd")
    ]
    # 0.4 s of the application and 0.1 s of ten steps at the least, on two cores.
    assert bounds[1] == bounds[2] == pytest.approx(2 / 0.4, rel=0.05)
    found = goodput(profile, Deployment(parse_topology("4epd")), demand)
    assert 0.5 * bounds[1] < found <= bounds[1]
