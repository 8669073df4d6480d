"""Keeps media by the names that clients give them (vLLM's `uuid`), so that they need not be sent again.

A name belongs to the clients of one API key and one cache salt. What is kept is the URL as it was sent: the
whole medium of a `data:` URL, while media at other addresses are read again.

With a folder, what was found out about a named video is kept, too, on disk without its URL. Then a name alone
is enough, also after a restart, as long as no frame is needed that nobody kept. With an object store it is on
other machines, too. A name stands for what was named last, on whichever machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from epd.errors import UnknownUuidError
from epd.serve_app.service import FetchedItem, MediaReference, MediaSource
from epd.store.object_values import ObjectValues
from epd.store.piece_files import PieceFiles
from epd.types import MediaFacts, MediaKind

_MAX_SHOWN_CHARS = 60
# Of the whole room, for one medium.
_SHARE = 4

# Bytes of a file about a named video; what does not fit is not kept.
_ENTRY_BYTES = 1024

_Key = tuple[bytes, MediaKind, str]


@dataclass(frozen=True, slots=True)
class NameAsked:
    """What a front asks the others about a name. is_taken: it names another medium from now on."""

    key: _Key
    is_taken: bool = False


def namespace_of(authorization: str, cache_salt: str) -> bytes:
    """Returns the space of names of a client. authorization: its header, empty for none."""
    parts = (authorization.encode("utf-8", "surrogatepass"), cache_salt.encode("utf-8", "surrogatepass"))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


class KeptNames:
    """Keeps what was found out about named videos in files, so that their names outlive the server.

    objects: has it for other machines; None for no others
    """

    def __init__(self, files: PieceFiles, objects: ObjectValues | None = None) -> None:
        self._files = files
        self._objects = objects
        self._thread = ThreadPoolExecutor(1, "names")

    async def known(self, key: _Key) -> FetchedItem | None:
        """Returns what is kept of a name."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, _name_of(key))

    def keep(self, key: _Key, item: FetchedItem | None) -> None:
        """Keeps what a name stands for, in a thread; None forgets it."""
        self._thread.submit(self._write, _name_of(key), item, time.time())

    def _read(self, name: str) -> FetchedItem | None:
        here, elsewhere = (memoryview(bytearray(_ENTRY_BYTES)) for _ in range(2))
        found: list[Any] = []
        if self._files.read(name, 0, here):
            found.append(json.loads(bytes(here)))
        if self._objects is not None and self._objects.read(name, elsewhere):
            found.append(json.loads(bytes(elsewhere)))
        try:
            item = max(found, key=lambda each: each["named_s"])["item"]
            return FetchedItem(MediaFacts(**item["facts"]), item["mm_hash"], item["num_bytes"])
        except (KeyError, TypeError, ValueError):  # nothing, forgotten, or of another release
            return None

    def _write(self, name: str, item: FetchedItem | None, named_s: float) -> None:
        entry = _entry(item, named_s)
        if item is None or len(entry) > _ENTRY_BYTES:
            if self._read(name) is None:
                return
            entry = _entry(None, named_s)
        self._files.remove(name)
        with suppress(OSError):  # a full disk keeps no name
            self._files.write({name: entry})
        if self._objects is not None:
            self._objects.write(name, entry)

    def close(self) -> None:
        """Ends the thread, once what waits is written."""
        self._thread.shutdown()


def _entry(item: FetchedItem | None, named_s: float) -> memoryview:
    """Returns what a name stands for since a Unix time; None for nothing that is kept."""
    entry = {"named_s": named_s, "item": None if item is None else asdict(item)}
    return memoryview(json.dumps(entry).encode().ljust(_ENTRY_BYTES))


def _name_of(key: _Key) -> str:
    """Returns a digest: no file says what a client calls a medium."""
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


def _is_kept(item: FetchedItem) -> bool:
    """Returns whether the facts of a medium, without its bytes, are enough to plan it."""
    facts = item.facts
    return facts.kind == "video" and not facts.is_frame_list and not facts.num_pictures


