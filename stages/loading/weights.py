"""Loads only what a stage needs of a checkpoint: read from the files by name, the rest never touched.

skeleton: the whole model, its parameters without memory (buffers are computed as always)
prune:    modules of other stages are taken out of it
fill:     the tensors that are left are read, one by one, from the files that hold them

The experts of a layer come as the modules of transformers 5 have them. E experts, I channels within one, C of
the model:

    files    experts.0.gate_proj [I, C] | experts.0.up_proj [I, C] | experts.1.gate_proj ...    one by one, or
             experts.gate_up_proj [E, C, 2 I]                                                  all of them
    model    experts.gate_up_proj [E, 2 I, C]                                                  gate before up
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from epd.encoders.checkpoint import published, read_config
from epd.encoders.embedded import PlainConfig
from epd.encoders.families.qwen3_vl import Qwen3VLModules
from epd.encoders.names import JointPart, WeightSet, is_wanted, joint_part, name_in_model
from epd.encoders.quantization import check_plain, read_quantization
from epd.errors import ModelError
from epd.host_memory import map_large_tensors
from epd.stages.attention.support import check_attention
from epd.stages.device_memory import check_room
from epd.stages.loading.draft_modules import add_draft_head
from epd.stages.loading.host_weights import HostWeights
from epd.stages.loading.merged_weights import MergedMemory, merged_part
from epd.stages.loading.quantized_linear import products_text, quantize_modules, quantized_on_load
from epd.stages.loading.weight_files import (
    StoredTensor,
    TensorPart,
    listed_tensors,
    mapped_tensors,
    read_tensors,
    tensors_in,
    with_forms,
)
from epd.stages.placement import Placement

logger = logging.getLogger(__name__)

OnBytes = Callable[[int, int], None]
# Makes a skeleton smaller, and returns the part of each tensor that there is still room for.
Cut = Callable[[nn.Module], Mapping[str, TensorPart]]
# Making a skeleton changes how the whole process registers parameters: threads take turns.
_LOADING = threading.Lock()


def in_layout(tensor: Tensor, wanted: torch.Size, name: str) -> Tensor:
    """Returns a stored tensor, or a view of it, in the shape that the model wants: on a GPU in one piece.

    Only experts that are all in one tensor, and what chooses those of a kind of tokens, may differ, by an
    exchange of the last two dimensions. Raises ValueError for any other difference.
    """
    if tensor.shape == wanted:
        return tensor
    may_be_turned = tensor.ndim == (3 if ".experts." in name else 2 if "_moe.gate." in name else 0)
    if may_be_turned and tensor.transpose(-2, -1).shape == wanted:
        turned = tensor.transpose(-2, -1)
        return turned.contiguous() if tensor.is_cuda else turned
    raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(wanted)}")


def check_parts(stored: Iterable[tuple[str, str]], known: Mapping[str, Tensor]) -> None:
    """Checks that of tensors stored in parts all are there, before memory is taken for them.

    stored: names of tensors in memory, and in the model. known: the model's tensors.
    Raises ValueError for those of which some are missing.
    """
    found = ((name, joint_part(each)) for each, name in stored)
    counts = Counter((name, part.num_places, part.expert is None) for name, part in found if part is not None)
    for (name, num_places, is_all), count in counts.items():
        wanted = num_places * (1 if is_all else len(known[name]))
        if count != wanted:
            what = "parts" if is_all else "experts"
            raise ValueError(f"{wanted - count} {what} of {name} are missing; get all of the files")


def _check_rows(places: Mapping[StoredTensor, str], known: Mapping[str, Tensor]) -> None:
    """Raises ValueError for parts of lengths of their own that do not make up a tensor."""
    counts = Counter[str]()
    for each, name in places.items():
        part = joint_part(each.name)
        counts[name] += each.shape[0] if part is not None and part.is_uneven else 0
    for name, count in counts.items():
        if count not in (0, len(known[name])):
            raise ValueError(f"{name} has {count} rows in its parts, the model wants {len(known[name])}")


def put_part(model: nn.Module, name: str, part: JointPart, tensor: Tensor) -> None:
    """Copies a stored tensor to its rows of the parameter `name`, which gets memory with the first.

    Raises ValueError if it does not fit.
    """
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    place: Tensor = getattr(module, attribute)
    if place.is_meta:
        memory = torch.empty(place.shape, dtype=tensor.dtype, device=tensor.device)
        place = nn.Parameter(memory, requires_grad=False)
        module.register_parameter(attribute, place)
    rows = _rows_of(place, part, len(tensor))
    if rows.shape != tensor.shape:
        shapes = f"{tuple(tensor.shape)}, the model wants {tuple(rows.shape)}"
        what = f"part {part.place}" if part.expert is None else f"expert {part.expert}"
        raise ValueError(f"{what} of {name} has shape {shapes}")
    with torch.no_grad():
        rows.copy_(tensor)


def _rows_of(place: Tensor, part: JointPart, num_stored: int) -> Tensor:
    if part.is_uneven:
        return place[-num_stored:] if part.place else place[:num_stored]
    rows = place if part.expert is None else place[part.expert : part.expert + 1].flatten(0, 1)
    length = len(rows) // part.num_places
    return rows[part.place * length : (part.place + 1) * length]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Holds a model for one role.

    tensor_names: what was read, as the files name it. num_bytes: its size there.
    """

    model: nn.Module
    tensor_names: tuple[str, ...]
    num_bytes: int


