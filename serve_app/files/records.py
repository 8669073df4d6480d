"""Defines the objects that clients get of files and batches, and how they are kept: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

Purpose = Literal["batch", "batch_output", "user_data", "vision"]
MEDIA_PURPOSES: tuple[Purpose, ...] = ("user_data", "vision")
UPLOAD_PURPOSES: tuple[Purpose, ...] = ("batch", *MEDIA_PURPOSES)
BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"
]
FINAL: frozenset[BatchStatus] = frozenset({"completed", "failed", "cancelled", "expired"})


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
