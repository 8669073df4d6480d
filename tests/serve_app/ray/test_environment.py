"""What Ray's processes inherit of the command's environment, and what is said of what they do not hide."""

from __future__ import annotations

import logging
import os
import socket

import pytest

from epd.errors import UnavailableError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.ray.cluster import RaySettings, _without_keys
from epd.serve_app.ray.server import ServeSettings, served_app


def test_ray_inherits_no_key_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_API_KEY", "secret")
    monkeypatch.delenv("EPD_ADMIN_API_KEY", raising=False)
    with _without_keys():
        assert "EPD_API_KEY" not in os.environ
    assert os.environ["EPD_API_KEY"] == "secret"
    assert "EPD_ADMIN_API_KEY" not in os.environ


def test_plain_links_are_told_before_a_cluster_is_joined(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    settings, cluster = ServeSettings(HttpAddress()), RaySettings(address=nobody)
    with caplog.at_level(logging.INFO), pytest.raises(UnavailableError):
        served_app(AppArgs(), settings, cluster).__enter__()
    assert "authenticated and not encrypted" in caplog.text
