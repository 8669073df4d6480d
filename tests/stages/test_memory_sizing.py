"""The KV pool of a GPU takes what is left. No GPU is needed: torch's answers are given by the tests."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd.control.elasticity.assignment import switchable_roles
from epd.encoders import load_adapter
from epd.encoders.adapter import Embeddings, PatchRun
from epd.engine_config import EngineConfig
from epd.errors import InfeasibleError
from epd.kv.pass_limits import SchedulerConfig
from epd.serve_app.local.fleet import LocalTransport
from epd.serve_app.worker import worker_stages
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker.worker_stages import StageBuilder
from epd.stages import memory_sizing
from epd.stages.engine import setup
from epd.stages.engine.kv_pool import KVPoolsShape
from epd.stages.engine.model_runner import kv_layouts
from epd.stages.engine.setup import build_engine, kv_shape, run_sampling
from epd.stages.loading.weights import load_role
from epd.stages.memory_sizing import (
    GPUMemory,
    LargestPasses,
    MemoryShare,
    embeddings_within,
    kv_tokens_beside,
    measured_kv_tokens,
    run_encode,
    run_prefill,
)
from epd.stages.placement import CPU_FLOAT32, Placement
from epd.stages.profiling import peak_bytes
from epd.topology import Stage, parse_topology, stages_of
from tests.encoders.families import Family
from tests.encoders.tiny_gemma import build_gemma3
from tests.tiny_audio import build_qwen2_audio
from tests.tiny_models import load_reference

GB = 10**9
ON_GPU = Placement(torch.device("cuda:0"), torch.bfloat16)
GENERATION: Any = None

pytestmark = pytest.mark.usefixtures("little_to_collect")


def tokens(memory: GPUMemory, **changed: Any) -> int:
    values: dict[str, Any] = {
        "activation_bytes": 2 * GB,
        "embedding_bytes": GB,
        "bytes_per_token": 100_000,
        "utilization": 0.9,
        "model": "seven",
        "device": "cuda:0",
    }
    return kv_tokens_beside(memory, **(values | changed))


def test_keys_and_values_take_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """90 % of 80 GB, less 1 of others, 16 of weights, 2 of the largest pass and 1 of embeddings: 52 GB."""
    memory = GPUMemory(80 * GB, GB, 16 * GB)
    with caplog.at_level(logging.INFO, "epd.stages.memory_sizing"):
        assert tokens(memory) == 520_000
    assert "weights 16 GB, activations 2 GB, embeddings 1 GB" in caplog.text
    assert "keys and values of 520000 tokens; 90% of 80.0 GB" in caplog.text
    assert tokens(memory, utilization=0.5) == 200_000
    assert tokens(memory, bytes_per_token=100_001) % 16 == 0


def test_a_gpu_without_room_is_refused_with_the_sizes() -> None:
    with pytest.raises(
        InfeasibleError, match=r"weights 66 GB, activations 2 GB, .*allowed are 72 GB, 90% of cuda:0"
    ):
        tokens(GPUMemory(80 * GB, 3 * GB, 66 * GB))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Torch's answers about a GPU of 10 GB: 4 of this process, 2 of others; a pass takes 1 more."""
    said = {"share": 1.0, "peak": 5 * GB}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4 * GB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: said["peak"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GB, 10 * GB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: said["share"])
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return said


def test_a_limit_for_the_process_is_its_device(gpu: dict[str, Any]) -> None:
    """What others have is no part of a share that is our own."""
    assert GPUMemory.now(ON_GPU.device) == GPUMemory(10 * GB, 2 * GB, 4 * GB)
    gpu["share"] = 0.5
    assert GPUMemory.now(ON_GPU.device) == GPUMemory(5 * GB, 0, 4 * GB)


def test_workers_of_one_process_have_equal_parts_of_the_gpu() -> None:
    """Each counts its own tensors; what others have is taken off before."""
    whole = GPUMemory(80 * GB, 2 * GB, 40 * GB)
    assert GPUMemory.part_of(whole, 3, 15 * GB) == GPUMemory(26 * GB, 0, 15 * GB)
    assert GPUMemory.part_of(whole, 1, 15 * GB) == whole


