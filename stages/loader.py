"""Loads the weights of a checkpoint for inference on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging

from epd.errors import ModelError
from epd.machine import usable_cpus


def load_model(path: Path, dtype: torch.dtype) -> nn.Module:
    """The transformers model at `path`, in eval mode, with sdpa attention. Raises ModelError."""
    try:
        with _quiet_transformers():
            model, loading = transformers.AutoModelForImageTextToText.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the weights at '{path}' do not load: {reason}") from error
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(
            f"the weights at '{path}' lack {len(missing)} tensors, such as {missing[0]}; get them all"
        )
    loaded: nn.Module = model.eval()
    return loaded


def use_threads(num_threads: int | None) -> None:
    """Sets how many threads torch computes with: as told, else OMP_NUM_THREADS, else the cores we may use."""
    torch.set_num_threads(num_threads or int(os.environ.get("OMP_NUM_THREADS") or usable_cpus()))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bar over the weights and no report on them: what is wrong with them is raised."""
    had_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()
