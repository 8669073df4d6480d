"""The simulator: order of events, exact fast path, conservation, and stories of single requests.

Modules: `epd/simulate/clock.py`, `epd/simulate/deployment.py`, `epd/simulate/encoding.py`,
`epd/simulate/language.py`, `epd/simulate/media_flow.py`, `epd/simulate/records.py`, `epd/simulate/worker.py`.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.control.routing import InFlight, Router
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.analytic import analytic_profile
from epd.profiles.cost import StageCost
from epd.profiles.profile import Profile
from epd.simulate import Deployment, Job, JobMaker, Simulation, SimulationResult, records
from epd.simulate.clock import TICKS_PER_S, EventPriority, EventQueue, ticks_of
from epd.simulate.placement import Elasticity
from epd.topology import parse_topology
from epd.workload.config import MixPart, WorkloadConfig
from epd.workload.metrics import SLO, ClientRecord, report_of
from epd.workload.requests import Resolution
from tests.control.plain_router import PlainRouter

PROFILE = analytic_profile("a100-80gb", "minicpm-v-2.6")


def flat(seconds: float, per_unit: float = 0.0, per_item: float = 0.0) -> StageCost:
    return StageCost(seconds, 0.0, per_unit, per_item)


def plain_profile() -> Profile:
    """Encode 1 s per 1024 patches, prefill 0.1 s, decode 0.01 s per step, transfers 0.25 s, reading 0.5 s."""
    assert PROFILE.images is not None
    return replace(
        PROFILE,
        encode=replace(PROFILE.encode, cost=flat(0.0, 1 / 1024)),
        prefill=replace(PROFILE.prefill, cost=flat(0.1)),
        decode=replace(PROFILE.decode, cost=flat(0.01)),
        transfer=replace(PROFILE.transfer, cost=flat(0.25)),
        images=replace(PROFILE.images, cost=flat(0.5)),
    )


def jobs(profile: Profile, num: int, rate: float = 4.0, seed: int = 0, **part: str | float) -> list[Job]:
    fields = {
        "text_tokens": "22",
        "output_tokens": "10..60",
        "images": "0..3",
        "image_size": "896x896",
        **part,
    }
    repeat_rate = float(fields.pop("repeat_rate", 0.0))
    config = WorkloadConfig(
        rate=rate, num_requests=num, repeat_rate=repeat_rate, mix=(MixPart.model_validate(fields),)
    )
    return list(JobMaker(profile).jobs(config.resolve().requests(seed)))


def simulate(profile: Profile, topology: str, work: list[Job], **settings: object) -> SimulationResult:
    """Single steps go with the router that sorts: both are slow twins."""
    deployment = Deployment(parse_topology(topology), **settings)  # type: ignore[arg-type]
    router = PlainRouter if deployment.is_stepwise else Router
    with mock.patch("epd.simulate.simulation.Router", router):
        simulation = Simulation(profile, deployment)
    result = simulation.run(work)
    for worker in simulation._workers.values():
        assert not worker.has_work()
        if worker.language is not None:
            worker.language.scheduler.check_integrity()
            assert worker.language.kv.usage == 0
        assert simulation.router.in_flight(worker.name) == InFlight()
    return result


def test_ties_in_time_go_by_rank_then_by_order_of_planning() -> None:
    """As the module says; what is planned during an instant still belongs to it."""
    events, seen = EventQueue(), []
    for rank in (EventPriority.START, EventPriority.ARRIVAL, EventPriority.END, EventPriority.POLICY):
        for number in (1, 2):
            events.push(5, rank, lambda rank=rank, number=number: seen.append((rank.name, number)))
    events.push(
        4, EventPriority.START, lambda: events.push(5, EventPriority.END, lambda: seen.append(("END", 3)))
    )
    while events.step():
        pass
    assert seen == [
        ("END", 1), ("END", 2), ("END", 3), ("POLICY", 1), ("POLICY", 2),
        ("ARRIVAL", 1), ("ARRIVAL", 2), ("START", 1), ("START", 2),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="cannot be planned"):
        events.push(3, EventPriority.END, lambda: None)


def test_one_request_takes_the_sum_of_its_stages() -> None:
    """0.5 read + 1 encode + 0.25 embeddings + 0.1 prefill; then 0.25 keys and values + 4 steps of 0.01."""
    profile = plain_profile()
    [job] = jobs(profile, 1, images="1", image_size="448x448", output_tokens="5")
    result = simulate(profile, "1e1p1d", [job])
    assert result.ttft_s[0] == pytest.approx(1.85)
    assert result.e2e_s[0] == pytest.approx(1.85 + 0.25 + 0.04)
    merged = simulate(profile, "1epd", [job])
    assert merged.ttft_s[0] == pytest.approx(1.6)
    assert merged.e2e_s[0] == pytest.approx(1.64)


@pytest.mark.parametrize(("sharding", "encode_s"), [("groups", 1.0), ("request", 3.0)])
def test_sharding_spreads_one_request_over_the_encoders(sharding: str, encode_s: float) -> None:
    profile = plain_profile()
    [job] = jobs(profile, 1, images="3", image_size="448x448")
    result = simulate(profile, "3e1p1d", [job], sharding=sharding, is_overlapped=False, max_batch_patches=1)
    assert result.seconds("media_read", "encoded")[0] == pytest.approx(encode_s + 0.25)


def test_groups_are_prefilled_while_later_ones_are_encoded() -> None:
    profile = plain_profile()
    profile = replace(profile, prefill=replace(profile.prefill, cost=flat(0.0, 1 / 64)))
    [job] = jobs(profile, 1, images="3", image_size="448x448")
    # 3 x 1 s to encode, 3 x 1 s and the question's 22 / 64 s to prefill.
    whole = simulate(profile, "1e1p1d", [job], is_overlapped=False, max_batch_patches=1)
    streamed = simulate(profile, "1e1p1d", [job], is_overlapped=True, max_batch_patches=1)
    assert whole.ttft_s[0] == pytest.approx(0.5 + 3.25 + 3 + 22 / 64)
    assert streamed.ttft_s[0] == pytest.approx(0.5 + 3.25 + 1 + 22 / 64)


def test_a_model_whose_media_attend_each_other_prefills_when_all_are_there() -> None:
    """As Molmo 2 does: its groups are encoded as they come, and none is prefilled before the last."""
    profile = plain_profile()
    profile = replace(profile, prefill=replace(profile.prefill, cost=flat(0.0, 1 / 64)))
    [job] = jobs(profile, 1, images="3", image_size="448x448")
    whole = replace(profile, media=replace(profile.media, is_whole=True))
    result = simulate(whole, "1e1p1d", [job], max_batch_patches=1)
    assert result.ttft_s[0] == pytest.approx(0.5 + 3.25 + 3 + 22 / 64)


def test_a_repeated_image_is_neither_read_nor_encoded_again() -> None:
    profile = plain_profile()
    drawn = jobs(profile, 40, images="1", repeat_rate=0.5)
    work = [replace(job, due=ticks_of(20.0 * job.index)) for job in drawn]
    cached = simulate(profile, "1epd", work, enable_prefix_caching=True)
    cold = simulate(profile, "1epd", work)
    is_repeat = np.array([job.media_key in {each.media_key for each in work[: job.index]} for job in work])
    assert 10 < is_repeat.sum() < 30
    assert (cold.ttft_s > 1.5).all()
    assert (cached.ttft_s[is_repeat] < 0.5).all()
    assert (cached.ttft_s[~is_repeat] > 1.5).all()


TIGHT = {
    "kv_tokens": 1600,
    "decode": SchedulerConfig(max_num_seqs=6),
    "language": SchedulerConfig(max_num_seqs=6),
}


@pytest.mark.parametrize("topology", ["2e1p2d", "1ep1d", "1e2pd", "2epd", "1epd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_overlapped": False, "sharding": "request"},
        {"enable_prefix_caching": True},
        TIGHT,
        {**TIGHT, "enable_prefix_caching": True},
        {"language": SchedulerConfig(max_num_batched_tokens=64, max_chunk_tokens=32)},
    ],
    ids=str,
)
def test_many_steps_at_once_are_exactly_single_steps(topology: str, options: dict[str, object]) -> None:
    """The fast path and its slow twin agree on every time of every request, to the tick."""
    work = jobs(PROFILE, 60, rate=8.0, repeat_rate=0.3, output_tokens="10..120")
    fast = simulate(PROFILE, topology, work, **options)
    slow = simulate(PROFILE, topology, work, is_stepwise=True, **options)
    assert (fast.rows == slow.rows).all()
    assert fast.num_preempted == slow.num_preempted
    assert fast.num_events < slow.num_events
    if options is TIGHT and topology == "1e2pd":
        assert fast.num_preempted > 0


@settings(max_examples=25, deadline=None)
@given(
    topology=st.sampled_from(["1e1p1d", "2e1p2d", "1ep2d", "2epd", "1e1pd"]),
    seed=st.integers(0, 1000),
    rate=st.sampled_from([1.0, 10.0, 100.0]),
    kv_tokens=st.sampled_from([600, 1600, 100_000]),
    seats=st.integers(1, 8),
    is_cached=st.booleans(),
)
def test_the_fast_path_is_exact_for_any_load(
    topology: str, seed: int, rate: float, kv_tokens: int, seats: int, is_cached: bool
) -> None:
    work = jobs(PROFILE, 25, rate, seed, repeat_rate=0.4, images="0..2", image_size="448x448")
    limits = SchedulerConfig(max_num_seqs=seats)
    options = {
        "kv_tokens": kv_tokens,
        "language": limits,
        "decode": limits,
        "enable_prefix_caching": is_cached,
    }
    fast = simulate(PROFILE, topology, work, **options)
    slow = simulate(PROFILE, topology, work, is_stepwise=True, **options)
    assert (fast.rows == slow.rows).all()


@pytest.mark.parametrize("kv_tokens", [500, 700, 1000, 2000])
def test_blocks_of_steps_under_way_are_booked_when_another_asks_for_room(kv_tokens: int) -> None:
    """Room, not seats, decides who is let in: a reservation must see what a run has taken by then."""
    part = {"images": "0", "text_tokens": "20..200", "output_tokens": "50..250"}
    work = jobs(PROFILE, 80, rate=30.0, **part)
    fast = simulate(PROFILE, "1e1p1d", work, kv_tokens=kv_tokens)
    slow = simulate(PROFILE, "1e1p1d", work, kv_tokens=kv_tokens, is_stepwise=True)
    assert (fast.rows == slow.rows).all()
    assert fast.num_preempted > 0


def test_every_request_ends_once_and_times_go_forward() -> None:
    work = jobs(PROFILE, 300, rate=20.0, images="1..3")
    rows = simulate(PROFILE, "3e2p3d", work).rows
    assert rows["index"].tolist() == list(range(300))
    moments = ["due", "placed", "media_read", "encoded", "first_token", "adopted", "end"]
    for before, after in pairwise(moments):
        assert (rows[before] <= rows[after]).all(), (before, after)


def test_what_does_not_fit_or_waits_too_long_is_refused() -> None:
    work = jobs(PROFILE, 50, rate=50.0, images="3", output_tokens="60")
    small = simulate(PROFILE, "1e1p1d", work, kv_tokens=256)
    assert small.rows["is_refused"].all()
    few = simulate(PROFILE, "1e1p1d", work, max_waiting=4, decode=SchedulerConfig(max_num_seqs=1))
    assert 0 < few.rows["is_refused"].sum() < 50
    assert few.attainment(SLO(1000.0)) == pytest.approx(1 - few.rows["is_refused"].mean())


def client_records(result: SimulationResult) -> list[ClientRecord]:
    """Requests as the load generator has them, of each the time of its first token alone."""
    return [
        ClientRecord(
            index=int(row["index"]),
            due_s=float(row["due"]) / TICKS_PER_S,
            sent_s=float(row["due"]) / TICKS_PER_S,
            end_s=float(row["end"]) / TICKS_PER_S,
            token_times_s=(float(row["first_token"]) / TICKS_PER_S,),
            prompt_tokens=int(row["prompt_tokens"]),
            completion_tokens=int(row["output_tokens"]),
        )
        for row in result.rows
    ]


def test_figures_are_those_of_the_load_generator() -> None:
    result = simulate(PROFILE, "2e1p1d", jobs(PROFILE, 80))
    slo = SLO(ttft_s=float(np.median(result.ttft_s)) + 1e-6, tpot_s=0.1)
    report = report_of([client_records(result)], slo)
    assert report.ttft is not None
    assert report.tpot is not None
    assert report.ttft.mean_s == pytest.approx(result.ttft_s.mean())
    assert report.tpot.mean_s == pytest.approx(result.tpot_s.mean())
    assert report.slo_attainment == pytest.approx(result.attainment(slo))


def test_encoders_become_decoders_while_they_have_time_to_spare() -> None:
    profile = plain_profile()
    # A step takes as long again for each sequence, so that another decoder helps.
    profile = replace(profile, decode=replace(profile.decode, cost=flat(0.01, 0.01)))
    work = jobs(profile, 120, rate=1.5, images="1", image_size="448x448", output_tokens="150")
    deployment = Deployment(parse_topology("4e1p1d"), kv_tokens=100_000)
    result = Simulation(profile, deployment, elasticity=Elasticity()).run(work)
    assert len(result.rows) == 120
    assert [roles for _, _, roles in result.switches] == ["d"] * len(result.switches)
    # 1.5 come per second, for a second of encoding and 1.5 of decoding each: two encoders, three decoders.
    assert len([at for at, _, _ in result.switches if at < work[-1].due / 1e12]) == 2


def run_of(num: int) -> tuple[SimulationResult, int]:
    """A run whose requests are made as they come, and the most bytes that Python held in it."""
    part = MixPart(text_tokens="22", output_tokens="10..30", images="0..1", image_size="448x448")
    requests = WorkloadConfig(rate=8.0, num_requests=num, mix=(part,)).resolve().requests(0)
    simulation = Simulation(PROFILE, Deployment(parse_topology("3e2p3d"), kv_tokens=20_000))
    tracemalloc.start()
    result = simulation.run(JobMaker(PROFILE).jobs(requests))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, peak


def test_time_and_memory_grow_with_the_number_of_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events per request do not grow with the run; what is kept of a request is a row in a file."""
    monkeypatch.setattr(records, "_BUFFER_ROWS", 256)
    run_of(1000)  # what is made once: after a shorter run, a longer one holds up to 126 kB more
    (few, few_peak), (many, many_peak) = run_of(500), run_of(3500)
    assert many.num_events / few.num_events == pytest.approx(7, rel=0.02)
    assert many_peak < few_peak + 3000 * 40
    assert many.rows["index"].tolist() == list(range(3500))


