"""The controller: when it switches, when it does not and why, under any load. Stories and properties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epd.control.elasticity.assignment import switchable_roles
from epd.control.elasticity.cluster import ClusterTraffic, Roles, StageNeed
from epd.control.elasticity.controller import PURE_ROLES, ControllerConfig, RoleController, Switch
from epd.topology import STAGES, Stage, parse_topology, role_letters
from tests.control.elasticity.clusters import NEEDS, cluster, roles_of

ENCODE: Roles = frozenset({"encode"})
DECODE: Roles = frozenset({"decode"})
MERGED: Roles = frozenset({"prefill", "decode"})
# Prompts take longer than pictures and answers.
LONG_PROMPTS = {
    **NEEDS,
    "encode": StageNeed(1.0, part_s=0.2),
    "prefill": StageNeed(1.0, part_s=1.0),
    "decode": StageNeed(1.0, 20.0, 0.01, 0.002),
}


def looks(
    controller: RoleController, traffic: ClusterTraffic, num: int, start_s: float = 0.0
) -> list[Switch]:
    """What comes of so many looks at the same load, a second apart, if switches never end."""
    switches = (controller.decide(start_s + second, traffic) for second in range(num))
    return [each for each in switches if each is not None]


def overloaded_decode() -> ClusterTraffic:
    return cluster(roles_of("4e1p1d"), rate=1.0, requests={"decode": 80.0})


def quick(num: int) -> settings:
    """So many examples; those that fail are not made smaller, which would take minutes."""
    return settings(max_examples=num, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


# Stories


def test_an_encoder_becomes_a_decoder_after_two_looks() -> None:
    controller = RoleController()
    assert controller.decide(0.0, overloaded_decode()) is None
    assert controller.decisions[-1].verdict == "unconfirmed"
    assert controller.decide(1.0, overloaded_decode()) == Switch("e0", DECODE)
    decision = controller.decisions[-1]
    assert (decision.verdict, decision.old_roles) == ("switch", ENCODE)
    assert decision.gain_s > decision.cost_s
    assert "e0: e to d, gains" in decision.reason


def test_one_switch_at_a_time_then_a_pause() -> None:
    controller, traffic = RoleController(), overloaded_decode()
    assert len(looks(controller, traffic, 20)) == 1
    assert controller.decisions[-1].verdict == "in flight"
    assert controller.in_flight == {"e0"}
    controller.succeeded(20.0, "e0")
    controller.decide(21.0, traffic)
    assert controller.decisions[-1].verdict == "cooldown"
    assert not controller.in_flight


def test_several_may_be_in_flight() -> None:
    """Each is counted as if it were done, so that the second is no repetition of the first."""
    controller = RoleController(ControllerConfig(max_in_flight=3))
    assert [each.worker for each in looks(controller, overloaded_decode(), 20)] == ["e0", "e1"]


def test_loading_longer_than_it_helps_is_not_worth_it() -> None:
    assert not looks(RoleController(ControllerConfig(load_s=29.0)), overloaded_decode(), 10)


def test_what_a_switch_took_is_the_price_of_the_next_to_these_roles() -> None:
    config, now_s = ControllerConfig(min_encode=1), 1000.0
    for load_s, is_worth_it in ((0.7, True), (29.0, False), (None, True)):
        controller, traffic = RoleController(config), overloaded_decode()
        assert len(looks(controller, traffic, 10)) == 1
        controller.succeeded(10.0, "e0", load_s)
        verdicts = set()
        for number in range(3):
            controller.decide(now_s + number, traffic)
            verdicts.add(controller.decisions[-1].verdict)
        assert ("switch" in verdicts) is is_worth_it


def test_no_switch_before_the_load_is_known() -> None:
    controller = RoleController()
    assert not looks(controller, replace(overloaded_decode(), is_known=False), 10)
    assert [each.verdict for each in controller.decisions] == ["unknown load"]


def test_a_stage_that_is_needed_itself_gives_nothing() -> None:
    """Two requests/s need two encoders: with four one may go, and a second, then no more."""
    needy = cluster(roles_of("4e1p1d"), rate=2.2, requests={"decode": 80.0})
    assert len(looks(RoleController(), needy, 10)) == 1
    needy = cluster(roles_of("2e1p3d"), rate=2.2, requests={"decode": 80.0})
    controller = RoleController()
    assert not looks(controller, needy, 10)
    assert controller.decisions[-1].verdict == "no gain"


def test_a_wave_that_has_just_gone_by_is_remembered() -> None:
    """The same load, but a minute ago encoders were all at work."""
    gone = cluster(roles_of("4e1p1d"), rate=1.0, requests={"decode": 80.0}, peaks={"encode": 4.0})
    assert not looks(RoleController(), gone, 10)


def test_the_worker_that_is_done_soonest_is_taken() -> None:
    traffic = overloaded_decode()
    slow = [replace(each, queued_s={"encode": 5.0 - index}) for index, each in enumerate(traffic.workers)]
    [switch] = looks(RoleController(), replace(traffic, workers=tuple(slow)), 10)
    assert switch.worker == "e3"


def test_a_worker_that_keeps_its_roles_is_not_taken_and_counts_as_one_that_is_left() -> None:
    """Of two encoders the one of no class goes; where both are of a class, none does."""
    traffic = cluster(roles_of("2e1p1d"), rate=0.2, requests={"decode": 80.0})
    [switch] = looks(RoleController(keeps_roles=lambda name: name == "e0"), traffic, 10)
    assert switch == Switch("e1", DECODE)
    assert not looks(RoleController(keeps_roles=lambda name: name[0] == "e"), traffic, 10)


def test_a_failed_switch_is_put_off_longer_each_time() -> None:
    """Others are tried meanwhile; each worker is left alone for 30 s, then for 60 s and so on."""
    controller, traffic = RoleController(), overloaded_decode()
    begun_s: dict[str, list[int]] = {}
    for second in range(400):
        switch = controller.decide(float(second), traffic)
        if switch is not None:
            begun_s.setdefault(switch.worker, []).append(second)
            controller.failed(float(second), switch.worker)
            assert not controller.in_flight
    assert sorted(begun_s) == ["e0", "e1", "e2", "e3"]
    for times_s in begun_s.values():
        waits_s = [after - before for before, after in pairwise(times_s)]
        assert len(waits_s) == 3
        assert all(wait_s >= 30 * 2**count for count, wait_s in enumerate(waits_s))


def test_a_worker_that_vanishes_is_in_flight_no_more() -> None:
    controller = RoleController()
    looks(controller, overloaded_decode(), 2)
    assert controller.in_flight == {"e0"}
    others = {name: roles for name, roles in roles_of("4e1p1d").items() if name != "e0"}
    switches = looks(controller, cluster(others, rate=1.0, requests={"decode": 80.0}), 10, 2.0)
    assert [each.worker for each in switches] == ["e1"]


def test_merged_workers_are_left_alone_unless_they_may_be_broken() -> None:
    workers = {"e0": ENCODE, "e1": ENCODE, "pd0": MERGED, "pd1": MERGED}
    traffic = cluster(workers, rate=0.3, requests={"decode": 80.0})
    controller = RoleController()
    assert not looks(controller, traffic, 10)
    allowed = RoleController(ControllerConfig(roles=(ENCODE, MERGED)))
    assert looks(allowed, traffic, 10) == [Switch("e0", MERGED)]


@pytest.mark.parametrize(
    ("topology", "letters"),
    [
        ("3e1p1d", "e p d"),
        ("1ed3ep", "e p d ed ep"),
        ("1e1pd", "e p d pd"),
        ("1epd1d", "e p d ed ep epd pd"),
    ],
)
def test_workers_change_to_single_roles_and_to_parts_of_merged_ones(topology: str, letters: str) -> None:
    found = switchable_roles(parse_topology(topology))
    assert [role_letters(each) for each in found] == letters.split()
    assert found[:3] == PURE_ROLES


@pytest.mark.parametrize(
    ("topology", "stage", "rate", "switches"),
    [
        ("1ed3ep", "decode", 0.1, {"ep>d", "ep>ed"}),  # E with D, as far as E is not needed elsewhere
        ("1ed2p1d", "encode", 0.1, {"p>ep", "p>e", "d>ed"}),
        ("2p2ed", "encode", 0.1, {"p>e", "p>ep"}),
        ("2p2ed", "prefill", 0.1, {"ed>p", "ed>ep"}),
        ("1ep1ed", "decode", 0.1, {"none"}),  # the sole worker of a stage stays
        ("1ed1ep1d", "prefill", 0.1, {"ed>p", "ed>ep", "d>p", "d>ep"}),  # whose set nobody else has
        ("1epd1d", "decode", 0.1, {"d>pd", "d>epd"}),  # nobody gives it answers
        ("2e2pd", "prefill", 0.1, {"e>pd"}),  # nobody decodes what a pure one would prefill
    ],
)
def test_merged_workers_switch_to_what_helps(
    topology: str, stage: Stage, rate: float, switches: set[str]
) -> None:
    config = ControllerConfig(roles=switchable_roles(parse_topology(topology)))
    workers, needs = roles_of(topology), LONG_PROMPTS if stage == "prefill" else NEEDS
    traffic = cluster(workers, rate=rate, requests={stage: 80.0}, needs=needs)
    found = looks(RoleController(config), traffic, 3) or [None]
    names = {
        "none" if each is None else f"{role_letters(workers[each.worker])}>{role_letters(each.roles)}"
        for each in found
    }
    assert names <= switches


def test_a_role_is_not_only_given_up() -> None:
    """Without E a worker would decode no more than it does: its time goes to what it has to do."""
    config = ControllerConfig(roles=switchable_roles(parse_topology("1d2ed1ep")))
    needs = {**NEEDS, "decode": StageNeed(1.0, 200.0, 0.03, 0.001)}
    traffic = cluster(roles_of("1d2ed1ep"), rate=0.8, requests={"decode": 20.0}, needs=needs)
    assert not looks(RoleController(config), traffic, 10)


@pytest.mark.parametrize(
    "wrong",
    [{"min_decode": 0}, {"interval_s": 0.0}, {"margin": -1.0}, {"min_gain": 1.0}, {"min_waiting": 1.0}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got ControllerConfig"):
        ControllerConfig(**wrong)  # type: ignore[arg-type]


# Properties

part_s = st.floats(0.001, 60.0)


@quick(60)
@given(
    stage=st.sampled_from(STAGES),
    encode_s=part_s,
    prefill_s=part_s,
    step_s=st.floats(0.0, 0.1),
    request_s=st.floats(0.0001, 0.05),
    tokens=st.floats(1.0, 10_000.0),
    topology=st.sampled_from(["2e1p1d", "3e2p3d", "1e2p1d", "1e1p2d", "6e1p1d"]),
)
def test_no_switch_for_a_queue_of_one(
    stage: Stage,
    encode_s: float,
    prefill_s: float,
    step_s: float,
    request_s: float,
    tokens: float,
    topology: str,
) -> None:
    """Two requests at any stage, however long they take: one at work, one that waits for it or soon will."""
    needs: dict[Stage, StageNeed] = {
        "encode": StageNeed(1.0, part_s=encode_s),
        "prefill": StageNeed(1.0, part_s=prefill_s),
        "decode": StageNeed(1.0, tokens, step_s, request_s),
    }
    workers = roles_of(topology)
    controller = RoleController()
    assert not looks(controller, cluster(workers, requests={stage: 2.0}, needs=needs), 20)
    assert controller.decisions[-1].verdict in ("no gain", "no candidate")


class Fleet:
    """Workers whose switches end as they are told to, and what was ever done to them."""

    def __init__(self, topology: str, config: ControllerConfig) -> None:
        self.workers = roles_of(topology)
        self.controller = RoleController(config)
        self.switches: list[tuple[float, str, Roles, Roles]] = []

    def run(self, history: Iterator[tuple[ClusterTraffic, bool]], interval_s: float = 1.0) -> None:
        """loads: with each, whether a switch that begins then comes to pass."""
        for number, (traffic, is_done) in enumerate(history):
            now_s = number * interval_s
            switch = self.controller.decide(now_s, traffic)
            if switch is None:
                continue
            old = self.workers[switch.worker]
            if is_done:
                self.switches.append((now_s, switch.worker, old, switch.roles))
                self.workers[switch.worker] = switch.roles
                self.controller.succeeded(now_s + 0.5, switch.worker)
            else:
                self.controller.failed(now_s + 0.5, switch.worker)

    def num(self, stage: Stage) -> int:
        return sum(stage in roles for roles in self.workers.values())


@quick(20)
@given(data=st.data(), minimum=st.integers(1, 2), topology=st.sampled_from(["3e2p3d", "4e2p2d", "2e2p2d1pd"]))
def test_never_fewer_than_the_minimum_whatever_comes_and_fails(
    data: st.DataObject, minimum: int, topology: str
) -> None:
    fleet = Fleet(topology, ControllerConfig(min_encode=minimum, min_prefill=minimum, min_decode=minimum))

    def history() -> Iterator[tuple[ClusterTraffic, bool]]:
        for _ in range(12):
            queues = {stage: data.draw(st.sampled_from([0.0, 5.0, 100.0])) for stage in STAGES}
            is_done = data.draw(st.booleans())
            for _ in range(10):
                assert all(fleet.num(stage) >= minimum for stage in STAGES)
                yield cluster(fleet.workers, rate=0.5, requests=queues), is_done

    fleet.run(history())
    assert all(fleet.num(stage) >= minimum for stage in STAGES)
    assert all(roles == MERGED for name, roles in fleet.workers.items() if name == "pd0")


def turns(switches: list[tuple[float, str, Roles, Roles]], stage: Stage) -> list[float]:
    """When the stage began to lose workers after it had gained some, or the other way round."""
    moves = [(at_s, stage in new) for at_s, _, old, new in switches if stage in old ^ new]
    return [after[0] for before, after in pairwise(moves) if before[1] != after[1]]


@quick(8)
@given(
    period_s=st.floats(2.0, 400.0),
    phase=st.floats(0.0, 1.0),
    high=st.floats(5.0, 500.0),
    pair=st.sampled_from([("encode", "decode"), ("prefill", "decode"), ("encode", "prefill")]),
    topology=st.sampled_from(["3e1p3d", "2e2p3d", "5e1p2d"]),
    is_free=st.booleans(),
)
def test_no_load_makes_roles_go_to_and_fro(
    period_s: float, phase: float, high: float, pair: tuple[Stage, Stage], topology: str, is_free: bool
) -> None:
    """A queue that jumps from one stage to another and back, with nothing known of its return: there is no
    worse; even where switches cost nothing, so that no margin is too wide. Turns come at growing distances:
    within five minutes the k-th waits 10 * 2^(k - 1) s or longer."""
    config = ControllerConfig(load_s=0.0, cache_s=0.0, max_drain_s=0.0) if is_free else ControllerConfig()
    fleet = Fleet(topology, config)

    def history() -> Iterator[tuple[ClusterTraffic, bool]]:
        for second in range(400):
            busy = pair[(second / period_s + phase) % 1.0 < 0.5]
            yield cluster(fleet.workers, requests={busy: high}), True

    fleet.run(history())
    for stage in STAGES:
        turned_s = turns(fleet.switches, stage)
        for start_s in range(0, 400, 10):
            assert len([at_s for at_s in turned_s if start_s <= at_s < start_s + 300]) <= 5
    for seconds, most in ((60, 2 * len(fleet.workers)), (300, 4 * len(fleet.workers))):
        for start_s in range(0, 400, 10):
            within = [at_s for at_s, *_ in fleet.switches if start_s <= at_s < start_s + seconds]
            assert len(within) <= most
