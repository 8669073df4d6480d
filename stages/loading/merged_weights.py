"""Keeps matrices that are multiplied by the same rows in one piece of memory, the only one that there is.

    merged [Nq + Nk + Nv, C]   | q_proj.weight | k_proj.weight | v_proj.weight |
    merged [2 I, C]            | gate_proj.weight | up_proj.weight |

And what gated delta layers multiply their rows by.

The modules of transformers keep their parts, as views.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What is merged, in this order.
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_GROUP = {part: group for group in (QKV, GATE_UP, DELTA) for part in group}
_PART = re.compile(
    rf"^(.*\blayers\.\d+\.(?:self_attn|mlp(?:\.shared_experts?)?|linear_attn)\.)({'|'.join(_GROUP)})"
    r"\.(weight|bias|scales|packed|zeros)$"
)


@dataclass(frozen=True, slots=True)
class MergedPart:
    """Names a part of a merged tensor. names: of all its parts, in order; index: of this one."""

    names: tuple[str, ...]
    index: int


def merged_part(name: str) -> MergedPart | None:
    """Reads the name of a tensor, in the files or in the model; None if it is merged with no other."""
    found = _PART.match(name)
    if found is None:
        return None
    start, part, kind = found.groups()
    group = _GROUP[part]
    return MergedPart(tuple(f"{start}{each}.{kind}" for each in group), group.index(part))


def in_merged_order(names: Collection[str]) -> list[str]:
    """Orders names so that the parts of what is merged follow each other."""
    known, ordered = set(names), dict[str, None]()
    for name in names:
        part = merged_part(name)
        ordered.update(dict.fromkeys(each for each in (part.names if part else (name,)) if each in known))
    return list(ordered)


class MergedMemory:
    """Puts tensors that are read one by one into the memory of what they are merged into."""

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        """Takes the tensors of the model, by name; only their shapes are read."""
        self._known = known
        self._held: dict[tuple[str, ...], Tensor] = {}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """Copies a tensor to its rows, and returns these; one that is merged with no other is returned."""
        part = merged_part(name)
        if part is None or any(each not in self._known for each in part.names):
            return tensor
        sizes = [len(self._known[each]) for each in part.names]
        whole = self._held.get(part.names)
        if whole is None:
            shape = (sum(sizes), *tensor.shape[1:])
            whole = self._held[part.names] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        rows: Tensor = torch.split(whole, sizes)[part.index]
        if rows.shape != tensor.shape or rows.dtype != tensor.dtype:
            return tensor  # whoever puts it into the model says what is wrong with it
        return rows.copy_(tensor)


def merged(modules: Sequence[Any], kind: str) -> Tensor | None:
    """Returns what linear modules have as `kind`, such as weight or bias, in one tensor; None without any.

    Parts that are not yet side by side in memory are copied there, and the modules get views of it.
    """
    parts: list[Tensor] = [getattr(module, kind) for module in modules]
    if any(part is None for part in parts):
        if all(part is None for part in parts):
            return None
        raise ValueError(f"of {len(parts)} modules that are merged only some have a {kind}")
    if not _are_adjacent(parts):
        whole = torch.cat([part.detach() for part in parts])
        pieces = torch.split(whole, [len(part) for part in parts])
        for module, piece in zip(modules, pieces, strict=True):
            module.register_parameter(kind, nn.Parameter(piece, requires_grad=False))
        return whole
    num_rows = sum(map(len, parts))
    return parts[0].detach().as_strided((num_rows, *parts[0].shape[1:]), parts[0].stride())


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    """Reports whether each part begins in memory where the one before ends."""
    first = parts[0]
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for part in parts:
        is_next = part.storage_offset() == end and part.is_contiguous() and part.dtype == first.dtype
        if not is_next or part.untyped_storage()._cdata != storage:
            return False
        end += part.numel()
    return True
