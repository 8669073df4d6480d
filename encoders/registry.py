"""Opens a model folder with the adapter of its family."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from epd.encoders.adapter import Adapter
from epd.encoders.checkpoint import Checkpoint, open_checkpoint, read_model_type
from epd.encoders.families.internvl import InternVLAdapter
from epd.encoders.families.llava_onevision import LlavaOnevisionAdapter
from epd.encoders.families.qwen2_5_vl import Qwen2_5VLAdapter
from epd.encoders.families.qwen2_audio import Qwen2AudioAdapter
from epd.encoders.families.qwen3_vl import Qwen3VLAdapter
from epd.encoders.families.smolvlm import SmolVLMAdapter
from epd.encoders.prompt.mrope import PositionLayout
from epd.encoders.readiness import refused_kinds
from epd.errors import UnsupportedModelError
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings

logger = logging.getLogger(__name__)

ADAPTERS: dict[str, Callable[[Checkpoint], Adapter]] = {
    "internvl": InternVLAdapter,
    "llava_onevision": LlavaOnevisionAdapter,
    "qwen2_5_vl": Qwen2_5VLAdapter,
    "qwen2_audio": Qwen2AudioAdapter,
    "qwen3_vl": Qwen3VLAdapter,
    "qwen3_vl_moe": Qwen3VLAdapter,
    "smolvlm": SmolVLMAdapter,
}


def load_adapter(
    path: str | Path, *, positions: PositionLayout | None = None, pixels: PixelSettings = AUTHORS_LIMITS
) -> Adapter:
    """Opens the model folder at `path` without its weights.

    positions: where text after a video is, for models with M-RoPE; by default as its config.json says in
    `position_layout`, and as the authors of Qwen2.5-VL place it when that is not there (docs/decisions/0009).
    pixels: of images and frames; by default as the model's authors have them.
    Raises ModelNotFoundError, UnsupportedModelError naming what is supported, ModelError for a broken folder,
    RequestError for pixels that change nothing for the family.
    """
    folder = Path(path)
    model_type = read_model_type(folder)
    if model_type not in ADAPTERS:
        supported = ", ".join(sorted(ADAPTERS))
        raise UnsupportedModelError(
            f"'{folder}' is a '{model_type}' model; supported model types: {supported}"
        )
    pixels.check_family(model_type)
    checkpoint = open_checkpoint(folder, pixels)
    if positions is not None:
        checkpoint.config.position_layout = positions
    adapter = ADAPTERS[model_type](checkpoint)
    for refusal in refused_kinds(adapter):
        logger.warning("'%s' takes no %s: %s", folder.name, refusal.kind, refusal.reason)
    return adapter
