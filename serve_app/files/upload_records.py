"""Defines the uploads in parts that clients get, in OpenAI's form, and what is kept of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from epd.serve_app.files.records import FileObject

_Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
MAX_PARTS = 10_000
_MAX_KEPT_S = 30 * 24 * 3600


class ExpiresAfter(BaseModel):
    """How long the file is kept once it is complete."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=60, le=_MAX_KEPT_S)


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
