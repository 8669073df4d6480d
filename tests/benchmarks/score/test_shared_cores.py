"""Workers that share the cores of one machine, and what the application costs there.

Modules: `epd/profiles/measuring.py`, `epd/simulate/clock.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.score.app_costs import KINDS, LAYOUTS, LONG_TEXT, SHORT_TEXT, Figures, prompt_rule, sequence_s
from benchmarks.score.calibrating import Asked, _weights, calibrated, simulated_figures
from benchmarks.score.shared_cores import (
    HostCosts,
    HostedProfile,
    Overhead,
    SharedCores,
    read_profile,
    write_profile,
)
from benchmarks.score.speed import SpeedSampler, at_speed
from epd.profiles.analytic import analytic_profile
from epd.profiles.cost import StageCost
from epd.profiles.measuring import core_speed
from epd.profiles.profile import Profile, PromptRule
from epd.simulate import Deployment, JobMaker, Simulation, SimulationResult
from epd.simulate.clock import EventPriority, EventQueue, ticks_of
from epd.simulate.drafting import DraftPlan
from epd.topology import parse_topology
from epd.workload.config import load_workload
from tests.simulate.test_simulation import PROFILE, flat, jobs, plain_profile

FREE = HostCosts(num_cores=2, idle_cores=0.0)


def ends_of(costs: HostCosts, tasks: list[tuple[float, float]]) -> list[float]:
    """tasks: (start, seconds alone). When each ends, in the order of the list."""
    events, ends = EventQueue(), [0.0] * len(tasks)
    cores = SharedCores(events, costs)
    for number, (start_s, length_s) in enumerate(tasks):

        def end(number: int = number) -> None:
            ends[number] = events.now / 1e12

        def begin(length_s: float = length_s, end: object = end) -> None:
            cores.run(ticks_of(length_s), end)  # type: ignore[arg-type]

        events.push(ticks_of(start_s), EventPriority.ARRIVAL, begin)
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
    deployment = Deployment(parse_topology(topology))
    made = profile.simulation if isinstance(profile, HostedProfile) else partial(Simulation, profile)
    return made(deployment).run(work)


def test_what_costs_nothing_changes_nothing() -> None:
    profile = plain_profile()
    for topology in ("1e1p1d", "2ep1d"):
        alone = simulate(profile, topology, images="1", image_size="448x448")
        shared = simulate(HostedProfile.of(profile, FREE), topology, images="1", image_size="448x448")
        assert shared.ttft_s[0] == pytest.approx(alone.ttft_s[0], abs=1e-9)
        assert shared.e2e_s[0] == pytest.approx(alone.e2e_s[0], abs=1e-9)


def test_every_overhead_has_its_place() -> None:
    """Of one request with one image, alone: see `test_one_request_takes_the_sum_of_its_stages`."""
    costs = replace(
        FREE,
        request=Overhead(0.01, 0.02),
        split=Overhead(0.1, 0.2),
        media=Overhead(0.5),
        image=Overhead(1.0),
        sent=Overhead(2.0),
        second=Overhead(0.0, 4.0),
        end=Overhead(32.0),
        encode_s=8.0,
        prefill_s=16.0,
        decode_s=0.001,
        sequence_s=0.002,
    )
    profile = HostedProfile.of(plain_profile(), costs)
    part = {"images": "1", "image_size": "448x448", "output_tokens": "5"}
    split = simulate(profile, "1e1p1d", **part)
    assert split.ttft_s[0] == pytest.approx(1.85 + 0.03 + 0.3 + 0.5 + 2 * 1 + 2 + 8 + 16)
    assert split.e2e_s[0] - split.ttft_s[0] == pytest.approx(0.25 + 4 + 4 * 0.013 + 32)
    merged = simulate(profile, "1epd", **part)
    assert merged.ttft_s[0] == pytest.approx(1.6 + 0.03 + 0.5 + 2 * 1 + 8 + 16)
    assert merged.e2e_s[0] - merged.ttft_s[0] == pytest.approx(4 * 0.013 + 32)


def test_media_that_are_known_are_looked_at_all_the_same() -> None:
    """The second request's image is in the prefix cache: 10 ms for any media and 4 for the image are left."""
    host = replace(FREE, media=Overhead(work_s=0.01), image=Overhead(work_s=0.004))
    work = [replace(job, due=job.due * 100) for job in jobs(plain_profile(), 2, images="1", repeat_rate=1.0)]
    ttft_s = []
    for costs in (FREE, host):
        deployment = Deployment(parse_topology("1epd"), enable_prefix_caching=True)
        result = HostedProfile.of(plain_profile(), costs).simulation(deployment).run(work)
        assert result.rows["cached_tokens"][1] > 0
        ttft_s.append(result.ttft_s[1])
    assert ttft_s[1] - ttft_s[0] == pytest.approx(0.014)


