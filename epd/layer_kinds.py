"""Refuses options that nothing here computes yet for language models with layers of other kinds.

Those with a recurrent state, and those with a sliding window.
"""

from __future__ import annotations

import json
from pathlib import Path

from epd.errors import RequestError
from epd.reduction import SELECTION_METHODS

# By `model_type` of config.json.
RECURRENT_FAMILIES = ("qwen3_5", "qwen3_5_moe")
WINDOWED_FAMILIES = ("gemma3", "gemma4")


def check_options(folder: Path, draft: str, reduction: str, max_ranks: int) -> None:
    """Raises RequestError for what the model at `folder` cannot be asked to do.

    draft, reduction: methods. max_ranks: processes that share the language model.
    """
    model_type = _model_type(folder)
    if model_type not in (*RECURRENT_FAMILIES, *WINDOWED_FAMILIES):
        return
    is_recurrent = model_type in RECURRENT_FAMILIES
    what = "a recurrent state" if is_recurrent else "a sliding window"
    received = f"for a '{{}}' model, whose layers have {what}; allowed: {{}}; use {{}}"
    if draft != "none" and is_recurrent:
        why = received.format(model_type, "none, since drafts that are wrong cannot be taken back", "none")
        raise RequestError(f"received the draft {draft} {why}")
    if reduction not in SELECTION_METHODS:
        why = received.format(model_type, ", ".join(SELECTION_METHODS), "one of these")
        raise RequestError(f"received the reduction {reduction} {why}")
    if max_ranks > 1:
        why = received.format(model_type, "1", "a larger GPU")
        raise RequestError(f"received a tensor_parallel_size of {max_ranks} {why}")


def _model_type(folder: Path) -> str | None:
    """Returns `model_type` of a folder; None for a broken one, which is refused when it is opened."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None
