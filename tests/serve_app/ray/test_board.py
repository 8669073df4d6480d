"""The processes beside the workers stay small: the board, the command, and Serve's controller."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "torchvision", "av")


@pytest.mark.parametrize("module", ["ray.board", "ray.server", "cli.serve"])
def test_what_is_no_worker_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, epd.serve_app.{module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
