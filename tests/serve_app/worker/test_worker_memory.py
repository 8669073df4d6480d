"""What a worker has on its device, and the pools of a GPU's worker that changes its roles.

No GPU is needed: placements of the CPU say that they are a GPU's, and torch's answers are given by the tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epd.errors import InfeasibleError
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.role_messages import Offload, Onload, SetRoles
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker_info import MemoryUse
from epd.stages.memory_sizing import GPUMemory
from epd.stages.placement import Placement
from epd.topology import Stage
from tests.serve_app.worker.bench import Bench

ENCODE, PREFILL, DECODE = (frozenset[Stage]({each}) for each in ("encode", "prefill", "decode"))  # type: ignore[arg-type]


def memory_of(load: WorkerLoad) -> MemoryUse:
    assert load.memory is not None
    return load.memory


def test_a_worker_says_what_it_has(bench: Bench) -> None:
    encoder, prefill = (memory_of(bench.cores[name].load()) for name in ("e0", "p0"))
    assert (encoder.num_embeddings, encoder.num_kv_tokens, encoder.kv_bytes) == (2048, 0, 0)
    assert encoder.embedding_bytes == 2048 * 64 * 4
    assert (prefill.num_embeddings, prefill.num_kv_tokens) == (2048, 4096)
    assert prefill.kv_bytes == 4096 * 2 * 3 * 2 * 16 * 4, "keys and values of 3 layers and 2 heads of 16"
    assert prefill.weight_bytes > encoder.weight_bytes > 0
    assert prefill.device == "float32 on cpu"
    assert prefill.allowed_bytes > prefill.kv_bytes


def test_what_it_has_follows_its_roles(bench: Bench) -> None:
    before = memory_of(bench.cores["e0"].load())
    bench.tell("e0", SetRoles(DECODE))
    bench.cores["e0"].step()
    now = memory_of(bench.cores["e0"].load())
    assert (now.num_embeddings, now.num_kv_tokens) == (0, 4096)
    assert now.weight_bytes > before.weight_bytes


class Sizes:
    """Gives a worker's KV pool another size each time, and notes which stages the worker had then."""

    def __init__(self) -> None:
        self.core: WorkerCore | None = None
        self.asked: list[tuple[str, frozenset[str]]] = []

    def __call__(self, *arguments: Any, **_: Any) -> int:
        self.asked.append((arguments[-1].letters, frozenset(self.core.hosted) if self.core else frozenset()))
        return 4096 - 512 * len(self.asked)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    found = Sizes()
    monkeypatch.setattr(Placement, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(GPUMemory, "now", classmethod(lambda cls, _: cls(10**9, 0, 0)))
    monkeypatch.setattr("epd.serve_app.worker.worker_stages.measured_kv_tokens", found)
    return found


@pytest.fixture
def core(bench: Bench, sizes: Sizes) -> WorkerCore:
    """A decode worker of a GPU, which is about to prefill."""
    of_gpu = Bench(bench.path, "1d", {"num_kv_tokens": None, "num_embeddings": None})
    sizes.core = of_gpu.cores["d0"]
    assert memory_of(sizes.core.load()).num_kv_tokens == 3584
    sizes.core.handle(Offload(frozenset(), DECODE))
    return sizes.core


def test_old_pools_make_room_before_new_ones_are_sized(core: WorkerCore, sizes: Sizes) -> None:
    core.handle(Onload(PREFILL))
    assert sizes.asked == [("d", frozenset()), ("p", frozenset())]
    core.handle(SetRoles(PREFILL))
    memory = memory_of(core.load())
    assert memory.num_kv_tokens == 3072
    assert memory.num_embeddings == 45_000_000 // (64 * 4) // 16 * 16, "5 % of 90 % of the GPU"
    assert memory.allowed_bytes == 900_000_000


def test_a_switch_that_fails_gives_the_old_pool_back(core: WorkerCore, sizes: Sizes) -> None:
    core.handle(Onload(PREFILL))
    core.handle(SetRoles(DECODE))
    core.step()
    assert set(core.hosted) == {"decode"}
    assert [letters for letters, _ in sizes.asked] == ["d", "p", "d"]
    assert memory_of(core.load()).num_kv_tokens == 2560


def test_pools_without_room_are_refused(core: WorkerCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str, **_options: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GB")

    monkeypatch.setattr(core._builder, "prefill", fail)
    with pytest.raises(InfeasibleError, match=r"do not fit beside the 0.0 GB .*20 GB; lower gpu_memory"):
        core.handle(Onload(PREFILL))
    core.handle(SetRoles(DECODE))
    assert set(core.hosted) == {"decode"}
