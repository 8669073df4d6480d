"""Defines the files, batches and uploads that clients get, in OpenAI's form, and what is kept of them.

A record is kept whole or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

Purpose = Literal["batch", "batch_output", "user_data", "vision"]
MEDIA_PURPOSES: tuple[Purpose, ...] = ("user_data", "vision")
UPLOAD_PURPOSES: tuple[Purpose, ...] = ("batch", *MEDIA_PURPOSES)
BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"
]
FINAL: frozenset[BatchStatus] = frozenset({"completed", "failed", "cancelled", "expired"})
MIN_KEPT_S, MAX_KEPT_S = 60, 30 * 24 * 3600
MAX_PARTS = 10_000
_Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
WINDOW_S = 24 * 3600
_Value = Annotated[str, StringConstraints(max_length=512)]
_Key = Annotated[str, StringConstraints(max_length=64)]
Endpoint = Literal["/v1/chat/completions", "/v1/completions"]


class FileObject(BaseModel):
    """A file. expires_at: seconds of the epoch, null for one that stays until it is deleted."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class StoredFile(BaseModel):
    """A file as it is kept. owner: a name of the key that made it; empty where the server has no key."""

    owner: str
    file: FileObject


_T = TypeVar("_T", bound=BaseModel)


def write_record(path: Path, record: BaseModel) -> None:
    """Writes a record so that readers, and a crash, find the old or the new one. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(record.model_dump_json())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_record(path: Path, kind: type[_T]) -> _T | None:
    """Returns a record; None if there is none, or none of ours."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


class BatchRequest(BaseModel):
    """What a client asks for. metadata: its own, given back."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)


class RequestCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(BaseModel):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchObject(BaseModel):
    """A batch. Its times are seconds of the epoch, null for what has not happened."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredBatch(BaseModel):
    """A batch as it is kept. owner: a name of the key that made it."""

    owner: str
    batch: BatchObject


class ExpiresAfter(BaseModel):
    """How long the file is kept once it is complete."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_KEPT_S, le=MAX_KEPT_S)


class UploadRequest(BaseModel):
    """What a client asks for. bytes: of the whole file. mime_type: what the file holds counts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    filename: _Name
    bytes: int = Field(ge=1)
    purpose: Literal["batch", "user_data", "vision"]
    mime_type: str = ""
    expires_after: ExpiresAfter | None = None


class CompleteRequest(BaseModel):
    """The parts of the file, in its order. md5: of all bytes, in hexadecimal; None: not checked."""

    model_config = ConfigDict(extra="forbid", strict=True)

    part_ids: list[str] = Field(min_length=1, max_length=MAX_PARTS)
    md5: str | None = None


class PartObject(BaseModel):
    """A part. bytes: of it, which OpenAI leaves out."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str
    bytes: int


class UploadObject(BaseModel):
    """An upload. expires_at: of what is not complete by then; each part puts it off."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "user_data", "vision"]
    status: Literal["pending", "completed", "cancelled"] = "pending"
    expires_at: int
    file: FileObject | None = None


class UploadState(UploadObject):
    """An upload with the parts that have arrived, the oldest first."""

    parts: list[PartObject]


class StoredUpload(BaseModel):
    """An upload as it is kept. owner: a name of the key that made it. kept_s: of its file, None for ever."""

    owner: str
    upload: UploadObject
    kept_s: int | None = None
