"""Says what a model's folder holds, from the names of its files and their first bytes, before anything loads.

Weights are chosen as transformers chooses them: `model.safetensors`, else the files of the index. Where that
could be weights of an earlier save, the folder is refused. Shards without an index are taken, too.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any, NamedTuple

from epd.errors import ModelError, ModelNotFoundError, UnsupportedModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(\.safetensors)?")
_POINTER = b"version https://git-lfs"
_MOST_POINTER_BYTES = 1024
# The header of a safetensors file is no longer: the limit of its library, bytes.
_MOST_HEADER_BYTES = 100_000_000
_LAYOUT = "a folder in Hugging Face layout, with config.json and model.safetensors"

_ADAPTER = (
    "a LoRA adapter (adapter_config.json), not a whole model; merge it into its base model with PEFT's "
    "merge_and_unload, save that, and give its folder"
)
# Files by a pattern of their names, what they make of a folder without other weights, and what to do.
_FORMATS = (
    ("adapter_config.json", _ADAPTER),
    ("adapter_model.*", _ADAPTER),
    ("*.gguf", "weights of llama.cpp (GGUF); get the checkpoint that they were made from, in safetensors"),
    (
        "consolidated*",
        "weights in Mistral's own layout (params.json, consolidated files); get the checkpoint in Hugging "
        "Face layout, or convert it with transformers' conversion script",
    ),
    ("params.json", "a model in Mistral's own layout (params.json); get it in Hugging Face layout"),
    ("model_index.json", "a pipeline of diffusers (model_index.json); give a model that answers questions"),
    *(
        (
            pattern,
            f"weights as pickles of PyTorch ({pattern}), which can run code when they are read; load "
            "them with transformers and save_pretrained, which writes safetensors, or get those",
        )
        for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")
    ),
    ("*.h5", "weights of TensorFlow (*.h5); get the checkpoint in safetensors"),
    ("*.msgpack", "weights of Flax (*.msgpack); get the checkpoint in safetensors"),
    ("*.onnx", "a model of ONNX (*.onnx); get the checkpoint in safetensors"),
)


class StoredName(NamedTuple):
    """Names a tensor of a weight file."""

    file: Path
    name: str


def check_folder(path: Path) -> None:
    """Raises ModelNotFoundError where there is no config.json, ModelError for a folder that is another thing.

    Both say in one line what the path is, and what to do.
    """
    if not path.is_dir():
        raise ModelNotFoundError(_not_a_folder(path))
    if (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise UnsupportedModelError(f"'{path}' is {_ADAPTER}; without those files if that was done")
        _check_small_files(path)
        return
    _check_links(path)
    found = format_of(_names(path))
    if found:
        raise UnsupportedModelError(f"'{path}' holds no config.json: it is {found}")
    inside = _folders_inside(path)
    if inside:
        raise ModelNotFoundError(f"'{path}' holds no config.json, a folder inside does; give '{inside[0]}'")
    raise ModelNotFoundError(
        f"'{path}' holds no config.json; give the path of a model in Hugging Face layout"
    )


def weight_files(path: Path) -> tuple[Path, ...]:
    """Lists the files with the weights of a folder, each complete, and no tensor in two of them.

    Reads headers alone. Raises ModelError, UnsupportedModelError for weights in files of other formats.
    """
    files = tuple(path / name for name in _chosen(path))
    seen: dict[str, Path] = {}
    for each in (stored for file in files for stored in _stored_names(file)):
        if each.name in seen:
            raise ModelError(
                f"'{path}' has the tensor {each.name} in {seen[each.name].name} and in {each.file.name}; "
                "allowed: one save in a folder; get its files again"
            )
        seen[each.name] = each.file
    return files


def _chosen(path: Path) -> Sequence[str]:
    """Returns the names of the weight files, of which all are there."""
    there = {each.name: each.stat().st_mtime_ns for each in path.iterdir() if each.is_file()}
    indexed = indexed_files(path) if INDEX in there else ()
    series = _series(there)
    shards = {name for names in series.values() for name in names} | (set(indexed) & there.keys())
    if SINGLE in there:
        others = shards - {SINGLE}
        _check_newest(path, there, {SINGLE}, others | ({INDEX} & there.keys() if others else set()))
        return (SINGLE,)
    missing = sorted(set(indexed) - there.keys())
    if missing:
        raise ModelError(
            f"'{path}' lacks {len(missing)} of the {len(indexed)} files of {INDEX}, such as {missing[0]}; "
            "get all of them"
        )
    if indexed:
        _check_newest(path, there, {INDEX, *indexed}, shards - set(indexed))
        return sorted(indexed)
    return _only_series(path, series)


def _check_newest(path: Path, there: dict[str, int], chosen: set[str], others: set[str]) -> None:
    """Raises ModelError if weights that are not chosen were written when the chosen ones were, or later."""
    if others and max(there[name] for name in others) >= max(there[name] for name in chosen):
        raise ModelError(
            f"'{path}' holds weights of two saves, {min(chosen)} and {min(others)}, and the latter is not "
            "older; allowed: one save in a folder; remove the files of the other"
        )


def indexed_files(path: Path) -> tuple[str, ...]:
    """Returns the files that the index names. Raises ModelError for one that cannot be read."""
    _check_pointer(path / INDEX)
    try:
        weights = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = tuple(dict.fromkeys(weights.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"cannot read '{path / INDEX}': {_one_line(error)}; get it again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"'{path / INDEX}' names the file {str(name)[:100]!r}; allowed: names of safetensors files "
                "beside it; get it again"
            )
    if not names:
        raise ModelError(f"'{path / INDEX}' names no files; get it again")
    return names


def _series(names: Iterable[str]) -> dict[tuple[str, int], set[str]]:
    """Groups shards by what they are shards of: their name without the number, and the total."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        match = _SHARD.fullmatch(name)
        if match and is_shard(name):
            found[match["stem"], int(match["total"])].add(name)
    return found


