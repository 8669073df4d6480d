"""Lists, checks and removes what an object store keeps: see `slabs` and `object_values`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import TYPE_CHECKING

from epd.errors import UnavailableError
from epd.late_module import LateModule
from epd.store.file_format import holds, piece_digest
from epd.store.object_store import open_store, read_whole
from epd.store.object_values import SUFFIX
from epd.store.piece_files import ABOUT, Contents, texts_of
from epd.store.slabs import Place, places_of

if TYPE_CHECKING:
    from pyarrow import fs
    from pyarrow.fs import FileInfo
else:
    fs = LateModule("pyarrow.fs")

# Seconds after which a slab without a list is no longer being written.
_WRITING_S = 86_400.0


class ObjectContents:
    """What is kept at a URL. Raises RequestError for a bad one, UnavailableError where it does not answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        with self._answering():
            self._system, self._root = open_store(url)
            listed = self._system.get_file_info(fs.FileSelector(self._root, recursive=True))
        self._objects = {info.path: info for info in listed if info.is_file}

    def contents(self) -> Iterator[Contents]:
        """Yields what each namespace has, by name. used_s: when it was last written."""
        for path in sorted(path for path in self._objects if path.endswith(f"/{ABOUT}")):
            folder = path.removesuffix(f"/{ABOUT}")
            inside = self._inside(folder)
            lists = [info for info in inside if info.path.endswith(".keys")]
            num_pieces = sum(len(self._places(info)) for info in lists)
            num_pieces += sum(info.path.endswith(SUFFIX) for info in inside)
            num_bytes = sum(info.size or 0 for info in inside)
            used_s = max((_written_s(info) for info in inside), default=0.0)
            about = texts_of(self._read(path))
            yield Contents(folder.rpartition("/")[2], about, num_pieces, num_bytes, used_s)

    def remove(self, namespace: str, before_s: float = math.inf) -> int:
        """Removes a namespace's slabs that were written before, Unix time. Returns their bytes.

        Lists go first, so that no list ever names what is not there.
        """
        old = [info for info in self._inside(f"{self._root}/{namespace}") if _written_s(info) <= before_s]
        old = [info for info in old if not info.path.endswith(f"/{ABOUT}")]
        for info in sorted(old, key=lambda info: info.path.endswith(".slab")):
            self._delete(info)
        return sum(info.size or 0 for info in old)

    def verify(self) -> Iterator[tuple[str, int, bool]]:
        """Yields each slab or value, its number of pieces, and whether all are whole. Damaged ones go.

        A slab without a list goes too, unless it may still be written.
        """
        for each in self.contents():
            inside = {info.path: info for info in self._inside(f"{self._root}/{each.namespace}")}
            for path, info in inside.items():
                if path.endswith(".keys"):
                    places = self._places(info)
                    slab = path.removesuffix(".keys") + ".slab"
                    is_whole = bool(places) and self._is_whole(each.namespace, slab, places)
                    yield slab, len(places), is_whole
                    if not is_whole:
                        self._delete(info)
                        if slab in inside:
                            self._delete(inside[slab])
                elif path.endswith(SUFFIX):
                    data = BytesIO(self._read(path))
                    is_whole = holds(data, each.namespace, info.base_name.removesuffix(SUFFIX))
                    yield path, 1, is_whole
                    if not is_whole:
                        self._delete(info)
                elif path.removesuffix(".slab") + ".keys" not in inside and self._is_left(info):
                    self._delete(info)

    def _is_left(self, info: FileInfo) -> bool:
        """Returns whether it is a slab that nobody writes any more."""
        return info.path.endswith(".slab") and _written_s(info) < time.time() - _WRITING_S

    def _is_whole(self, namespace: str, slab: str, places: dict[str, Place]) -> bool:
        """Reads a slab piece by piece."""
        large = [each for each in places.values() if not each.small]
        with self._answering(), suppress(FileNotFoundError, ValueError):
            file = self._system.open_input_file(slab) if large else None
            for key, place in places.items():
                if place.small or file is None:
                    data = bytes.fromhex(place.small)
                elif 0 <= place.offset <= file.size() - place.num_bytes:
                    data = file.read_at(place.num_bytes, place.offset)
                else:
                    return False
                if piece_digest(namespace, key, memoryview(data)).hex() != place.digest:
                    return False
            return True
        return False

    def _inside(self, folder: str) -> list[FileInfo]:
        return [info for path, info in self._objects.items() if path.rpartition("/")[0] == folder]

    def _places(self, info: FileInfo) -> dict[str, Place]:
        return places_of(info.base_name.removesuffix(".keys"), self._read(info.path))

    def _read(self, path: str) -> bytes:
        with self._answering():
            return read_whole(self._system, path)

    def _delete(self, info: FileInfo) -> None:
        with self._answering(), suppress(FileNotFoundError):
            self._system.delete_file(info.path)
        self._objects.pop(info.path, None)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raises UnavailableError where the store fails: what it does not give now may be whole."""
        try:
            yield
        except OSError as error:
            said = f"the object store '{self._url}' gave {error}; check URL and key"
            raise UnavailableError(said) from None


def _written_s(info: FileInfo) -> float:
    return (info.mtime_ns or 0) / 1e9
