"""Answers files of questions about many media: policy and files of `epd batch`, without a model.

`from epd.batch import ask_videos` asks about a dataset of Ray Data.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd.batch.ask import ask_videos

__all__ = ["ask_videos"]


def __getattr__(name: str) -> object:
    """Imports what is heavy when it is asked for."""
    if name == "ask_videos":
        return import_module("epd.batch.ask").ask_videos
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