def test_embeddings_get_their_share() -> None:
    """5 % of 72 GB, 3.6 GB, hold 100 thousand rows of 36 KB, or half as many in each of two pools."""
    assert embeddings_within(72 * GB, 36_000, 1) == 100_000
    assert embeddings_within(72 * GB, 36_000, 2) == 50_000
    assert embeddings_within(GB, 36_000, 1) == 16_384, "at least a long video"


def test_the_largest_passes_are_run_before_the_pool_is_sized(
    family: Family, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(memory_sizing, "run_encode", lambda *_: ran.append("encode"))
    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *_: ran.append("prefill"))
    passes = LargestPasses(4096, 2048)
    arguments = (family.model, family.model, family.adapter, GENERATION)
    assert measured_kv_tokens(*arguments, CPU_FLOAT32, passes) is None
    assert not ran
    num_tokens = measured_kv_tokens(*arguments, ON_GPU, passes)
    assert ran == ["prefill", "encode"]
    bytes_per_token = memory_sizing.kv_bytes_per_token(family.model)
    assert num_tokens == (9 - 4 - 2 - 1) * GB // bytes_per_token // 16 * 16
    both_at_once = measured_kv_tokens(*arguments, ON_GPU, replace(passes, encode_beside=True))
    assert both_at_once == (9 - 4 - 2 - 2) * GB // bytes_per_token // 16 * 16


