"""Uses transformers for checkpoints: reads their files, creates their models.

`epd.encoders.checkpoint.published` imports this module when it is needed: that takes a second of CPU, and the
embedded model does without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.initialization import no_init_weights
from transformers.vision_utils import get_vision_window_index

from epd.encoders import internvl_chat
from epd.encoders.published_settings import with_processor_files

__all__ = [
    "AttentionInterface",
    "create_model",
    "get_vision_window_index",
    "read_config",
    "read_generation_config",
    "read_processor",
    "renaming",
]


def read_config(path: Path) -> Any:
    """Reads a folder's config.json. Raises OSError, and what transformers does."""
    if internvl_chat.is_authors_layout(path):
        return transformers.InternVLConfig.from_dict(internvl_chat.settings_of(path))
    return transformers.AutoConfig.from_pretrained(path, local_files_only=True)


def read_generation_config(path: Path) -> Any:
    """Reads a folder's generation_config.json; transformers' defaults where it has none."""
    try:
        return transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:
        return transformers.GenerationConfig()


def read_processor(path: Path) -> Any:
    """Reads a folder's processor. Raises as `read_config`, and as `with_processor_files`."""
    with with_processor_files(path, read_config) as folder:
        try:
            return transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
        except ImportError:  # the processor class wants a package; its parts do not
            return _processor_parts(folder)


@dataclass(frozen=True, slots=True)
class ProcessorParts:
    """Replaces a processor whose class cannot be created here (SmolVLM's needs num2words)."""

    tokenizer: Any
    image_processor: Any
    video_processor: Any
    chat_template: str | None = None  # then it is the tokenizer's


def _processor_parts(path: Path) -> ProcessorParts:
    return ProcessorParts(
        transformers.AutoTokenizer.from_pretrained(path, local_files_only=True),
        transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True),
        transformers.AutoVideoProcessor.from_pretrained(path, local_files_only=True),
    )


def create_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Creates the model of a configuration, with sdpa attention. Its weights are not initialised."""
    with no_init_weights():
        model: nn.Module = transformers.AutoModelForMultimodalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return model


def renaming(model: Any, known: Mapping[str, Tensor]) -> Callable[[str], str]:
    """Returns the map from names of stored tensors to those that transformers gives them.

    known: the model's tensors
    """
    renames = [each for each in get_model_conversion_mapping(model) if not isinstance(each, WeightConverter)]

    def renamed(stored: str) -> str:
        name: str = rename_source_key(stored, renames, [], model.base_model_prefix, dict(known))[0]
        return name

    return renamed
