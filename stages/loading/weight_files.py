"""Reads the tensors of a checkpoint one by one, and writes them, without ever holding all of them.

A file is mapped while it is read, and what has been read of it counts as memory of this process until the
mapping ends. So it is renewed every `_MAPPED_BYTES`; a tensor that is kept as it was read keeps its mapping.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from epd.encoders import internvl_chat
from epd.encoders.names import molmo_parts, parts_by_kind
from epd.encoders.quantization import Quantization, read_quantization
from epd.errors import ModelError
from epd.models.folder import weight_files
from epd.stages.loading.merged_weights import in_merged_order
from epd.stages.loading.quantized_forms import Step, TensorForm, forms_of
from epd.types import ceil_div

_MAPPED_BYTES = 512 << 20
# Bytes of a file, and places in it, that distinguish one set of weights from another.
_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 64
# Types by their names in a file.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_TO_FP8: tuple[Step, ...] = ("fp8", "fp8_scales")
# Ends of names of tensors that only weights of FP8 have.
_SCALES = (".weight_scale", ".weight_scale_inv", "_proj_scale_inv")
# Of those that keep the type of the files: what chooses experts.
_KEPT = ("_moe.gate.weight", "e_score_correction_bias")
# That transformers has for a config.json that does not say so.
_ERNIE_EXPERTS = 64
_MOLMO_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Names a part of a tensor, along a dimension.

    ranges: [start, stop), one in each piece of the dimension, such as gate and up of experts.
    whole: the shape in the model of experts [E, N, C], which files have one by one, or as [E, C, N].
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    whole: tuple[int, ...] = ()

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the part. Raises ValueError for a tensor that does not have it."""
        if len(shape) <= self.dim or shape[self.dim] < self.ranges[-1][1]:
            raise ValueError(f"a tensor of {tuple(shape)} has no part {self}")
        length = sum(stop - start for start, stop in self.ranges)
        return *shape[: self.dim], length, *shape[self.dim + 1 :]

    def of_stored(self, shape: Sequence[int], form: TensorForm | None) -> TensorPart | None:
        """Returns the part of a stored tensor of this shape that becomes this one; None for all of it."""
        part = replace(self, dim=3 - self.dim) if self.is_turned(shape) else self
        return part if form is None else _part_in_form(part, shape, form)

    def of_one(self, shape: Sequence[int]) -> TensorPart:
        """Returns the part of a matrix [N, C] that is an expert's; this one for a tensor of another kind."""
        return TensorPart(self.dim - 1, self.ranges[:1]) if self.whole and len(shape) == 2 else self

    def is_turned(self, shape: Sequence[int]) -> bool:
        """Reports whether a stored tensor of this shape has experts the other way round."""
        num_experts, *matrix = self.whole or (0,)
        return tuple(shape) == (num_experts, *reversed(matrix)) != self.whole


# Of files of 4 bits, by step: whether they have columns first, and in how many of theirs a row and a column
# of ours lie. A column of our packed values is two of the matrix.
_UNITS: Mapping[Step, tuple[bool, tuple[tuple[int, int], tuple[int, int]]]] = {
    "packed": (True, ((1, 8), (2, 1))),
    "zeros": (True, ((1, 8), (1, 1))),
    "turned": (True, ((1, 1), (1, 1))),
    "packed_down": (True, ((1, 1), (1, 4))),
    "zeros_across": (True, ((1, 8), (1, 1))),
    "raised_zeros_across": (True, ((1, 8), (1, 1))),
    "packed_across": (False, ((1, 1), (1, 4))),
    "zeros_down": (False, ((1, 8), (1, 1))),
}