def _only_series(path: Path, series: dict[tuple[str, int], set[str]]) -> Sequence[str]:
    """Returns the shards of a folder without an index. Raises ModelError unless they are one whole series."""
    if not series:
        raise _no_weights(path)
    if len(series) > 1:
        stems = " and ".join(f"{stem} of {total}" for stem, total in sorted(series))
        raise ModelError(
            f"'{path}' has no {INDEX} and shards of several saves, {stems}; allowed: one; remove the others"
        )
    ((_, total), names) = next(iter(series.items()))
    if len(names) < total:
        raise ModelError(
            f"'{path}' has {len(names)} of {total} shards, such as {min(names)}; get the others and {INDEX}"
        )
    return sorted(names)


def _no_weights(path: Path) -> ModelError:
    _check_links(path)
    found = format_of(_names(path))
    if found:
        return UnsupportedModelError(f"'{path}' has no {SINGLE}: it holds {found}")
    others = sorted(each.name for each in path.glob("*.safetensors"))
    if others:
        return ModelError(
            f"'{path}' has no {SINGLE}, but {others[0]}; allowed: {SINGLE}, or shards such as "
            "model-00001-of-00002.safetensors; rename it if it holds the whole model"
        )
    return ModelError(f"'{path}' holds no weights; get {SINGLE}, or all of its shards and {INDEX}")


def _stored_names(file: Path) -> Iterator[StoredName]:
    """Lists the tensors of a file. Raises ModelError for one that is not a whole safetensors file."""
    _check_pointer(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        num_header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= num_header_bytes <= min(size - 8, _MOST_HEADER_BYTES):
            what = f"is cut off, or no safetensors file: it has {size} bytes" if size else "is empty"
            raise ModelError(f"'{file}' {what}; get it again")
        try:
            header = json.loads(stream.read(num_header_bytes))
            ends = {name: each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"}
            end = 8 + num_header_bytes + max(ends.values(), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ModelError(f"'{file}' has no header of a safetensors file; get it again") from error
    if size < end:
        raise ModelError(f"'{file}' is cut off: it has {size} of {end} bytes; get it again")
    yield from (StoredName(file, name) for name in ends)


def _not_a_folder(path: Path) -> str:
    if not path.is_file():
        return f"no model folder at '{path}'; give the path of a folder that holds config.json"
    found = next((what for pattern, what in _FORMATS if path.match(pattern)), "")
    if found:
        return f"'{path}' is a file: {found}"
    return f"'{path}' is a file; give {_LAYOUT}"


def format_of(names: Iterable[str]) -> str:
    """Says what a folder without other weights is by the names of its files; empty if nothing known."""
    there = list(names)
    return next((what for pattern, what in _FORMATS if matching(there, pattern)), "")


def is_shard(name: str) -> bool:
    """Returns whether a file is one of several with weights, by its name."""
    return ".safetensors" in name and _SHARD.fullmatch(name) is not None


def _names(path: Path) -> list[str]:
    return [each.name for each in path.iterdir()]


def _folders_inside(path: Path) -> list[Path]:
    """Lists folders with a model one level below, or in a cache of huggingface_hub: newest first."""
    found = [*path.glob("*/config.json"), *path.glob("snapshots/*/config.json")]
    return [each.parent for each in sorted(found, key=lambda each: each.stat().st_mtime_ns, reverse=True)]


def _check_small_files(path: Path) -> None:
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model", ".ttf") and file.is_file():
            _check_pointer(file)


def _check_pointer(file: Path) -> None:
    """Raises ModelError for a file that Git LFS left in the place of the real one."""
    if file.stat().st_size > _MOST_POINTER_BYTES:
        return
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ModelError(
                f"'{file}' is a Git LFS pointer, not the file itself; run `git lfs install` and "
                "`git lfs pull` in its folder, or download it"
            )


def _check_links(path: Path) -> None:
    """Raises ModelError for a link to a file that is not there, as an unfinished download leaves it."""
    for file in sorted(path.iterdir()):
        if file.is_symlink() and not file.exists():
            raise ModelError(f"'{file}' is a link to a file that is not there; download the model again")


def _one_line(error: Any) -> str:
    return " ".join(str(error).split())
