"""Workers on several devices: what they cost, what they hold, and when a plan takes them.

Modules: `epd/profiles/parallel.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from epd.errors import InfeasibleError, RequestError
from epd.planning.files import PlanFile, is_served
from epd.planning.goodput import rate_bound, simulate_at
from epd.planning.plan import make_plan
from epd.planning.search import Planner
from epd.planning.space import Settings, Space, splits_of
from epd.profiles.analytic import analytic_profile
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.program import app
from epd.simulate import Deployment
from epd.topology import parse_topology
from epd.workload.metrics import SLO
from tests.planning.test_planning import BASE, HEAVY, PROFILE, demand

LARGE = analytic_profile("a100-80gb", "internvl2-26b")


def test_two_devices_halve_the_work_and_pay_for_their_sums() -> None:
    """28 layers, two sums each of 15 us and of 3584 values of a token over 60 % of 300 GB/s.

    Each device's host launches every layer of prefill: 18.21 ms, as long as one device's, and longer than
    reading half of the weights.
    """
    one, two = PROFILE.prefill.cost, PROFILE.on(2).prefill.cost
    assert two.fixed_s == pytest.approx(one.fixed_s + 56 * 15e-6)
    assert two.per_unit_s == pytest.approx(one.per_unit_s / 2 + 56 * 3584 * 2 / 180e9)
    assert (two.floor_s, two.per_item_s) == (pytest.approx(18.21e-3), one.per_item_s / 2)
    step, halves = PROFILE.decode.cost, PROFILE.on(2).decode.cost  # replayed
    assert (halves.floor_s, halves.per_item_s) == (step.floor_s / 2, step.per_item_s / 2)
    large = LARGE.on(2).prefill.cost
    assert large.floor_s == max(LARGE.prefill.cost.floor_s / 2, 48 * 18.21e-3 / 28)
    assert PROFILE.on(1) is PROFILE
    steps = [PROFILE.on(n).decode.cost.seconds(16, 16_000) for n in (1, 2, 4)]
    assert steps[0] > steps[1] > steps[2] > steps[0] / 4


def test_each_device_holds_its_share() -> None:
    """Four heads of keys and values: each of eight devices still holds one."""
    memory, shared = PROFILE.memory, PROFILE.on(4).memory
    assert shared.language_weight_bytes == memory.language_weight_bytes // 4
    assert shared.kv_bytes_per_token == memory.kv_bytes_per_token // 4
    assert PROFILE.on(7).memory.kv_bytes_per_token == memory.kv_bytes_per_token // 4
    assert shared.prefill_bytes_per_token == memory.prefill_bytes_per_token


def test_states_and_windows_are_shared_out_with_heads() -> None:
    """As the server does: Qwen3.5-35B-A3B has two heads of keys, and its states go by heads of their own."""
    recurrent, windowed = analytic_profile("h200", "qwen3.5-35b-a3b"), analytic_profile("h200", "gemma-3-27b")
    assert recurrent.parallel is not None
    assert [n for n in (1, 2, 4) if recurrent.parallel.allows({"decode"}, n)] == [1, 2]
    halves = recurrent.on(2)
    assert halves.memory.state_bytes == recurrent.memory.state_bytes // 2 > 0
    assert halves.decode.cost.read_s == recurrent.decode.cost.read_s / 2 > 0
    assert halves.decode.cost.experts_s == recurrent.decode.cost.experts_s / 2 > 0
    quarter = windowed.on(4).memory.window_bytes_per_token
    assert quarter == windowed.memory.window_bytes_per_token // 4 > 0


def test_a_profile_without_layers_says_so() -> None:
    with pytest.raises(
        RequestError, match=r"does not know the model's layers, and 2 devices .* allowed is 1"
    ):
        replace(PROFILE, parallel=None).on(2)


def test_numbers_of_workers_use_all_devices() -> None:
    assert list(splits_of(5, (1, 2))) == [(1, 2), (3, 1)]
    assert list(splits_of(3, (2,))) == []
    assert list(splits_of(8, (8,))) == [(1,)]
    for topology, degrees in Space(8, degrees=(1, 2, 4, 8)).layouts():
        found = Deployment(topology, degrees=degrees)
        assert found.num_devices == 8, (str(topology), degrees)


def test_heads_that_cannot_be_shared_out_are_left_out() -> None:
    """28 heads of the language model are not for eight; a tower of 25 stays on the first device."""
    want = demand(PROFILE, SLO(ttft_s=5.0), 20, **HEAVY)
    planner = Planner(PROFILE, want, Space(8, degrees=(1, 8)), BASE)
    assert {n for each in planner.points.candidates() for _, n in each.settings.degrees} == set()
    large = Planner(LARGE, demand(LARGE, SLO(ttft_s=5.0), 20, **HEAVY), Space(4, degrees=(1, 2)), BASE)
    shared = {letters for each in large.points.candidates() for letters, _ in each.settings.degrees}
    assert shared == {"p", "d", "pd", "ep", "ed", "epd"}
    for each in large.points.candidates():
        degrees = {group.letters: each.settings.degree(group.letters) for group in each.topology.groups}
        assert is_served(degrees), each.layout


def test_heads_of_keys_and_values_are_shared_out_too() -> None:
    """Four of Qwen2.5-VL-7B: four devices, not seven or eight. An encoder has one."""
    parallel = PROFILE.parallel
    assert parallel is not None
    assert [n for n in (1, 2, 4, 7, 8) if parallel.allows({"prefill"}, n)] == [1, 2, 4]
    assert parallel.allows({"encode", "prefill"}, 4)
    assert not parallel.allows({"encode"}, 2)
    assert PROFILE.on(4).encode == PROFILE.encode
    assert PROFILE.on(4).memory.vision_weight_bytes == PROFILE.memory.vision_weight_bytes


def test_a_model_too_large_for_a_device_is_planned_over_two() -> None:
    """26 billion parameters on devices of 40 GB, half of its language model on each."""
    small = replace(LARGE, memory=replace(LARGE.memory, device_bytes=40 * 10**9))
    want = demand(small, SLO(ttft_s=20.0), 20, **HEAVY)
    settings = {"encode_patches": (4096,), "language_seqs": (16,), "chunk_tokens": (2048,)}
    with pytest.raises(InfeasibleError, match="memory binds: received a worker of the roles p"):
        Planner(small, want, Space(4, **settings), BASE).search()  # type: ignore[arg-type]
    plan = make_plan(Planner(small, want, Space(4, degrees=(1, 2), **settings), BASE))  # type: ignore[arg-type]
    assert plan.num_devices == 4
    record = plan.record()
    assert set(record["settings"]["tensor_parallel"].values()) == {2}
    assert all(each["peak_bytes"] <= 36 * 10**9 for each in record["explanation"]["memory"])
    options = PlanFile.model_validate(record).app_options()
    assert 2 in (options["tensor_parallel_size"], options["decode_tensor_parallel_size"])
    args = AppArgs(**{name: value for name, value in options.items() if value is not None})
    assert args.topology == record["topology"]


@pytest.mark.parametrize(
    ("topology", "devices", "expected"),
    [
        ("1e1p1d", {}, (None, None)),
        ("1e1p1d", {"p": 2}, (2, 1)),
        ("1e1p1d", {"d": 4}, (1, 4)),
        ("2e1p3d", {"p": 4, "d": 2}, (4, 2)),
        ("1e1pd", {"pd": 8}, (8, 8)),
        ("1e1pd1d", {"pd": 2, "d": 2}, (2, 2)),
        ("1ep1d", {"ep": 2}, (2, 1)),
        ("2epd", {"epd": 4}, (4, 4)),
        ("1ed2p1d", {"ed": 2, "p": 2, "d": 4}, (2, 4)),
    ],
)
def test_a_server_takes_the_devices_of_a_plan(
    topology: str, devices: dict[str, int], expected: tuple[int | None, int | None]
) -> None:
    """What its options of the same meaning would say; nothing where each worker has one device."""
    options = plan_of(topology, devices).app_options()
    found = (options.get("tensor_parallel_size"), options.get("decode_tensor_parallel_size"))
    assert found == expected


@pytest.mark.parametrize(
    ("topology", "devices"),
    [
        ("1e1p1d", {"e": 2}),
        ("1ed1p", {"p": 2}),
        ("1e1p1pd", {"p": 2}),
        ("1e1p1pd", {"pd": 2}),
    ],
)
def test_devices_that_a_server_cannot_use_are_refused(topology: str, devices: dict[str, int]) -> None:
    """An encoder is one process; all that do more than decode have one number of devices."""
    with pytest.raises(RequestError, match=r"2 of .*; allowed are 1 for workers that only encode"):
        plan_of(topology, devices).app_options()


def plan_of(topology: str, devices: dict[str, int]) -> PlanFile:
    settings = {
        "max_batch_patches": 4096,
        "max_num_batched_tokens": 2048,
        "max_chunk_tokens": 512,
        "max_num_seqs": 16,
        "decode_max_num_seqs": 16,
        "sharding": "groups",
        "retention": 1.0,
        "dtype": "bfloat16",
        "num_video_threads": 1,
        "tensor_parallel": devices,
    }
    record = {
        "format": "epd plan, version 1",
        "model": "qwen2.5-vl-72b",
        "topology": topology,
        "settings": settings,
        "objectives": {"attainment": 0.9},
    }
    return PlanFile.model_validate(record)


def test_a_strict_objective_for_tokens_needs_several_devices() -> None:
    """One device needs 12 ms for a step, two 7: an objective between them binds for one alone."""
    slo = SLO(ttft_s=5.0, tpot_s=0.010)
    want = demand(PROFILE, slo, 20, **HEAVY)
    settings = {"encode_patches": (4096,), "language_seqs": (16,), "chunk_tokens": (2048,)}
    with pytest.raises(InfeasibleError, match="TPOT binds"):
        Planner(PROFILE, want, Space(3, **settings), BASE).search()  # type: ignore[arg-type]
    found = Planner(PROFILE, want, Space(3, degrees=(1, 2), **settings), BASE).search()  # type: ignore[arg-type]
    assert found.winner.goodput > 0
    assert any("d" in letters for letters, _ in found.winner.candidate.settings.degrees)


def test_no_schedule_exceeds_the_bound_of_several_devices() -> None:
    want = demand(PROFILE, SLO(ttft_s=1e6), 100, **HEAVY)
    degrees = (("pd", 2),)
    for name in ("1e1pd", "2e2pd"):
        settings = Settings(32768, 64, 128, 8192, "groups", degrees=degrees)
        deployment = settings.deployment(parse_topology(name), BASE)
        bound = rate_bound(PROFILE, deployment, want)
        done_s = simulate_at(PROFILE, deployment, want, 100 * bound).rows["end"].max() / 1e12
        assert len(want.jobs) / done_s <= bound * 1.001
        alone = replace(deployment, degrees=())
        assert done_s < simulate_at(PROFILE, alone, want, 100 * bound).rows["end"].max() / 1e12


def test_a_search_over_eight_devices_is_quick() -> None:
    """All layouts, degrees 1 and 2, of which few are simulated; 64 devices are eight cells."""
    space = Space(8, degrees=(1, 2))
    plan = make_plan(
        Planner(PROFILE, demand(PROFILE, SLO(2.6, 0.04), 20, **HEAVY), space, BASE), cells=[(8, 8)]
    )
    assert plan.search.num_candidates > 800
    assert plan.search.num_simulated < 800 / 4
    assert plan.num_devices == 64


def test_the_command_takes_degrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("epd.planning.asked.MOST_REQUESTS", 20)
    options = ["plan", "--gpus", "2", "--slo-ttft-s", "2", "--slo-tpot-s", "0.01", "--workload", "images"]
    app([*options, "--max-tensor-parallel", "2"], standalone_mode=False)
    assert "workers on 2 devices each" in capsys.readouterr().out
    assert app([*options, "--max-tensor-parallel", "3"], standalone_mode=False) == 2
    assert "must be 1, 2, 4 or 8" in capsys.readouterr().err
