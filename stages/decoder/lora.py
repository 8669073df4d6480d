"""Adds the low-rank products of LoRA adapters to those of a decoder's matrices, which all requests share.

    rows of a pass       | request a, adapter 1 | request b | request c, adapter 2 |
    product              | all rows times the model's matrix                      |
    adapter 1 adds to    | its own rows         |
    adapter 2 adds to                                       | its own rows         |

Every adapter of a pass multiplies all rows by A, which is small; rows of others are zero before B. A rank has
what goes with its part of a matrix: of its rows those of B, of its columns those of A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epd.encoders.device import to_device
from epd.errors import UnsupportedModelError
from epd.lora_modules import LoRAModule
from epd.stages.decoder.delta_layer import DeltaLayer
from epd.stages.decoder.layers import DecoderLayer, DecoderLayers, GatedMlp, SummedLinear, projections_of
from epd.stages.decoder.linear import Linear
from epd.stages.decoder.rank_cut import matrices_of
from epd.stages.loading.lora_files import LowRank, read_lora, unsupported
from epd.stages.loading.merged_weights import DELTA, GATE_UP, QKV
from epd.stages.loading.weight_files import TensorPart
from epd.stages.loading.weights import names_of
from epd.stages.rank import Rank

_ATTENTION, _MLP, _DELTA = "self_attn", "mlp", "linear_attn"
# Modules of a layer whose products an adapter may add to, by what they are merged into.
_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": tuple(f"{_ATTENTION}.{each}" for each in QKV),
    "out": (f"{_ATTENTION}.o_proj",),
    "delta": tuple(f"{_DELTA}.{each}" for each in DELTA),
    "delta_out": (f"{_DELTA}.out_proj",),
    "gate_up": tuple(f"{_MLP}.{each}" for each in GATE_UP),
    "down": (f"{_MLP}.down_proj",),
}
_GATE_UP_IN_ONE = f"{_MLP}.gate_up_proj"
_PLACES = {module: product for product, modules in _PRODUCTS.items() for module in modules}
_PLACES[_GATE_UP_IN_ONE] = "gate_up"


@dataclass(frozen=True, slots=True)
class LoRARows:
    """Says which adapter each row of a pass has.

    owners: int64 [T], an adapter's number, -1 for the model alone.
    present: numbers of the adapters of the pass. is_all: whether all rows have the only one.
    """

    owners: Tensor
    present: tuple[int, ...]
    is_all: bool

    @classmethod
    def of(cls, adapters: Sequence[int], lengths: Sequence[int], device: torch.device) -> LoRARows | None:
        """Takes the adapter of each segment, and its rows; returns None where no segment has one."""
        present = tuple(sorted({each for each in adapters if each >= 0}))
        if not present:
            return None
        owners = torch.from_numpy(np.repeat(np.array(adapters, np.int64), lengths))
        return cls(to_device(owners, device), present, set(adapters) == set(present[:1]))

    def only(self, rows: Tensor) -> LoRARows:
        """Returns some of the rows, int64 [R]."""
        return replace(self, owners=self.owners.index_select(0, rows))


@dataclass(slots=True)
class LoRAPass:
    """Holds the rows that products are made of now; None where none has an adapter."""

    rows: LoRARows | None = None


@dataclass(frozen=True, slots=True)
class LoRALinear:
    """Multiplies by a matrix, and adds the products of the adapters of a pass. added: by their numbers."""

    base: Linear
    added: Mapping[int, LowRank]
    current: LoRAPass

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [T, N] of rows [T, C]."""
        product, now = self.base(rows), self.current.rows
        if now is None:
            return product
        for number in now.present:
            if (low_rank := self.added.get(number)) is not None:
                low = rows @ low_rank.a.t()
                if not now.is_all:
                    low.masked_fill_((now.owners != number)[:, None], 0)
                product = product.addmm_(low, low_rank.b.t())
        return product


@dataclass(frozen=True, slots=True)
class LoRAAdapters:
    """Holds the adapters that are served beside a model.

    numbers: of each, by its name.
    added: to each product of each layer, by the numbers of adapters.
    """

    numbers: Mapping[str, int]
    added: Sequence[Mapping[str, Mapping[int, LowRank]]]
    current: LoRAPass = field(default_factory=LoRAPass)

    def wrapped(self, layers: DecoderLayers) -> DecoderLayers:
        """Returns the same layers with these adapters; the matrices are shared."""
        changed = tuple(self._layer(*each) for each in zip(layers.layers, self.added, strict=True))
        return replace(layers, layers=changed)

    def _layer(
        self, layer: DecoderLayer | DeltaLayer, added: Mapping[str, Mapping[int, LowRank]]
    ) -> DecoderLayer | DeltaLayer:
        def linear(base: Linear, product: str) -> Linear:
            if product not in added:
                return base
            if isinstance(base, SummedLinear):  # what is added is a rank's part, too
                return replace(base, part=LoRALinear(base.part, added[product], self.current))
            return LoRALinear(base, added[product], self.current)

        mlp = layer.mlp
        if isinstance(mlp, GatedMlp):
            gate_up, down = linear(mlp.gate_up, "gate_up"), linear(mlp.down, "down")
            mlp = replace(mlp, gate_up=gate_up, down=down)
        if isinstance(layer, DeltaLayer):
            mixer = replace(layer.mixer, projection=linear(layer.mixer.projection, "delta"))
            return replace(layer, mixer=mixer, out=linear(layer.out, "delta_out"), mlp=mlp)
        return replace(layer, qkv=linear(layer.qkv, "qkv"), out=linear(layer.out, "out"), mlp=mlp)


