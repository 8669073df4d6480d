"""From a model folder to the adapter of its family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from encoders.adapter import Adapter
from encoders.checkpoint import Checkpoint, open_checkpoint, read_model_type
from encoders.internvl import InternVLAdapter
from encoders.llava_onevision import LlavaOnevisionAdapter
from encoders.qwen2_5_vl import Qwen2_5VLAdapter
from encoders.qwen3_vl import Qwen3VLAdapter
from encoders.smolvlm import SmolVLMAdapter
from epd.errors import UnsupportedModelError

ADAPTERS: dict[str, Callable[[Checkpoint], Adapter]] = {
    "internvl": InternVLAdapter,
    "llava_onevision": LlavaOnevisionAdapter,
    "qwen2_5_vl": Qwen2_5VLAdapter,
    "qwen3_vl": Qwen3VLAdapter,
    "smolvlm": SmolVLMAdapter,
}


def load_adapter(path: str | Path) -> Adapter:
    """Opens the model folder at `path` without its weights.

    Raises ModelNotFoundError, UnsupportedModelError naming what is supported, ModelError for a broken folder.
    """
    folder = Path(path)
    model_type = read_model_type(folder)
    if model_type not in ADAPTERS:
        supported = ", ".join(sorted(ADAPTERS))
        raise UnsupportedModelError(
            f"'{folder}' is a '{model_type}' model; supported model types: {supported}"
        )
    return ADAPTERS[model_type](open_checkpoint(folder))
