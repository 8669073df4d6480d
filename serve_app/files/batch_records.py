"""Defines the batch that clients get, in OpenAI's form, and what is kept of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from epd.serve_app.files.records import BatchStatus

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
_Key = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]
WINDOW_S = 24 * 3600


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
