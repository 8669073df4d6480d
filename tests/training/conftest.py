"""Steps of training at half of their cost."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.draws import same_draws

__all__ = ["same_draws"]


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon makes a matrix orthogonal in one iteration, not five: they were half of these tests."""
    monkeypatch.setattr(torch.optim, "Muon", partial(torch.optim.Muon, ns_steps=1))