def test_what_is_done_beside_takes_cores_from_others() -> None:
    profile = HostedProfile.of(plain_profile(), replace(FREE, num_cores=1))
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


def test_a_profile_with_a_host_survives_its_file(tmp_path: Path) -> None:
    host = replace(FREE, request=Overhead(0.1, 0.2, 0.3))
    profile = HostedProfile.of(plain_profile(), host, num_threads=1, core_speed=4000.0)
    write_profile(profile, tmp_path / "hosted.json")
    assert read_profile(tmp_path / "hosted.json") == profile


# What an application would report whose costs are known, of a model with these costs.

KNOWN = replace(
    FREE, idle_cores=0.1, request=Overhead(0.02, beside_s=0.01), split=Overhead(0.004),
    media=Overhead(0.015),
    image=Overhead(0.002, beside_s=0.002), video=Overhead(0.009), sent=Overhead(0.006),
    second=Overhead(0.008), end=Overhead(0.01), token_s=0.0015, encode_s=0.003, prefill_s=0.002,
    decode_s=0.004,
)  # fmt: skip


def small_profile() -> Profile:
    """Milliseconds a stage, as of a small model."""
    return replace(
        plain_profile(),
        encode=replace(PROFILE.encode, cost=StageCost(0.004, 0.0, 5e-6)),
        prefill=replace(PROFILE.prefill, cost=StageCost(0.006, 0.0, 7e-5)),
        decode=replace(PROFILE.decode, cost=StageCost(0.005, 0.0, 3e-4)),
        transfer=replace(PROFILE.transfer, cost=StageCost()),
        images=replace(PROFILE.transfer, cost=StageCost(0.001)),
        prompt=PromptRule(12.0, 1.0),
    )


def asked(profile: HostedProfile, layout: str, part: Mapping[str, object], core_speed: float) -> Asked:
    """As if the simulator were the application, on cores of that speed."""
    profile = at_speed(profile, core_speed)
    config = load_workload(None, {"rate": 0.1, "num_requests": 6, "mix": [part]}).resolve()
    deployment = Deployment(parse_topology(layout), cpu_threads=2)
    return Asked(layout, config, 3, simulated_figures(profile, deployment, config, 3), core_speed)