def _part_in_form(part: TensorPart, shape: Sequence[int], form: TensorForm) -> TensorPart | None:
    if form.step == "for_each_row":
        return None if part.dim == 1 or math.prod(shape) == 1 else part
    if form.step in ("none", *_TO_FP8):
        return part
    if form.step == "middle":
        return None
    is_turned, units = _UNITS[form.step]
    times, over = units[part.dim]
    dim = 1 - part.dim if is_turned else part.dim
    ranges = [(start * times // over, ceil_div(stop * times, over)) for start, stop in part.ranges]
    return TensorPart(dim, tuple(ranges))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describes a tensor of a file.

    part: what of it is read, all if None. is_turned: its last two dimensions are exchanged then.
    shape: of what is read.
    form: what it becomes in memory, for a tensor of a quantised matrix.
    source: its name in the file, where that is another.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: TensorPart | None = None
    form: TensorForm | None = None
    is_turned: bool = False
    source: str | None = None

    def named(self, names: Sequence[str]) -> Iterator[StoredTensor]:
        """Returns its rows in equal parts, of which each has its name; those with one name are one."""
        rows, at = self.shape[0] // len(names) if len(names) > 1 else 0, 0
        for name, same in groupby(names):
            stop = at + len(list(same))
            part = TensorPart(0, ((at * rows, stop * rows),)) if rows else None
            yield replace(self.cut(part), name=name, source=self.name)
            at = stop

    def cut(self, part: TensorPart | None) -> StoredTensor:
        """Returns a part of a whole tensor, as the model has it. Raises ValueError if it has no such part."""
        if part is None:
            return self
        if self.part is not None:
            raise ValueError(f"{self.name} is a part of {self.source} already, and cannot be cut again")
        form = self.form
        part = part.of_one(self.shape if form is None else form.shape)
        if form is not None and form.step in _TO_FP8 and (part.whole or part.dim == 1):
            form = replace(form, shape=part.shape_of(form.shape), kept=(part.dim, part.ranges))
            return replace(self, form=form)
        read, is_turned = part.of_stored(self.shape, form), part.is_turned(self.shape)
        if form is not None:
            form = replace(form, shape=part.shape_of(part.whole or form.shape))
        shape = self.shape if read is None else read.shape_of(self.shape)
        return replace(self, shape=shape, part=read, form=form, is_turned=is_turned)

    @property
    def num_bytes(self) -> int:
        return self.num_bytes_as(self.dtype)

    @property
    def name_in_memory(self) -> str:
        return self.name if self.form is None else self.form.name

    @property
    def shape_in_memory(self) -> tuple[int, ...]:
        return self.shape if self.form is None else self.form.shape

    def dtype_as(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the type that the tensor has in a model of this type: only floating-point ones change."""
        if self.form is not None:
            return self.form.dtype
        is_kept = not self.dtype.is_floating_point or self.name.endswith(_KEPT)
        return self.dtype if is_kept else dtype

    def num_bytes_as(self, dtype: torch.dtype) -> int:
        """Counts its bytes in a model of this type."""
        return math.prod(self.shape_in_memory) * self.dtype_as(dtype).itemsize

    def in_memory(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns what was read of it as it is in a model of this type."""
        if self.form is not None:
            return self.form.of(tensor)
        return tensor.to(self.dtype_as(dtype))


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Lists the tensors of a model's folder, file by file; only headers and the configuration are read.

    Raises OSError, ValueError, SafetensorError, UnsupportedModelError for weights that are quantised as
    nothing here computes.
    """
    quantization = read_quantization(path)  # what it refuses needs no files
    return with_forms(listed_tensors(path), quantization)


def listed_tensors(path: Path) -> list[StoredTensor]:
    """Lists the same without their forms, by the names of transformers.

    Raises OSError, ValueError, SafetensorError, ModelError.
    """
    stored = [tensor for file in weight_files(path) for tensor in tensors_in(file)]
    names_of_parts = _names_of_parts(path)
    if names_of_parts is None:
        return stored
    return [part for each in stored for part in each.named(names_of_parts(each.name))]


def _names_of_parts(path: Path) -> Callable[[str], Sequence[str]] | None:
    """Returns what tensors of the files are in parts, for a layout that has some of these."""
    if internvl_chat.is_authors_layout(path):
        return internvl_chat.names_of_parts
    config = internvl_chat.read_json(path / "config.json")
    text, model_type = config.get("text_config", {}), config.get("model_type")
    if model_type == "molmo2":
        heads = (text.get(name, default) for name, default in _MOLMO_HEADS.items())
        return partial(molmo_parts, **dict(zip(("num_heads", "num_kv_heads"), heads, strict=True)))
    if model_type != "ernie4_5_vl_moe":
        return None
    return partial(parts_by_kind, num_experts=text.get("moe_num_experts", _ERNIE_EXPERTS))


def with_forms(stored: list[StoredTensor], quantization: Quantization | None) -> list[StoredTensor]:
    """Says of tensors of a model what they become in memory.

    Raises ValueError as `forms_of` does, and for scales of weights that nothing says to be quantised.
    """
    if quantization is None:
        scale = next((each.name for each in stored if each.name.endswith(_SCALES)), None)
        if scale is not None:
            raise ValueError(f"there is {scale}, but config.json has no quantization_config; get both files")
        return stored
    forms = forms_of({each.name: (each.shape, each.dtype) for each in stored}, quantization)
    return [replace(each, form=forms.get(each.name)) for each in stored]


def tensors_in(file: Path) -> Iterator[StoredTensor]:
    """Lists the tensors of one file."""
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it cannot be iterated
            stored = tensors.get_slice(name)
            kind = stored.get_dtype()
            if kind not in _DTYPES:
                raise ValueError(f"'{file}' has tensors of the type {kind}; allowed: {', '.join(_DTYPES)}")
            yield StoredTensor(file, name, tuple(stored.get_shape()), _DTYPES[kind])


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Reads tensors in this order, each when it is asked for. They are memory of the mapped file."""
    for file, tensors in groupby(stored, lambda each: each.file):
        for run in _runs(tensors):
            with safe_open(file, framework="pt") as opened:
                for each in run:
                    yield each, _read(opened, each)


def _read(opened: Any, stored: StoredTensor) -> Tensor:
    """Reads a tensor, or a view of a part of it, which keeps the memory of all of it."""
    part, name = stored.part, stored.source or stored.name
    if part is None:
        tensor: Tensor = opened.get_tensor(name)
        return tensor
    rows, before = opened.get_slice(name), (slice(None),) * part.dim
    views: list[Tensor] = [rows[(*before, slice(start, stop))] for start, stop in part.ranges]
    view = views[0] if len(views) == 1 else torch.cat(views, part.dim)
    return view.transpose(1, 2) if stored.is_turned else view


def mapped_tensors(stored: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Maps files of `write_weights`, each once, and yields their tensors, which are their memory."""
    for file, tensors in groupby(stored, lambda each: each.file):
        mapped = MappedWeights(file)
        for each in tensors:
            yield each, mapped.tensor(each)


class MappedWeights:
    """Maps a file of `write_weights`: what follows each other there does so in memory.

    memory: all of the file, uint8 [n]. It stays mapped as long as one of its tensors is kept.
    """

    def __init__(self, file: Path, *, is_shared: bool = False) -> None:
        """Reads the index. is_shared: pages are those of the file even where a device might write them."""
        with file.open("rb") as stream:
            num_index_bytes = int.from_bytes(stream.read(8), "little")
            self._index = json.loads(stream.read(num_index_bytes))
        size = file.stat().st_size
        self.memory = torch.from_file(str(file), shared=is_shared, size=size, dtype=torch.uint8)
        self._values = self.memory[8 + num_index_bytes :]

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Returns a tensor of the file."""
        start, stop = self._index[stored.name]["data_offsets"]
        return self._values[start:stop].view(stored.dtype).view(stored.shape)


def _runs(stored: Iterable[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Cuts into runs of at most `_MAPPED_BYTES`, or of one tensor."""
    run: list[StoredTensor] = []
    for each in stored:
        if run and sum(one.num_bytes for one in run) + each.num_bytes > _MAPPED_BYTES:
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def write_weights(path: Path, dtype: torch.dtype, target: Path) -> None:
    """Writes all tensors of the model at `path` to one file, floating-point ones in `dtype`.

    Quantised ones are written in the forms, and under the names, that they have in a model.

    Raises OSError, ModelError.
    """
    try:
        stored = stored_tensors(path)
        names = in_merged_order([each.name_in_memory for each in stored])
        order = {name: place for place, name in enumerate(names)}
        # The widest types first, so that each tensor is aligned.
        stored.sort(key=lambda each: (-each.dtype_as(dtype).itemsize, order[each.name_in_memory]))
        with target.open("wb") as file:
            file.write(file_header(stored, dtype))
            for each, tensor in read_tensors(stored):
                _write(file, each.in_memory(tensor, dtype))
    except (ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"the weights at '{path}' cannot be copied: {error}") from error


def file_header(stored: Sequence[StoredTensor], dtype: torch.dtype) -> bytes:
    """Returns what a safetensors file of such tensors begins with: the length of its index, and the index."""
    entries, end = {}, 0
    for each in stored:
        start, end = end, end + each.num_bytes_as(dtype)
        kind = _DTYPE_NAMES[each.dtype_as(dtype)]
        shape = each.shape_in_memory
        entries[each.name_in_memory] = {"dtype": kind, "shape": shape, "data_offsets": (start, end)}
    index = json.dumps(entries).encode()
    index += b" " * (-len(index) % 8)
    return len(index).to_bytes(8, "little") + index


def _write(file: BinaryIO, tensor: Tensor) -> None:
    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def num_weight_bytes(path: Path, dtype: torch.dtype) -> int:
    """Counts the bytes of the tensors that `write_weights` writes; names take a few more."""
    return sum(each.num_bytes_as(dtype) for each in stored_tensors(path))


def weights_revision(path: Path) -> str:
    """Names what a model folder holds: other weights, or another configuration, have another name.

    Configuration and headers are hashed whole, the weights at `_NUM_SAMPLES` places of each file.
    Raises ModelError.
    """
    digest = hashlib.blake2b(digest_size=8)
    for config in sorted(path.glob("*.json")):
        digest.update(config.read_bytes())
    for file in weight_files(path):
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
