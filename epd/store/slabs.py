"""Keeps pieces in an object store, beneath the files of a machine, for all machines that have its URL.

    url/<namespace>/about.json       what the namespace is of, for people
    url/<namespace>/<slab>.slab      payloads, one after another
    url/<namespace>/<slab>.keys      of each payload its key, place and digest; small payloads themselves

No object ever changes. The list of keys is written last, so a slab whose writer was killed is not found.
Lists are read once and held; payloads are read by their ranges. One that does not match its digest is a miss,
and is asked for no more. A thread writes and looks for new lists. A store that does not answer is left alone
for a while, and is no longer written to.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any

from epd.late_module import LateModule
from epd.store.file_format import piece_digest
from epd.store.object_store import Namespace, put, read_whole
from epd.store.piece_files import ABOUT, StoreCounts

if TYPE_CHECKING:
    from pyarrow import NativeFile, fs
    from pyarrow.fs import FileInfo, FileSystem
else:
    fs = LateModule("pyarrow.fs")

logger = logging.getLogger(__name__)

# Bytes and seconds after which what waits becomes a slab.
_SLAB_BYTES, _SLAB_S = 1 << 26, 1.0
# Bytes that wait to be written; what comes on top is not.
_MOST_WAITING = 1 << 28
# A payload up to so many bytes stands in the list of keys.
_SMALL_BYTES = 2048
# Pieces that are known at most: those written last.
_MOST_PIECES = 1 << 20
_MOST_OPEN = 32
_LIST_READERS = 8
# A payload and its digest.
_Waiting = tuple[memoryview, bytes]
# Seconds: between looks for new lists, for the first look, for the last slab.
_LOOK_S, _FIRST_LOOK_S, _CLOSE_S = 30.0, 5.0, 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Says where a payload is. small: the payload itself, if it stands in the list."""

    slab: str
    offset: int
    num_bytes: int
    digest: str
    small: str

    @property
    def row(self) -> tuple[int, int, str, str]:
        """Returns it as a list of keys has it."""
        return self.offset, self.num_bytes, self.digest, self.small


class _Queue:
    """Holds payloads that wait to become a slab, each with its digest, by key.

    since_s: when the first of them came, or the last slab was written.
    """

    def __init__(self) -> None:
        self.payloads: OrderedDict[str, _Waiting] = OrderedDict()
        self._num_bytes = 0
        self._since_s = 0.0

    def add(self, key: str, payload: memoryview, digest: bytes) -> None:
        """Adds a payload, unless it waits already or there are too many bytes."""
        if key in self.payloads or self._num_bytes + len(payload) > _MOST_WAITING:
            return
        self._since_s = self._since_s if self.payloads else time.monotonic()
        self.payloads[key] = payload, digest
        self._num_bytes += len(payload)

    def is_due(self, *, at_once: bool) -> bool:
        """Returns whether a slab should be written. at_once: of whatever waits."""
        is_old = time.monotonic() - self._since_s >= _SLAB_S or at_once
        return bool(self.payloads) and (is_old or self._num_bytes >= _SLAB_BYTES)

    def next_slab(self) -> dict[str, _Waiting]:
        """Returns payloads for a slab. They wait until they are dropped."""
        slab, num_bytes = dict[str, _Waiting](), 0
        for key, (payload, digest) in self.payloads.items():
            if slab and num_bytes + len(payload) > _SLAB_BYTES:
                break
            slab[key] = payload, digest
            num_bytes += len(payload)
        return slab

    def drop(self, slab: Mapping[str, _Waiting]) -> None:
        for key, (payload, _) in slab.items():
            self._num_bytes -= len(payload) if self.payloads.pop(key, None) else 0
        self._since_s = time.monotonic()

    def clear(self) -> None:
        self.payloads.clear()
        self._num_bytes = 0