def load_role(
    path: Path,
    role: WeightSet,
    placement: Placement,
    weights: Path | HostWeights | None = None,
    on_progress: OnBytes | None = None,
    cut: Cut | None = None,
    *,
    with_draft_head: bool = False,
) -> LoadedModel:
    """Loads the part of the model at `path` for a worker of this role, in eval mode, with sdpa attention.

    placement: where its weights go, and their type.
    weights: what `write_weights` has made of it, to be mapped, or copied to a GPU, instead of being read.
    on_progress: called with the bytes that have been read, and with all of them.
    cut: leaves the part of a rank, which alone is read; not with `weights`.
    with_draft_head: whether the language model has its head for drafts, see `add_draft_head`; not with `cut`.
    Raises ModelError when the files lack a tensor or cannot be read, UnsupportedModelError for attention that
    nothing here computes, and for weights quantised as nothing here computes, or can cut, InfeasibleError for
    weights that the memory has no room for, before any is read.
    """
    start_s = time.perf_counter()
    if placement.device.type == "cpu":
        map_large_tensors()
    try:
        config = read_config(path)
        quantization = read_quantization(path)
        check_attention(config)
        with _LOADING:
            model = skeleton(config, placement.dtype)
            prune(model, role)
            listed = _listed(path, weights)
            if with_draft_head and role != "encode":
                add_draft_head(model, (each.name for each in listed))
            stored = with_forms(listed, quantization)
            if placement.quantization is not None and role != "encode":
                check_plain(quantization)
                stored = list(quantized_on_load(stored, model, names_of(model, model.state_dict())))
            is_weight_only = quantization is not None and quantization.is_weight_only
            forms = [each.form for each in stored if each.form is not None]
            quantize_modules(model, forms, is_weight_only=is_weight_only)
            parts = cut(model) if cut is not None else {}
            loaded = _fill(model, path, stored, placement, on_progress, parts, weights)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the weights at '{path}' do not load: {reason}") from error
    model.eval()
    seconds = time.perf_counter() - start_s
    size, products = loaded.num_bytes / 1e9, products_text(model)
    logger.info("loaded %.2f GB of %s weights, %s%s, in %.1f s", size, role, placement, products, seconds)
    return loaded


def skeleton(config: Any, dtype: torch.dtype) -> nn.Module:
    """Creates the model of a configuration, with its parameters on the meta device.

    Nothing is initialised: what has no memory has no values, and buffers are computed with their modules.
    config: of transformers, or of an embedded model.
    """
    if isinstance(config, PlainConfig):
        with torch.device("meta"):
            return Qwen3VLModules(config).to(dtype)
    create = published().create_model
    with _parameters_without_memory():
        model: nn.Module = create(config, dtype)
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


def part_bytes(model: nn.Module, role: WeightSet) -> int:
    """Returns the size of the weights, of a whole model, that a worker of this role holds."""
    parameters = (each for name, each in model.named_parameters() if is_wanted(name, role))
    return sum(each.numel() * each.element_size() for each in parameters)


