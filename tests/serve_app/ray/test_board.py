"""The processes beside the workers stay small, and the board ends when nobody has called it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray

from epd.serve_app.ray import board
from epd.serve_app.ray.board import BoardActor

HEAVY = ("torch", "transformers", "torchvision", "av")


@pytest.mark.parametrize("module", ["ray.board", "ray.server", "cli.serve"])
def test_what_is_no_worker_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, epd.serve_app.{module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_board_that_nobody_calls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first member may be killed before it calls: a start that was stopped."""

    async def run() -> None:
        ended = asyncio.Event()
        context = SimpleNamespace(was_current_actor_reconstructed=False)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray.actor, "exit_actor", ended.set)
        monkeypatch.setattr(board, "_END_S", 0.05)
        kept = BoardActor()
        await asyncio.wait_for(ended.wait(), 30.0)
        assert kept

    asyncio.run(run())