class Slabs:
    """Keeps the pieces of one namespace. Any thread may ask.

    counts: of the files above, which this adds to.
    """

    def __init__(self, url: str, namespace: str, about: Mapping[str, str]) -> None:
        """Looks what is there, for some seconds at most. Raises RequestError as `open_store`."""
        self.counts = StoreCounts()
        self.is_open = True  # for writing
        self._place = Namespace(url, namespace)
        self._about = json.dumps(dict(about), indent=1).encode()
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._lists: dict[str, int] = {}  # that were read, by path, with their sizes
        self._files: OrderedDict[str, NativeFile] = OrderedDict()
        self._waiting = _Queue()
        self._changed = Condition()
        self._looked_s = 0.0
        self._has_missed, self._is_closing = True, False
        self._first_look = Event()
        self._thread = Thread(target=self._run, name="objects", daemon=True)
        try:
            _ = self._place.system
        except OSError as error:
            self._fail(error)
        self._thread.start()
        self._first_look.wait(_FIRST_LOOK_S)

    # Reading

    def __contains__(self, key: str) -> bool:
        is_known = key in self._places
        self._has_missed |= not is_known
        return is_known and not self._place.is_silent

    def read(self, key: str, payload: memoryview) -> bool:
        """Fills a payload, of the right number of bytes. False for one that is not there or not whole."""
        place = self._places.get(key)
        if place is None or self._place.is_silent:
            return False
        if place.num_bytes == len(payload) and self._fill(place, key, payload):
            return True
        if not self._place.is_silent:
            self._places.pop(key, None)
        return False

    def _fill(self, place: Place, key: str, payload: memoryview) -> bool:
        try:
            data = bytes.fromhex(place.small) if place.small else self._range(place)
        except (FileNotFoundError, ValueError):
            return False
        except OSError as error:
            self._fail(error)
            return False
        digest = piece_digest(self._place.name, key, memoryview(data)).hex()
        if len(data) != len(payload) or digest != place.digest:
            return False
        payload[:] = data
        return True

    def _range(self, place: Place) -> bytes:
        """Reads a payload out of its slab, as far as that goes. Raises OSError."""
        path = self._place.path(f"{place.slab}.slab")
        with self._changed:
            file = self._files.get(path)
        if file is None:
            file = self._place.system.open_input_file(path)
            with self._changed:
                self._files[path] = file
                if len(self._files) > _MOST_OPEN:
                    self._files.popitem(last=False)
        is_cut = place.offset + place.num_bytes > file.size()
        return b"" if is_cut else bytes(file.read_at(place.num_bytes, place.offset))

    # Writing

    def add(self, key: str, payload: memoryview, digest: bytes) -> None:
        """Queues a payload, which is not written to meanwhile, with its `piece_digest`. Never waits."""
        with self._changed:
            if self.is_open and key not in self._places:
                self._waiting.add(key, payload, digest)
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread once what waits is written, or after some time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    self._is_due, timeout=_SLAB_S if self._waiting.payloads else _LOOK_S / 10
                )
                slab = self._waiting.next_slab() if self._waiting.is_due(at_once=self._is_closing) else {}
                is_over = self._is_closing and not slab
            if is_over:
                return
            try:
                if slab:
                    self._write(slab)
                if self._is_look_due():
                    self._look()
            except (OSError, ValueError) as error:
                self._fail(error)
            finally:
                self._first_look.set()

    def _is_due(self) -> bool:
        return self._is_closing or self._waiting.is_due(at_once=False) or self._is_look_due()

    def _is_look_due(self) -> bool:
        waited_s = time.monotonic() - self._looked_s
        return self._has_missed and not self._place.is_silent and (not self._looked_s or waited_s >= _LOOK_S)

    def _write(self, slab: Mapping[str, _Waiting]) -> None:
        """Writes a slab, then its list. Raises OSError; in any case its payloads wait no longer."""
        name, places, offset = uuid.uuid4().hex, dict[str, Place](), 0
        try:
            if not self._lists:
                self._put(ABOUT, [memoryview(self._about)])
            large = []
            for key, (payload, digest) in slab.items():
                is_small = len(payload) <= _SMALL_BYTES
                small = bytes(payload).hex() if is_small else ""
                places[key] = Place(name, offset, len(payload), digest.hex(), small)
                if not is_small:
                    large.append(payload)
                    offset += len(payload)
            if large:
                self._put(f"{name}.slab", large)
            text = json.dumps([[key, *each.row] for key, each in places.items()]).encode()
            self._put(f"{name}.keys", [memoryview(text)])
            self.counts.objects_written_bytes += offset + len(text)
            self._lists[self._place.path(f"{name}.keys")] = len(text)
            self._learn(places)
        finally:
            with self._changed:
                self._waiting.drop(slab)

    def _put(self, name: str, parts: list[memoryview]) -> None:
        """Writes an object as a whole, as far as the store can. Raises OSError."""
        put(self._place.system, self._place.path(name), parts)

    def _look(self) -> None:
        """Reads the lists that are new, those written last first. Raises OSError."""
        self._has_missed, self._looked_s = False, time.monotonic()
        new = [
            info
            for info in lists_of(self._place.system, self._place.path("").rstrip("/"))
            if self._lists.get(info.path) != info.size
        ]

        def read(info: FileInfo) -> dict[str, Place]:
            return places_of(info.base_name.removesuffix(".keys"), read_whole(self._place.system, info.path))

        new.sort(key=lambda info: info.mtime_ns or 0, reverse=True)
        with ThreadPoolExecutor(_LIST_READERS, "objects-lists") as readers:
            for info, places in zip(new, readers.map(read, new), strict=True):
                self._lists[info.path] = info.size
                self._learn(places)

    def _learn(self, places: Mapping[str, Place]) -> None:
        with self._changed:
            for key, place in places.items():
                if len(self._places) < _MOST_PIECES:
                    self._places.setdefault(key, place)

    def _fail(self, error: Exception) -> None:
        """Leaves the store alone for a while, and writes no more."""
        if self.is_open:
            logger.warning("nothing is kept in %s any longer: %s", self._place.url, error)
        with self._changed:
            self.is_open = False
            self._waiting.clear()
            self._files.clear()
        self._place.leave_alone()
        self._looked_s, self._has_missed = time.monotonic(), True
        self._first_look.set()


def lists_of(system: FileSystem, folder: str) -> list[FileInfo]:
    """Returns the lists of keys below a folder. Raises OSError."""
    selector = fs.FileSelector(folder, allow_not_found=True)
    return [info for info in system.get_file_info(selector) if info.path.endswith(".keys")]


def places_of(slab: str, text: bytes) -> dict[str, Place]:
    """Returns what a list of keys says, as far as it says anything."""
    try:
        rows: Any = json.loads(text)
        return {
            str(key): Place(slab, int(at), int(size), str(digest), str(small))
            for key, at, size, digest, small in rows
        }
    except (ValueError, TypeError):
        return {}
