"""The board's process stays small: each application has one beside its workers."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "torchvision", "av")


def test_the_board_imports_nothing_heavy() -> None:
    code = f"import sys, serve_app.ray.board; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
