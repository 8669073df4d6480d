"""Writes plots as files. Imports matplotlib when a plot is drawn, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Opens an empty figure, and writes it when the block is left. width, height: inches."""
    from matplotlib.figure import Figure  # takes half a second, and few commands draw

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    figure.savefig(path, dpi=_DPI)
