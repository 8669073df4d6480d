"""Keeps small values by key in an object store. Unlike pieces they change, and the last one counts.

url/<namespace>/about.json     what the namespace is of, for people
url/<namespace>/<key>.value    a file of one piece: see `file_format`
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from epd.store.file_format import Payload, fill_from, header_of, piece_digest
from epd.store.object_store import open_store, put, read_whole
from epd.store.piece_files import ABOUT

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

logger = logging.getLogger(__name__)

SUFFIX = ".value"
# Seconds for which a store that does not answer is left alone.
_SILENT_S = 30.0


class ObjectValues:
    """Reads and writes the values of one namespace. Used by one thread."""

    def __init__(self, url: str, namespace: str, about: Mapping[str, str]) -> None:
        """Asks nothing of the store. Raises RequestError for a bad URL, as `open_store`."""
        self._url = url
        self._namespace = namespace
        self._about = json.dumps(dict(about), indent=1).encode()
        self._store: tuple[FileSystem, str] | None = None
        self._is_described = self._has_failed = False
        self._silent_until_s = 0.0

    def read(self, key: str, payload: memoryview) -> bool:
        """Fills a payload. False for one that is not there, of another size or not whole."""
        try:
            data = b"" if self._is_silent else read_whole(self._opened[0], self._path(key + SUFFIX))
        except OSError as error:
            self._fail(error)
            return False
        return fill_from(io.BytesIO(data), self._namespace, key, payload)

    def write(self, key: str, payload: memoryview) -> None:
        """Writes a value over the one before, if the store takes it."""
        digest = piece_digest(self._namespace, key, payload)
        try:
            if self._is_silent:
                return
            if not self._is_described:
                put(self._opened[0], self._path(ABOUT), [memoryview(self._about)])
                self._is_described = True
            header = header_of([Payload(key, payload, digest)])
            put(self._opened[0], self._path(key + SUFFIX), [header, payload])
        except OSError as error:
            self._fail(error)

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() < self._silent_until_s

    @property
    def _opened(self) -> tuple[FileSystem, str]:
        """Returns the store, and the place in it. Raises OSError if it cannot be opened."""
        self._store = self._store or open_store(self._url)
        return self._store

    def _path(self, name: str) -> str:
        return f"{self._opened[1]}/{self._namespace}/{name}"

    def _fail(self, error: OSError) -> None:
        """Leaves the store alone for a while."""
        if not self._has_failed:
            logger.warning("%s does not answer, and is tried again: %s", self._url, error)
        self._has_failed = True
        self._silent_until_s = time.monotonic() + _SILENT_S
