"""Loads only what a stage needs of a checkpoint: read from the files by name, the rest never touched.

skeleton: the whole model, its parameters without memory (buffers are computed as always)
prune:    modules of other stages are taken out of it
fill:     the tensors that are left are read, one by one, from the files that hold them
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from encoders.checkpoint import check_unquantised
from encoders.names import WeightSet, is_wanted, name_in_model
from epd.errors import ModelError
from stages.attention.support import check_attention
from stages.placement import Placement

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Bytes of a file, and places in it, that distinguish one set of weights from another.
_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 64
# Making a skeleton changes how the whole process registers parameters: threads take turns.
_LOADING = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Holds a model for one role.

    tensor_names: what was read, as the files name it. num_bytes: its size there.
    """

    model: nn.Module
    tensor_names: tuple[str, ...]
    num_bytes: int


def load_role(path: Path, role: WeightSet, placement: Placement, weights: Path | None = None) -> LoadedModel:
    """Loads the part of the model at `path` for a worker of this role, in eval mode, with sdpa attention.

    placement: where its weights go, and their type.
    weights: what `write_weights` has made of it, to be mapped instead of being read.
    Raises ModelError when the files lack a tensor or cannot be read, UnsupportedModelError for attention that
    nothing here computes, and for quantised weights.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        check_unquantised(config)
        check_attention(config)
        with _LOADING:
            model = skeleton(config, placement.dtype)
            prune(model, role)
            stored = _stored_names(path) if weights is None else {weights: _names_in(weights)}
            loaded = _fill(model, stored, placement)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the weights at '{path}' do not load: {reason}") from error
    model.eval()
    return loaded


def skeleton(config: Any, dtype: torch.dtype) -> nn.Module:
    """Creates the model of a transformers configuration, with its parameters on the meta device.

    Nothing is initialised: what has no memory has no values, and buffers are computed with their modules.
    """
    with _parameters_without_memory(), no_init_weights():
        model: nn.Module = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return model


def prune(model: nn.Module, role: WeightSet) -> None:
    """Removes from a model what a worker of this role does not run."""
    for prefix, parent in (("", model), ("model.", model.get_submodule("model"))):
        for name in [name for name, _ in parent.named_children() if f"{prefix}{name}" != "model"]:
            if not is_wanted(f"{prefix}{name}", role):
                setattr(parent, name, None)
        for name, _ in list(parent.named_parameters(recurse=False)):
            if not is_wanted(f"{prefix}{name}", role):
                setattr(parent, name, None)


def _fill(model: nn.Module, stored_names: Mapping[Path, list[str]], placement: Placement) -> LoadedModel:
    """Reads the tensors that the model has a place for, and no others."""
    wanted = model.state_dict(keep_vars=True)
    read: list[str] = []
    num_bytes = 0
    for file, names in stored_names.items():
        with safe_open(file, framework="pt") as tensors:
            for stored in names:
                name = name_in_model(stored, wanted)
                if name is None:
                    continue
                tensor = tensors.get_tensor(stored)
                _assign(model, name, _placed(tensor, placement))
                read.append(stored)
                num_bytes += tensor.nbytes
    _tie(model)
    _move_buffers(model, placement.device)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}; get all of the files")
    return LoadedModel(model, tuple(read), num_bytes)


def write_weights(path: Path, dtype: torch.dtype, target: Path) -> None:
    """Writes all tensors of the model at `path` to one file, floating-point ones in `dtype`: see `load_role`.

    Raises OSError, ModelError.
    """
    tensors: dict[str, Tensor] = {}
    try:
        for file, names in _stored_names(path).items():
            with safe_open(file, framework="pt") as stored:
                tensors |= {name: _converted(stored.get_tensor(name), dtype) for name in names}
        save_file(tensors, target)
    except (ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"the weights at '{path}' cannot be copied: {error}") from error


def num_weight_bytes(path: Path, dtype: torch.dtype) -> int:
    """Counts the bytes of the tensors that `write_weights` writes; names take a few more."""
    size = 0
    for file, names in _stored_names(path).items():
        with safe_open(file, framework="pt") as stored:
            size += sum(math.prod(stored.get_slice(name).get_shape()) for name in names)
    return size * dtype.itemsize


def _placed(tensor: Tensor, placement: Placement) -> Tensor:
    """Brings a stored tensor to its device, and to its type there: what travels is as small as the files."""
    return _converted(tensor.to(placement.device), placement.dtype)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class WholeModel:
    """Maps a model's weights: whatever part of it is requested is there at once."""

    def __init__(self, path: Path, placement: Placement, weights: Path) -> None:
        """Maps weights as in `load_role`. Raises ModelError."""
        self._model = load_role(path, "whole", placement, weights).model

    def part(self, role: WeightSet) -> nn.Module:
        """Returns what a worker of this role runs: other modules are left out, weights share memory."""
        part = _shallow(self._model)
        part.model = _shallow(part.get_submodule("model"))
        prune(part, role)
        return part


def _shallow(module: nn.Module) -> nn.Module:
    """Copies a module with the same children and parameters; removals from one leave the other intact."""
    copy: nn.Module = module.__class__.__new__(module.__class__)
    copy.__dict__ = dict(module.__dict__)
    for held in ("_modules", "_parameters", "_buffers"):
        copy.__dict__[held] = dict(module.__dict__[held])
    return copy


def _stored_names(path: Path) -> Mapping[Path, list[str]]:
    """Lists the tensors in each of the folder's files; only headers are read."""
    if (path / _INDEX).is_file():
        index: dict[str, str] = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = [path / file for file in sorted(set(index.values()))]
    else:
        files = [path / _SINGLE]
    return {file: _names_in(file) for file in files}


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a tensor in the place of the parameter or buffer `name`. Raises ValueError if it does not fit."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    place: Tensor = getattr(module, attribute)
    tensor = in_layout(tensor, place.shape, name)
    if isinstance(place, nn.Parameter):
        module.register_parameter(attribute, nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(module, attribute, tensor)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves what modules have computed when they were made, such as the frequencies of rotary positions."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def in_layout(tensor: Tensor, wanted: torch.Size, name: str) -> Tensor:
    """Returns a stored tensor, or a view of it, in the shape that the model wants.

    Published experts are [experts, in, out], all in one tensor; the modules of transformers 5 have
    [experts, out, in]. Raises ValueError for any other difference.
    """
    if tensor.shape == wanted:
        return tensor
    if ".experts." in name and tensor.ndim == 3 and tensor.transpose(1, 2).shape == wanted:
        return tensor.transpose(1, 2)
    raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(wanted)}")


def _tie(model: Any) -> None:
    """Ties a head that is not stored to the embedding of tokens, where the checkpoint ties the two."""
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight.is_meta and getattr(model.config, "tie_word_embeddings", False):
        head.weight = model.get_input_embeddings().weight


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Creates modules with parameters on the meta device, and real buffers, while this is open.

    It holds for the whole process: no other thread may make modules meanwhile.
    """
    register = nn.Module.register_parameter

    def register_without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def weights_revision(path: Path) -> str:
    """Names what a model folder holds: other weights, or another configuration, have another name.

    Configuration and headers are hashed whole, the weights at `_NUM_SAMPLES` places of each file.
    """
    digest = hashlib.blake2b(digest_size=8)
    for config in sorted(path.glob("*.json")):
        digest.update(config.read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(header))
            last = max(size - 8 - header - _SAMPLE_BYTES, 0)
            for sample in range(_NUM_SAMPLES):
                stream.seek(8 + header + last * sample // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
