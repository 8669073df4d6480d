"""Makes media of requests local files: fetched within limits, hashed, and deleted when the request ends.

    file:, ID   in separate threads, read in place               \
    data:       in separate threads, decoded into the spool       |  shared by requests, clients in turns
    http(s):    in separate threads, downloaded into the spool   /
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from epd import video
from epd.control.recent import Recent
from epd.encoders import OWN_LIMITS, PixelLimits
from epd.errors import (
    CancelledError,
    MediaError,
    MediaLimitError,
    RequestError,
    UnavailableError,
    UnsupportedMediaError,
)
from epd.serve_app.fair_threads import FairThreads
from epd.serve_app.held_folder import SPOOL_PREFIX, HeldFolder, remove_abandoned
from epd.serve_app.media.spool_files import ByteBudget, RequestFolder, SpooledFile, refusing_when_full
from epd.serve_app.service import FetchedItem, MediaReference
from epd.stages.media import PlannedMedia
from epd.types import MediaKind, UInt8Array, content_hash
from epd.video import FetchPolicy, FileIdentity

SCHEMES = ("http", "https", "data", "file")
# Number of files named by path whose hashes are remembered.
_MAX_KNOWN_FILES = 4096
# Number of media whose facts are remembered, by content: a second question about one opens no file.
_MAX_KNOWN_FACTS = 4096
# Share of the spool that one request may fill; one medium of the maximum size is always allowed.
_REQUEST_SHARE = 4


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A medium as a local file.

    label: its name in messages
    identity: of the file that was checked
    pixels: what it is resized within
    start_s, end_s: the part of a clip of sound that is heard, seconds, None for its end
    """

    path: Path
    label: str
    mm_hash: str
    facts: video.MediaFacts
    identity: FileIdentity
    pixels: PixelLimits = OWN_LIMITS
    start_s: float = 0.0
    end_s: float | None = None

    @property
    def found(self) -> FetchedItem:
        """Returns what is said about it to the front."""
        return FetchedItem(self.facts, self.mm_hash, self.identity.num_bytes)

    def open(self) -> video.OpenFile:
        """Opens the exact file that was checked. Raises MediaError."""
        return video.open_file(self.path, self.label, self.identity)


@dataclass(slots=True, eq=False)
class IncomingFile:
    """A medium that comes in pieces from another media worker. num_written: bytes so far."""

    reference: MediaReference
    path: Path
    num_bytes: int
    num_written: int = 0

    def append(self, chunk: UInt8Array) -> bool:
        """Appends bytes. Returns whether it is complete. Raises StorageFullError, CancelledError."""
        if self.num_written + len(chunk) > self.num_bytes:
            raise MediaLimitError(f"{self.reference.label} has more bytes than were announced; send it again")
        try:
            with refusing_when_full(), self.path.open("ab") as file:
                file.write(chunk.data)
        except FileNotFoundError as error:
            raise CancelledError("the request of this medium has ended") from error
        self.num_written += len(chunk)
        return self.num_written == self.num_bytes


@dataclass(frozen=True, slots=True)
class SpoolLimits:
    """Limits of a spool.

    max_spooled_bytes: of the media of all requests
    max_s: until all media of a request are fetched
    num_downloads: at once, of all requests
    max_downloads: of these, for one request; an eighth of all is for other clients
    num_threads: for local files, and as many for data: URLs; a request has half of each
    """

    max_spooled_bytes: int = 8 << 30
    max_s: float = 180.0
    num_downloads: int = 32
    max_downloads: int = 4
    num_threads: int = 4


class KnownFiles:
    """Remembers hashes of local files by their identity: a second question about a file reads nothing."""

    def __init__(self) -> None:
        self._hashes: Recent[FileIdentity, str] = Recent(_MAX_KNOWN_FILES)

    def content_hash(self, file: video.OpenFile) -> str:
        found = self._hashes.get(file.identity) or content_hash(file.source)
        self._hashes.set(file.identity, found)
        return found


