"""Opens media: a path, bytes or a seekable file object becomes an FFmpeg container, or a typed error.

What is opened is never allowed to open anything else: only the listed container formats are tried and only
the `file` protocol may be used, so a playlist named `.mp4` cannot make the process read other files or URLs.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import av
import av.container
import av.error
import av.logging
from av.codec.hwaccel import HWAccel
from av.packet import Packet
from av.video.stream import VideoStream

from epd.errors import CorruptMediaError, MediaError, MediaNotFoundError, UnsupportedMediaError

CONTAINER_FORMATS = (
    "mov,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,h264,hevc,m4v,ivf,obu,mpegvideo,mjpeg,nut,mxf"
)

av.logging.set_level(None)


class SeekableFile(Protocol):
    """What a file-like source must offer."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class Reader(SeekableFile, Protocol):
    """A separate position in a source; the caller closes it."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FileDescriptor:
    """A file that is open for reading, where no path to it may be opened. Its code closes it."""

    number: int


Source = str | Path | bytes | SeekableFile | FileDescriptor
VideoPacket: TypeAlias = "Packet[VideoStream]"  # generic in PyAV's stubs only


class _PositionedReader:
    """One reader's own position in what several read; `close` does nothing, as others opened it."""

    def __init__(self, size_bytes: int, read_at: Callable[[int, int], bytes]) -> None:
        """read_at: returns (size) bytes from (offset) on, fewer at the end."""
        self._size_bytes, self._read_at, self._offset = size_bytes, read_at, 0

    def read(self, size: int = -1) -> bytes:
        chunk = self._read_at(self._size_bytes if size < 0 else size, self._offset)
        self._offset += len(chunk)
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size_bytes}[whence]
        self._offset = max(0, base + offset)
        return self._offset

    def tell(self) -> int:
        return self._offset

    def close(self) -> None:
        """Does nothing."""


class Media:
    """A source that can be opened many times, each time with its own position.

    name: what messages call it; by default the path, which not everybody should see.
    """

    def __init__(self, source: Source, name: str | None = None) -> None:
        self._source = source
        self._lock = threading.Lock()
        self.name = name or _name_of(source)
        self.size_bytes = self._measure()
        if self.size_bytes == 0:
            raise CorruptMediaError(
                f"{self.name} is empty: 0 bytes, allowed 1 or more; check how it was written"
            )

    def _measure(self) -> int:
        if isinstance(self._source, str | Path):
            return _size_of_file(Path(self._source), self.name)
        if isinstance(self._source, bytes):
            return len(self._source)
        if isinstance(self._source, FileDescriptor):
            return os.fstat(self._source.number).st_size
        with self._lock:
            return self._source.seek(0, io.SEEK_END)

    def reader(self) -> Reader:
        """Returns a file object at the start of the media, for the caller to close."""
        if isinstance(self._source, str | Path):
            return open(self._source, "rb")
        if isinstance(self._source, bytes):
            return io.BytesIO(self._source)
        if isinstance(self._source, FileDescriptor):
            return _PositionedReader(self.size_bytes, partial(os.pread, self._source.number))
        return _PositionedReader(self.size_bytes, partial(self._read_shared, self._source))

    def _read_shared(self, file: SeekableFile, size: int, offset: int) -> bytes:
        with self._lock:
            file.seek(offset)
            return file.read(size)

    def head(self, num_bytes: int) -> bytes:
        """Returns the first bytes of the media."""
        with closing(self.reader()) as reader:
            return reader.read(num_bytes)

    def open_target(self) -> str | SeekableFile:
        """Returns what FFmpeg opens: `file:` and an absolute path, so that no name poses as a protocol."""
        if isinstance(self._source, str | Path):
            return "file:" + os.path.abspath(self._source)
        return self.reader()


def _name_of(source: Source) -> str:
    if isinstance(source, str | Path):
        return str(source)
    return f"<{len(source)} bytes>" if isinstance(source, bytes) else f"<{type(source).__name__}>"


