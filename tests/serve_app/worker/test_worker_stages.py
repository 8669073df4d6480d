"""Weights of a worker: shared where several workers of a machine's CPUs run the model, its own elsewhere.

Modules: `serve_app/worker/worker_settings.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from epd.errors import RequestError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.composition import worker_settings
from epd.serve_app.local.fleet import LocalTransport
from epd.serve_app.network.memory import PoolFiles, new_fleet_id
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import PeerPlace
from epd.serve_app.role_messages import Onload, SetRoles
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_stages import StageBuilder
from epd.stages.placement import Placement


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


def test_a_worker_on_a_gpu_loads_its_own_weights(checkpoints: dict[str, Path]) -> None:
    files = PoolFiles(new_fleet_id())
    transport = ProcessTransport(lambda *_: None, lambda _: None, files, PeerPlace("e0 1", "here"))
    on_gpu = Placement(torch.device("cuda"), torch.bfloat16)
    assert transport.weights(checkpoints["qwen2_5_vl"], on_gpu) is None
    assert files.paths() == []


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
