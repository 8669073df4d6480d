"""Answers questions about images and long videos; `from epd import LLM` is the way in for Python.

Inside, this folder has nouns, policy and planning of the EPD pipeline: no Ray, no PyAV, no Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd.serve_app.llm import LLM

__all__ = ["LLM", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports what is heavy when it is asked for."""
    if name == "LLM":
        return import_module("epd.serve_app.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
