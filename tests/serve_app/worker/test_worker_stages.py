"""Weights of a worker: shared where several workers of a machine's CPUs run the model, its own elsewhere.

Modules: `serve_app/worker/worker_settings.py`, `stages/loading/host_weights.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from epd.errors import RequestError
from epd.serve_app.app_args import STAGE_FIELDS, AppArgs
from epd.serve_app.composition import worker_settings
from epd.serve_app.local.fleet import LocalTransport
from epd.serve_app.network import memory
from epd.serve_app.network.memory import PoolFiles, new_fleet_id
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import PeerPlace
from epd.serve_app.role_messages import Offload, Onload, SetRoles
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker.worker_stages import StageBuilder
from epd.stages.loading.host_weights import HostWeights
from epd.stages.loading.weight_files import write_weights
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32, Placement
from epd.topology import Stage
from tests.fake_cuda import CUDA, fake_cuda
from tests.serve_app.worker.bench import Bench, answered

ON_GPU = Placement(CUDA, torch.bfloat16)
DECODE, OTHERS = frozenset[Stage]({"decode"}), frozenset[Stage]({"encode", "prefill"})


@dataclass(slots=True)
class AskedTransport(LocalTransport):
    """Notes what weights were asked for."""

    asked: list[Placement] = field(default_factory=list)

    def weights(self, path: Path, placement: Placement) -> Path | None:
        self.asked.append(placement)
        return LocalTransport.weights(self, path, placement)


@pytest.mark.parametrize(("topology", "num_asked"), [("1epd", 0), ("1e1pd", 1)])
def test_a_lone_worker_shares_its_weights_with_none(
    checkpoints: dict[str, Path], topology: str, num_asked: int
) -> None:
    args = AppArgs(model=checkpoints["qwen2_5_vl"], topology=topology, device="cpu", dtype="bfloat16")
    transport = AskedTransport()
    StageBuilder(worker_settings(args), transport)
    assert transport.asked == [Placement(torch.device("cpu"), torch.bfloat16)] * num_asked


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolFiles]:
    """What workers of a machine share, in a folder for memory."""
    monkeypatch.setattr(memory, "_MEMORY_FOLDER", tmp_path)
    monkeypatch.setattr(WorkerSettings, "placement", lambda _: ON_GPU)
    files = PoolFiles(new_fleet_id())
    yield files
    files.release()


def transport_of(files: PoolFiles) -> ProcessTransport:
    return ProcessTransport(lambda *_: None, lambda _: None, files, PeerPlace("e0 1", "here"))


@pytest.mark.parametrize(
    ("topology", "elastic", "is_kept"),
    [("1e1pd", False, False), ("1epd", True, False), ("1e1pd", True, True)],
)
def test_weights_are_kept_for_gpus_whose_workers_change_roles(
    checkpoints: dict[str, Path],
    files: PoolFiles,
    caplog: pytest.LogCaptureFixture,
    topology: str,
    elastic: bool,
    is_kept: bool,
) -> None:
    """Once for all workers of the machine, which is told with their size; elsewhere each loads its own."""
    args = AppArgs(model=checkpoints["qwen2_5_vl"], topology=topology, elastic=elastic)
    settings = worker_settings(args.for_workers(*STAGE_FIELDS))
    with caplog.at_level("INFO"), fake_cuda() as cuda, cuda.unchecked():
        builders = [StageBuilder(settings, transport_of(files)) for _ in range(2)]
        assert len(cuda.cudart.registered) == 2 * is_kept
        for each in builders:
            each.release()
    assert len(files.paths()) == is_kept
    assert caplog.text.count("GB of memory that are free, once for all workers of this machine") == is_kept


@pytest.mark.parametrize(
    ("free", "folder", "reason"),
    [
        (1000, "", "of the 0.00 GB of memory that are free, of which 50% at most are kept for role switches"),
        (10**12, "another", "another has no room for"),
    ],
)
def test_weights_that_memory_has_no_room_for_are_read_from_files(
    checkpoints: dict[str, Path],
    files: PoolFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    folder: str,
    reason: str,
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: free)
    monkeypatch.setattr(memory, "_roomy_folder", lambda *_: tmp_path)
    monkeypatch.setattr(memory, "_MEMORY_FOLDER", tmp_path / folder)
    (tmp_path / folder).mkdir(exist_ok=True)
    assert transport_of(files).weights(checkpoints["qwen2_5_vl"], ON_GPU) is None
    assert reason in caplog.text
    assert "each worker reads its own" in caplog.text
    assert files.paths() == []


def test_roles_from_kept_weights_give_the_same_tokens(
    checkpoints: dict[str, Path], media: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where values are real, a worker copies as on a GPU: other roles, its own again, an answer."""
    path, kept = checkpoints["qwen2_5_vl"], tmp_path / "weights"
    write_weights(path, torch.float32, kept)
    expected = answered(path, "1e1p1d", (media["image"],))

    def keep(builder: StageBuilder) -> None:
        builder._kept = HostWeights(kept, torch.device("cpu"))

    def change(bench: Bench) -> None:
        parts = ("_encoder", "encode"), ("_language", "language")
        for roles, others in ((DECODE, OTHERS), (OTHERS, DECODE)):
            bench.tell("d0", Offload(frozenset(), roles))
            bench.tell("d0", Onload(others))
            bench.tell("d0", SetRoles(others))
            bench.step()
            builder = bench.cores["d0"]._builder
            for held, role in parts if others == OTHERS else parts[1:]:
                read = load_role(path, role, CPU_FLOAT32).model.state_dict()
                copied = getattr(builder, held).state_dict()
                assert copied.keys() == read.keys()
                assert all(torch.equal(copied[name], read[name]) for name in read)
        assert builder._encoder is None

    monkeypatch.setattr(StageBuilder, "_share_weights", keep)
    assert answered(path, "1e1p1d", (media["image"],), change) == expected


def test_a_worker_beside_groups_of_other_sizes_keeps_its_roles(checkpoints: dict[str, Path]) -> None:
    """Its engine of one size would be lost while that of the other is started."""
    args = AppArgs(model=checkpoints["qwen2_5_vl"], device="cpu", decode_tensor_parallel_size=2)
    transport = AskedTransport()
    core = WorkerCore("e0", frozenset({"encode"}), worker_settings(args), transport)
    assert not transport.asked, "each rank reads its own part"
    for change in (Onload, SetRoles):
        with pytest.raises(RequestError, match=r"need prefill where 2 processes .* and 1 that of others"):
            core.handle(change(frozenset({"encode", "prefill"})))
    assert core.roles == core.hosted.keys() == {"encode"}


def test_stages_of_a_worker_learn_of_a_disk_from_each_other(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    args = AppArgs(model=checkpoints["qwen2_5_vl"], topology="1epd", device="cpu", cache_dir=tmp_path)
    builder = StageBuilder(worker_settings(args), LocalTransport())
    encode, prefill = builder.encode("e0"), builder.prefill("p0")
    keys, embeddings = prefill.engine.store, encode.store
    assert keys is not None
    assert embeddings is not None
    now_s = time.monotonic()
    keys._files.note_read("disk", 1 << 20, now_s - 2.0)
    assert embeddings.units.files.seconds("disk", 1 << 20) == pytest.approx(2.0, rel=0.1)
    encode.close()
    prefill.engine.close()
