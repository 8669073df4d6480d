"""A worker gives up its role and takes others, on a device that computes nothing.

Its answer moves to another worker with its keys and values; then it encodes and prefills. No tensor of
another device, and no wait that is not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from epd.encode.sharding import BATCH_PATCHES
from epd.sampling_params import SamplingParams
from epd.serve_app.local.fleet import LocalTransport
from epd.serve_app.messages import Reserve, endpoint
from epd.serve_app.role_messages import AskRemaining, Move, Offload, Onload, Pause, SetRoles, StagesClosed
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker.worker_stages import StageBuilder
from epd.stages.loading.host_weights import HostWeights, copy_seconds
from epd.stages.loading.weight_files import write_weights
from epd.stages.loading.weights import load_role
from epd.stages.memory_sizing import GPUMemory
from epd.stages.placement import Placement
from epd.topology import Stage
from tests.encoders.conftest import families, family
from tests.encoders.families import Family
from tests.fake_cuda import CUDA, FakeCuda, UnlistedWaitError, fake_cuda
from tests.serve_app.deployments import Question
from tests.serve_app.worker.bench import Bench

__all__ = ["families", "family"]

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
DECODE = frozenset[Stage]({"decode"})
OTHERS = frozenset[Stage]({"encode", "prefill"})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    placement = Placement(CUDA, torch.float32)
    monkeypatch.setattr(WorkerSettings, "placement", lambda _: placement)
    monkeypatch.setattr("epd.stages.device_memory.free_bytes", lambda _: 10**10)
    monkeypatch.setattr("epd.stages.device_memory.total_bytes", lambda _: 10**10)
    monkeypatch.setattr(GPUMemory, "now", lambda _: GPUMemory(10**10, 0, 0))
    monkeypatch.setattr("epd.serve_app.worker.worker_stages.StageBuilder._allowed_bytes", 10**10)
    with fake_cuda() as mode:
        yield mode


def test_a_decode_worker_encodes_and_prefills_from_then_on(
    family: Family, media: dict[str, Path], cuda: FakeCuda
) -> None:
    with cuda.unchecked():  # weights are loaded
        bench = Bench(family.path, "1e1p2d")
    question = Question((media["image"],), sampling=SamplingParams(max_tokens=5, ignore_eos=True))
    plan = bench.plan(question)
    assert bench.submit("r", plan)
    while len(bench.outputs.get("r", {})) < 3:
        for granted in bench.granted(bench.step()):
            assert bench.encode(question, plan, granted, "e0")

    bench.tell("d0", Offload(frozenset(), DECODE))
    identity, _ = bench.tell("d0", Pause("r"))
    sender = endpoint("d0", "decode")
    ticket = bench.tell("d1", Reserve("r", sender, identity, plan.sampling))
    assert bench.tell("d0", Move("r", ticket))
    for _ in range(20):
        bench.step()
        if bench.tell("d0", AskRemaining(DECODE)).is_over:
            break
    with cuda.unchecked():
        bench.tell("d0", Onload(OTHERS))
        bench.tell("d0", SetRoles(OTHERS))
    for name in ("e0", "p0", "d1"):
        bench.tell(name, StagesClosed("d0", DECODE))
    bench.finish({"r": (question, plan)})
    assert set(bench.cores["d0"].hosted) == {"encode", "prefill"}
    assert bench.cores["d1"].load().counters["generated_tokens"] > 0

    again = replace(question, text="And now?", sampling=SamplingParams(max_tokens=2, ignore_eos=True))
    plan = bench.plan(again)
    ticket = bench.reserve("s", plan, sender="d0", worker="d1")
    assert bench.submit_with("s", plan, "d0", ticket)
    bench.finish({"s": (again, plan)}, encoder="d0")
    assert bench.cores["d0"].load().counters["encoded_groups"] > 0
    bench.settle()


def test_an_encoder_takes_more_patches_together_on_a_gpu(family: Family, cuda: FakeCuda) -> None:
    for given, taken in ((None, BATCH_PATCHES["cuda"]), (100, 100)):
        settings = WorkerSettings(family.path, max_batch_patches=given)
        with cuda.unchecked():
            stage = StageBuilder(settings, LocalTransport()).encode("e0.encode")
        assert stage._max_batch_patches == taken


@pytest.fixture
def weights(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that workers of a machine share."""
    path = tmp_path / "weights"
    write_weights(checkpoints["qwen2_5_vl"], torch.float32, path)
    monkeypatch.setattr(LocalTransport, "weights", lambda *_: path)
    return path


