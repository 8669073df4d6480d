"""Answers `epd batch` with a model of this process, as `--url` does with a server. Imports torch, httpx."""

from __future__ import annotations

import json
import math

import httpx

from epd.batch.http_backend import HttpBackend
from epd.batch.in_flight import InFlight, media_at_once
from epd.batch.tasks import BackendCounts
from epd.errors import EPDError, http_status
from epd.serve_app.cli.own_model import HERE, open_model
from epd.serve_app.local.own_service import OwnService

__all__ = ["OwnBackend", "open_model"]


class OwnBackend(HttpBackend):
    """Answers batches with a model of this process. Lines without a seed get one of their own."""

    def __init__(self, service: OwnService, *, max_requests: int, lines_per_medium: float = math.inf) -> None:
        """Takes max_requests: in flight. lines_per_medium: mean of the input."""
        super().__init__(
            HERE,
            transport=_OwnTransport(service),
            in_flight=InFlight(media_at_once(max_requests, lines_per_medium), max_requests),
            has_seeds=True,
            signs=True,
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