def _size_of_file(path: Path, name: str) -> int:
    try:
        if not path.is_file():
            raise MediaNotFoundError(
                f"no file at {name}: received a path to nothing; give the path of a video or image"
            )
        return path.stat().st_size
    except (OSError, ValueError) as error:
        raise MediaNotFoundError(
            f"cannot read {name}: {reason(error)}; give the path of a readable file"
        ) from error


def reason(error: Exception) -> str:
    """Returns what went wrong, without the path that errors of files and of FFmpeg carry."""
    return getattr(error, "strerror", None) or type(error).__name__


def as_media(source: Source | Media) -> Media:
    """Returns the source as `Media`, checked to exist and not to be empty."""
    return source if isinstance(source, Media) else Media(source)


@dataclass(slots=True)
class OpenVideo:
    """An FFmpeg container and its chosen video stream, closed on leaving the `with` block."""

    media: Media
    container: av.container.InputContainer
    stream: VideoStream

    def __enter__(self) -> OpenVideo:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.container.close()


def open_video(
    source: Source | Media,
    *,
    open_timeout_s: float = 10.0,
    ignores_edits: bool = False,
    hwaccel: HWAccel | None = None,
) -> OpenVideo:
    """Open a container and choose its first real video stream, decoded by one thread.

    ignores_edits: whether FFmpeg leaves the edit list of an MP4 alone; times are those of the media then.
    hwaccel: the device that decodes; frames that it cannot are decoded here.

    Raises MediaNotFoundError, UnsupportedMediaError (not a container, no video) or CorruptMediaError.
    """
    media = as_media(source)
    container = open_container(media, open_timeout_s, ignores_edits=ignores_edits, hwaccel=hwaccel)
    try:
        stream = _choose_stream(container, media.name)
    except BaseException:
        container.close()
        raise
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    return OpenVideo(media, container, stream)


def open_container(
    media: Media,
    open_timeout_s: float,
    formats: str = CONTAINER_FORMATS,
    *,
    ignores_edits: bool = False,
    hwaccel: HWAccel | None = None,
) -> av.container.InputContainer:
    """Opens a container of one of the formats. Raises as `open_video`."""
    options = {"format_whitelist": formats, "protocol_whitelist": "file"}
    options |= {"ignore_editlist": "1"} if ignores_edits else {}
    try:
        return av.open(
            media.open_target(),
            container_options=options,
            metadata_errors="replace",
            timeout=(open_timeout_s, None),
            hwaccel=hwaccel,
        )
    except (av.error.FFmpegError, ValueError, OSError) as error:
        raise open_error(media, error) from error


def open_error(media: Media, error: Exception) -> MediaError:
    """Returns the typed error for what FFmpeg said when it could not open the media."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return MediaNotFoundError(
            f"cannot read {media.name}: {reason(error)}; give the path of a readable file"
        )
    if looks_like_media(media.head(4096)):
        return CorruptMediaError(
            f"{media.name} begins like a video but cannot be opened ({reason(error)}); allowed: "
            "complete files; copy or encode it again"
        )
    return UnsupportedMediaError(
        f"{media.name} is not a video that can be read ({reason(error)}); "
        "allowed: MP4, MOV, MKV, WebM, AVI, TS; convert it"
    )


def looks_like_media(head: bytes) -> bool:
    """Returns whether the first bytes carry the signature of a known video container."""
    signatures = (
        (4, b"ftyp"),
        (4, b"moov"),
        (4, b"mdat"),
        (0, b"\x1aE\xdf\xa3"),
        (0, b"RIFF"),
        (0, b"G"),
        (0, b"FLV"),
    )
    return any(head[offset : offset + len(magic)] == magic for offset, magic in signatures)


def _choose_stream(container: av.container.InputContainer, name: str) -> VideoStream:
    for stream in container.streams.video:
        assert isinstance(stream, VideoStream)
        attached = stream.disposition & av.stream.Disposition.attached_pic
        if not attached and stream.codec_context is not None:
            return stream
    kinds = sorted({stream.type for stream in container.streams})
    raise UnsupportedMediaError(
        f"{name} has no video that can be decoded, only streams of kind {kinds}; "
        "allowed: a file with a video stream; give one"
    )
