"""Answers `/v1/files`: inputs that clients upload for batches, and the results of these."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from epd.errors import NotFoundError, StorageFullError
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import FileDeleted, FileList, FileObject
from epd.serve_app.files.settings import MAX_LISTED, page_of
from epd.serve_app.files.upload import kept_upload
from epd.serve_app.http.guard.http_guard import sent_key
from epd.serve_app.http.routes.prompt_routes import server_of

file_routes = APIRouter()
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


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
    """Returns a name of the key that a request came with; empty where the server has none."""
    settings = server_of(request).settings
    if settings.api_key is None and not request.state.is_admin:
        return ""
    return hashlib.blake2b(sent_key(request) or b"", digest_size=16, person=b"epd files").hexdigest()


@file_routes.post("/v1/files", openapi_extra=_UPLOAD)
async def upload_file(request: Request) -> FileObject:
    """Keeps a file of lines for batches. It is written to disk as it arrives."""
    store, chunks = store_of(request), server_of(request).bodies.chunks(request)
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