def not_ours(module: LoRAModule) -> UnsupportedModelError:
    """Returns the error for an adapter of a model whose layers our decoder does not compute."""
    where = "layers that transformers' modules compute"
    return unsupported(module.name, where, "a language model that our decoder computes")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Describes the matrix of a linear module. size: rows and columns of it all. part: that a rank has."""

    size: tuple[int, int]
    part: TensorPart

    @property
    def num_rows(self) -> int:
        """Returns the rows that a rank has."""
        return self.part.shape_of(self.size)[0]

    def cut(self, low_rank: LowRank) -> LowRank:
        """Returns what is added to a rank's part."""
        chosen = torch.cat([torch.arange(*each) for each in self.part.ranges])
        if self.part.dim == 0:
            return LowRank(low_rank.a, low_rank.b[chosen])
        return LowRank(low_rank.a[:, chosen], low_rank.b)


def read_adapters(modules: Sequence[LoRAModule], model: Any, rank: Rank) -> LoRAAdapters:
    """Reads adapters of a model of transformers, to its device and type.

    rank: that has this model, cut; its part alone is kept.
    Raises ModelError as `read_lora` does, and UnsupportedModelError for what is not a linear module of the
    language model's layers.
    """
    matrices = _matrices(model, rank)
    added: list[dict[str, dict[int, LowRank]]] = [{} for _ in matrices]
    for number, module in enumerate(modules):
        for index, found in _by_layer(module, model, matrices).items():
            for product, parts in _by_product(found).items():
                weight = model.get_input_embeddings().weight
                names = _modules_of(model.get_decoder().layers[index], product)
                merged = _merged(parts, names, matrices[index])
                added[index].setdefault(product, {})[number] = merged.to(weight.device, weight.dtype)
    return LoRAAdapters({module.name: number for number, module in enumerate(modules)}, added)


def _modules_of(layer: Any, product: str) -> tuple[str, ...]:
    """Names the modules that a product is merged from, in the order of its channels."""
    if product == "gate_up" and hasattr(layer.mlp, "gate_up_proj"):
        return (_GATE_UP_IN_ONE,)
    if product != "qkv":
        return _PRODUCTS[product]
    return tuple(f"{_ATTENTION}.{each}" for each in projections_of(layer.self_attn))


def _matrices(model: Any, rank: Rank) -> list[dict[str, _Matrix]]:
    """Returns the linear modules of each layer that adapters may add to, by their names in it."""
    found = []
    for layer in model.get_decoder().layers:
        names = {module: name for name, module in layer.named_modules()}
        named = {names[module]: (module, part) for module, part in matrices_of(layer, rank)}
        found.append({
            name: _Matrix((module.out_features, module.in_features), part)
            for name, (module, part) in named.items()
            if name in _PLACES
        })  # fmt: skip
    return found


def _by_layer(
    module: LoRAModule, model: Any, matrices: Sequence[Mapping[str, _Matrix]]
) -> dict[int, dict[str, LowRank]]:
    """Reads an adapter: of each layer, by the names of the modules in it."""
    names = {each: name for name, each in model.named_modules()}
    start = f"{names[model.get_decoder()]}.layers."
    known = {f"{name}.weight": model.get_input_embeddings().weight for name in names.values()}
    name_of, layers = names_of(model, known), dict[int, dict[str, LowRank]]()
    for stored, low_rank in read_lora(module).items():
        name = (name_of(f"{stored}.weight") or "").removesuffix(".weight")
        index, _, place = name.removeprefix(start).partition(".")
        if not name.startswith(start) or int(index) >= len(matrices) or place not in matrices[int(index)]:
            raise unsupported(
                module.name, f"the module {stored}", "linear modules of the language model's layers"
            )
        matrix = matrices[int(index)][place]
        _check_size(module, stored, low_rank, matrix.size)
        layers.setdefault(int(index), {})[place] = matrix.cut(low_rank)
    return layers


def _check_size(module: LoRAModule, stored: str, low_rank: LowRank, size: tuple[int, int]) -> None:
    found = len(low_rank.b), low_rank.a.shape[1]
    if found != size:
        raise UnsupportedModelError(
            f"received the LoRA module '{module.name}' for {stored} of {found}, which has {size} in this "
            "model; allowed: an adapter of this model; give that"
        )


def _by_product(found: Mapping[str, LowRank]) -> dict[str, dict[str, LowRank]]:
    products: dict[str, dict[str, LowRank]] = {}
    for place, low_rank in found.items():
        products.setdefault(_PLACES[place], {})[place] = low_rank
    return products


def _merged(parts: Mapping[str, LowRank], modules: Sequence[str], matrices: Mapping[str, _Matrix]) -> LowRank:
    """Joins what is added to the modules of one product: A above each other, B along a diagonal."""
    a = [parts[each].a for each in modules if each in parts]
    b = [parts[each].b if each in parts else torch.zeros(matrices[each].num_rows, 0) for each in modules]
    diagonal: Tensor = torch.block_diag(*b)  # type: ignore[no-untyped-call]
    return LowRank(torch.cat(a), diagonal)
