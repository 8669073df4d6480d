"""Answers `/v1/files`: media and inputs of batches that clients upload, and the results of batches."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from epd.errors import NotFoundError, RequestError, RequestLimitError, StorageFullError
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import UPLOAD_PURPOSES, FileDeleted, FileList, FileObject
from epd.serve_app.files.settings import MAX_LISTED, page_of
from epd.serve_app.files.upload import kept_upload
from epd.serve_app.http.guard.http_guard import client_of
from epd.serve_app.http.routes.prompt_routes import server_of

file_routes = APIRouter()
# Of a form, beside the bytes of its file: its fields and their headers.
_MAX_FORM_BYTES = 64 << 10


def form_of(field: str, **others: object) -> dict[str, object]:
    """Returns what the schema says of a form with a file. others: of its fields."""
    properties = {field: {"type": "string", "format": "binary"}, **others}
    form = {"type": "object", "required": [*properties], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


def check_announced(request: Request, max_bytes: int) -> None:
    """Raises RequestLimitError for a form whose header says that its file is too large, before it is read."""
    announced = request.headers.get("content-length", "")[:20]
    if announced.isdecimal() and int(announced) > max_bytes + _MAX_FORM_BYTES:
        raise RequestLimitError(
            f"received a form of {announced} bytes; allowed: a file of {max_bytes} in one request; send it "
            "in parts to /v1/uploads"
        )


def store_of(request: Request) -> FileStore:
    """Returns the server's files. Raises NotFoundError if it keeps none."""
    files = server_of(request).files
    if files is None:
        raise NotFoundError(
            f"received {request.method} {request.url.path[:100]}; allowed: on servers that keep files; start "
            "the server with --files-dir FOLDER"
        )
    return files


def owner_of(request: Request) -> str:
    return client_of(request).owner


def _check_site(request: Request) -> None:
    """Raises RequestError for a form from a page of another site, which a browser sends without asking."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise RequestError(
            f"received a form from a page of {origin[:100]!r}; allowed: from pages of this server; use "
            "/v1/uploads"
        )


@file_routes.post("/v1/files", openapi_extra=form_of("file", purpose={"enum": [*UPLOAD_PURPOSES]}))
async def upload_file(request: Request) -> FileObject:
    """Keeps a medium, or lines for a batch. It is written to disk as it arrives."""
    store, chunks = store_of(request), server_of(request).bodies.chunks(request)
    _check_site(request)
    check_announced(request, store.settings.max_file_bytes)
    content_type = request.headers.get("content-type", "")
    try:
        return await kept_upload(store, owner_of(request), content_type, chunks)
    except OSError as error:
        raise StorageFullError(f"the file cannot be kept: {error.strerror}; send it again later") from error


@file_routes.get("/v1/files")
def list_files(
    request: Request,
    purpose: str | None = None,
    limit: int = MAX_LISTED,
    after: str | None = None,
    order: str = "desc",
) -> FileList:
    """Returns the files of the key, the newest first."""
    files = store_of(request).owned_by(owner_of(request), purpose)
    page, has_more = page_of(files, limit, after, newest_first=order != "asc")
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return FileList(data=page, first_id=ends[0], last_id=ends[1], has_more=has_more)


@file_routes.get("/v1/files/{file_id}")
def get_file(request: Request, file_id: str) -> FileObject:
    return store_of(request).get(owner_of(request), file_id)


@file_routes.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
def get_content(request: Request, file_id: str) -> FileResponse:
    """Returns the bytes of a file."""
    store = store_of(request)
    store.get(owner_of(request), file_id)
    return FileResponse(store.path_of(file_id), media_type="application/octet-stream")


@file_routes.delete("/v1/files/{file_id}")
def delete_file(request: Request, file_id: str) -> FileDeleted:
    """Deletes a file. A batch that has not ended fails without its input."""
    store_of(request).delete(owner_of(request), file_id)
    return FileDeleted(id=file_id)
