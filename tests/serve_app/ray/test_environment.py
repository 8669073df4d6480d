"""What Ray's processes inherit of the command's environment, and what is said of what they do not hide."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from epd.errors import UnavailableError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.ray.cluster import RaySettings, _without_keys, own_ray_folder
from epd.serve_app.ray.server import ServeSettings, served_app
from tests.serve_app.ray.ray_session import IGNORED

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]


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


@pytest.mark.usefixtures("ray_session")
def test_no_other_user_reaches_the_sockets_of_ray() -> None:
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    session = Path(node["RayletSocketName"]).parent.parent
    assert session.parent == own_ray_folder()
    assert session.stat().st_mode & 0o777 == 0o777  # Ray's own
    assert session.parent.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("made", ["open", "link", "file"])
def test_ray_starts_in_a_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = tmp_path / f"ray-{os.getuid()}"
    if made == "open":
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        assert own_ray_folder() == folder / "ray"
        assert folder.stat().st_mode & 0o777 == 0o700
        return
    folder.symlink_to(tmp_path) if made == "link" else folder.touch()
    with pytest.raises(UnavailableError, match="no folder of this user's"):
        own_ray_folder()
