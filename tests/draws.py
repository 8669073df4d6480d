"""What tests draw from torch without a generator of their own."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """A test draws the same alone, after others, and in any order of them."""
    torch.manual_seed(0)
