"""Workers that encode beside their passes, or in turns with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.score.shared_cores import HostCosts, SharedCores
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.profile import Profile
from epd.simulate import Deployment, Job, JobMaker, Simulation, SimulationResult
from epd.simulate.clock import EventPriority, EventQueue, Machine, ticks_of
from epd.topology import parse_topology
from epd.workload.requests import PlannedRequest, RequestShape, Resolution
from tests.simulate.test_simulation import PROFILE, flat, jobs, plain_profile, simulate

IMAGE = (Resolution(448, 448),)  # 1024 patches: a second


def slowed(factor: float) -> Profile:
    """Steps of 10 ms and batches of 1 s alone; passes with a prompt take 100 ms."""
    return replace(plain_profile(), beside=factor)


def a_text_and_an_image(profile: Profile, text_tokens: int = 300) -> list[Job]:
    """The text decodes from 0.1 s on; the image is read by 0.7 s."""
    shapes = (RequestShape(16, text_tokens), RequestShape(16, 2, IMAGE))
    planned = [
        PlannedRequest(number, due_s, shape, number, number)
        for number, (due_s, shape) in enumerate(zip((0.0, 0.2), shapes, strict=True))
    ]
    return list(JobMaker(profile).jobs(planned))


def spans_of(profile: Profile, encode_beside: bool) -> tuple[SimulationResult, list[tuple[str, float]]]:
    """Returns the result, and (name, seconds) of what the worker does."""
    deployment = Deployment(parse_topology("1epd"), encode_beside=encode_beside, is_stepwise=True)
    result = Simulation(profile, deployment, has_spans=True).run(a_text_and_an_image(profile))
    return result, [(span.name, span.ticks / 1e12) for span in result.spans]


def test_answers_go_on_while_a_batch_is_encoded() -> None:
    beside, spans = spans_of(slowed(1.25), encode_beside=True)
    assert dict(spans)["encode"] == pytest.approx(1.25)
    slow = [seconds for name, seconds in spans if name == "language" and seconds == pytest.approx(0.0125)]
    assert len(slow) == 100
    # Both: 1.1 s of the image's own, and 0.7 s to come and be read; then its prompt with a step of the text.
    assert beside.ttft_s[1] == pytest.approx(0.5 + 1.25 + 0.1)
    assert beside.rows["end"][0] / 1e12 == pytest.approx(0.1 + 299 * 0.01 + 100 * 0.0025 + 0.09)


def test_in_turns_an_answer_waits_for_the_batch() -> None:
    in_turns, spans = spans_of(slowed(1.25), encode_beside=False)
    assert dict(spans)["encode"] == pytest.approx(1.0)
    assert {round(seconds, 6) for name, seconds in spans if name == "language"} == {0.01, 0.1}
    assert in_turns.rows["end"][0] / 1e12 == pytest.approx(0.1 + 299 * 0.01 + 1.0 + 0.09)


def test_a_batch_begins_and_is_handed_on_between_two_passes() -> None:
    """Passes of 0.36 s alone, 0.45 beside a batch. The image comes at 0.7 s; its batch ends in a pass too."""
    profile = slowed(1.25)
    profile = replace(profile, decode=replace(profile.decode, cost=flat(0.36)))
    deployment = Deployment(parse_topology("1epd"), is_stepwise=True)
    result = Simulation(profile, deployment, has_spans=True).run(a_text_and_an_image(profile, 20))
    [encoded] = [span for span in result.spans if span.name == "encode"]
    assert (encoded.start / 1e12, encoded.ticks / 1e12) == (pytest.approx(0.82), pytest.approx(1.25))
    ends = [(span.start + span.ticks) / 1e12 for span in result.spans if span.name == "language"]
    # The sixth pass has 0.08 s left, alone, when the batch ends at 2.07 s.
    assert ends[:6] == pytest.approx([0.1, 0.46, 0.82, 1.27, 1.72, 2.07 + 0.08])
    assert result.rows["encoded"][1] / 1e12 == pytest.approx(ends[5])


def test_a_prompt_gets_room_for_its_media_between_two_passes() -> None:
    """It comes at 0.2 s, in a pass that ends at 0.46 s; its image takes 0.5 s to be read."""
    profile = slowed(1.0)
    profile = replace(profile, decode=replace(profile.decode, cost=flat(0.36)))
    work = a_text_and_an_image(profile, 20)
    read_s = work[1].groups[0].decode_ticks / 1e12
    for topology, granted_s in (("1e1pd", 0.46), ("1e1p1d", 0.2)):
        deployment = Deployment(parse_topology(topology), enable_prefix_caching=True)
        result = Simulation(profile, deployment).run(work)
        assert result.rows["media_read"][1] / 1e12 == pytest.approx(granted_s + read_s), topology


@pytest.mark.parametrize("topology", ["1epd", "1ep1d", "1ed1p"])
@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0])
def test_many_steps_at_once_are_exactly_single_steps_beside_batches_too(topology: str, factor: float) -> None:
    profile = replace(PROFILE, beside=factor)
    work = jobs(profile, 40, rate=12.0, repeat_rate=0.3, output_tokens="10..120")
    for options in ({}, {"kv_tokens": 1600, "language": SchedulerConfig(max_num_seqs=6)}):
        fast = simulate(profile, topology, work, **options)
        slow = simulate(profile, topology, work, is_stepwise=True, **options)
        assert (fast.rows == slow.rows).all()
        assert fast.num_events < slow.num_events


def test_without_merged_roles_there_is_nothing_beside() -> None:
    work = jobs(PROFILE, 30)
    assert (
        simulate(PROFILE, "2e1p1d", work).rows == simulate(PROFILE, "2e1p1d", work, encode_beside=False).rows
    ).all()


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_a_task_has_left_may_change_while_it_runs(is_shared: bool) -> None:
    """A task of 4 s has 3 left at 1 s and gets 6; at 3 s these are 4, and it gets 1: it ends at 4 s."""
    events, ends = EventQueue(), []
    costs = HostCosts(num_cores=2, idle_cores=0.0)
    machine = SharedCores(events, costs) if is_shared else Machine(events)
    task = machine.run(ticks_of(4), lambda: ends.append(events.now))
    machine.run(ticks_of(10), lambda: ends.append(events.now))

    def change(left_s: int, new_s: int) -> None:
        assert machine.left(task) == ticks_of(left_s)
        machine.set_left(task, ticks_of(new_s))

    events.push(ticks_of(1), EventPriority.POLICY, lambda: change(3, 6))
    events.push(ticks_of(3), EventPriority.POLICY, lambda: change(4, 1))
    while events.step():
        pass
    assert ends == [ticks_of(4), ticks_of(10)]
