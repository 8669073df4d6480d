"""Media of requests as local files: fetched within limits, hashed, and deleted when their request ends."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import video
from epd.content import content_hash
from epd.errors import (
    MediaError,
    OverloadedError,
    RequestError,
    UnsupportedMediaError,
)
from epd.recent import Recent
from epd.types import MediaKind
from serve_app.held_folder import SPOOL_PREFIX, HeldFolder, remove_abandoned
from serve_app.service import MediaSource
from video import FetchPolicy

SCHEMES = ("http", "https", "data", "file")
# Hashes of files that clients name by path are remembered for as many files.
_MAX_KNOWN_FILES = 4096
# What was seen of media, by content: a second question about one opens nothing.
_MAX_KNOWN_FACTS = 4096
_RETRY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class MediaReference:
    """A medium as a request names it. label: how to call it in answers, which never show our paths."""

    kind: MediaKind
    url: str
    label: str


class ByteBudget:
    """How many bytes all requests together may hold. For any thread."""

    def __init__(self, max_bytes: int, what: str) -> None:
        self._free = self._max = max_bytes
        self._what = what
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Raises OverloadedError when that many are not free."""
        with self._lock:
            if num_bytes > self._free:
                raise OverloadedError(
                    f"{num_bytes} bytes of {self._what} do not fit beside those of other requests; "
                    f"allowed {self._max} in all; try again later",
                    _RETRY_AFTER_S,
                )
            self._free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._free += num_bytes

    @property
    def num_taken(self) -> int:
        return self._max - self._free


class RequestFolder:
    """The spooled media of one request. Threads that are late find it closed and leave nothing behind."""

    def __init__(self, path: Path, budget: ByteBudget) -> None:
        self._path = path
        self._budget = budget
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_files = 0
        self._is_open = True

    def write(self, data: bytes) -> Path:
        """A new file of these bytes. Raises OverloadedError when the spool is full."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the request of this folder has ended")
            self._budget.take(len(data))
            self._num_bytes += len(data)
            self._num_files += 1
            path = self._path / f"{self._num_files}"
        path.write_bytes(data)
        return path

    def close(self) -> None:
        with self._lock:
            self._is_open = False
        shutil.rmtree(self._path, ignore_errors=True)
        self._budget.give_back(self._num_bytes)


class KnownFiles:
    """Hashes of local files, by what changes when they do: a second question about a file reads nothing."""

    def __init__(self) -> None:
        self._hashes: Recent[tuple[str, int, int, int], str] = Recent(_MAX_KNOWN_FILES)

    def content_hash(self, path: Path) -> str:
        status = path.stat()
        key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        found = self._hashes.get(key) or content_hash(path)
        self._hashes.set(key, found)
        return found


class MediaSpool:
    """A folder of its own below `parent`, where each request has one for as long as it lasts."""

    def __init__(
        self, policy: FetchPolicy, *, parent: Path | None, max_spooled_bytes: int, num_threads: int
    ) -> None:
        self._policy = policy
        self._known = KnownFiles()
        self._facts: Recent[str, video.MediaFacts] = Recent(_MAX_KNOWN_FACTS)
        self.budget = ByteBudget(max_spooled_bytes, "media")
        folder = parent or Path(tempfile.gettempdir())
        remove_abandoned(folder, SPOOL_PREFIX)
        self._held = HeldFolder(folder / f"{SPOOL_PREFIX}{secrets.token_hex(8)}")
        self.path = self._held.path / "requests"
        self.path.mkdir()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="media")

    def close(self) -> None:
        """Deletes everything; requests must have ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._held.remove()

    @asynccontextmanager
    async def sources(self, references: Sequence[MediaReference]) -> AsyncIterator[tuple[MediaSource, ...]]:
        """The media of one request as files, in order, until the block is left.

        Raises MediaError, RequestError for a URL of no known kind, OverloadedError when the spool is full.
        """
        folder = RequestFolder(Path(tempfile.mkdtemp(dir=self.path)), self.budget)
        loop = asyncio.get_running_loop()
        try:
            work = [loop.run_in_executor(self._threads, self._source, one, folder) for one in references]
            del references  # a data: URL holds a whole medium
            yield tuple(await asyncio.gather(*work))
        finally:
            folder.close()

    def _source(self, reference: MediaReference, folder: RequestFolder) -> MediaSource:
        try:
            path = self._local_file(reference.url, folder)
        except MediaError as error:
            raise type(error)(f"{reference.label}: {error}") from error
        mm_hash = self._known.content_hash(path)
        facts = self._facts.get(mm_hash)
        if facts is None:
            facts = video.look(video.Media(path, reference.label))
            self._facts.set(mm_hash, facts)
        _check_kind(facts.kind, reference)
        num_bytes = path.stat().st_size
        return MediaSource(facts.kind, path, mm_hash, num_bytes, facts, reference.label)

    def _local_file(self, url: str, folder: RequestFolder) -> Path:
        scheme = url[:8].partition(":")[0].lower() if ":" in url[:8] else ""
        if scheme not in SCHEMES:
            raise RequestError(
                f"received a media URL that begins with {url[:16]!r}; allowed {', '.join(SCHEMES)}; use one"
            )
        if scheme == "file":  # used where it lies: `video.fetch` would read all of it into memory
            return video.allowed_file(url, self._policy.media_folder, self._policy.max_bytes)
        return folder.write(video.fetch(url, self._policy))


def _check_kind(kind: MediaKind, reference: MediaReference) -> None:
    if kind != reference.kind:
        raise UnsupportedMediaError(
            f"{reference.label}: received a {kind} as {reference.kind}_url; allowed there: "
            f"{reference.kind}s; send it as {kind}_url"
        )
