"""Boards that replace no worker that is only slow, where a test does not say so."""

from __future__ import annotations

import pytest

from epd.serve_app.network import board
from tests.serve_app.deployments import NEVER_S


@pytest.fixture(autouse=True)
def replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """All members share one process here, which may get no core for seconds."""
    monkeypatch.setattr(board, "_REPLACED_S", NEVER_S)
