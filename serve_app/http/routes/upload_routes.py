"""Answers `/v1/uploads`: large files in parts, of which a cut one is sent again alone."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from epd.errors import StorageFullError
from epd.serve_app.files.upload import UploadForm, written
from epd.serve_app.files.upload_records import (
    CompleteRequest,
    PartObject,
    UploadObject,
    UploadRequest,
    UploadState,
)
from epd.serve_app.files.upload_store import UploadStore
from epd.serve_app.http.routes.file_routes import check_announced, form_of, owner_of, store_of
from epd.serve_app.http.routes.prompt_routes import body_of, server_of

upload_routes = APIRouter()
_MAX_BYTES = 1 << 20


def _store_of(request: Request) -> UploadStore:
    """Returns the server's uploads. Raises NotFoundError if it keeps none."""
    store_of(request)
    uploads = server_of(request).uploads
    assert uploads is not None
    return uploads


@upload_routes.post("/v1/uploads", openapi_extra=body_of("UploadRequest"))
async def create_upload(request: Request) -> UploadObject:
    """Begins an upload; its size is checked here, before any byte of it is sent."""
    store = _store_of(request)
    asked = await server_of(request).read_small(request, UploadRequest, _MAX_BYTES)
    return await asyncio.to_thread(store.create, owner_of(request), asked)


@upload_routes.get("/v1/uploads/{upload_id}")
def get_upload(request: Request, upload_id: str) -> UploadState:
    """Returns an upload and the parts that have arrived, so that one that was cut can go on."""
    return _store_of(request).get(owner_of(request), upload_id)


@upload_routes.post("/v1/uploads/{upload_id}/parts", openapi_extra=form_of("data"))
async def add_part(request: Request, upload_id: str) -> PartObject:
    """Keeps a part. It is written to disk as it arrives; parts may come at once and in any order."""
    store, owner = _store_of(request), owner_of(request)
    check_announced(request, store.settings.max_part_bytes)
    try:
        path = await asyncio.to_thread(store.new_part, owner, upload_id)
        content_type = request.headers.get("content-type", "")
        form = UploadForm(content_type, path, store.settings.max_part_bytes, "data")
        async with written(store.files, form, server_of(request).bodies.chunks(request)):
            return await asyncio.to_thread(store.keep_part, owner, upload_id, path)
    except OSError as error:
        raise StorageFullError(f"the part cannot be kept: {error.strerror}; send it again later") from error


@upload_routes.post("/v1/uploads/{upload_id}/complete", openapi_extra=body_of("CompleteRequest"))
async def complete_upload(request: Request, upload_id: str) -> UploadObject:
    """Makes the parts a file, in the order of their ids. Asked again, it says the same."""
    store = _store_of(request)
    asked = await server_of(request).read_small(request, CompleteRequest, _MAX_BYTES)
    try:
        return await asyncio.to_thread(store.complete, owner_of(request), upload_id, asked)
    except OSError as error:
        raise StorageFullError(f"the parts cannot be joined: {error.strerror}; upload them later") from error


@upload_routes.post("/v1/uploads/{upload_id}/cancel")
def cancel_upload(request: Request, upload_id: str) -> UploadObject:
    """Ends an upload. Its parts are removed."""
    return _store_of(request).cancel(owner_of(request), upload_id)
