"""Model folders as people have them: which weights are read, and what is said of those that are none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from epd.encoders import load_adapter
from epd.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from epd.models.folder import INDEX, SINGLE, check_folder, weight_files
from epd.serve_app.app_args import AppArgs
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from tests.tiny_models import build_qwen3_vl, load_reference

SHARD = "model-{:05}-of-{:05}.safetensors".format
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456789\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A folder of Qwen3-VL without weights."""
    target = tmp_path / "model"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


@pytest.fixture(scope="module")
def tensors(source: Path) -> dict[str, Tensor]:
    with safe_open(source / SINGLE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it cannot be iterated


def single(folder: Path, tensors: dict[str, Tensor], name: str = SINGLE) -> None:
    save_file(tensors, folder / name, {"format": "pt"})
    later(folder)


def shards(folder: Path, tensors: dict[str, Tensor], total: int = 2, *, indexed: bool = True) -> None:
    """Writes the tensors by turns into so many files."""
    names = sorted(tensors)
    where = {name: SHARD(1 + place % total, total) for place, name in enumerate(names)}
    for file in set(where.values()):
        save_file(
            {name: tensors[name] for name in names if where[name] == file}, folder / file, {"format": "pt"}
        )
    if indexed:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    later(folder)


def later(folder: Path) -> None:
    """Makes everything in a folder a minute older: what comes next is newer whatever clock the disk has."""
    for file in folder.iterdir():
        at = file.stat().st_mtime - 60
        os.utime(file, (at, at))


def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in tensors.items()}


def is_new(folder: Path, tensors: dict[str, Tensor]) -> bool:
    """Whether the folder loads as `changed` weights, and not as the first ones. They are one or the other."""
    name = "model.language_model.norm.weight"
    loaded = load_role(folder, "language", CPU_FLOAT32).model.get_parameter(name)
    assert torch.equal(loaded, tensors[name]) != torch.equal(loaded, tensors[name] + 1)
    theirs = load_reference(folder).get_parameter(name)
    assert torch.equal(theirs, loaded), "transformers loads others"
    return torch.equal(loaded, tensors[name] + 1)


