"""Looks at media, decodes images and sound: in this process, or in children of it that files cannot hurt."""

from __future__ import annotations

from typing import Protocol

from epd.types import Float32Array, MediaFacts, UInt8Array
from epd.video.containers.audio import AudioSlice, load_audio
from epd.video.containers.images import load_image
from epd.video.containers.look import look
from epd.video.sources.local_files import OpenFile
from epd.video.sources.source import Media


class MediaReader(Protocol):
    """Reads open files. name: what messages call the file. For any thread; callers wait."""

    def look(self, file: OpenFile, name: str, *, as_audio: bool = False) -> MediaFacts:
        """Does what `video.look` does. Raises MediaError, UnavailableError."""
        ...

    def load_image(self, file: OpenFile, name: str) -> UInt8Array:
        """Does what `video.load_image` does. Raises as `look`."""
        ...

    def load_audio(self, file: OpenFile, name: str, part: AudioSlice) -> Float32Array:
        """Does what `video.load_audio` does. Raises as `look`, and RequestError."""
        ...


class OwnReader:
    """A MediaReader in this process, for media that are trusted."""

    def look(self, file: OpenFile, name: str, *, as_audio: bool = False) -> MediaFacts:
        return look(Media(file.source, name), as_audio=as_audio)

    def load_image(self, file: OpenFile, name: str) -> UInt8Array:
        return load_image(Media(file.source, name))

    def load_audio(self, file: OpenFile, name: str, part: AudioSlice) -> Float32Array:
        return load_audio(Media(file.source, name), part)
