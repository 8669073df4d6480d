"""Answers questions about images and long videos; `from epd import LLM` is the way in for Python.

Inside, this folder has nouns, policy and planning of the EPD pipeline: no Ray, no PyAV, no Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd.planning.asked import plan
    from epd.serve_app.llm import LLM
    from epd.serve_app.verification import verify

__all__ = ["LLM", "__version__", "plan", "verify"]
__version__ = "0.2.0"
_HEAVY = {
    "LLM": "epd.serve_app.llm",
    "plan": "epd.planning.asked",
    "verify": "epd.serve_app.verification",
}


def __getattr__(name: str) -> object:
    """Imports what is heavy when it is asked for."""
    if name in _HEAVY:
        return getattr(import_module(_HEAVY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
