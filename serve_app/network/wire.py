"""Defines what goes over links between fronts, workers and media workers, beside their messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epd.serve_app.messages import Message
from epd.serve_app.network.link import Address
from epd.types import UInt8Array


@dataclass(frozen=True, slots=True)
class BulkPlace:
    """Where frames wait to be fetched. number: of them at that process."""

    address: Address
    number: int


@dataclass(frozen=True, slots=True)
class FrontLost:
    """Tells a front that it was declared lost, before its link ends: no worker is lost with that."""


@dataclass(frozen=True, slots=True)
class TakeBulk:
    """Asks for frames, uint8 [N, h, w, 3], which stay until they are released."""

    number: int


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A message to a worker. bulk: frames, or where they are."""

    message: Message[Any]
    bulk: BulkPlace | UInt8Array | None = None


@dataclass(frozen=True, slots=True)
class ReleaseBulk:
    """Announces that the frames of this number will not be fetched again."""

    number: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The reply to a message with bulk. number: of the frames, which stay until released."""

    value: Any
    number: int | None


@dataclass(frozen=True, slots=True)
class FetchCall:
    """A message to a media worker whose reply has frames."""

    message: Message[Any]