def test_rows_of_a_long_run_are_those_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    work = jobs(PROFILE, 300, rate=20.0)
    whole = simulate(PROFILE, "3e2p3d", work).rows
    for size in (1, 7, 100, 150, 299, 300, 301):
        monkeypatch.setattr(records, "_BUFFER_ROWS", size)
        assert (simulate(PROFILE, "3e2p3d", work).rows == whole).all(), size


def test_ticks_are_whole() -> None:
    assert ticks_of(1e-12) == 1
    assert ticks_of(0.1) == 10**11
    assert Resolution(448, 448).width == 448


def test_a_gpu_reads_videos_beside_the_threads_and_images_stay_with_them() -> None:
    """A thread takes 25 parts of a video 1 s each. The GPU has three decoders of an eighth of that."""
    [film] = jobs(PROFILE, 1, images="0", videos="1")
    group = replace(film.groups[0], decode_ticks=TICKS_PER_S)
    one = {"cpu_threads": 1, "enable_prefix_caching": False}

    def read_s(is_video: bool, **settings: int) -> float:
        job = replace(film, due=0, groups=(replace(group, is_video=is_video),) * 25)
        result = simulate(PROFILE, "1e1p1d", [job], **one, **settings)
        return float(result.rows["media_read"][0] / TICKS_PER_S)

    assert read_s(True) == pytest.approx(25.0)
    assert read_s(True, video_gpus=1) == pytest.approx(1.0)  # one by the thread, eight by each decoder
    assert read_s(True, video_gpus=3) == pytest.approx(0.375)  # all by nine decoders
    assert read_s(False, video_gpus=1) == pytest.approx(25.0)
