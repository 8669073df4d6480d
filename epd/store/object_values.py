"""Keeps small values by key in an object store. Unlike pieces they change, and the last one counts.

url/<namespace>/about.json     what the namespace is of, for people
url/<namespace>/<key>.value    a file of one piece: see `file_format`
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping

from epd.store.file_format import Payload, fill_from, header_of, piece_digest
from epd.store.object_store import Namespace, put, read_whole
from epd.store.piece_files import ABOUT

logger = logging.getLogger(__name__)

SUFFIX = ".value"


class ObjectValues:
    """Reads and writes the values of one namespace. Used by one thread."""

    def __init__(self, url: str, namespace: str, about: Mapping[str, str]) -> None:
        """Asks nothing of the store. Raises RequestError for a bad URL, as `check_url`."""
        self._place = Namespace(url, namespace)
        self._about = json.dumps(dict(about), indent=1).encode()
        self._is_described = self._has_failed = False

    def read(self, key: str, payload: memoryview) -> bool:
        """Fills a payload. False for one that is not there, of another size or not whole."""
        place, name = self._place, key + SUFFIX
        try:
            data = b"" if place.is_silent else read_whole(place.system, place.path(name))
        except OSError as error:
            self._fail(error)
            return False
        return fill_from(io.BytesIO(data), place.name, key, payload)

    def write(self, key: str, payload: memoryview) -> None:
        """Writes a value over the one before, if the store takes it."""
        place = self._place
        digest = piece_digest(place.name, key, payload)
        try:
            if place.is_silent:
                return
            if not self._is_described:
                put(place.system, place.path(ABOUT), [memoryview(self._about)])
                self._is_described = True
            header = header_of([Payload(key, payload, digest)])
            put(place.system, place.path(key + SUFFIX), [header, payload])
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning("%s does not answer, and is tried again: %s", self._place.url, error)
        self._has_failed = True
        self._place.leave_alone()