def _fill(
    model: nn.Module,
    path: Path,
    stored: Iterable[StoredTensor],
    placement: Placement,
    on_progress: OnBytes | None,
    parts: Mapping[str, TensorPart],
    weights: Path | HostWeights | None,
) -> LoadedModel:
    """Reads the tensors that the model has a place for, and no others. weights: as in `load_role`."""
    is_copied = not isinstance(weights, Path)
    known = model.state_dict(keep_vars=True)
    name_of = names_of(model, known)
    named = ((each, name_of(each.name_in_memory)) for each in stored)
    places = {each.cut(parts.get(name)): name for each, name in named if name is not None}
    if is_copied:
        check_room(path, _bytes_by_role(places, placement.dtype), placement)
    num_bytes, num_read = sum(each.num_bytes for each in places), 0
    check_parts(((each.name_in_memory, name) for each, name in places.items()), known)
    _check_rows(places, known)
    _check_complete(model, places.values())
    merged = MergedMemory(known)
    for each, tensor in _tensors_of(places, weights):
        placed = _placed(each, tensor, placement)
        if is_copied:
            rows = merged.place(places[each], placed)
            # Of a rank's part, nothing is left as it was read: that keeps the mapping of what others have.
            is_own = rows is not placed or not parts
            placed = rows if is_own else placed.clone(memory_format=torch.contiguous_format)
        _put(model, each.name_in_memory, places[each], placed)
        num_read += each.num_bytes
        if on_progress is not None:
            on_progress(num_read, num_bytes)
    _tie(model)
    _move_buffers(model, placement.device)
    return LoadedModel(model, tuple(each.name for each in places), num_bytes)


def names_of(model: Any, known: Mapping[str, Tensor]) -> Callable[[str], str | None]:
    """Returns the map from names of stored tensors to those of the model, None for one without a place.

    What `name_in_model` does not know has the name that transformers gives it when it loads the family.
    """
    if isinstance(model, Qwen3VLModules):
        return lambda stored: name_in_model(stored, known)
    renamed = published().renaming(model, known)

    def name_of(stored: str) -> str | None:
        name = name_in_model(stored, known)
        return name_in_model(renamed(stored), known) if name is None else name

    return name_of


def _check_complete(model: Any, names: Iterable[str]) -> None:
    """Raises ValueError if these names in a model, and what is tied, are not all of its parameters."""
    tied = {"lm_head.weight"} if _has_tied_head(model) else set()
    missing = {name for name, _ in model.named_parameters()}.difference(names, tied)
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, such as {min(missing)}; get all of the files")


def _listed(path: Path, weights: Path | HostWeights | None) -> list[StoredTensor]:
    if weights is None:
        return listed_tensors(path)
    return list(tensors_in(weights if isinstance(weights, Path) else weights.file))


def _tensors_of(
    places: Mapping[StoredTensor, str], weights: Path | HostWeights | None
) -> Iterator[tuple[StoredTensor, Tensor]]:
    if weights is None:
        return _read_merged_first(places)
    return mapped_tensors(places) if isinstance(weights, Path) else weights.tensors(places)


def _read_merged_first(places: Mapping[StoredTensor, str]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Reads what is merged before the rest: of that nothing is kept as it was read, so no mapping stays."""
    is_merged = {each: merged_part(name) is not None for each, name in places.items()}
    yield from read_tensors(each for each in places if is_merged[each])
    yield from read_tensors(each for each in places if not is_merged[each])


def _bytes_by_role(places: Mapping[StoredTensor, str], dtype: torch.dtype) -> dict[str, int]:
    """Counts the bytes of encoder and language model. places: names in the model."""
    sizes = {"vision": 0, "language": 0}
    for each, name in places.items():
        sizes["vision" if is_wanted(name, "encode") else "language"] += each.num_bytes_as(dtype)
    return sizes


def _placed(stored: StoredTensor, tensor: Tensor, placement: Placement) -> Tensor:
    """Brings what was read to its device, and to its type there: what travels is as small as the files."""
    return stored.in_memory(tensor.to(placement.device, non_blocking=True), placement.dtype)


class WholeModel:
    """Maps a model's weights: whatever part of it is requested is there at once."""

    def __init__(
        self, path: Path, placement: Placement, weights: Path, *, with_draft_head: bool = False
    ) -> None:
        """Maps weights as in `load_role`. Raises ModelError."""
        loaded = load_role(path, "whole", placement, weights, with_draft_head=with_draft_head)
        self._model = loaded.model

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


def _put(model: nn.Module, stored: str, name: str, tensor: Tensor) -> None:
    """Puts a tensor in its place, or in its part of one. stored: its name in memory, name: the place's."""
    part = joint_part(stored)
    if part is None:
        _assign(model, name, tensor)
    else:
        put_part(model, name, part, tensor)


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
        for held in (module._buffers, vars(module)):
            for name, value in held.items():
                if isinstance(value, Tensor):
                    held[name] = value.to(device)


def _tie(model: Any) -> None:
    """Ties a head that is not stored to the embedding of tokens, where the checkpoint ties the two."""
    if _has_tied_head(model):
        model.lm_head.weight = model.get_input_embeddings().weight


def _has_tied_head(model: Any) -> bool:
    """Reports whether the head has no weights of its own yet, and the checkpoint ties it."""
    head = getattr(model, "lm_head", None)
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    return isinstance(head, nn.Linear) and head.weight.is_meta and is_tied


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
