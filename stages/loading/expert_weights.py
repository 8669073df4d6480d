"""Brings the experts of a layer to the tensors in which the modules of transformers 5 have them.

E experts, I channels within one, C of the model:

    files    experts.0.gate_proj [I, C] | experts.0.up_proj [I, C] | experts.1.gate_proj ...    one by one, or
             experts.gate_up_proj [E, C, 2 I]                                                  all of them
    model    experts.gate_up_proj [E, 2 I, C]                                                  gate before up
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from epd.encoders.names import ExpertPart, expert_part


def in_layout(tensor: Tensor, wanted: torch.Size, name: str) -> Tensor:
    """Returns a stored tensor, or a view of it, in the shape that the model wants.

    Only experts that are all in one tensor may differ, by an exchange of the last two dimensions. Raises
    ValueError for any other difference.
    """
    if tensor.shape == wanted:
        return tensor
    if ".experts." in name and tensor.ndim == 3 and tensor.transpose(1, 2).shape == wanted:
        return tensor.transpose(1, 2)
    raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(wanted)}")


def check_experts(stored: Iterable[tuple[str, str]], known: Mapping[str, Tensor]) -> None:
    """Checks that of experts stored one by one all are there, before memory is taken for them.

    stored: names of tensors in the files, and in the model. known: the model's tensors.
    Raises ValueError for those of which some are missing.
    """
    counts = Counter(name for each, name in stored if expert_part(each) is not None)
    for name, count in counts.items():
        wanted = len(known[name]) * (2 if name.endswith("gate_up_proj") else 1)
        if count != wanted:
            raise ValueError(f"{wanted - count} experts of {name} are missing; get all of the files")


def put_expert(model: nn.Module, name: str, part: ExpertPart, tensor: Tensor) -> None:
    """Copies one expert's tensor to its rows of the parameter `name`, which gets memory with the first.

    Raises ValueError if it does not fit.
    """
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    place: Tensor = getattr(module, attribute)
    if place.is_meta:
        memory = torch.empty(place.shape, dtype=tensor.dtype, device=tensor.device)
        place = nn.Parameter(memory, requires_grad=False)
        module.register_parameter(attribute, place)
    rows = _rows_of(place, part)
    if rows.shape != tensor.shape:
        shapes = f"{tuple(tensor.shape)}, the model wants {tuple(rows.shape)}"
        raise ValueError(f"expert {part.expert} of {name} has shape {shapes}")
    with torch.no_grad():
        rows.copy_(tensor)


def _rows_of(place: Tensor, part: ExpertPart) -> Tensor:
    rows = place[part.expert : part.expert + 1].flatten(0, 1)
    half = len(rows) // 2
    return {"gate": rows[:half], "up": rows[half:], "down": rows}[part.part]
