"""Imports a library when something of it is first used: for those that most commands do without."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LateModule:
    """Stands for a module, which its first attribute imports."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
