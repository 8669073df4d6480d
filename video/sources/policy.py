"""Says where media may come from, how large and how slow they may be, and where fetched bytes go."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from epd.video.sources.addresses import Resolver, resolve


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Where media may come from, and how much of it.

    allowed_hosts: None allows every host with public addresses; a set allows only its hosts, which may have
        private addresses. A name that begins with a dot stands for every host below it.
    trusts_urls: whether a URL that is asked for may have a private address, since who runs this process wrote
        it. What it redirects to may not.
    media_folder: the only folder that local files are read from; None reads no local file.
    uploads_folder: where the files are that clients have uploaded; a request cannot name a path in it.
    max_s: time limit of one download.
    grace_s, min_bytes_per_s: after t seconds a download must have (t - grace_s) times that many bytes.
    """

    allowed_hosts: frozenset[str] | None = None
    trusts_urls: bool = False
    media_folder: Path | None = None
    uploads_folder: Path | None = None
    max_bytes: int = 2 << 30
    max_s: float = 120.0
    grace_s: float = 10.0
    min_bytes_per_s: float = 100_000.0
    max_redirects: int = 5
    resolver: Resolver = field(default=resolve)


DEFAULT_POLICY = FetchPolicy()


class Sink(Protocol):
    """Takes the bytes of one medium, in order. Both may raise EPDError to end the fetch."""

    def expect(self, num_bytes: int) -> None:
        """Learns, before any bytes come, how many the sender promises."""
        ...

    def write(self, chunk: bytes) -> None: ...


class BytesSink:
    """Keeps the bytes in memory."""

    def __init__(self) -> None:
        self._body = bytearray()

    def expect(self, num_bytes: int) -> None:
        """Sets nothing aside."""

    def write(self, chunk: bytes) -> None:
        self._body += chunk

    @property
    def body(self) -> bytes:
        return bytes(self._body)
