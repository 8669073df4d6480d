"""Looks at media and decodes images: in this process, or in children of it that files cannot hurt."""

from __future__ import annotations

from typing import Protocol

from epd.types import UInt8Array
from video.containers.images import load_image
from video.containers.look import MediaFacts, look
from video.sources.local_files import OpenFile
from video.sources.source import Media


class MediaReader(Protocol):
    """Reads open files. name: what messages call the file. For any thread; callers wait."""

    def look(self, file: OpenFile, name: str) -> MediaFacts:
        """Does what `video.look` does. Raises MediaError, UnavailableError."""
        ...

    def load_image(self, file: OpenFile, name: str) -> UInt8Array:
        """Does what `video.load_image` does. Raises as `look`."""
        ...


class OwnReader:
    """A MediaReader in this process, for media that are trusted."""

    def look(self, file: OpenFile, name: str) -> MediaFacts:
        return look(Media(file.source, name))

    def load_image(self, file: OpenFile, name: str) -> UInt8Array:
        return load_image(Media(file.source, name))
