"""Answers `/v1/files`, `/v1/uploads` and `/v1/batches`.

files      media and inputs of batches that clients upload, and the results of batches
uploads    large files in parts, of which a cut one is sent again alone
batches    files of requests that are answered in the background
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from epd.errors import NotFoundError, RequestError, RequestLimitError, StorageFullError
from epd.serve_app.files.batch_store import BatchStore
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import (
    UPLOAD_PURPOSES,
    BatchList,
    BatchObject,
    BatchRequest,
    CompleteRequest,
    FileDeleted,
    FileList,
    FileObject,
    PartObject,
    UploadObject,
    UploadRequest,
    UploadState,
)
from epd.serve_app.files.settings import MAX_LISTED_FILES, page_of
from epd.serve_app.files.upload import UploadForm, kept_form, kept_upload
from epd.serve_app.files.upload_store import UploadStore
from epd.serve_app.http.guard.http_guard import client_of
from epd.serve_app.http.routes.prompt_routes import body_of
from epd.serve_app.http.server_state import server_of

file_routes, batch_routes = APIRouter(), APIRouter()
# Of a form, beside the bytes of its file: its fields and their headers.
_MAX_FORM_BYTES = 64 << 10
# Of the JSON that begins or ends an upload, and of that which makes a batch.
_MAX_UPLOAD_BYTES, _MAX_BATCH_BYTES = 1 << 20, 64 << 10
_PAGE = 20  # batches


def _form_of(field: str, **others: object) -> dict[str, object]:
    """Returns what the schema says of a form with a file. others: of its fields."""
    properties = {field: {"type": "string", "format": "binary"}, **others}
    form = {"type": "object", "required": [*properties], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


def _check_announced(request: Request, max_bytes: int) -> None:
    """Raises RequestLimitError for a form whose header says that its file is too large, before it is read."""
    announced = request.headers.get("content-length", "")[:20]
    if announced.isdecimal() and int(announced) > max_bytes + _MAX_FORM_BYTES:
        raise RequestLimitError(
            f"received a form of {announced} bytes; allowed: a file of {max_bytes} in one request; send it "
            "in parts to /v1/uploads"
        )


def _store_of(request: Request) -> FileStore:
    """Returns the server's files. Raises NotFoundError if it keeps none."""
    files = server_of(request).files
    if files is None:
        raise NotFoundError(
            f"received {request.method} {request.url.path[:100]}; allowed: on servers that keep files; start "
            "the server with --files-dir FOLDER"
        )
    return files


def _owner_of(request: Request) -> str:
    return client_of(request).owner


def _check_site(request: Request) -> None:
    """Raises RequestError for a form from a page of another site, which a browser sends without asking."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise RequestError(
            f"received a form from a page of {origin[:100]!r}; allowed: from pages of this server; use "
            "/v1/uploads"
        )


@file_routes.post("/v1/files", openapi_extra=_form_of("file", purpose={"enum": [*UPLOAD_PURPOSES]}))
async def upload_file(request: Request) -> FileObject:
    """Keeps a medium, or lines for a batch. It is written to disk as it arrives."""
    store, chunks = _store_of(request), server_of(request).bodies.chunks(request)
    _check_site(request)
    _check_announced(request, store.settings.max_file_bytes)
    content_type = request.headers.get("content-type", "")
    try:
        return await kept_upload(store, _owner_of(request), content_type, chunks)
    except OSError as error:
        raise StorageFullError(f"the file cannot be kept: {error.strerror}; send it again later") from error


@file_routes.get("/v1/files")
def list_files(
    request: Request,
    purpose: str | None = None,
    limit: int = MAX_LISTED_FILES,
    after: str | None = None,
    order: str = "desc",
) -> FileList:
    """Returns the files of the key, the newest first."""
    files = _store_of(request).owned_by(_owner_of(request), purpose)
    page, has_more = page_of(files, limit, after, newest_first=order != "asc", most=MAX_LISTED_FILES)
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return FileList(data=page, first_id=ends[0], last_id=ends[1], has_more=has_more)


@file_routes.get("/v1/files/{file_id}")
def get_file(request: Request, file_id: str) -> FileObject:
    return _store_of(request).get(_owner_of(request), file_id)


@file_routes.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
def get_content(request: Request, file_id: str) -> FileResponse:
    """Returns the bytes of a file."""
    store = _store_of(request)
    store.get(_owner_of(request), file_id)
    return FileResponse(store.path_of(file_id), media_type="application/octet-stream")


@file_routes.delete("/v1/files/{file_id}")
def delete_file(request: Request, file_id: str) -> FileDeleted:
    """Deletes a file. A batch that has not ended fails without its input."""
    _store_of(request).delete(_owner_of(request), file_id)
    return FileDeleted(id=file_id)


def _uploads_of(request: Request) -> UploadStore:
    """Returns the server's uploads. Raises NotFoundError if it keeps none."""
    _store_of(request)
    uploads = server_of(request).uploads
    assert uploads is not None
    return uploads