def test_a_new_single_file_beside_an_old_index_is_read(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards(folder, tensors)
    single(folder, changed(tensors))
    assert is_new(folder, tensors)


def test_a_new_single_file_beside_an_index_without_its_files_is_read(
    folder: Path, tensors: dict[str, Tensor]
) -> None:
    """As transformers' save_pretrained leaves it."""
    single(folder, changed(tensors))
    shards(folder, tensors)
    for number in (1, 2):
        (folder / SHARD(number, 2)).unlink()
    assert is_new(folder, tensors)


@pytest.mark.parametrize("indexed", [True, False])
def test_new_shards_beside_an_old_single_file_are_refused(
    folder: Path, tensors: dict[str, Tensor], *, indexed: bool
) -> None:
    """transformers would load the old file without a word."""
    single(folder, tensors)
    shards(folder, changed(tensors), indexed=indexed)
    with pytest.raises(
        ModelError, match=r"weights of two saves, model\.safetensors and model-00001-of-00002"
    ):
        load_role(folder, "whole", CPU_FLOAT32)


def test_a_part_of_new_shards_beside_an_old_single_file_is_refused(
    folder: Path, tensors: dict[str, Tensor]
) -> None:
    single(folder, tensors)
    shards(folder, changed(tensors))
    (folder / SHARD(2, 2)).unlink()
    with pytest.raises(ModelError, match="weights of two saves"):
        weight_files(folder)


def test_old_shards_beside_a_new_index_are_left_alone(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards(folder, tensors, 3)
    shards(folder, changed(tensors), 2)
    assert is_new(folder, tensors)


def test_new_shards_beside_an_old_index_are_refused(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards(folder, tensors, 3)
    shards(folder, changed(tensors), 2, indexed=False)
    with pytest.raises(ModelError, match="weights of two saves"):
        weight_files(folder)


def test_an_index_that_lies_about_files_is_not_followed(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Names of tensors are those of the headers, as transformers reads them."""
    shards(folder, changed(tensors))
    index = json.loads((folder / INDEX).read_text())
    swapped = {SHARD(1, 2): SHARD(2, 2), SHARD(2, 2): SHARD(1, 2)}
    index["weight_map"] = {name: swapped[file] for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    assert is_new(folder, tensors)


def test_shards_without_an_index_are_read(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards(folder, tensors, 3, indexed=False)
    assert len(weight_files(folder)) == 3
    loaded = load_role(folder, "whole", CPU_FLOAT32).model.state_dict()
    theirs = load_reference(_with_index(folder, tensors)).state_dict()
    assert all(torch.equal(loaded[name], theirs[name]) for name in theirs)


def _with_index(folder: Path, tensors: dict[str, Tensor]) -> Path:
    shards(folder, tensors, 3)
    return folder


def test_shards_of_two_saves_without_an_index_are_refused(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards(folder, tensors, 2, indexed=False)
    shards(folder, changed(tensors), 3, indexed=False)
    with pytest.raises(ModelError, match="shards of several saves, model of 2 and model of 3"):
        weight_files(folder)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard_is_named(folder: Path, tensors: dict[str, Tensor], *, indexed: bool) -> None:
    shards(folder, tensors, 3, indexed=indexed)
    (folder / SHARD(2, 3)).unlink()
    words = f"lacks 1 of the 3 files of .*{SHARD(2, 3)}" if indexed else "has 2 of 3 shards"
    with pytest.raises(ModelError, match=words):
        load_role(folder, "whole", CPU_FLOAT32)


def test_a_tensor_in_two_files_is_refused(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards(folder, tensors)
    shutil.copy(folder / SHARD(1, 2), folder / SHARD(2, 2))
    with pytest.raises(ModelError, match=r"has the tensor \S+ in model-00001-of-00002\S* and in model-00002"):
        weight_files(folder)


def test_a_tensor_in_no_file_is_named_before_any_is_read(
    folder: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = dict(tensors)
    del left["model.language_model.norm.weight"]
    shards(folder, left)
    read: list[object] = []
    monkeypatch.setattr(
        "epd.stages.loading.weights.read_tensors", lambda places: iter(read.extend(places) or ())
    )
    with pytest.raises(
        ModelError, match=r"1 tensors are missing, such as model\.language_model\.norm\.weight"
    ):
        load_role(folder, "whole", CPU_FLOAT32)
    assert not read


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "model.bin", 3])
def test_an_index_names_files_beside_it_alone(folder: Path, name: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="allowed: names of safetensors files beside it"):
        weight_files(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": []}}', "[" * 99_999]
)
def test_a_broken_index_is_one_line(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"^cannot read '[^\n]*get it again$"):
        weight_files(folder)


def whole(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "is empty; get it again"),
    "a few bytes": (lambda content: content[:5], "it has 5 bytes"),
    "cut in its header": (lambda content: content[:100], "it has 100 bytes"),
    "cut in its data": (lambda content: content[:-1], r"is cut off: it has \d+ of \d+ bytes"),
    "a page of an error": (lambda _: b"<!DOCTYPE html><html>404</html>", "no safetensors file: it has 31"),
    "a header of 2^63 bytes": (lambda content: b"\xff" * 8 + content[8:], "no safetensors file"),
    "a header of JSON that is another": (lambda _: (2).to_bytes(8, "little") + b"[]", "has no header"),
    "a pointer of Git LFS": (lambda _: POINTER.encode(), "is a Git LFS pointer.*`git lfs pull`"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("in_shards", [True, False])
def test_a_damaged_file_is_named(
    folder: Path, tensors: dict[str, Tensor], damage: str, *, in_shards: bool
) -> None:
    (shards if in_shards else single)(folder, tensors)
    file = folder / (SHARD(2, 2) if in_shards else SINGLE)
    damaged, words = DAMAGES[damage]
    file.write_bytes(damaged(file.read_bytes()))
    later(folder)
    with pytest.raises(ModelError, match=words) as raised:
        weight_files(folder)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


FORMATS = {
    "adapter_config.json": "a LoRA adapter.*merge_and_unload",
    "adapter_model.safetensors": "a LoRA adapter",
    "model-Q4_K_M.gguf": r"llama\.cpp \(GGUF\)",
    "pytorch_model.bin": "pickles of PyTorch.*save_pretrained",
    "pytorch_model-00001-of-00002.bin": "pickles of PyTorch",
    "model.pt": "pickles of PyTorch",
    "params.json": "Mistral's own layout",
    "consolidated.safetensors": "Mistral's own layout",
    "consolidated.00.pth": "Mistral's own layout",
    "tf_model.h5": "TensorFlow",
    "flax_model.msgpack": "Flax",
    "model.onnx": "ONNX",
    "model_index.json": "diffusers",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("has_config", [True, False])
def test_a_folder_of_another_format_is_named(folder: Path, name: str, *, has_config: bool) -> None:
    """In one line, which says what to do; without a configuration when it is opened, else before weights."""
    if not has_config:
        (folder / "config.json").unlink()
    (folder / name).write_bytes(b"{}")
    opened = weight_files if has_config and name != "adapter_config.json" else load_adapter
    with pytest.raises(UnsupportedModelError, match=FORMATS[name]) as raised:
        opened(folder)
    assert "\n" not in str(raised.value)


def test_adapters_beside_whole_weights_are_refused(folder: Path, tensors: dict[str, Tensor]) -> None:
    """transformers would load the base model that they name, and not these weights."""
    single(folder, tensors)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="is a LoRA adapter"):
        load_adapter(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"]
)
def test_a_pointer_in_the_place_of_a_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    with pytest.raises(ModelError, match=rf"{name}' is a Git LFS pointer.*`git lfs pull`"):
        load_adapter(folder)


def test_a_folder_above_the_model_says_where_it_is(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "qwen" / "checkpoint-500")
    with pytest.raises(ModelNotFoundError, match=r"a folder inside does; give '\S*/qwen/checkpoint-500'"):
        load_adapter(tmp_path / "qwen")


@pytest.fixture
def cache(source: Path, tmp_path: Path) -> Path:
    """A model in a cache of huggingface_hub: snapshots are links to files named by their hash."""
    root = tmp_path / "models--Qwen--Tiny"
    snapshot = root / "snapshots" / "4d7a"
    (root / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, root / "blobs" / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    return root


def test_a_cache_names_its_snapshot_which_loads(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"give '\S*/models--Qwen--Tiny/snapshots/4d7a'"):
        load_adapter(cache)
    snapshot = cache / "snapshots" / "4d7a"
    load_adapter(snapshot)
    assert load_role(snapshot, "whole", CPU_FLOAT32).num_bytes > 0


@pytest.mark.parametrize("name", ["config.json", SINGLE])
def test_an_unfinished_download_is_named(cache: Path, name: str) -> None:
    snapshot = cache / "snapshots" / "4d7a"
    (snapshot / name).resolve().unlink()
    opened = weight_files if name == SINGLE else check_folder
    with pytest.raises(ModelError, match=f"{name}' is a link to a file that is not there; download"):
        opened(snapshot)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.gguf", "is a file: weights of llama.cpp"),
        (SINGLE, "is a file; give a folder"),
        ("none", "no model"),
    ],
)
def test_a_path_that_is_no_folder_is_named(folder: Path, name: str, words: str) -> None:
    if name != "none":
        (folder / name).touch()
    with pytest.raises(ModelNotFoundError, match=words):
        load_adapter(folder / name)


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "pytorch_model.safetensors"])
def test_a_file_of_another_name_is_named(folder: Path, tensors: dict[str, Tensor], name: str) -> None:
    single(folder, tensors, name)
    with pytest.raises(ModelError, match=f"has no model.safetensors, but {name}; .*rename it"):
        weight_files(folder)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights; get model"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_model.bin", "model.gguf"])
def test_the_server_says_it_before_anything_is_started(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"{}")
    with pytest.raises(UnsupportedModelError, match=f"^[^\n]*{FORMATS.get(name, 'GGUF')}[^\n]*$"):
        AppArgs(model=str(folder)).resolved()
