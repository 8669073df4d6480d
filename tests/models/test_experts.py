"""Experts that lie in the files one by one, as in InternVL3.5, and those of a layer in one tensor."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from epd.encoders.names import JointPart, joint_part
from epd.errors import ModelError
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.loading.weights import in_layout, load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.rank import Rank
from epd.topology import TensorParallel
from tests.fake_cuda import fake_cuda
from tests.models.shrunk import build
from tests.serve_app.worker.bench import answered
from tests.stages.ranks.thread_ranks import StartedThreadRanks

PREFIX = "model.language_model.layers.1.mlp.experts"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build("InternVL3.5-30B-A3B", tmp_path)


def changed(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """Replaces a tensor in the folder's files, or takes it away; returns the folder."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    file = folder / index["weight_map"][name]
    tensors = {each: value.clone() for each, value in load_file(file).items() if each != name}
    save_file(tensors | ({name: tensor} if tensor is not None else {}), file)
    return folder


def test_each_expert_is_in_its_rows(checkpoint: Path) -> None:
    files = [load_file(file) for file in checkpoint.glob("*.safetensors")]
    stored = {name: tensor for file in files for name, tensor in file.items()}
    model = load_role(checkpoint, "language", CPU_FLOAT32).model
    experts = model.get_submodule(PREFIX)
    gate_up, down = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
    for number in (0, 7, 15):
        parts = [stored[f"{PREFIX}.{number}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(gate_up[number], torch.cat(parts))
        assert torch.equal(down[number], stored[f"{PREFIX}.{number}.down_proj.weight"])


@pytest.mark.parametrize("name", ["InternVL3.5-30B-A3B", "Qwen3-VL-30B-A3B"])
def test_a_rank_has_its_channels_of_every_expert(name: str, tmp_path: Path) -> None:
    """One by one in the files, and all in one tensor the other way round: of 48 channels the last 24."""
    path = build(name, tmp_path)
    whole = load_role(path, "language", CPU_FLOAT32).model.get_submodule(PREFIX)
    cut = partial(cut_model, rank=Rank(1, 2))
    part = load_role(path, "language", CPU_FLOAT32, cut=cut).model.get_submodule(PREFIX)
    gate, up = whole.get_parameter("gate_up_proj").chunk(2, dim=1)
    assert torch.equal(part.get_parameter("gate_up_proj"), torch.cat([gate[:, 24:], up[:, 24:]], 1))
    assert torch.equal(part.get_parameter("down_proj"), whole.get_parameter("down_proj")[:, :, 24:])


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
def test_two_ranks_give_the_tokens_of_one(
    checkpoint: Path, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.stages.ranks.group.ProcessRanks", StartedThreadRanks)
    alone = answered(checkpoint, "1epd", (media["image"],))
    for topology in ("1epd", "1e1p1d"):
        ranks = TensorParallel(2)
        assert answered(checkpoint, topology, (media["image"],), tensor_parallel=ranks) == alone


def test_a_missing_expert_is_an_error(checkpoint: Path) -> None:
    """Memory of its rows would hold anything."""
    folder = changed(checkpoint, f"{PREFIX}.3.up_proj.weight", None)
    with pytest.raises(ModelError, match=r"1 experts of \S+gate_up_proj are missing; get all of the files"):
        load_role(folder, "language", CPU_FLOAT32)


def test_an_expert_of_another_size_is_an_error(checkpoint: Path) -> None:
    folder = changed(checkpoint, f"{PREFIX}.3.up_proj.weight", torch.zeros(3, 5))
    with pytest.raises(ModelError, match=r"expert 3 of \S+gate_up_proj has shape \(3, 5\), the model wants"):
        load_role(folder, "language", CPU_FLOAT32)


def test_names_of_single_experts_are_read() -> None:
    name = "model.language_model.layers.47.mlp.experts.127.down_proj.weight"
    joint = "model.language_model.layers.47.mlp.experts.down_proj"
    assert joint_part(name) == JointPart(joint, 127, 0, 1)
    assert joint_part(joint) is None
    assert joint_part("model.layers.0.mlp.gate_proj.weight") is None


def test_experts_that_lie_the_other_way_round_are_turned_on_a_gpu() -> None:
    """Its kernels read them in one piece."""
    with fake_cuda():
        stored = torch.empty(4, 2, 3, device="cuda")
        turned = in_layout(stored, torch.Size((4, 3, 2)), "layers.0.mlp.experts.gate_up_proj")
        assert (turned.shape, turned.is_contiguous()) == ((4, 3, 2), True)


def test_only_experts_may_lie_the_other_way_round() -> None:
    tensor = torch.zeros(4, 2, 3)
    turned = in_layout(tensor, torch.Size((4, 3, 2)), "layers.0.mlp.experts.gate_up_proj")
    assert turned.shape == (4, 3, 2)
    assert turned.data_ptr() == tensor.data_ptr()
    for name, wanted in (("layers.0.mlp.experts.gate_up_proj", (4, 6)), ("visual.pos_embed", (4, 3, 2))):
        with pytest.raises(ValueError, match="the model wants"):
            in_layout(tensor, torch.Size(wanted), name)