def test_a_worker_that_has_roles_again_runs_no_pass_and_captures_none(
    checkpoints: dict[str, Path], gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have by then counts."""
    ran: list[str] = []
    engine = SimpleNamespace(pools=SimpleNamespace(shape=SimpleNamespace(num_bytes=0)))
    monkeypatch.setattr(memory_sizing, "run_encode", lambda *_: ran.append("encode"))
    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *_: ran.append("prefill"))
    monkeypatch.setattr(memory_sizing, "run_sampling", lambda *_: None)
    monkeypatch.setattr(memory_sizing, "_capture", lambda *_: ran.append("capture") or engine)
    path = checkpoints["qwen2_5_vl"]
    builder = StageBuilder(WorkerSettings(path, num_embeddings=1024), LocalTransport())
    monkeypatch.setattr(builder, "_load", lambda role: load_role(path, role, CPU_FLOAT32).model)
    builder.placement, found = ON_GPU, list[int | None]()
    for roles in ({"decode"}, {"prefill"}, {"decode"}, {"encode", "prefill"}):
        builder.size(frozenset(roles), frozenset(roles))
        found.append(builder._kv_tokens)
    assert ran == ["prefill", "capture", "prefill", "capture", "prefill", "encode", "capture"]
    assert found[0] == found[2] is not None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GB, 10 * GB))
    builder.size(frozenset({"decode"}), frozenset({"decode"}))
    assert len(ran) == 7
    bytes_per_token = memory_sizing.kv_bytes_per_token(builder._language)
    assert found[0] - (builder._kv_tokens or 0) == pytest.approx(GB / bytes_per_token, abs=16)


def with_largest_image(path: Path, num_pixels: int) -> Any:
    """The adapter of a model whose processor allows images of so many pixels."""
    adapter: Any = load_adapter(path)
    adapter.checkpoint.processor.image_processor.size["longest_edge"] = num_pixels
    return adapter


# Of Qwen2.5-VL-7B about: bytes of the tower for a patch of an image, the largest of which has 16,384 here.
_PATCH_BYTES, _PIXELS = 600_000, 16_384 * 14 * 14


@pytest.mark.parametrize(
    ("device_gb", "resize_pixels", "left_gb"),
    [
        (24, None, None),
        (48, None, 43.2 - 15 - 9.8304),
        (80, None, 72 - 15 - 9.8304),
        (80, 2 * _PIXELS, 37.3392),
    ],
)
def test_the_largest_image_that_is_allowed_has_room(
    families: dict[str, Family],
    gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    device_gb: int,
    resize_pixels: int | None,
    left_gb: float | None,
) -> None:
    """On GPUs of 24, 48 and 80 GB: beside 15 GB of weights, or it is refused when the worker starts."""
    family = families["qwen2_5_vl"]
    adapter = with_largest_image(family.path, _PIXELS)
    seen: list[int] = [0]

    def counted(_adapter: Any, _tower: Any, runs: list[PatchRun]) -> list[Embeddings]:
        seen.append(sum(run.grid.num_patches for run in runs))
        return [Embeddings(torch.zeros(1, 1)) for _ in runs]

    monkeypatch.setattr(type(adapter), "encode_batch", counted)
    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 15 * GB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 15 * GB + max(seen) * _PATCH_BYTES)
    passes = LargestPasses(4096, 2048, resize_pixels=resize_pixels)

    def measured() -> int | None:
        memory = GPUMemory(device_gb * GB, 0, 15 * GB)
        arguments = (family.model, adapter.vision_tower(family.model), adapter, GENERATION, ON_GPU, passes)
        return measured_kv_tokens(*arguments, memory_of=lambda _: memory)

    if left_gb is None:
        with pytest.raises(InfeasibleError, match=r"activations 9.* GB"):
            measured()
        return
    bytes_per_token = memory_sizing.kv_bytes_per_token(family.model)
    num_tokens = measured()
    assert num_tokens is not None
    assert num_tokens * bytes_per_token == pytest.approx(left_gb * GB, rel=1e-3)
    assert max(seen) == (32_768 if resize_pixels else 16_384)


def test_an_image_without_room_is_refused_in_words(
    families: dict[str, Family], gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    family = families["qwen2_5_vl"]
    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *_: None)
    monkeypatch.setattr(memory_sizing, "run_encode", full)
    arguments = (family.model, family.model, family.adapter, GENERATION, ON_GPU, LargestPasses(4096, 2048))
    with pytest.raises(InfeasibleError, match=r"^[^\n]*largest image that is allowed[^\n]*max_pixels[^\n]*$"):
        measured_kv_tokens(*arguments)


def test_a_model_that_hears_runs_its_longest_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_qwen2_audio(tmp_path)
    adapter = load_adapter(path)
    seen: list[int] = []
    encode_batch = type(adapter).encode_batch

    def counted(of: Any, tower: Any, runs: list[PatchRun]) -> Any:
        seen.append(len(runs))
        return encode_batch(of, tower, runs)

    monkeypatch.setattr(type(adapter), "encode_batch", counted)
    longest = adapter.plan_audio(adapter.audio.max_samples).grid.num_patches
    run_encode(adapter, adapter.vision_tower(load_role(path, "encode", CPU_FLOAT32).model), 3 * longest)
    assert seen == [3]


def test_captured_passes_are_part_of_what_a_worker_needs(
    families: dict[str, Family], gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a GB beside the pool that they were captured with; of what torch reports, and the driver takes."""
    free, family = iter([int(3.6 * GB)]), families["qwen2_5_vl"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free, 3 * GB), 10 * GB))
    engine = SimpleNamespace(pools=SimpleNamespace(shape=SimpleNamespace(num_bytes=GB // 10)))
    sizes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *_: None)
    monkeypatch.setattr(memory_sizing, "_capture", lambda *args: sizes.append(args[-2:]) or engine)
    arguments = (family.model, None, family.adapter, GENERATION, ON_GPU)
    kinds = frozenset({"chunks", "tower"})
    num_tokens = measured_kv_tokens(*arguments, LargestPasses(4096, 2048, 64, captures=kinds))
    assert sizes == [({"chunks"}, 64)]
    bytes_per_token = memory_sizing.kv_bytes_per_token(family.model)
    assert num_tokens == int((9 - 4 - 2 - 1 - 0.5) * GB) // bytes_per_token // 16 * 16


@pytest.mark.parametrize(
    ("device_gb", "num_tokens", "num_seqs", "left_gb"),
    [
        (24, 2048, 256, 6.6 - 2.304),
        (48, 2048, 256, 28.2 - 2.304),
        (80, 8192, 1024, 57 - 9.216),
    ],
)
def test_passes_are_as_large_as_the_device_and_have_room(
    checkpoints: dict[str, Path],
    gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    device_gb: int,
    num_tokens: int,
    num_seqs: int,
    left_gb: float,
) -> None:
    """A prefilled token takes 1 MB, an answer that is drawn 9 MB: it is the answers that need most."""
    held, peak = [15 * GB], [0]

    def run(num_bytes: int) -> None:
        peak[0] = held[0] + num_bytes

    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *args: run(args[3] * 10**6))
    monkeypatch.setattr(memory_sizing, "run_sampling", lambda _, count: run(count * 9 * 10**6))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: held[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak[0])
    monkeypatch.setattr(GPUMemory, "now", classmethod(lambda cls, _: cls(device_gb * GB, 0, 15 * GB)))
    settings = WorkerSettings(checkpoints["qwen2_5_vl"], EngineConfig(enforce_eager=True), num_embeddings=0)
    builder = StageBuilder(settings, LocalTransport())
    monkeypatch.setattr(
        builder, "_load", lambda role: load_role(settings.model_path, role, CPU_FLOAT32).model
    )
    builder.placement = ON_GPU
    builder._num_embeddings = 0
    builder.size(frozenset({"prefill", "decode"}), frozenset({"prefill", "decode"}))
    assert builder.limits == builder.decode_limits == SchedulerConfig(num_tokens, num_seqs, num_tokens)
    assert builder._kv_tokens is not None
    bytes_per_token = memory_sizing.kv_bytes_per_token(builder._language_model())
    assert builder._kv_tokens * bytes_per_token == pytest.approx(left_gb * GB, rel=1e-3)


@pytest.mark.parametrize(
    ("roles", "draft", "kinds"),
    [
        ({"prefill"}, "none", {"chunks"}),
        ({"decode"}, "none", {"decodes"}),
        ({"decode"}, "recycling", {"decodes", "chunks"}),
        ({"prefill", "decode"}, "none", {"decodes", "chunks"}),
    ],
)
def test_a_worker_captures_the_passes_that_its_roles_have(
    checkpoints: dict[str, Path],
    gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    roles: set[Stage],
    draft: Any,
    kinds: set[str],
) -> None:
    """When its memory is sized, and in its stage; of a worker that prefills, in the prefill stage."""
    path, asked = checkpoints["qwen2_5_vl"], list[set[str]]()
    builder = StageBuilder(
        WorkerSettings(path, EngineConfig(draft=draft), num_embeddings=1024), LocalTransport()
    )
    monkeypatch.setattr(builder, "_load", lambda role: load_role(path, role, CPU_FLOAT32).model)
    monkeypatch.setattr(
        worker_stages, "measured_kv_tokens", lambda *args, **_: asked.append(args[5].captures)
    )
    on_cpu, builder.placement = builder.placement, ON_GPU
    builder.size(frozenset(roles), frozenset(roles))
    builder.placement = on_cpu

    def build(*args: Any, captures: Any, **options: Any) -> Any:
        asked.append(captures)
        return build_engine(*args, captures=captures, **options)

    monkeypatch.setattr(worker_stages, "build_engine", build)
    if "prefill" in roles:
        builder.prefill("a", decodes="decode" in roles)
    else:
        builder.decode("a")
    assert asked == [kinds, kinds]


@pytest.mark.parametrize("device_gb", [24, 48, 80])
def test_graphs_of_the_tower_are_part_of_what_a_worker_needs(
    checkpoints: dict[str, Path],
    gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device_gb: int,
) -> None:
    """They take .7 GB, are given back when they are measured, and held by the stage of a worker."""
    free, model = [9 * GB], checkpoints["qwen2_5_vl"]
    monkeypatch.setattr(memory_sizing, "run_encode", lambda *_: None)
    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *_: None)
    monkeypatch.setattr(memory_sizing, "run_sampling", lambda *_: None)
    monkeypatch.setattr(memory_sizing, "CudaGraphMaker", lambda _: Taking(free))
    monkeypatch.setattr(memory_sizing, "_capture", lambda *_: Taking(free, 0.3).engine())
    monkeypatch.setattr(memory_sizing, "uses_kernels", lambda _: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free[0]), device_gb * GB))
    monkeypatch.setattr(GPUMemory, "now", classmethod(lambda cls, _: cls(device_gb * GB, 0, 15 * GB)))

    def builder_of(**options: Any) -> StageBuilder:
        settings = WorkerSettings(model, EngineConfig(**options), num_embeddings=1024)
        builder = StageBuilder(settings, LocalTransport())
        monkeypatch.setattr(builder, "_load", lambda role: load_role(model, role, CPU_FLOAT32).model)
        builder.placement = ON_GPU
        return builder

    def sized(roles: set[Stage], **options: Any) -> float:
        """GB of keys and values."""
        builder = builder_of(**options)
        builder.size(frozenset(roles), frozenset(roles))
        assert free[0] == 9 * GB
        return (builder._kv_tokens or 0) * memory_sizing.kv_bytes_per_token(builder._language_model()) / GB

    most = sized({"encode", "prefill"}, enforce_eager=True)
    assert most - sized({"encode", "prefill"}) == pytest.approx(0.7 + 0.3, abs=0.01)
    assert sized({"prefill"}, enforce_eager=True) - sized({"prefill"}) == pytest.approx(0.3, abs=0.01)
    with caplog.at_level(logging.INFO, "epd.serve_app.worker.worker_stages"):
        builder = builder_of()
        tower = builder._captured(builder.adapter.vision_tower(builder._encoder_model()), 700)
    assert "calls of the tower of at most 512 patches, 0.70 GB" in caplog.text
    del tower


