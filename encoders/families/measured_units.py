"""Measures which frames a tower of transformers attends across, from its configuration, without its weights.

A tower of the same kind, of few layers and with random weights, encodes drawn frames whole and in parts. What
is equal for any weights depends on the structure alone:

    frames     | 0  1  2  3 |      rows of the whole
    in ones    | 0| 1| 2| 3 |      the same rows: a unit is one frame
    in pairs   | 0  1| 2  3 |      the same rows: a unit is two frames
    else                           the video is one unit
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

# Of frames that are measured, and the largest difference of equal rows, as a share of the largest value.
NUM_FRAMES, SIDE = 4, 112
TOLERANCE = 1e-4
_NUM_LAYERS, _WIDTH = 2, 64
_DEPTHS = ("num_hidden_layers", "depth")
# A tower of more parameters is not built.
_MOST_PARAMETERS = 300_000_000
logger = logging.getLogger(__name__)

# Encodes frames, uint8 [N, H, W, 3], with a tower: rows [V, C].
Encode = Callable[[Any, Tensor], Tensor]


def frames_per_unit(config: Any, encode: Encode) -> int | None:
    """Returns how many frames the family's tower attends within, 1 or 2; None for all, or if unknown."""
    with torch.random.fork_rng(devices=()), torch.inference_mode():
        torch.manual_seed(0)
        try:
            tower = transformers.AutoModel.from_config(_shrunk(config)).eval()
            frames = torch.randint(0, 256, (NUM_FRAMES, SIDE, SIDE, 3), dtype=torch.uint8)
            whole = encode(tower, frames)
            return next(
                (each for each in (1, 2) if _is_equal(whole, tower, torch.split(frames, each), encode)), None
            )
        except Exception as error:  # noqa: BLE001 # of other people's code, which only costs the measurement
            logger.debug("units of a %s tower are not measured: %r", config.model_type, error)
            return None


def _is_equal(whole: Tensor, tower: Any, parts_of: Sequence[Tensor], encode: Encode) -> bool:
    try:
        parts = torch.cat([encode(tower, part) for part in parts_of])
    except ValueError:  # a processor that takes no single frame
        return False
    most = TOLERANCE * float(whole.abs().max())
    return parts.shape == whole.shape and float((parts - whole).abs().max()) <= most


def _shrunk(config: Any) -> Any:
    """Returns a configuration without layers of the language model, and with few narrow ones of the tower.

    A tower that numbers its layers keeps all. Raises ValueError for one that is too large then.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.update({"num_hidden_layers": 0, "vocab_size": 8, "pad_token_id": None})
    if getattr(text, "layer_types", None):
        text.layer_types = []
    vision = small.vision_config
    if not _numbers_layers(small.to_dict()) and not _numbers_layers(vision.to_dict()):
        vision.update({name: _NUM_LAYERS for name in _DEPTHS if hasattr(vision, name)})
    projector = getattr(small, "adapter_config", None)
    if projector is not None and hasattr(projector, "vision_feature_layer"):  # of Molmo 2: layers left
        projector.vision_feature_layer = [0] * len(projector.vision_feature_layer)
    if hasattr(vision, "intermediate_size"):
        vision.intermediate_size = _WIDTH
    num_layers = max(getattr(vision, name, 0) for name in _DEPTHS)
    if 8 * vision.hidden_size**2 * num_layers > _MOST_PARAMETERS:
        raise ValueError(f"a tower of {num_layers} layers is too large to be measured")
    return small


def _numbers_layers(fields: Mapping[str, Any]) -> bool:
    """Reports whether a configuration names layers by their numbers, from the front."""
    return any(
        name.endswith("layer_id")
        or (isinstance(value, list | tuple) and ("layer" in name or "index" in name))
        for name, value in fields.items()
    )
