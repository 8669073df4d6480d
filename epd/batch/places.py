"""Finds files on disks and in object stores: tables, parts of tables, and media.

    videos/rows.parquet             a path
    s3://bucket/rows.parquet        AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL and their like
    gs://bucket/rows.parquet        GOOGLE_APPLICATION_CREDENTIALS

Object stores and Parquet need pyarrow: `pip install "epd-vlm[cloud]"`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

from epd.errors import RequestError

REMOTE = ("s3://", "gs://")
_BESIDE = ".writing"
_FILES = (".jsonl", ".ndjson", ".csv")  # results that are no parts of a table in Parquet


def is_remote(place: str | Path) -> bool:
    return str(place).startswith(REMOTE)


def check_apart(out: str, table: str) -> None:
    """Raises RequestError where results would replace the table that is read, or become parts of it."""
    if is_remote(out) or is_remote(table):
        place, source = PurePath(out), PurePath(table)
    else:
        place, source = Path(out).resolve(), Path(table).resolve()
    is_part = source in place.parents and place.suffix.lower() not in _FILES
    if place == source or is_part:
        raise RequestError(f"'{out}' is the input, or a part of it; name another place for the results")


def arrow(name: str) -> Any:
    """Returns a module of pyarrow. Raises RequestError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise RequestError(
            f"received Parquet or an object store, and pyarrow is not installed ({error}); allowed: with it; "
            "pip install 'epd-vlm[cloud]'"
        ) from error


class Folder:
    """Reads and writes files below a place by their names. A reader never sees half of a file."""

    def __init__(self, place: str | Path) -> None:
        """Makes no folder yet. Raises RequestError for a place that cannot be."""
        self.place = str(place).rstrip("/") if is_remote(place) else str(Path(place).absolute())
        with telling(place):
            files = arrow("pyarrow.fs")
            if is_remote(place):
                self.filesystem, self._root = files.FileSystem.from_uri(self.place)
            else:
                self.filesystem, self._root = files.LocalFileSystem(), self.place

    def at(self, name: str) -> str:
        """Returns the path of a file for `filesystem`."""
        return f"{self._root}/{name}"

    def names(self, suffixes: Collection[str] = ()) -> list[str]:
        """Returns the names of files below, sorted, of some suffixes; none that begins with . or _."""
        selector = arrow("pyarrow.fs").FileSelector(self._root, recursive=True, allow_not_found=True)
        with telling(self.place):
            found = self.filesystem.get_file_info(selector)
        names = [PurePath(each.path).relative_to(self._root) for each in found if each.is_file]
        return sorted(
            str(name)
            for name in names
            if not any(part.startswith((".", "_")) for part in name.parts)
            and (not suffixes or name.suffix.lower() in suffixes)
        )

    def read(self, name: str) -> bytes | None:
        """Returns a file, None where there is none."""
        with telling(self.place):
            try:
                with self.filesystem.open_input_stream(self.at(name)) as file:
                    return bytes(file.read())
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Writes a whole file, which is on the disk or in the store on return. Raises OSError."""
        if not is_remote(self.place):
            _write_local(Path(self.at(name)), data)
            return
        with self.filesystem.open_output_stream(self.at(name)) as file:
            file.write(data)

    def delete(self, name: str) -> None:
        with telling(self.place):
            self.filesystem.delete_file(self.at(name))


def _write_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}{_BESIDE}")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def copied(place: str, folder: Path) -> Path:
    """Returns a copy of a remote file in a folder. Raises RequestError where it cannot be read."""
    parent, _, name = place.rpartition("/")
    out = folder / name
    held = Folder(parent)
    with telling(place), held.filesystem.open_input_stream(held.at(name)) as file, out.open("wb") as copy:
        shutil.copyfileobj(file, copy)
    return out


@contextmanager
def telling(place: str | Path) -> Iterator[None]:
    """Raises RequestError for what pyarrow says about a place."""
    try:
        yield
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(
            f"cannot use '{place}': {first}; give a file or folder that exists, and the store's credentials"
        ) from error
