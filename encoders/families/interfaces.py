"""Reads what a family of transformers offers: its model's class, the media it sees, its pads and positions.

Nothing here knows a family by its name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor, nn

from epd.encoders.checkpoint import Checkpoint
from epd.encoders.families.qwen_vl import image_size
from epd.encoders.patches import INTERPOLATION
from epd.errors import UnsupportedModelError
from epd.pixel_limits import PixelLimits
from epd.types import Int64Array, MediaKind

FEATURES: Mapping[MediaKind, str] = {"image": "get_image_features", "video": "get_video_features"}


def model_class(config: Any) -> Any:
    """Returns transformers' class of the model without its head. Raises UnsupportedModelError for none."""
    found = transformers.AutoModel._model_mapping.get(type(config), None)
    if found is None:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no model of type '{config.model_type}'; allowed: "
            "the types that it lists; install a release that has it"
        )
    return found


def seen_kinds(checkpoint: Checkpoint, model: Any) -> tuple[MediaKind, ...]:
    """Returns what the family sees. Raises UnsupportedModelError for nothing."""
    processor = checkpoint.processor
    kinds: list[MediaKind] = ["image", "video"]
    found = tuple(
        kind
        for kind in kinds
        if hasattr(model, FEATURES[kind])
        and hasattr(processor, f"replace_{kind}_token")
        and getattr(processor, f"{kind}_token", None)
        and getattr(processor, f"{kind}_processor", None) is not None
    )
    if not found:
        raise UnsupportedModelError(
            f"a '{checkpoint.config.model_type}' model has no get_image_features, or its processor no "
            "replace_image_token, which the generic path takes; use a family of this project"
        )
    return found


def pad_of(processor: Any, kind: MediaKind, token: str) -> str:
    """Returns the token that a medium's tokens are made of, which may be another than marks its place."""
    ids = getattr(processor, f"{kind}_token_ids", None) or [None]
    if ids[0] is None or processor.tokenizer.convert_tokens_to_ids(token) in ids:
        return token
    return str(processor.tokenizer.convert_ids_to_tokens(ids[0]))


@dataclass(frozen=True, slots=True)
class SizeRule:
    """Sizes pictures of any shape within limits of their pixels, as processors of Qwen-VL's kind do.

    factor: that sides are multiples of. patch: pixels of a patch's edge. own: least and most pixels of the
    processor. resample: Pillow's number of its filter.
    """

    kind: MediaKind
    factor: int
    patch: int
    own: tuple[int, int]
    resample: int

    def within(
        self, made: tuple[int, int], size: tuple[int, int], pixels: PixelLimits, most: int | None
    ) -> tuple[int, int]:
        """Returns (height, width) of a picture in the limits of a request, and `most` of a server.

        made: what the processor makes of `size`. Of frames there is only a most. Raises ValueError for an
        impossible shape.
        """
        if self.kind == "video":
            pixels = PixelLimits(max_pixels=pixels.max_pixels)
        least, largest = pixels.within((0, most or max(math.prod(made), pixels.least)))
        if least <= math.prod(made) <= largest:
            return made
        return image_size(*size, self.factor, least, largest)


def size_rule(processor: Any, kind: MediaKind) -> SizeRule | None:
    """Returns how a family sizes images or frames; None for one whose pictures have sizes of their own."""
    part = getattr(processor, f"{kind}_processor")
    size = dict(part.size or {})
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    resample = int(getattr(part, "resample", None) or 0)
    if not (least and most and hasattr(part, "merge_size") and resample in INTERPOLATION):
        return None
    patch = int(part.patch_size)
    return SizeRule(kind, patch * int(part.merge_size), patch, (int(least), int(most)), resample)


PositionRule = Callable[[Mapping[str, Tensor]], Int64Array]


def position_rule(model: Any, config: Any) -> PositionRule | None:
    """Returns the family's own rule of M-RoPE positions; None for a family that counts tokens."""
    if not hasattr(model, "get_rope_index"):
        return None
    bare = model.__new__(model)
    nn.Module.__init__(bare)
    bare.config = config
    names = inspect.signature(bare.get_rope_index).parameters

    def positions(inputs: Mapping[str, Tensor]) -> Int64Array:
        given = {name: value for name, value in inputs.items() if name in names}
        found: Int64Array = bare.get_rope_index(**given)[0][:, 0].numpy()
        return found

    return positions
