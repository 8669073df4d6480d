"""Loads models into this process, for commands: they ask the service without HTTP.

`epd batch` is answered as `--url` does with a server. Imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from epd import console
from epd.batch.http_backend import HttpBackend
from epd.batch.tasks import BackendCounts
from epd.client.conversation import Conversation
from epd.client.endpoint import Endpoint
from epd.engine_config import EngineConfig
from epd.errors import EPDError, http_status
from epd.machine import usable_cpus
from epd.models import model_folder
from epd.serve_app.app_args import AppArgs
from epd.serve_app.local.own_service import JSON, OwnService, own_service
from epd.serve_app.request_options import medium_of, request_fields
from epd.stages.placement import Placement

HERE = Endpoint("this process", "http://localhost")


@contextmanager
def open_model(
    model: Path | None, config: EngineConfig, *, is_greedy: bool = True, **options: Any
) -> Iterator[OwnService]:
    """Loads a model, with all cores unless `config` says otherwise.

    is_greedy: whether answers are, unless a request says otherwise
    options: more of `epd serve`
    Raises EPDError.
    """
    given = {"num_threads": _num_threads(config), **config.given, **options}
    args = AppArgs(model=model, topology="1epd", allowed_media_path=Path("/"), **given)
    with ExitStack() as stack:
        with console.status("loading the model"):
            service = stack.enter_context(own_service(args, is_greedy=is_greedy))
        yield service


def placement_of(config: EngineConfig, model: Path | None) -> Placement:
    """Returns where a model runs: see `Placement.resolve`. Raises RequestError."""
    return Placement.resolve(config.device, config.dtype, model_folder(model, config.revision, config.hub))


def _num_threads(config: EngineConfig) -> int:
    """Returns OMP_NUM_THREADS, or the cores we may use, shared by the processes of a model."""
    num = int(os.environ.get("OMP_NUM_THREADS") or usable_cpus())
    return max(1, num // config.tensor_parallel_size)


class OwnConversation(Conversation):
    """Asks a model of this process, turn by turn."""

    def __init__(
        self, service: OwnService, paths: Sequence[str | Path], *, audio: bool = False, **options: Any
    ) -> None:
        """Takes paths or URLs. audio: whether sound alone is heard. options: see `request_fields`."""
        self._service = service
        media = [medium_of(path, is_audio=audio) for path in paths]
        super().__init__(HERE, service.model, media, request_fields(**options))

    def _events(self, body: JSON) -> Iterator[JSON]:
        return self._service.events(body)

    def counters(self) -> Mapping[str, float]:
        return self._service.counters()


__all__ = ["OwnBackend", "open_model"]


class OwnBackend(HttpBackend):
    """Answers batches with a model of this process. Lines without a seed get one of their own."""

    def __init__(self, service: OwnService, *, max_requests: int) -> None:
        """Takes max_requests: in flight."""
        super().__init__(
            HERE, transport=_OwnTransport(service), max_requests=max_requests, has_seeds=True, signs=True
        )
        self._service = service

    def counts(self) -> BackendCounts:
        num_skipped = int(self._service.counters().get("units_skipped", 0))
        return BackendCounts(super().counts().num_encoded, num_skipped)


class _OwnTransport(httpx.AsyncBaseTransport):
    """Passes chat requests to the service of this process."""

    def __init__(self, service: OwnService) -> None:
        self._service = service

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200)
        try:
            return httpx.Response(200, json=await self._service.completion(json.loads(request.content)))
        except EPDError as error:
            told = {"message": str(error), "code": type(error).__name__}
            return httpx.Response(http_status(error), json={"error": told})
