"""What Ray's processes inherit of the command's environment, and what is said of what they do not hide."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

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


def test_plain_links_are_told_before_a_cluster_is_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cluster is not there. A real start would end the Ray of the tests behind this one."""

    @contextmanager
    def joined(_settings: RaySettings) -> Iterator[None]:
        assert "authenticated and not encrypted" in caplog.text
        raise UnavailableError("nobody is there")
        yield

    monkeypatch.setattr("epd.serve_app.ray.server.ray_cluster", joined)
    settings, cluster = ServeSettings(HttpAddress()), RaySettings(address="127.0.0.1:9")
    with caplog.at_level(logging.INFO), pytest.raises(UnavailableError, match="nobody"):
        served_app(AppArgs(), settings, cluster).__enter__()
