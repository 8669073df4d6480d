"""Each worker loads its own weights and no others, and what it loads is what transformers loads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

import epd.stages.device_memory
import epd.stages.loading.weight_files
import epd.stages.loading.weights
from epd.encoders.names import WeightSet, is_wanted
from epd.errors import InfeasibleError, ModelError
from epd.stages.loading.weight_files import num_weight_bytes, weights_revision, write_weights
from epd.stages.loading.weights import WholeModel, load_role, part_bytes
from epd.stages.placement import CPU_FLOAT32, Placement
from tests.encoders.families import Family, Picture
from tests.encoders.tolerances import BATCHING, assert_close_to
from tests.tiny_models import load_reference

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

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        self.read.append(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


class OutsideFile(CountingFile):
    """Reads as if no device were pretended."""

    def get_tensor(self, name: str) -> torch.Tensor:
        with unset_fake_temporarily():
            return super().get_tensor(name)


@pytest.fixture
def tensors_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    CountingFile.read = []
    monkeypatch.setattr(epd.stages.loading.weight_files, "safe_open", CountingFile)
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


def test_parts_of_a_whole_model_are_as_large_as_what_is_loaded(family: Family) -> None:
    """In tile families too, whose tower is called through the model that has both parts."""
    whole = load_role(family.path, "whole", CPU_FLOAT32).model
    roles: tuple[WeightSet, ...] = ("encode", "language")
    sizes = [part_bytes(whole, role) for role in roles]
    for role, size in zip(roles, sizes, strict=True):
        loaded = load_role(family.path, role, CPU_FLOAT32).model
        assert size == sum(each.numel() * each.element_size() for each in loaded.parameters())
    assert sum(sizes) == part_bytes(whole, "whole")


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


@pytest.mark.parametrize("placement", [CPU_FLOAT32, CPU_BFLOAT16], ids=str)
def test_what_is_loaded_equals_what_transformers_loads(family: Family, placement: Placement) -> None:
    """Its types too: frequencies of rotary positions stay float32 in a model of another type."""
    reference = load_reference(family.path, placement.dtype)
    theirs = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    model = load_role(family.path, "whole", placement).model
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == theirs.keys()
    assert {name: each.dtype for name, each in ours.items()} == {n: each.dtype for n, each in theirs.items()}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_all_of_a_model_is_on_its_device(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what modules compute when they are made. The device is pretended: nothing is allocated."""
    monkeypatch.setattr(epd.stages.loading.weight_files, "safe_open", OutsideFile)
    monkeypatch.setattr(epd.stages.loading.weights, "check_room", lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = load_role(family.path, "whole", Placement(torch.device("cuda:0"), torch.bfloat16)).model
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [each for module in model.modules() for each in vars(module).values() if torch.is_tensor(each)]
    assert {each.device for each in tensors} == {torch.device("cuda:0")}
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_weights_in_several_files_are_read_by_their_index(family: Family, tmp_path: Path) -> None:
    whole = load_role(family.path, "whole", CPU_FLOAT32).model
    path = sharded(family.path, tmp_path / "shards")
    assert len(list(path.glob("*.safetensors"))) == 3
    parts = dict(load_role(path, "whole", CPU_FLOAT32).model.named_parameters())
    assert all(torch.equal(parts[name], each) for name, each in whole.named_parameters())
    write_weights(path, torch.bfloat16, tmp_path / "one")
    mapped = dict(WholeModel(path, CPU_BFLOAT16, tmp_path / "one").part("whole").named_parameters())
    assert all(torch.equal(mapped[name], each.bfloat16()) for name, each in whole.named_parameters())


def sharded(path: Path, target: Path) -> Path:
    """A copy of a checkpoint with its weights in three files and an index, as large ones are published."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(path / "model.safetensors")
    weight_map = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, at in weight_map.items() if at == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def test_progress_is_in_bytes(family: Family) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load_role(family.path, "whole", CPU_FLOAT32, on_progress=lambda *each: seen.append(each))
    assert seen == sorted(set(seen))
    assert seen[-1] == (loaded.num_bytes, loaded.num_bytes)


def test_weights_without_room_are_refused_with_their_sizes(
    family: Family, monkeypatch: pytest.MonkeyPatch, tensors_read: list[str]
) -> None:
    monkeypatch.setattr(epd.stages.device_memory, "available_memory_bytes", lambda: 1000)
    whole = refusal(family.path, "whole", CPU_FLOAT32)
    assert re.search(r"float32 on cpu \(vision .* GB, language .* GB\), .*--dtype bfloat16", whole)
    assert "\n" not in whole
    assert "cpu (language" in refusal(family.path, "language", CPU_FLOAT32)
    assert "--dtype bfloat16" not in refusal(family.path, "encode", CPU_BFLOAT16)
    assert not tensors_read
    enough = sum(stored(family.path).values())
    monkeypatch.setattr(epd.stages.device_memory, "available_memory_bytes", lambda: enough)
    load_role(family.path, "whole", CPU_FLOAT32)


def refusal(path: Path, role: WeightSet, placement: Placement) -> str:
    with pytest.raises(InfeasibleError) as refused:
        load_role(path, role, placement)
    return str(refused.value)


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
    # Weights that lie elsewhere in memory are summed in another order by some processors.
    assert_close_to(lone.encode(picture, plan).rows, whole.rows, BATCHING)


@torch.inference_mode()
def test_the_lone_language_model_answers_as_the_whole_model_does(family: Family) -> None:
    model: Any = load_role(family.path, "language", CPU_FLOAT32).model
    ids = torch.arange(3, 40)[None]
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(embeds, family.model.get_input_embeddings()(ids))
    hidden = [m.get_decoder()(inputs_embeds=embeds).last_hidden_state for m in (model, family.model)]
    logits = [m.get_output_embeddings()(h) for m, h in zip((model, family.model), hidden, strict=True)]
    assert_close_to(*logits, BATCHING)


def test_published_names_are_understood() -> None:
    from epd.encoders.names import name_in_model

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
    with pytest.raises(ModelError, match="holds no weights"):
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
