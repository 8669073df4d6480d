"""Steps of training at half of their cost, which leave nothing to other tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.draws import same_draws

__all__ = ["same_draws"]


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon makes a matrix orthogonal in one iteration, not five: they were half of these tests."""
    monkeypatch.setattr(torch.optim, "Muon", partial(torch.optim.Muon, ns_steps=1))


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    """The programs set how many threads torch has: others go on with theirs."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
