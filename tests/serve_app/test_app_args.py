"""How much room for keys and values an engine gets where nobody says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from epd.errors import RequestError
from epd.serve_app import composition, worker_args
from epd.serve_app.app_args import STAGE_FIELDS, AppArgs
from epd.serve_app.composition import worker_settings
from epd.serve_app.local.fleet import LocalFleet, LocalFleetConfig, LocalTransport
from epd.serve_app.network.routes import Route
from epd.serve_app.ray.replica_parts import transport_config
from epd.serve_app.service_composition import _orchestrator_config
from epd.serve_app.worker.worker_stages import StageBuilder
from epd.stages.engine import setup as engine_setup
from epd.topology import TensorParallel, role_letters
from tests.encoders.tiny_gemma import build_gemma3
from tests.tiny_models import build_qwen3_5

MIB, GIB = 1 << 20, 1 << 30


def test_keys_and_values_follow_the_containers_limit_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_setup, "memory_limit_bytes", lambda: 8 * GIB)
    assert engine_setup.default_kv_tokens(1 << 20) == 2 * 1024


@pytest.mark.parametrize(("topology", "num_pools"), [("1epd", 2), ("1e1p1d", 3), ("1e1pd", 3), ("2e2p2d", 6)])
def test_workers_of_a_machine_share_a_quarter_of_its_memory(
    topology: str, num_pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one may be given a role that keeps keys and values."""
    assert AppArgs(topology=topology).num_kv_pools == num_pools
    monkeypatch.setattr(engine_setup, "memory_limit_bytes", lambda: 24 * GIB)
    each = engine_setup.default_kv_tokens(1 << 20, num_pools)
    assert each * num_pools <= 6 * 1024 < (each + 1) * num_pools


def test_an_encoder_merges_as_it_was_told(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="tower_merge_layer of 1 alone"):
        AppArgs(tower_merge_layer=1).resolved()
    for share, layer, merges in ((None, None, False), (1.0, None, False), (0.5, 2, True)):
        args = AppArgs(
            model=checkpoints["qwen2_5_vl"], device="cpu", tower_share=share, tower_merge_layer=layer
        )
        stage = StageBuilder(worker_settings(args), LocalTransport()).encode("e0.encode")
        assert (stage._encoder._merger is not None) == merges


@pytest.mark.parametrize(("topology", "num_pools"), [("1epd", 2), ("1e1p1d", 3)])
def test_a_worker_builds_its_pool_within_its_share(
    topology: str, num_pools: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_setup, "memory_limit_bytes", lambda: 96 * MIB)
    args = AppArgs(model=checkpoints["qwen2_5_vl"], topology=topology, device="cpu")
    engine = StageBuilder(worker_settings(args), LocalTransport()).decode("d0.decode").engine
    num_blocks, block_size = engine.kv.spec.num_blocks[0], engine.kv.spec.block_size
    share = 24 * MIB // num_pools
    assert 0.9 * share < num_blocks * block_size * engine.pools.bytes_per_token <= share


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"elastic": True, "decode_tensor_parallel_size": 4},
            "size of 2 and a decode_tensor_parallel_size of 4 with elastic; allowed: the same for both",
        ),
        ({"gpus_per_worker": 0.5}, "size of 2 and gpus_per_worker 0.5; allowed: 1, a GPU for each"),
    ],
)
def test_workers_of_several_processes_are_refused_what_they_cannot_do(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        AppArgs(tensor_parallel_size=2, **options).resolved()


def test_nixl_that_is_not_installed_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_args, "find_spec", lambda _name: None)
    with pytest.raises(RequestError, match=r"received connector nixl; .* install epd-vlm\[nixl\]") as refused:
        AppArgs(connector="nixl").resolved()
    assert "\n" not in str(refused.value)
    assert AppArgs().resolved().connector == "link"


def test_workers_on_ray_get_the_connector() -> None:
    sent = AppArgs(connector="nixl").for_workers(*STAGE_FIELDS)
    assert transport_config(sent.connector).between_machines is Route.NIXL
    assert transport_config(AppArgs().connector).between_machines is Route.LINK