@file_routes.post("/v1/uploads", openapi_extra=body_of("UploadRequest"))
async def create_upload(request: Request) -> UploadObject:
    """Begins an upload; its size is checked here, before any byte of it is sent."""
    store = _uploads_of(request)
    asked = await server_of(request).read_small(request, UploadRequest, _MAX_UPLOAD_BYTES)
    return await store.files.run(owner := _owner_of(request), store.create, owner, asked)


@file_routes.get("/v1/uploads/{upload_id}")
def get_upload(request: Request, upload_id: str) -> UploadState:
    """Returns an upload and the parts that have arrived, so that one that was cut can go on."""
    return _uploads_of(request).get(_owner_of(request), upload_id)


@file_routes.post("/v1/uploads/{upload_id}/parts", openapi_extra=_form_of("data"))
async def add_part(request: Request, upload_id: str) -> PartObject:
    """Keeps a part. It is written to disk as it arrives; parts may come at once and in any order."""
    store, owner = _uploads_of(request), _owner_of(request)
    _check_announced(request, store.settings.max_part_bytes)
    try:
        path = await store.files.run(owner, store.new_part, owner, upload_id)
        content_type = request.headers.get("content-type", "")
        form = UploadForm(content_type, path, store.settings.max_part_bytes, "data")
        chunks = server_of(request).bodies.chunks(request)
        return await kept_form(
            store.files, owner, form, chunks, lambda: store.keep_part(owner, upload_id, path)
        )
    except OSError as error:
        raise StorageFullError(f"the part cannot be kept: {error.strerror}; send it again later") from error


@file_routes.post("/v1/uploads/{upload_id}/complete", openapi_extra=body_of("CompleteRequest"))
async def complete_upload(request: Request, upload_id: str) -> UploadObject:
    """Makes the parts a file, in the order of their ids. Asked again, it says the same."""
    store = _uploads_of(request)
    asked = await server_of(request).read_small(request, CompleteRequest, _MAX_UPLOAD_BYTES)
    try:
        return await store.files.run(owner := _owner_of(request), store.complete, owner, upload_id, asked)
    except OSError as error:
        raise StorageFullError(f"the parts cannot be joined: {error.strerror}; upload them later") from error


@file_routes.post("/v1/uploads/{upload_id}/cancel")
def cancel_upload(request: Request, upload_id: str) -> UploadObject:
    """Ends an upload. Its parts are removed."""
    return _uploads_of(request).cancel(_owner_of(request), upload_id)


def _batches_of(request: Request) -> BatchStore:
    """Returns the server's batches. Raises NotFoundError if it keeps none."""
    _store_of(request)
    batches = server_of(request).batches
    assert batches is not None
    return batches


@batch_routes.post("/v1/batches", openapi_extra=body_of("BatchRequest"))
async def create_batch(request: Request) -> BatchObject:
    """Has a file of requests answered in the background."""
    store = _batches_of(request)
    asked = await server_of(request).read_small(request, BatchRequest, _MAX_BATCH_BYTES)
    return await store.files.run(owner := _owner_of(request), store.create, owner, asked)


@batch_routes.get("/v1/batches")
def list_batches(request: Request, limit: int = _PAGE, after: str | None = None) -> BatchList:
    """Returns the batches of the key, the newest first."""
    page, has_more = page_of(_batches_of(request).owned_by(_owner_of(request)), limit, after)
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return BatchList(data=page, first_id=ends[0], last_id=ends[1], has_more=has_more)


@batch_routes.get("/v1/batches/{batch_id}")
def get_batch(request: Request, batch_id: str) -> BatchObject:
    return _batches_of(request).get(_owner_of(request), batch_id)


@batch_routes.post("/v1/batches/{batch_id}/cancel")
def cancel_batch(request: Request, batch_id: str) -> BatchObject:
    """Has a batch end with the lines that are answered; those in flight are dropped."""
    return _batches_of(request).cancel(_owner_of(request), batch_id)
