"""Drives batches on a disk that fails at drawn operations, by servers that end at some: one seed decides all.

Every line is in the results once, with its answer, or in the errors with its reason; nothing else is left. A
batch that its client cancels, or whose input is deleted, has some of them. Endpoints are not asked.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from tempfile import mkstemp
from threading import Event
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

from epd.errors import EPDError
from epd.serve_app.files.batch_runner import BatchRun
from epd.serve_app.files.batch_store import BatchStore
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import FINAL, BatchRequest
from epd.serve_app.files.settings import FileSettings
from epd.store import file_format
from tests.batch.fakes import FakeBackend
from tests.faults.virtual_time import Clock, decided

# A full disk takes half of what is written, a broken one nothing. A server that ends has written half.
DiskFault = Literal["full", "broken", "ends"]
_ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO}
_OWNER = "owner"
_ENDS = ("", "", "cancel", "delete")  # what a client does to its batch
_MAX_ROUNDS = 60
_NUM_OPERATIONS = 40  # among which faults are drawn


class ServerEndedError(BaseException):
    """Ends a server at once, as SIGKILL does: it does nothing more to the disk."""


class Disk:
    """Fails operations below a folder.

    faults: by the number of the operation
    operations: what was done, or tried
    failed: which faults came at which kinds of operations
    left_open: files that were open, and locked, after an error
    """

    def __init__(self, folder: Path, faults: Mapping[int, DiskFault]) -> None:
        self.operations: list[str] = []
        self.failed: set[str] = set()
        self.left_open: set[str] = set()
        self._folder = str(folder)
        self._faults = faults
        self._has_ended = False

    def restart(self) -> None:
        """Another server takes the place of the one that ended."""
        self._has_ended = False

    def note_open(self) -> None:
        """Notes the files below the folder that this process has open."""
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if (path := os.readlink(link)).startswith(self._folder):
                    self.left_open.add(Path(path).name)

    def _fault(self, operation: str, path: str | Path) -> DiskFault | None:
        """Counts an operation, and returns how it fails; None if it does not."""
        if not str(path).startswith(self._folder):
            return None
        if self._has_ended:
            raise ServerEndedError
        self.operations.append(f"{operation} {Path(path).suffix}")
        fault = self._faults.get(len(self.operations))
        self.failed |= {f"{fault} at {operation}"} if fault is not None else set()
        return fault

    def _fail(self, fault: DiskFault | None) -> None:
        if fault == "ends":
            self._has_ended = True
            raise ServerEndedError
        if fault is not None:
            raise OSError(_ERRORS[fault], os.strerror(_ERRORS[fault]))

    def _failing(self, operation: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        """Returns an operation that fails as a whole. Its first argument is a path, or a descriptor."""

        def done(place: Any, *arguments: Any, **options: Any) -> Any:
            is_read = operation == "open" and not set("wax+") & set(str(arguments[0] if arguments else "r"))
            if not is_read:
                self._fail(self._fault(operation, _path(place)))
            return whole(place, *arguments, **options)

        return done

    def _half_writing(self, write: Callable[[Any], int], place: int) -> Callable[[Any], int]:
        """Returns what writes to a descriptor: half of it where the disk is full, or the server ends."""

        def half_written(content: Any) -> int:
            fault = self._fault("write", _path(place))
            if fault in ("full", "ends"):
                write(content[: len(content) // 2])
            self._fail(fault)
            return write(content)

        return half_written

    def _made(self, *, prefix: str, dir: Path) -> tuple[int, str]:
        self._fail(self._fault("open", dir))
        return mkstemp(prefix=prefix, dir=dir)

    @contextmanager
    def _opened(self, descriptor: int, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Opens a descriptor as a file whose writes fail."""
        with open(descriptor, *arguments, **options) as file:
            yield SimpleNamespace(write=self._half_writing(file.write, descriptor))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Lets the operations of this process fail."""
        write = os.write

        def half_written(descriptor: int, content: bytes) -> int:
            return self._half_writing(partial(write, descriptor), descriptor)(content)

        with (
            mock.patch.object(os, "write", half_written),
            mock.patch.object(file_format, "open", self._opened, create=True),
            mock.patch.object(file_format, "mkstemp", self._made),
            mock.patch.object(os, "fsync", self._failing("fsync", os.fsync)),
            mock.patch.object(Path, "open", self._failing("open", Path.open)),
            mock.patch.object(os, "link", self._failing("link", os.link)),
            mock.patch.object(Path, "replace", self._failing("replace", Path.replace)),
        ):
            yield


def _path(place: int | Path) -> str | Path:
    return os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else place


def drawn_faults(seed: int) -> dict[int, DiskFault]:
    """Draws faults: single ones, and runs of them, as of a disk that is full for a while."""
    rng = Random(f"{seed} disk")
    faults: dict[int, DiskFault] = {}
    for _ in range(rng.randint(1, 4)):
        first, fault = rng.randint(1, _NUM_OPERATIONS), rng.choice(("full", "broken", "ends"))
        faults |= dict.fromkeys(range(first, first + rng.choice((1, 1, 3, 8))), fault)
    return faults


def run_batch_on(folder: Path, seed: int, faults: Mapping[int, DiskFault]) -> tuple[list[str], Disk]:
    """Drives a batch of drawn lines to its end. Returns what was wrong, and the disk."""
    rng = Random(f"{seed} lines")
    names = [f"line{number}" for number in range(rng.randint(1, 10))]
    bad = {name for name in names if rng.random() < 0.2}
    settings, disk = FileSettings(folder), Disk(folder, faults)
    with decided(Clock()):
        batch_id = _begun(settings, [_line(name, is_bad=name in bad) for name in names])
        store, end, last = BatchStore(FileStore(settings)), rng.choice(_ENDS), rng.randint(1, 3)
        for number in range(_MAX_ROUNDS):
            if number == last:
                _end_early(store, batch_id, end)
            if not _drives_on(settings, disk):
                break
        left = [f"left open: {name}" for name in sorted(disk.left_open)]
        return [*left, *_wrong(store, batch_id, names, bad)], disk


def _end_early(store: BatchStore, batch_id: str, end: str) -> None:
    """Does what its client does to a batch, which may have ended."""
    with suppress(EPDError):
        if end == "cancel":
            store.cancel(_OWNER, batch_id)
        elif end == "delete":
            store.files.delete(_OWNER, store.get(_OWNER, batch_id).input_file_id)


def _line(name: str, *, is_bad: bool) -> str:
    content = [{"type": "text", "text": f"what is {name}?"}]
    body = "no body" if is_bad else {"messages": [{"role": "user", "content": content}]}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


def _begun(settings: FileSettings, lines: list[str]) -> str:
    store = BatchStore(FileStore(settings))
    part = store.files.new_part()
    part.write_text("\n".join(lines))
    source = store.files.adopt(part, _OWNER, part.stem, "lines.jsonl", "batch")
    asked = BatchRequest(input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h")
    return store.create(_OWNER, asked).id


def _drives_on(settings: FileSettings, disk: Disk) -> bool:
    """Does what a server does until it ends, or must wait for its disk. Returns whether a batch is left."""
    try:
        with disk.failing():
            store = BatchStore(FileStore(settings))
            for batch_id in store.unfinished():
                with store.claimed(batch_id) as stored:
                    if stored is not None:
                        BatchRun(store, stored, lambda _path: FakeBackend(), Event()).drive()  # type: ignore[arg-type, return-value]
            return False
    except (EPDError, OSError):  # as `BatchRunner`: it waits, and tries again
        disk.note_open()
        return True
    except ServerEndedError:
        disk.restart()
        return True


def _wrong(store: BatchStore, batch_id: str, names: list[str], bad: set[str]) -> list[str]:
    """Returns what is wrong at the end."""
    batch = store.get(_OWNER, batch_id)
    found = [] if batch.status in FINAL else ["it has not ended"]
    is_there = store.files.path_of(batch.input_file_id).exists()
    found += [f"it failed: {batch.errors}"] if batch.status == "failed" and is_there else []
    answers, reasons = (_lines(store, each) for each in (batch.output_file_id, batch.error_file_id))
    got = Counter(each["custom_id"] for each in answers), Counter(each["custom_id"] for each in reasons)
    all_lines = Counter(set(names) - bad), Counter(bad)
    is_whole = got == all_lines or batch.status != "completed"
    if not (is_whole and all(map(Counter.__le__, got, all_lines))):
        found.append(f"answered {dict(got[0])}, explained {dict(got[1])}, of {names} without {bad}")
    for each in answers:
        with suppress(KeyError):
            text = each["response"]["body"]["choices"][0]["message"]["content"]
            if text == f"what is {each['custom_id']}?":
                continue
        found.append(f"{each['custom_id']} has the answer {each}")
    counts = batch.request_counts
    if batch.status == "completed" and (counts.completed, counts.failed) != (len(answers), len(reasons)):
        found.append(f"it counts {counts}")
    left = [path.name for path in store.settings.folder.rglob("*.part")]
    return [*found, f"left behind: {left}"] if left else found


def _lines(store: BatchStore, file_id: str | None) -> list[Any]:
    """Returns the lines of a file of results; for one that is none, its text."""
    if file_id is None:
        return []
    found = []
    for text in store.files.path_of(file_id).read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            found.append({"custom_id": text})
    return found