@pytest.mark.parametrize(("keeps", "error"), [(False, 0), (True, 0), (True, 2)])
def test_each_worker_pins_the_weights_of_its_machine_once(
    checkpoints: dict[str, Path],
    weights: Path,
    cuda: FakeCuda,
    caplog: pytest.LogCaptureFixture,
    keeps: bool,
    error: int,
) -> None:
    """It gives them back when it ends. Where they cannot be pinned, that is told, and roles change too."""
    cuda.cudart.error = error
    with cuda.unchecked():
        bench = Bench(checkpoints["qwen2_5_vl"], "1e1p1d", {"keeps_weights": keeps})
        for roles, others in ((DECODE, OTHERS), (OTHERS, DECODE)):
            bench.tell("d0", Offload(frozenset(), roles))
            bench.tell("d0", Onload(others))
            bench.tell("d0", SetRoles(others))
            bench.step()
            assert set(bench.cores["d0"].hosted) == others
    assert cuda.cudart.num_calls == (len(bench.cores) if keeps else 0)
    assert list(cuda.cudart.registered.values()) == [weights.stat().st_size] * (
        3 if keeps and not error else 0
    )
    assert caplog.text.count("GB of weights are not pinned: error 2; roles change slower") == (
        3 if error else 0
    )
    for core in bench.cores.values():
        core.close()
        core.close()
    assert not cuda.cudart.registered


def test_pinned_weights_are_copied_without_a_wait_for_each(
    checkpoints: dict[str, Path], weights: Path, cuda: FakeCuda
) -> None:
    path, placement = checkpoints["qwen2_5_vl"], Placement(CUDA, torch.float32)
    kept = HostWeights(weights, CUDA)
    (mapping,) = [each for each in Path("/proc/self/maps").read_text().splitlines() if str(weights) in each]
    assert "rw-s" in mapping, "a driver that may write pages of another mapping takes copies of them"
    loaded = load_role(path, "language", placement, kept)
    assert cuda.waits[0] == ("stages/loading/host_weights.py", "tensors"), "for all of them together"
    assert set(cuda.waits[1:]) == {("stages/loading/weights.py", "_move_buffers")}
    assert {each.device.type for each in loaded.model.parameters()} == {"cuda"}
    with pytest.raises(UnlistedWaitError, match="memory that is not pinned"):
        load_role(path, "language", placement)
    kept.close()
    with pytest.raises(UnlistedWaitError, match="memory that is not pinned"):
        load_role(path, "language", placement, kept)
    del kept
    assert not cuda.cudart.registered
    assert HostWeights(weights, CUDA) is not None
    assert not cuda.cudart.registered, "unpinned with the object"


def test_the_price_of_a_copy_is_that_of_a_part_of_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a quarter of a second later; the part is a quarter of 1 GiB, copied twice."""
    looks = count()
    monkeypatch.setattr("epd.stages.loading.host_weights.time.perf_counter", lambda: next(looks) / 4)
    assert copy_seconds(15 << 30, CUDA) == 60 * 0.25
    assert cuda.launches.count("copy_") == 2
    assert set(cuda.waits) == {("stages/loading/host_weights.py", "copy_seconds")}
    assert copy_seconds(1000, CUDA) == 0.25