class NamedMedia:
    """Keeps URLs by name, up to a number and a size, those named last by each client. Thread-safe.

    Where there is no room, the client that has most loses what it named first.
    ask_others: gets the answers of other fronts, which name media too; None without any
    tell_others: does not wait for answers
    """

    def __init__(self, max_media: int, max_bytes: int, kept: KeptNames | None = None) -> None:
        """kept: outlives the server; None for nothing."""
        self.ask_others: Callable[[NameAsked], Coroutine[Any, Any, Sequence[str]]] | None = None
        self.tell_others: Callable[[NameAsked], None] = lambda _: None
        self._kept = kept
        self._known: dict[_Key, FetchedItem] = {}  # of names in `_urls`
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

    async def completed(
        self, namespace: bytes, references: Sequence[MediaReference], client: str = ""
    ) -> tuple[MediaReference, ...]:
        """Returns references as `found` does. Names not in memory are asked for, and looked for on disk.

        client: has the share of what another front had
        """
        named = list(references)
        for place, each in enumerate(named):
            key = (namespace, each.kind, each.uuid)
            if each.uuid and not each.url and key not in self._urls:
                named[place] = await self._sought(key, each, client)
        return self.found(namespace, named)

    async def _sought(self, key: _Key, reference: MediaReference, client: str) -> MediaReference:
        """Returns a medium with what other fronts or the disk know of its name."""
        urls = () if self.ask_others is None else await self.ask_others(NameAsked(key))
        if urls:
            with self._lock:
                self._set(key, urls[0], client)
            return replace(reference, url=urls[0])
        return reference if self._kept is None else replace(reference, known=await self._kept.known(key))

    async def answer(self, asked: NameAsked) -> str | None:
        """Answers another front: the URL of a name, None if it is not known. A taken name is forgotten."""
        with self._lock:
            if asked.is_taken and asked.key in self._urls:
                self._forget(asked.key)
            return self._urls.get(asked.key)

    def found(self, namespace: bytes, references: Sequence[MediaReference]) -> tuple[MediaReference, ...]:
        """Returns the references with the URLs of those that came as a name alone.

        Raises UnknownUuidError for a name that is not known, or not any more.
        """
        return tuple(
            each if each.url or each.known or not each.uuid else self._found(namespace, each)
            for each in references
        )

    def _found(self, namespace: bytes, reference: MediaReference) -> MediaReference:
        key = (namespace, reference.kind, reference.uuid)
        with self._lock:
            url = self._urls.get(key)
            if url is None:
                name = reference.uuid[:_MAX_SHOWN_CHARS]
                raise UnknownUuidError(
                    f"{reference.label}: received the uuid {name!r} without {reference.kind}_url; allowed: "
                    "one sent before with its URL, by the same key and cache_salt, while a front keeps it; "
                    "send it again with its URL"
                )
            self._names[self._clients[key]].move_to_end(key)
            return replace(reference, url=url, known=self._known.get(key))

    def keep(
        self,
        namespace: bytes,
        references: Sequence[MediaReference],
        client: str = "",
        sources: Sequence[MediaSource] = (),
    ) -> None:
        """Keeps the media that have names; one too large for its share is not kept.

        client: has the share. sources: what was found out about each.
        """
        for place, each in enumerate(references):
            key = (namespace, each.kind, each.uuid)
            if each.uuid and each.url and _num_bytes(each.uuid, each.url) <= self._max_bytes // _SHARE:
                with self._lock:
                    is_new = self._urls.get(key) != each.url
                    self._set(key, each.url, client)
                if is_new:
                    self.tell_others(NameAsked(key, is_taken=True))
            if each.uuid and each.url and each.kind == "video" and self._kept is not None and sources:
                source = sources[place]
                item = FetchedItem(source.facts, source.mm_hash, source.num_bytes)
                self._keep_known(self._kept, key, item if _is_kept(item) else None)

    def _keep_known(self, kept: KeptNames, key: _Key, item: FetchedItem | None) -> None:
        with self._lock:
            is_same = item is not None and self._known.get(key) == item
            if item is not None and key in self._urls:
                self._known[key] = item
        if not is_same:
            kept.keep(key, item)

    def close(self) -> None:
        """Ends what writes names."""
        if self._kept is not None:
            self._kept.close()

    def _set(self, key: _Key, url: str, client: str) -> None:
        if key in self._urls:
            self._forget(key)
        self._urls[key], self._clients[key] = url, client
        self._names.setdefault(client, OrderedDict())[key] = None
        self._client_bytes[client] += _num_bytes(key[2], url)
        while len(self._urls) > self._max_media:
            largest = max(self._names, key=lambda client: len(self._names[client]))
            self._forget(next(iter(self._names[largest])))
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._names[max(self._client_bytes, key=self._client_bytes.__getitem__)])))

    def _forget(self, key: _Key) -> None:
        url, client = self._urls.pop(key), self._clients.pop(key)
        self._known.pop(key, None)
        del self._names[client][key]
        self._client_bytes[client] -= _num_bytes(key[2], url)
        if not self._names[client]:
            del self._names[client], self._client_bytes[client]


def _num_bytes(uuid: str, url: str) -> int:
    """Returns the bytes of both texts in memory: one of each character, four unless all are ASCII."""
    return sum(len(text) * (1 if text.isascii() else 4) for text in (uuid, url))
