"""Each worker loads its own weights and no others, and what it loads is what transformers loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import stages.weights
from encoders.names import is_wanted
from epd.errors import ModelError
from stages.placement import CPU_FLOAT32, Placement
from stages.weights import WholeModel, load_role, num_weight_bytes, weights_revision, write_weights
from tests.encoders.families import Family, Picture

FLOAT = torch.float32
CPU_BFLOAT16 = Placement(torch.device("cpu"), torch.bfloat16)


class CountingFile:
    """A safetensors file that tells which of its tensors were read."""

    read: list[str] = []  # noqa: RUF012 # one list for all files of a test

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = safe_open(*args, **kwargs)

    def __enter__(self) -> CountingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        self.read.append(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


@pytest.fixture
def tensors_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    CountingFile.read = []
    monkeypatch.setattr(stages.weights, "safe_open", CountingFile)
    return CountingFile.read


def stored(path: Path) -> dict[str, int]:
    """Bytes of every tensor of a checkpoint."""
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118


def test_roles_share_nothing_and_miss_nothing(family: Family, tensors_read: list[str]) -> None:
    encode = load_role(family.path, "encode", CPU_FLOAT32)
    assert sorted(encode.tensor_names) == sorted(tensors_read)
    language = load_role(family.path, "language", CPU_FLOAT32)
    sizes = stored(family.path)
    assert sorted(encode.tensor_names + language.tensor_names) == sorted(sizes)
    assert sorted(tensors_read) == sorted(sizes)
    assert encode.num_bytes == sum(sizes[name] for name in encode.tensor_names)
    assert encode.num_bytes + language.num_bytes == sum(sizes.values())


def test_no_parameter_of_another_role_exists(family: Family) -> None:
    for role in ("encode", "language"):
        model = load_role(family.path, role, CPU_FLOAT32).model
        names = [name for name, _ in model.named_parameters()]
        assert names
        assert all(is_wanted(name, role) for name in names)
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())


def test_parts_of_mapped_weights_equal_what_is_read(family: Family, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    write_weights(family.path, FLOAT, weights)
    assert weights.stat().st_size >= num_weight_bytes(family.path, FLOAT)
    whole = WholeModel(family.path, CPU_FLOAT32, weights)
    before = {name for name, _ in whole.part("whole").named_parameters()}
    for role in ("encode", "language"):
        part, lone = whole.part(role), load_role(family.path, role, CPU_FLOAT32).model
        theirs = dict(lone.named_parameters())
        ours = dict(part.named_parameters())
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        again = dict(whole.part(role).named_parameters())
        assert all(again[name].data_ptr() == ours[name].data_ptr() for name in ours)
        assert not part.training
    assert {name for name, _ in whole.part("whole").named_parameters()} == before


def test_mapped_weights_are_memory_of_their_file(family: Family, tmp_path: Path) -> None:
    """Also where the checkpoint has another type: what is converted is so once, for all."""
    weights = tmp_path / "weights"
    write_weights(family.path, torch.bfloat16, weights)
    part = WholeModel(family.path, CPU_BFLOAT16, weights).part("encode")
    ends = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(weights) in line]
    spans = [tuple(int(end, 16) for end in span[0].split("-")) for span in ends]
    places = [parameter.data_ptr() for parameter in part.parameters()]
    assert places
    assert all(any(start <= place < stop for start, stop in spans) for place in places)


def test_what_is_loaded_equals_what_transformers_loads(family: Family) -> None:
    theirs = {**dict(family.model.named_parameters()), **dict(family.model.named_buffers())}
    model = load_role(family.path, "whole", CPU_FLOAT32).model
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@torch.inference_mode()
def test_the_lone_encoder_encodes_as_the_whole_model_does(family: Family) -> None:
    picture = Picture(
        torch.arange(60 * 90 * 3, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(60, 90, 3)
    )
    plan = family.adapter.plan_image(60, 90)
    whole = family.encode(picture, plan)
    lone = Family(
        family.name, family.path, family.adapter, load_role(family.path, "encode", CPU_FLOAT32).model, None
    )
    assert torch.equal(lone.encode(picture, plan).rows, whole.rows)


@torch.inference_mode()
def test_the_lone_language_model_answers_as_the_whole_model_does(family: Family) -> None:
    model: Any = load_role(family.path, "language", CPU_FLOAT32).model
    ids = torch.arange(3, 40)[None]
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(embeds, family.model.get_input_embeddings()(ids))
    hidden = [m.get_decoder()(inputs_embeds=embeds).last_hidden_state for m in (model, family.model)]
    logits = [m.get_output_embeddings()(h) for m, h in zip((model, family.model), hidden, strict=True)]
    assert torch.equal(*logits)


def test_published_names_are_understood() -> None:
    from encoders.names import name_in_model

    known = {
        "model.vision_tower.encoder.x",
        "model.language_model.layers.0.y",
        "lm_head.weight",
        "model.visual.z",
    }
    assert name_in_model("vision_tower.vision_model.encoder.x", known) == "model.vision_tower.encoder.x"
    assert name_in_model("language_model.model.layers.0.y", known) == "model.language_model.layers.0.y"
    assert name_in_model("model.layers.0.y", known) == "model.language_model.layers.0.y"
    assert name_in_model("language_model.lm_head.weight", known) == "lm_head.weight"
    assert name_in_model("visual.z", known) == "model.visual.z"
    assert name_in_model("optimizer.z", known) is None


def test_a_missing_file_is_a_model_error(families: dict[str, Family], tmp_path: Path) -> None:
    for file in families["internvl"].path.glob("*.json"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ModelError, match="do not load"):
        load_role(tmp_path, "encode", CPU_FLOAT32)


def test_another_checkpoint_has_another_revision(families: dict[str, Family]) -> None:
    revisions = {weights_revision(family.path) for family in families.values()}
    assert len(revisions) == len(families)


def test_a_changed_weight_is_another_revision(families: dict[str, Family], tmp_path: Path) -> None:
    folder = shutil.copytree(families["internvl"].path, tmp_path / "copy")
    before = weights_revision(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert before == weights_revision(families["internvl"].path)
    assert weights_revision(folder) != before
