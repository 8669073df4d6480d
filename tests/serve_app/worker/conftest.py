"""A bench of workers, and a question for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve_app.deployments import Question
from tests.serve_app.worker.bench import Bench


@pytest.fixture
def bench(checkpoints: dict[str, Path]) -> Bench:
    return Bench(checkpoints["qwen2_5_vl"], "2e1p2d")


@pytest.fixture
def question(media: dict[str, Path]) -> Question:
    return Question((media["video"], media["image"]))
