"""Loads the weights of a checkpoint for inference on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from epd.errors import ModelError


def load_model(path: Path, dtype: torch.dtype) -> nn.Module:
    """The transformers model at `path`, in eval mode, with sdpa attention. Raises ModelError."""
    from transformers import AutoModelForImageTextToText

    try:
        with _no_progress_bar():
            model: nn.Module = AutoModelForImageTextToText.from_pretrained(
                path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the weights at '{path}' do not load: {reason}") from error
    return model.eval()


def use_threads(num_threads: int | None) -> None:
    """Sets how many threads torch computes with: as told, else OMP_NUM_THREADS, else the cores we may use."""
    torch.set_num_threads(num_threads or int(os.environ.get("OMP_NUM_THREADS") or _available_cores()))


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws a bar over its weights; ours is about the media."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