@dataclass(slots=True, eq=False)
class Hold:
    """The media of one request.

    owner: the front that asked for it. client: whose request it is
    files: of its references, in order; None until all are there
    incoming: a medium that is not complete yet
    tasks: fetching or planning them
    streams: ids of those opened
    """

    owner: str
    folder: RequestFolder
    client: str = ""
    files: tuple[FetchedFile, ...] | None = None
    incoming: IncomingFile | None = None
    images: dict[int, PlannedMedia] = field(default_factory=dict)
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    streams: set[str] = field(default_factory=set)


class MediaSpool:
    """Manages a new folder below `parent`, with a subfolder for each request until it ends."""

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        parent: Path | None = None,
        limits: SpoolLimits | None = None,
        reader: video.MediaReader | None = None,
    ) -> None:
        """Makes the folder. reader: reads media; by default this process."""
        self._policy = policy
        self._reader = reader or video.OwnReader()
        self._limits = limits or SpoolLimits()
        self._known = KnownFiles()
        self._facts: Recent[tuple[str, bool], video.MediaFacts] = Recent(_MAX_KNOWN_FACTS)  # and if as audio
        self.budget = ByteBudget(self._limits.max_spooled_bytes, "media")
        folder = parent or Path(tempfile.gettempdir())
        remove_abandoned(folder, SPOOL_PREFIX)
        self._held = HeldFolder(folder / f"{SPOOL_PREFIX}{secrets.token_hex(8)}")
        self.path = self._held.path / "requests"
        self.path.mkdir()
        num = self._limits.num_threads
        self._local = FairThreads("media-file", num, max(1, num // 2))
        self._data = FairThreads("media-data", num, max(1, num // 2))
        num_downloads = self._limits.num_downloads
        self._remote = FairThreads(
            "media-http", num_downloads, self._limits.max_downloads, num_for_others=num_downloads // 8
        )

    @property
    def num_downloads(self) -> int:
        """Returns the number of downloads in progress, including those being cancelled."""
        return self._remote.num_busy

    def close(self) -> None:
        """Deletes all files; requests must have ended."""
        for threads in (self._local, self._data, self._remote):
            threads.close()
        self._held.remove()

    def new_folder(self, *, is_copy: bool = False) -> RequestFolder:
        """Returns a folder for the media of one request, which the caller closes.

        is_copy: whether one medium comes from another media worker
        """
        most = max(self._policy.max_bytes, self._limits.max_spooled_bytes // _REQUEST_SHARE)
        return RequestFolder(self.path, self.budget, self._policy.max_bytes if is_copy else most)

    async def fetch(
        self, references: Sequence[MediaReference], folder: RequestFolder
    ) -> tuple[FetchedFile, ...]:
        """Returns the media of one request as files, those that are not files yet in its folder.

        Raises MediaError, RequestError for a URL of an unknown kind, OverloadedError when the spool is full,
        StorageFullError when the disk is.
        """
        work = [self._source(one, folder) for one in references]
        del references  # a data: URL holds a whole medium
        return await _all(work, self._limits.max_s)

    def incoming(self, reference: MediaReference, num_bytes: int, folder: RequestFolder) -> IncomingFile:
        """Returns an empty file for a medium of that many bytes. Raises OverloadedError, StorageFullError."""
        with folder.new_file() as file:
            file.expect(num_bytes)
        return IncomingFile(reference, file.path, num_bytes)

    async def append(self, incoming: IncomingFile, chunk: UInt8Array) -> FetchedFile | None:
        """Appends the next bytes. Returns the medium once it is complete. Raises as `fetch`."""
        is_whole = await self._data.run(incoming, partial(incoming.append, chunk))
        if not is_whole:
            return None
        return await self._local.run(incoming, partial(self._from_path, incoming.reference, incoming.path))

    async def _source(self, reference: MediaReference, folder: RequestFolder) -> FetchedFile:
        client = reference.client
        if reference.is_upload:
            return await self._local.run(folder, partial(self._from_upload, reference), client=client)
        scheme = _scheme(reference.url)
        if scheme == "file":  # used in place, without a copy
            return await self._local.run(folder, partial(self._from_file, reference), client=client)
        if scheme == "data":
            return await self._data.run(folder, partial(self._from_data, reference, folder), client=client)
        download = video.Download(self._policy)
        return await self._remote.run(
            folder, partial(self._from_web, reference, folder, download), download.cancel, client
        )

    # In threads

    def _from_file(self, reference: MediaReference) -> FetchedFile:
        policy = self._policy
        try:
            file = video.open_allowed(reference.url, policy.media_folder, policy.max_bytes)
        except MediaError as error:
            raise _labelled(error, reference) from error
        with file:
            return self._seen(reference, file, file.path)

    def _from_upload(self, reference: MediaReference) -> FetchedFile:
        folder = self._policy.uploads_folder
        if folder is None:
            raise UnavailableError(
                f"{reference.label}: the media worker has no folder of uploaded files; allowed: with the "
                "server's --files-dir; start it with one"
            )
        return self._from_path(reference, folder / f"{reference.url}.data")

    def _from_data(self, reference: MediaReference, folder: RequestFolder) -> FetchedFile:
        return self._spooled(
            reference, folder, lambda sink: video.read_data_uri(reference.url, self._policy.max_bytes, sink)
        )

    def _from_web(
        self, reference: MediaReference, folder: RequestFolder, download: video.Download
    ) -> FetchedFile:
        return self._spooled(reference, folder, lambda sink: download.run(reference.url, sink))

    def _spooled(
        self, reference: MediaReference, folder: RequestFolder, fetch: Callable[[SpooledFile], None]
    ) -> FetchedFile:
        with folder.new_file() as sink:
            try:
                fetch(sink)
            except MediaError as error:
                raise _labelled(error, reference) from error
        return self._from_path(reference, sink.path)

    def _from_path(self, reference: MediaReference, path: Path) -> FetchedFile:
        with video.open_file(path, reference.label) as file:
            return self._seen(reference, file, path)

    def _seen(self, reference: MediaReference, file: video.OpenFile, path: Path) -> FetchedFile:
        mm_hash = self._known.content_hash(file)
        as_audio = reference.kind == "audio"
        facts = self._facts.get((mm_hash, as_audio))
        if facts is None:
            facts = self._reader.look(file, reference.label, as_audio=as_audio)
            self._facts.set((mm_hash, as_audio), facts)
        facts = facts.taken_as(reference.kind)
        _check_kind(facts.kind, reference)
        return FetchedFile(
            path,
            reference.label,
            mm_hash,
            facts,
            file.identity,
            reference.pixels,
            reference.start_s,
            reference.end_s,
        )


async def _all(work: list[Coroutine[None, None, FetchedFile]], max_s: float) -> tuple[FetchedFile, ...]:
    """Returns the results in order. The first error, or the end of the request, cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    work.clear()
    try:
        async with asyncio.timeout(max_s):
            return tuple(await asyncio.gather(*tasks))
    except TimeoutError as error:
        raise MediaLimitError(
            f"the media of the request took more than {max_s:g} s to fetch; allowed that "
            "much; send fewer, or host them nearer"
        ) from error
    finally:
        for task in tasks:
            task.cancel()


def _scheme(url: str) -> str:
    scheme = url[:8].partition(":")[0].lower() if ":" in url[:8] else ""
    if scheme not in SCHEMES:
        raise RequestError(
            f"received a media URL that begins with {url[:16]!r}; allowed {', '.join(SCHEMES)}; use one"
        )
    return scheme


def _labelled(error: MediaError, reference: MediaReference) -> MediaError:
    return type(error)(f"{reference.label}: {error}")


def _check_kind(kind: MediaKind, reference: MediaReference) -> None:
    if kind != reference.kind:
        raise UnsupportedMediaError(
            f"{reference.label}: received {'audio' if kind == 'audio' else f'a {kind}'} as "
            f"{reference.kind}_url; allowed there: {reference.kind}s; send it as {kind}_url"
        )