class Taking:
    """Stands in for CUDA graphs that take some GB of a device while they live. free: its bytes, in a list."""

    def __init__(self, free: list[float], num_gb: float = 0.7) -> None:
        self._free, self._num_bytes = free, num_gb * GB

    def capture(self, _run: Any) -> Any:
        self._free[0] -= self._num_bytes
        weakref.finalize(self, _add, self._free, self._num_bytes)
        self._num_bytes = 0
        return lambda: self

    def engine(self) -> Any:
        kept = self.capture(None)
        return SimpleNamespace(pools=SimpleNamespace(shape=SimpleNamespace(num_bytes=0)), kept=kept)


def _add(free: list[float], num_bytes: float) -> None:
    free[0] += num_bytes


def test_the_largest_sampling_weighs_every_token_for_each_answer(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(setup, "sample", lambda logits, rows: seen.append((*logits.shape, len(rows))))
    run_sampling(family.model, 5)
    assert seen == [(5, family.model.get_output_embeddings().out_features, 5)]


def test_a_worker_is_sized_for_its_roles(
    checkpoints: dict[str, Path], gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, MemoryShare]] = []

    def measured(_model: Any, tower: Any, *others: Any, **_: Any) -> int:
        asked.append((tower is not None, others[-1]))
        return 4800

    monkeypatch.setattr("epd.serve_app.worker.worker_stages.measured_kv_tokens", measured)
    path = checkpoints["qwen2_5_vl"]
    settings = WorkerSettings(path, EngineConfig(gpu_memory_utilization=0.4), num_embeddings=1024)
    elastic = replace(settings, switchable=switchable_roles(parse_topology("1ep1d")))
    for topology, own in (("1ep1d", settings), ("1e1pd", settings), ("1e1p1d", elastic)):
        for worker in parse_topology(topology).workers():
            builder = StageBuilder(own, LocalTransport())
            monkeypatch.setattr(builder, "_load", lambda role: load_role(path, role, CPU_FLOAT32).model)
            builder.placement = ON_GPU
            builder.size(worker.roles, stages_of(worker.roles))
            assert builder._kv_tokens == (4800 if worker.roles != {"encode"} else None)
    found = [(share.letters, encodes, share.embedding_bytes) for encodes, share in asked]
    row_bytes = 64 * 2
    fixed = [("ep", True, 2048 * row_bytes), ("d", False, 0), ("pd", False, 1024 * row_bytes)]
    assert found == [*fixed, ("ep", True, 2048 * row_bytes), ("d", False, 0)]  # room to encode besides
    assert {share.options.gpu_memory_utilization for _, share in asked} == {0.4}


