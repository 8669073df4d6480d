"""Adds the modules of the head for drafts that checkpoints of Qwen3.5 have, which transformers leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from epd.errors import UnsupportedModelError
from epd.stages.attention.support import RECURRENT

_NAME = "mtp"


def add_draft_head(model: Any, stored: Iterable[str]) -> None:
    """Adds the modules of the head to a skeleton. stored: names of the checkpoint's tensors.

    Raises UnsupportedModelError for a checkpoint without one.
    """
    decoder = model.get_decoder()
    kind = decoder.config.model_type
    if kind not in RECURRENT or not any(name.startswith(f"{_NAME}.") for name in stored):
        raise UnsupportedModelError(
            f"received the draft {_NAME} for a checkpoint of '{kind}' without tensors {_NAME}.*; allowed: "
            "one of Qwen3.5 with its head for drafts; use another --draft"
        )
    with torch.device("meta"):
        setattr(model, _NAME, DraftHeadModules(decoder))


def draft_modules(model: Any) -> DraftHeadModules | None:
    """Returns the head of a model; None for one without, or without a language model."""
    found: DraftHeadModules | None = getattr(model, _NAME, None)
    return found


class DraftHeadModules(nn.Module):
    """Has the tensors of the head, by their names in the files."""

    def __init__(self, decoder: Any) -> None:
        """Takes the decoder of the model, on the meta device or not."""
        super().__init__()
        self.config = config = decoder.config
        index, size = config.layer_types.index("full_attention"), config.hidden_size
        norm = type(decoder.norm)
        self.pre_fc_norm_embedding = norm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([type(decoder.layers[index])(config, index)])
        self.norm = norm(size, eps=config.rms_norm_eps)
