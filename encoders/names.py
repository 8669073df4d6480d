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
    (re.compile(r"^thinker\."), ""),
    (re.compile(r"^language_model\.model\."), "model.language_model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(?=(visual|vision_tower|audio_tower|multi_modal_projector|image_newline)\b)"), "model."),
    (re.compile(r"^model\.(?=(embed_tokens|layers|norm)\.)"), "model.language_model."),
)
# Of all experts of a layer in the model; scales of those in FP8 have the same names with an end.
EXPERT_MATRICES, EXPERT_SCALES = ("gate_up_proj", "down_proj"), "_scales"
# An expert that lies in the files by itself, and queries, keys or values of a tower that do.
_SINGLE_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|scales)$")
_SINGLE_THIRD = re.compile(r"^(.*\bvisual\.blocks\.\d+\.attn)\.([qkv])\.(weight|bias)$")
_NESTED, _FLAT = "vision_tower.vision_model.", "vision_tower."
# Of ERNIE 4.5 VL, in each layer: experts, the gate of those for texts or for media, and the bias of both.
_BY_KIND = re.compile(r"^(.+\.mlp)\.(?:experts\.(\d+)\.(.+)|gate\.weight(_1)?|moe_statics\.(.+))$")
_KINDS = ("text_moe", "vision_moe")
# Of Molmo 2: matrices that its authors keep merged, and the embedding, whose last rows lie by themselves.
_MOLMO_MERGED = re.compile(r"^(.+\.)(self_attn\.att|mlp\.ff)_proj\.(weight|bias)$")
_SPLIT_EMBEDDING = re.compile(r"^(.+\.)wte\.(new_)?embedding$")


def is_wanted(name: str, role: WeightSet) -> bool:
    """Reports whether a worker of this role loads the parameter, or runs the module, `name` of the model."""
    if role == "whole":
        return True
    return _is_of_encoder(name) == (role == "encode")


def _is_of_encoder(name: str) -> bool:
    base, _, part = name.partition(".")
    return base == "model" and part.partition(".")[0] not in _LANGUAGE_PARTS


@dataclass(frozen=True, slots=True)
class JointPart:
    """Names a stored tensor that is a part of one of the model.

    joint: the tensor that it is a part of, by the names of the files.
    expert: whose it is, None for the third of a tower's queries, keys and values.
    place, num_places: which of as many equal runs of rows, of the expert or of all.
    is_uneven: whether the two runs are as long as they are stored: the first rows, and the last.
    """

    joint: str
    expert: int | None
    place: int
    num_places: int
    is_uneven: bool = False


def joint_part(stored: str) -> JointPart | None:
    """Reads the name of a stored tensor; None if it is a whole tensor of the model."""
    expert, third = _SINGLE_EXPERT.match(stored), _SINGLE_THIRD.match(stored)
    if third is not None:
        return JointPart(f"{third[1]}.qkv.{third[3]}", None, "qkv".index(third[2]), 3)
    if expert is None:
        embedding = _SPLIT_EMBEDDING.match(stored)
        if embedding is None:
            return None
        return JointPart(f"{embedding[1]}embed_tokens.weight", None, int(embedding[2] is not None), 2, True)
    is_down, end = expert[3] == "down", EXPERT_SCALES if expert[4] == "scales" else ""
    joint = f"{expert[1]}.{EXPERT_MATRICES[is_down]}{end}"
    return JointPart(joint, int(expert[2]), int(expert[3] == "up"), 1 if is_down else 2)


def parts_by_kind(stored: str, num_experts: int) -> tuple[str, ...]:
    """Names what a tensor in the files of ERNIE 4.5 VL is in the model, or equal parts of its rows.

        mlp.experts.70.up_proj.weight                   mlp.vision_moe.experts.6.up_proj.weight
        mlp.gate.weight, mlp.gate.weight_1 [C, E]       mlp.text_moe.gate.weight, mlp.vision_moe ... [E, C]
        mlp.moe_statics.e_score_correction_bias [2, E]  mlp.text_moe.gate.moe_statics ... [1, E] and so on

    num_experts: E, of each kind, such as 64.
    """
    found = _BY_KIND.match(stored)
    if found is None:
        return (stored,)
    start, expert, rest, second, bias = found.groups()
    if bias is not None:
        return tuple(f"{start}.{kind}.gate.moe_statics.{bias}" for kind in _KINDS)
    if expert is None:
        return (f"{start}.{_KINDS[second is not None]}.gate.weight",)
    is_media, number = divmod(int(expert), num_experts)
    return (f"{start}.{_KINDS[min(is_media, 1)]}.experts.{number}.{rest}",)


def molmo_parts(stored: str, num_heads: int, num_kv_heads: int) -> tuple[str, ...]:
    """Names each head's rows of queries, keys and values in the files of Molmo 2, and halves of its MLP's.

    self_attn.att_proj.weight    self_attn.q_proj.weight, k_proj, v_proj
    mlp.ff_proj.weight           mlp.up_proj.weight, gate_proj
    """
    found = _MOLMO_MERGED.match(stored)
    if found is None:
        return (stored,)
    start, what, kind = found.groups()
    if what == "mlp.ff":
        return tuple(f"{start}mlp.{each}_proj.{kind}" for each in ("up", "gate"))
    counts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    return tuple(f"{start}self_attn.{each}_proj.{kind}" for each, n in counts.items() for _ in range(n))


def name_in_model(stored: str, known: Collection[str]) -> str | None:
    """Returns the model's name of a stored tensor, one of `known`; None if the model has no place for it.

    For a part, returns the name of the tensor that it is a part of.
    """
    if stored in known:
        return stored
    part = joint_part(stored)
    renamed = stored if part is None else part.joint
    for pattern, replacement in _RENAMES:
        renamed = pattern.sub(replacement, renamed, count=1)
    candidates = (renamed, renamed.replace(_NESTED, _FLAT, 1), renamed.replace(_FLAT, _NESTED, 1))
    return next((name for name in candidates if name in known), None)