def test_costs_that_are_known_are_found_again() -> None:
    """Although the cores were slower for a while."""
    base = replace(small_profile(), core_speed=1000.0)
    answers = [
        asked(HostedProfile.of(base, KNOWN), layout, part, core_speed)
        for part, core_speed in zip(KINDS, (1000.0, 800.0, 800.0, 1100.0), strict=True)
        for layout in LAYOUTS
    ]
    found = calibrated(HostedProfile.of(base, replace(FREE, idle_cores=0.1)), answers)
    host = found.host
    for name in ("encode_s", "prefill_s", "decode_s", "token_s"):
        assert getattr(host, name) == pytest.approx(getattr(KNOWN, name), abs=1e-4), name
    for name in ("request", "split", "media", "image", "video", "sent", "second", "end"):
        one, known = getattr(host, name), getattr(KNOWN, name)
        assert one.work_s == pytest.approx(known.work_s, abs=1.5e-3), name
        assert one.beside_s == pytest.approx(known.beside_s, abs=1.5e-3), name
    for answer in answers:
        part = KINDS[answers.index(answer) // len(LAYOUTS)]
        again = asked(found, answer.topology, part, answer.core_speed).figures
        assert again.ttft_s == pytest.approx(answer.figures.ttft_s, rel=0.02)
        assert again.cpu_s == pytest.approx(answer.figures.cpu_s, rel=0.01)


def test_an_answer_that_was_disturbed_counts_by_its_error_and_not_by_the_square() -> None:
    errors = np.array([0.0, 0.05, -0.1, 0.2, -1.0])
    assert _weights(errors) * errors**2 == pytest.approx([0.0, 0.0025, 0.01, 0.02, 0.1])


def test_slower_cores_take_longer_for_work_but_not_for_waiting() -> None:
    host = replace(FREE, idle_cores=0.1, request=Overhead(0.02, 0.5), decode_s=0.004)
    profile = HostedProfile.of(small_profile(), host, core_speed=1000.0)
    slow = at_speed(profile, 500.0)
    part = {"images": "1", "image_size": "448x448", "output_tokens": "9"}
    before, after = simulate(profile, "1epd", **part), simulate(slow, "1epd", **part)
    assert after.ttft_s[0] - 0.5 == pytest.approx(2 * (before.ttft_s[0] - 0.5))
    assert after.tpot_s[0] == pytest.approx(2 * before.tpot_s[0])
    assert slow.host.idle_cores == pytest.approx(0.2)
    assert at_speed(slow, 1000.0) == profile
    with pytest.raises(ValueError, match="does not know at which speed"):
        at_speed(replace(profile, core_speed=None), 500.0)


def test_the_speed_of_a_core_is_told_by_the_time_of_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that compute do not count: only whether the same work takes as long."""
    assert core_speed(0.01) > 0
    with SpeedSampler() as sampler:
        pass
    assert sampler.core_speed > 0
    # A piece of work takes a millisecond of its thread, and a tenth of a second, for others have the core.
    own_s, passed_s = count(step=0.001), count(step=0.1)
    clocks = SimpleNamespace(thread_time=lambda: next(own_s), perf_counter=lambda: next(passed_s))
    monkeypatch.setattr("epd.profiles.measuring.time", clocks)
    assert core_speed(1.0) == pytest.approx(1000)
    with SpeedSampler() as sampler:
        pass
    assert sampler.core_speed == pytest.approx(1000)


def test_images_of_a_prompt_reach_the_encoder_one_by_one() -> None:
    """The first is taken at once, the others, which come while it is encoded, together."""
    profile = HostedProfile.of(plain_profile(), replace(FREE, image=Overhead(0.01)))
    simulation = profile.simulation(Deployment(parse_topology("1e1p1d")), has_spans=True)
    result = simulation.run(jobs(profile, 1, images="3", image_size="448x448"))
    spans = [span for span in result.spans if span.name == "encode"]
    assert len(spans) == 2
    assert spans[0].ticks < spans[1].ticks


def figures(ttft_s: float, tpot_s: float, *, prefill_s: float = 0.0, prompt: float = 0.0) -> Figures:
    return Figures(ttft_s, tpot_s, 0.0, prefill_s, 0.0, prompt, cached_tokens=10.0)


def test_tokens_of_the_template_and_of_the_text_are_told_apart() -> None:
    rule = prompt_rule(
        figures(0.1, 0, prompt=10 + 8 + 2 * SHORT_TEXT), figures(0.1, 0, prompt=18 + 2 * LONG_TEXT)
    )
    assert (rule.fixed_tokens, rule.per_text_token) == (8, 2)


def test_a_sequence_costs_what_a_step_of_several_takes_longer() -> None:
    """Three others, but for the time in which they are prefilled: each stalls the rest once in 32 steps."""
    alone = figures(0.0, 0.010, prefill_s=0.032)
    assert sequence_s(alone, figures(0.0, 0.010 + 3 * 0.001 + 3 * 0.001)) == pytest.approx(0.001)
    assert sequence_s(alone, alone) == 0.0


def test_groups_are_handed_over_one_after_the_other() -> None:
    """Three images arrive at 1, 2 and 3 s although both cores are free; what follows waits for nobody."""
    events, ends = EventQueue(), list[float]()
    cores = SharedCores(events, replace(FREE, image=Overhead(1.0)))
    for _ in range(3):
        cores.spend_in_turn("image", lambda: ends.append(events.now / 1e12))
    while events.step():
        pass
    assert ends == pytest.approx([1, 2, 3])


def test_a_batch_counts_once_for_a_request() -> None:
    """Three images of a request in one batch: the stage has worked on it as long as the batch took."""
    profile = plain_profile()
    rows = simulate(profile, "1e1p1d", images="3", image_size="448x448").rows
    spans = Simulation(profile, Deployment(parse_topology("1e1p1d")), has_spans=True)
    result = spans.run(jobs(profile, 1, images="3", image_size="448x448"))
    assert rows["encode_ticks"][0] == sum(span.ticks for span in result.spans if span.name == "encode")


def test_a_drafted_token_costs_the_application_no_sequence() -> None:
    """Of 5 ms for each sequence in a step, 4 are the application's."""
    profile = replace(plain_profile(), decode=replace(PROFILE.decode, cost=flat(0.01, 0.001)))
    hosted = HostedProfile.of(profile, HostCosts(2, 0.0, sequence_s=0.004))
    work = [replace(job, due=job.due * 1000) for job in jobs(profile, 30, images="0", output_tokens="401")]
    plain, drafted = (
        hosted.simulation(Deployment(parse_topology("1epd"), drafts=plan)).run(work)
        for plan in (None, DraftPlan(1.0, 8))
    )
    assert plain.tpot_s[-1] == pytest.approx(0.015)
    assert drafted.tpot_s[-1] == pytest.approx((0.015 + 8 * 0.001) / 9, rel=0.1)