def test_any_worker_of_an_elastic_application_may_become_two_processes() -> None:
    args = AppArgs(topology="2e1p1d", tensor_parallel_size=2, elastic=True).resolved()
    assert [args.num_ranks(roles) for roles in args.workers.values() if "video" not in roles] == [2] * 4
    alone = args.model_copy(update={"elastic": False})
    assert alone.num_ranks(frozenset({"encode"})) == 1
    limits = [_orchestrator_config(each).switching.limit_s for each in (args, AppArgs())]
    assert limits[0] > limits[1], "their processes have to start"


def test_an_elastic_application_switches_between_the_sets_of_its_topology_and_their_parts() -> None:
    for topology, letters in (("3e1p1d", "e p d"), ("1ed3ep", "e p d ed ep")):
        args = AppArgs(topology=topology, elastic=True)
        elastic = _orchestrator_config(args).elastic
        assert elastic is not None
        assert elastic.roles == worker_settings(args.resolved()).switchable
        assert [role_letters(each) for each in elastic.roles] == letters.split()


def test_models_with_recurrent_states_refuse_what_is_not_computed(tmp_path: Path) -> None:
    path = build_qwen3_5(tmp_path)
    message = "the reduction fastkv for a 'qwen3_5' model, .* allowed: balanced"
    with pytest.raises(RequestError, match=message) as refused:
        AppArgs(model=path, reduction="fastkv").resolved()
    assert "\n" not in str(refused.value)
    assert AppArgs(model=path, draft="auto", tensor_parallel_size=2).resolved().model == path


def test_models_with_windows_refuse_what_is_not_computed(tmp_path: Path) -> None:
    path = build_gemma3(tmp_path)
    with pytest.raises(
        RequestError, match=r"the reduction fastkv for a 'gemma3' model, .* a sliding window; "
    ):
        AppArgs(model=path, reduction="fastkv").resolved()
    computed = AppArgs(model=path, draft="auto", reduction="balanced", tensor_parallel_size=2)
    assert computed.resolved().model == path


def test_processes_of_a_worker_share_its_room_and_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.serve_app.worker_args.usable_cpus", lambda: 9)
    args = AppArgs(topology="1epd", tensor_parallel_size=2)
    assert args.threads_per_worker == 4
    assert worker_settings(args).num_kv_pools == 4
    assert worker_settings(args).tensor_parallel == TensorParallel(2)
    split = AppArgs(topology="2e1p2d", tensor_parallel_size=2, decode_tensor_parallel_size=1)
    assert split.threads_per_worker == 8 // (2 + 2 + 2)
    assert worker_settings(split).num_kv_pools == 2 + 2 + 2


@pytest.mark.parametrize("is_wanted", [None, True, False])
def test_workers_run_ahead_as_they_are_asked_to(is_wanted: bool | None) -> None:
    assert worker_settings(AppArgs(async_scheduling=is_wanted)).engine.async_scheduling is is_wanted


def test_workers_on_ray_get_what_is_set_for_them() -> None:
    args = AppArgs(async_scheduling=True, enforce_eager=True, encode_beside=False, num_kv_tokens=512)
    sent = worker_settings(args.for_workers(*STAGE_FIELDS))
    assert sent == worker_settings(args)
    assert (sent.engine.async_scheduling, sent.engine.enforce_eager, sent.encode_beside) == (
        True,
        True,
        False,
    )


def test_videos_are_cut_as_the_arguments_say(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[str, Any] = {}

    def planner(*_: Any, **options: Any) -> None:
        taken.update(options)
        raise InterruptedError

    monkeypatch.setattr("epd.serve_app.service_composition.RequestPlanner", planner)
    args = AppArgs(model=checkpoints["qwen2_5_vl"], group_tokens=64)
    with pytest.raises(InterruptedError):
        asyncio.run(composition.create_app(args, LocalFleet(LocalFleetConfig({}), worker_settings(args))))
    assert taken["group_tokens"] == 64