def test_embeddings_are_sized_by_the_gpu(
    checkpoints: dict[str, Path], gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 % of half of 10 GB, unless a number was set: an encoder alone has no other pool to size."""
    path = checkpoints["qwen2_5_vl"]
    row_bytes = 64 * 2
    for settings, expected in (
        (WorkerSettings(path, EngineConfig(gpu_memory_utilization=0.5)), GB // 4 // row_bytes),
        (WorkerSettings(path, num_embeddings=1024), 1024),
        (WorkerSettings(path, EngineConfig(num_kv_tokens=1024)), 65_536),
    ):
        builder = StageBuilder(settings, LocalTransport())
        monkeypatch.setattr(builder, "_load", lambda role: load_role(path, role, CPU_FLOAT32).model)
        builder.placement = ON_GPU
        builder.size(frozenset({"encode"}), frozenset({"encode"}))
        assert builder._num_embeddings == expected


def test_the_passes_are_as_large_as_settings_allow(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode_batch = type(family.adapter).encode_batch

    def counted(adapter: Any, tower: Any, runs: list[PatchRun]) -> Any:
        seen.append(sum(run.grid.num_patches for run in runs))
        return encode_batch(adapter, tower, runs)

    monkeypatch.setattr(type(family.adapter), "encode_batch", counted)
    one = family.adapter.plan_image(448, 448).grid.num_patches
    with torch.inference_mode():
        run_encode(family.adapter, family.adapter.vision_tower(family.model), 3 * one + 1)
    sizes = [(h, w) for h in range(28, 400, 28) for w in range(28, 400, 28)]
    most = max(family.adapter.plan_image(*size).grid.num_patches for size in sizes)
    assert seen == [3 * one, *([most] if most > 3 * one else [])]
    settings: Any = type("Settings", (), {"eos_ids": frozenset()})()
    model = load_reference(family.path)
    run_prefill(model, family.adapter, settings, 1)  # merges matrices that were not loaded side by side
    small, large = (
        peak_bytes(lambda n=n: run_prefill(model, family.adapter, settings, n))
        for n in (32, 256)  # type: ignore[misc]
    )
    assert large > 3 * small


def test_what_windows_do_not_need_is_room_for_tokens(
    tmp_path: Path, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is full: pools of windows are bounded, and the rest is for layers that keep all tokens."""
    family = Family.load("gemma3", build_gemma3(tmp_path / "model"))
    monkeypatch.setattr(memory_sizing, "run_sampling", lambda *_: None)
    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *_: None)
    arguments = (family.model, None, family.adapter, GENERATION, ON_GPU)
    largest = kv_shape(family.model, 2**24, max_num_seqs=4, max_chunk_tokens=64)
    num_tokens = measured_kv_tokens(*arguments, LargestPasses(4096, 64, num_seqs=4))
    assert num_tokens is not None
    shape = kv_shape(family.model, num_tokens, max_num_seqs=4, max_chunk_tokens=64)
    full, window = shape.groups
    assert window.num_blocks == largest.groups[1].num_blocks == (4 + 8) * (2 + 1) + 4
    whole = memory_sizing.kv_bytes_per_token(family.model)
    monkeypatch.setattr(memory_sizing, "kv_shape", lambda *_, **__: KVPoolsShape((full,), 16))
    kept = measured_kv_tokens(*arguments, LargestPasses(4096, 64, num_seqs=4))
    assert kept is not None
    assert shape.num_bytes == pytest.approx(kept * whole, abs=16 * whole)


def test_recurrent_states_are_taken_off_the_room_of_tokens(
    families: dict[str, Family], gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots of each answer that grows, and eight for states that are kept."""
    family = families["qwen3_5"]
    monkeypatch.setattr(memory_sizing, "run_sampling", lambda *_: None)
    monkeypatch.setattr(memory_sizing, "run_prefill", lambda *_: None)
    arguments = (family.model, None, family.adapter, GENERATION, ON_GPU)
    without = measured_kv_tokens(*arguments, LargestPasses(4096, 2048))
    num_tokens = measured_kv_tokens(*arguments, LargestPasses(4096, 2048, num_seqs=64))
    ((layout, _),) = kv_layouts(family.model)
    tails, matrices = 6 * 3 * 128 * 4, 6 * 4 * 16 * 16 * 4
    assert layout.num_layers == 2
    assert without is not None
    assert num_tokens is not None
    taken = (2 * 64 + 8) * (tails + matrices) / layout.bytes_per_token
    assert without - num_tokens == pytest.approx(taken, abs=16)
