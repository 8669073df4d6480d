"""What Ray's processes inherit of the command's environment."""

from __future__ import annotations

import os

import pytest

from epd.serve_app.ray.cluster import _without_keys


def test_ray_inherits_no_key_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_API_KEY", "secret")
    monkeypatch.delenv("EPD_ADMIN_API_KEY", raising=False)
    with _without_keys():
        assert "EPD_API_KEY" not in os.environ
    assert os.environ["EPD_API_KEY"] == "secret"
    assert "EPD_ADMIN_API_KEY" not in os.environ
