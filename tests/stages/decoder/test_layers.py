"""Ranks that share a language model: together they read it once, and compute what one alone computes.

Here a rank is a thread, whose sums wait for those of the others.
"""

from __future__ import annotations

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import epd.stages.loading.weight_files
from epd.encoders.names import WeightSet
from epd.errors import UnsupportedModelError
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.loading.weight_files import StoredTensor
from epd.stages.loading.weights import LoadedModel, load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.rank import Rank
from tests.stages.decoder.test_decoder import assert_close
from tests.stages.decoder.text_models import CONFIGS, Runner, model_of


class Meeting:
    """Where threads leave tensors for each other."""

    def __init__(self, size: int) -> None:
        self.left: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=120)


class ThreadCollectives:
    """One thread's end of a meeting."""

    def __init__(self, rank: Rank, meeting: Meeting) -> None:
        self.rank = rank
        self._meeting = meeting

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._meeting.left[self.rank.index] = tensor.clone()
        self._meeting.barrier.wait()
        tensors = list(self._meeting.left)
        self._meeting.barrier.wait()
        return tensors

    def add_up(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._all(tensor)).sum(0))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        tensors = self._all(tensor)
        return [] if self.rank.index else tensors


def load_part(path: Path, index: int, size: int = 2, role: WeightSet = "language") -> LoadedModel:
    return load_role(path, role, CPU_FLOAT32, cut=partial(cut_model, rank=Rank(index, size)))


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    whole = model_of(name)
    whole.save_pretrained(tmp_path)
    meeting = Meeting(2)

    def passes(index: int) -> tuple[list[Tensor], Runner]:
        ranks = ThreadCollectives(Rank(index, 2), meeting)
        runner = Runner.over(name, load_part(tmp_path, index).model, ranks=ranks)
        return runner.passes(), runner

    with ThreadPoolExecutor(2) as threads:
        (ours, first), (_, second) = threads.map(passes, range(2))
    alone = Runner.over(name, whole)
    for one, other in zip(ours, alone.passes(), strict=True):
        assert_close(one, other)
    halves = [each.pools.groups[0].storage for each in (first, second)]
    assert_close(torch.cat(halves, dim=4), alone.pools.groups[0].storage)
    assert first.pools.shape.num_bytes == alone.pools.shape.num_bytes // 2


@pytest.fixture
def elements_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements were taken from the files, tensor by tensor."""
    counts: list[int] = []
    read = epd.stages.loading.weight_files._read

    def counted(opened: Any, stored: StoredTensor) -> Tensor:
        tensor = read(opened, stored)
        counts.append(tensor.numel())
        return tensor

    monkeypatch.setattr(epd.stages.loading.weight_files, "_read", counted)
    return counts


def mappings(model: Path) -> list[str]:
    """The files of weights that this process maps: what was read of them counts as its memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(model) in line and ".safetensors" in line]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "shapes-vl"])
def test_a_rank_reads_and_holds_its_part_alone(
    name: str, checkpoints: dict[str, Path], elements_read: list[int]
) -> None:
    path = checkpoints[name]
    whole = load_role(path, "language", CPU_FLOAT32)
    gc.collect()  # else mappings that nobody needs any more would go meanwhile
    whole_elements, before = sum(elements_read), mappings(path)
    for index in range(2):
        elements_read.clear()
        part = load_part(path, index)
        held = sum(each.numel() for each in part.model.parameters())
        assert sum(elements_read) == held
        assert part.num_bytes * whole_elements == whole.num_bytes * held
        assert 0.49 < held / whole_elements < 0.51
        storages = {each.untyped_storage() for each in part.model.parameters()}
        assert sum(each.nbytes() for each in storages) == 4 * held
        assert mappings(path) == before
        assert part.tensor_names == whole.tensor_names


def test_parts_of_two_ranks_make_the_stored_tensors(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen2_5_vl"]
    stored = load_file(path / "model.safetensors")
    parts = [dict(load_part(path, index).model.named_parameters()) for index in range(2)]
    for name, dim in {
        "model.language_model.layers.1.self_attn.q_proj.bias": 0,
        "model.language_model.layers.1.self_attn.k_proj.weight": 0,
        "model.language_model.layers.0.mlp.up_proj.weight": 0,
        "model.language_model.layers.2.self_attn.o_proj.weight": 1,
        "model.language_model.layers.2.mlp.down_proj.weight": 1,
        "model.language_model.embed_tokens.weight": 0,
        "lm_head.weight": 0,
    }.items():
        theirs = next(stored[each] for each in stored if name.endswith(each.removeprefix("model.")))
        assert torch.equal(torch.cat([part[name] for part in parts], dim=dim), theirs)
        assert parts[0][name].shape != theirs.shape


def test_the_tower_stays_whole(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen3_vl"]
    tower = dict(load_role(path, "encode", CPU_FLOAT32).model.named_parameters())
    parts = dict(load_part(path, 0, role="whole").model.named_parameters())
    assert all(torch.equal(parts[name], tower[name]) for name in tower)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("qwen2.5-vl", 4, r"received a tensor parallel size of 4 .* 4 heads and 2 .*allowed: 1, 2; "),
        ("qwen2.5-vl", 3, r"received a tensor parallel size of 3 .*allowed: 1, 2; "),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused(name: str, size: int, message: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        load_part(tmp_path, 0, size)


def test_a_text_model_of_transformers_modules_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path / "model")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    with pytest.raises(UnsupportedModelError, match="only transformers' own modules compute; allowed: 1"):
        load_part(folder, 0)
