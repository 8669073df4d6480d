"""Answers `/v1/batches`: files of requests that are answered in the background."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from epd.serve_app.files.batch_records import BatchList, BatchObject, BatchRequest
from epd.serve_app.files.batch_store import BatchStore
from epd.serve_app.files.settings import page_of
from epd.serve_app.http.routes.file_routes import owner_of, store_of
from epd.serve_app.http.routes.prompt_routes import body_of, server_of

batch_routes = APIRouter()
_MAX_BYTES = 64 << 10
_PAGE = 20


def _store_of(request: Request) -> BatchStore:
    """Returns the server's batches. Raises NotFoundError if it keeps none."""
    store_of(request)
    batches = server_of(request).batches
    assert batches is not None
    return batches


@batch_routes.post("/v1/batches", openapi_extra=body_of("BatchRequest"))
async def create_batch(request: Request) -> BatchObject:
    """Has a file of requests answered in the background."""
    store = _store_of(request)
    asked = await server_of(request).read_small(request, BatchRequest, _MAX_BYTES)
    return await asyncio.to_thread(store.create, owner_of(request), asked)


@batch_routes.get("/v1/batches")
def list_batches(request: Request, limit: int = _PAGE, after: str | None = None) -> BatchList:
    """Returns the batches of the key, the newest first."""
    page, has_more = page_of(_store_of(request).owned_by(owner_of(request)), limit, after)
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return BatchList(data=page, first_id=ends[0], last_id=ends[1], has_more=has_more)


@batch_routes.get("/v1/batches/{batch_id}")
def get_batch(request: Request, batch_id: str) -> BatchObject:
    return _store_of(request).get(owner_of(request), batch_id)


@batch_routes.post("/v1/batches/{batch_id}/cancel")
def cancel_batch(request: Request, batch_id: str) -> BatchObject:
    """Has a batch end with the lines that are answered; those in flight are dropped."""
    return _store_of(request).cancel(owner_of(request), batch_id)
