"""Maps names of weights: in the files of a checkpoint, in the model, and by the stage that needs them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

WeightSet = Literal["encode", "language", "whole"]

# Where the families keep the language model and its head. What else lies below `model.` an encode worker
# needs: towers, projectors, newlines.
_LANGUAGE_PARTS = ("language_model", "text_model", "embed_tokens", "layers", "norm", "rotary_emb")
# Published files keep the names of the releases that wrote them: (there, here).
_RENAMES = (
    (re.compile(r"^language_model\.model\."), "model.language_model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(?=(visual|vision_tower|audio_tower|multi_modal_projector|image_newline)\b)"), "model."),
    (re.compile(r"^model\.(?=(embed_tokens|layers|norm)\.)"), "model.language_model."),
)
# An expert that lies in the files by itself.
_SINGLE_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_NESTED, _FLAT = "vision_tower.vision_model.", "vision_tower."


def is_wanted(name: str, role: WeightSet) -> bool:
    """Reports whether a worker of this role loads the parameter, or runs the module, `name` of the model."""
    if role == "whole":
        return True
    return _is_of_encoder(name) == (role == "encode")


def _is_of_encoder(name: str) -> bool:
    base, _, part = name.partition(".")
    return base == "model" and part.partition(".")[0] not in _LANGUAGE_PARTS


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Names a tensor of one expert.

    joint: the tensor of all experts that it is a part of, by the names of the files.
    """

    joint: str
    expert: int
    part: Literal["gate", "up", "down"]


def expert_part(stored: str) -> ExpertPart | None:
    """Reads the name of a stored tensor; None if it is not that of a single expert."""
    found = _SINGLE_EXPERT.match(stored)
    if found is None:
        return None
    start, expert, part = found.groups()
    joint = "down_proj" if part == "down" else "gate_up_proj"
    return ExpertPart(f"{start}.{joint}", int(expert), part)  # type: ignore[arg-type] # one of the three


def name_in_model(stored: str, known: Collection[str]) -> str | None:
    """Returns the model's name of a stored tensor, one of `known`; None if the model has no place for it.

    For a single expert, returns the name of the tensor that it is a part of.
    """
    if stored in known:
        return stored
    part = expert_part(stored)
    renamed = stored if part is None else part.joint
    for pattern, replacement in _RENAMES:
        renamed = pattern.sub(replacement, renamed, count=1)
    candidates = (renamed, renamed.replace(_NESTED, _FLAT, 1), renamed.replace(_FLAT, _NESTED, 1))
    return next((name for name in candidates if name in known), None)
