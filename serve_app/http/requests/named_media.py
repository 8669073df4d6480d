"""Keeps media by the names that clients give them (vLLM's `uuid`), so that they need not be sent again.

A name belongs to the clients of one API key and one cache salt. What is kept is the URL as it was sent: the
whole medium of a `data:` URL, while media at other addresses are read again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from epd.errors import UnknownUuidError
from epd.serve_app.service import MediaReference
from epd.types import MediaKind

_MAX_SHOWN_CHARS = 60
# Of the whole room, for one medium.
_SHARE = 4

_Key = tuple[bytes, MediaKind, str]


def namespace_of(authorization: str, cache_salt: str) -> bytes:
    """Returns the space of names of a client. authorization: its header, empty for none."""
    parts = (authorization.encode("utf-8", "surrogatepass"), cache_salt.encode("utf-8", "surrogatepass"))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


class NamedMedia:
    """Keeps URLs by name, up to a number and a size, those named last by each client. Thread-safe.

    Where there is no room, the client that has most loses what it named first.
    """

    def __init__(self, max_media: int, max_bytes: int) -> None:
        self._max_media = max_media
        self._max_bytes = max_bytes
        self._urls: dict[_Key, str] = {}
        self._clients: dict[_Key, str] = {}
        self._names: dict[str, OrderedDict[_Key, None]] = {}  # of each client, the oldest first
        self._client_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the URLs and their names, at most."""
        return self._client_bytes.total()

    def __len__(self) -> int:
        return len(self._urls)

    def found(self, namespace: bytes, references: Sequence[MediaReference]) -> tuple[MediaReference, ...]:
        """Returns the references with the URLs of those that came as a name alone.

        Raises UnknownUuidError for a name that is not known, or not any more.
        """
        return tuple(
            each if each.url or not each.uuid else self._found(namespace, each) for each in references
        )

    def _found(self, namespace: bytes, reference: MediaReference) -> MediaReference:
        key = (namespace, reference.kind, reference.uuid)
        with self._lock:
            url = self._urls.get(key)
            if url is None:
                name = reference.uuid[:_MAX_SHOWN_CHARS]
                raise UnknownUuidError(
                    f"{reference.label}: received the uuid {name!r} without {reference.kind}_url; allowed: "
                    "one sent before with its URL, by the same key and cache_salt, while this front keeps "
                    "it (each of several fronts keeps its own, so use one connection); send it again with "
                    "its URL"
                )
            self._names[self._clients[key]].move_to_end(key)
        return replace(reference, url=url)

    def keep(self, namespace: bytes, references: Sequence[MediaReference], client: str = "") -> None:
        """Keeps the media that have names; one too large for its share is not kept. client: has the share."""
        for each in references:
            if each.uuid and _num_bytes(each.uuid, each.url) <= self._max_bytes // _SHARE:
                with self._lock:
                    self._set((namespace, each.kind, each.uuid), each.url, client)

    def _set(self, key: _Key, url: str, client: str) -> None:
        if key in self._urls:
            self._forget(key)
        self._urls[key], self._clients[key] = url, client
        self._names.setdefault(client, OrderedDict())[key] = None
        self._client_bytes[client] += _num_bytes(key[2], url)
        while len(self._urls) > self._max_media:
            self._forget(next(iter(self._names[max(self._names, key=lambda each: len(self._names[each]))])))
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._names[max(self._client_bytes, key=self._client_bytes.__getitem__)])))

    def _forget(self, key: _Key) -> None:
        url, client = self._urls.pop(key), self._clients.pop(key)
        del self._names[client][key]
        self._client_bytes[client] -= _num_bytes(key[2], url)
        if not self._names[client]:
            del self._names[client], self._client_bytes[client]


def _num_bytes(uuid: str, url: str) -> int:
    """Returns the bytes of both texts in memory: one of each character, four unless all are ASCII."""
    return sum(len(text) * (1 if text.isascii() else 4) for text in (uuid, url))
