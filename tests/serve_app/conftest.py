"""A fake service behind a real server, and clients of it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import OpenAI

from epd.models import embedded_model_path
from epd.serve_app.http.api import ApiSettings
from epd.serve_app.media.media_spool import MediaSpool, SpoolLimits
from epd.serve_app.media.media_worker import MediaSettings
from epd.video import FetchPolicy
from tests.serve_app.fakes import FakeService
from tests.serve_app.server import START_S, Server, served, wait_until

if TYPE_CHECKING:
    from tests.serve_app.ray.ray_session import RaySession

JSON = dict[str, Any]
# The header of an admin of `front`.
ADMIN = {"authorization": "Bearer the admin's"}
_MEDIA_OPTIONS = {"fetch", "max_spooled_bytes", "num_downloads", "max_s"}
QUESTION: JSON = {"messages": [{"role": "user", "content": "What colour is it?"}]}


@dataclass(frozen=True)
class Front:
    """A running server, the fake behind it, and how to ask it."""

    service: FakeService
    server: Server
    http: httpx.Client
    openai_http: httpx.Client

    def ask(self, body: JSON | None = None, **more: Any) -> httpx.Response:
        """A question with some fields more, or another body."""
        return self.http.post("/v1/chat/completions", json={**(QUESTION if body is None else body), **more})

    def ask_about(self, *parts: JSON, **more: Any) -> httpx.Response:
        content = [*parts, {"type": "text", "text": "What colour is it?"}]
        return self.ask({"messages": [{"role": "user", "content": content}]}, **more)

    @property
    def openai(self) -> OpenAI:
        """The official client, over connections that are closed with the front."""
        return OpenAI(
            base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, http_client=self.openai_http
        )

    def wait_until_empty(self) -> None:
        """Returns when nothing is left of any request."""
        front = self.server.front
        wait_until(lambda: self.service.num_open == self.service.num_closed and front.num_requests == 0)
        wait_until(lambda: self.spool.budget.num_taken == front.bodies.budget.num_taken == 0)
        wait_until(lambda: not list(self.spool.path.iterdir()))

    @property
    def spool(self) -> MediaSpool:
        """Of the media worker."""
        assert self.server.media is not None
        return self.server.media.spool


@contextmanager
def running_front(
    service: FakeService,
    settings: ApiSettings | None = None,
    media: MediaSettings | None = None,
    *,
    is_left_busy: bool = False,
) -> Iterator[Front]:
    """Whatever is asked, nothing of it may be left at the end.

    is_left_busy: the server ends while it answers, and so nothing is left after it has ended.
    Its clients read no certificates, which would take longer than most of what is asked.
    """
    with (
        served(service, settings, media=media or media_settings()) as server,
        httpx.Client(base_url=server.url, trust_env=False, verify=False, timeout=START_S) as http,
        httpx.Client(trust_env=False, verify=False, timeout=START_S) as openai_http,
    ):
        front = Front(service, server, http, openai_http)
        yield front
        if not is_left_busy:
            front.wait_until_empty()
    assert service.num_open == service.num_closed
    assert not front.spool.path.exists()


def media_settings(
    fetch: FetchPolicy | None = None, spool_folder: Path | None = None, **limits: Any
) -> MediaSettings:
    """Settings of a media worker as they are by default, with other ones of a test. limits: of its spool.

    The model waits for the first image: `from transformers import ...` fails in a test while another thread
    imports it for the first time, since Python hands out the module that transformers replaces.
    """
    default = MediaSettings(embedded_model_path(), spool_folder=spool_folder, opens_early=False)
    return replace(default, fetch=fetch or default.fetch, limits=SpoolLimits(**limits))


@pytest.fixture
def run_front(tmp_path: Path) -> Iterator[Callable[..., Front]]:
    """Starts fronts over services and with settings of the test's own."""
    with ExitStack() as running:

        def run(service: FakeService | None = None, **options: Any) -> Front:
            """options: of `media_settings` and of ApiSettings."""
            of_media = {name: options.pop(name) for name in _MEDIA_OPTIONS & options.keys()}
            media = media_settings(spool_folder=tmp_path, **of_media)
            settings = ApiSettings(**options)
            return running.enter_context(running_front(service or FakeService(), settings, media))

        yield run


@pytest.fixture(scope="session")
def shared_front() -> Iterator[Front]:
    with running_front(FakeService(), ApiSettings(admin_api_key="the admin's")) as front:
        yield front


@pytest.fixture
def front(shared_front: Front) -> Front:
    """A front as it is by default, of which nothing was asked yet."""
    shared_front.wait_until_empty()
    shared_front.service.requests.clear()
    shared_front.service.files_seen.clear()
    return shared_front


def data_url(path: Path, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


def image_part(url: str) -> JSON:
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(url: str) -> JSON:
    return {"type": "video_url", "video_url": {"url": url}}


@pytest.fixture(scope="package")
def ray_session() -> Iterator[RaySession]:
    """Ray and Serve, started once."""
    from tests.serve_app.ray.ray_session import ray_with_serve

    with ray_with_serve() as session:
        yield session
