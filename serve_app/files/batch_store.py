"""Keeps batches in folders that several servers share; one server at a time drives a batch.

batches/ID/batch.json            the batch, replaced as a whole
batches/ID/cancel                a client wants it cancelled
batches/ID/lock                  locked by the server that drives it; the lock ends with its process
batches/ID/results.jsonl, results.errors.jsonl    a line for each one that has ended
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epd.errors import OverloadedError, RequestError, StorageFullError
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import (
    FINAL,
    WINDOW_S,
    BatchObject,
    BatchRequest,
    StoredBatch,
    read_record,
    write_record,
)
from epd.serve_app.files.settings import check_id, new_id, not_found

_CANCELLABLE = ("validating", "in_progress", "cancelling")


class BatchStore:
    """Finds and changes batches. Its methods block, and may be called by any thread of any server."""

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self.settings = files.settings
        self._folder = files.settings.folder / "batches"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._ended: set[str] = set()

    def create(self, owner: str, asked: BatchRequest) -> BatchObject:
        """Keeps a new batch. Raises NotFoundError, RequestError, OverloadedError, StorageFullError."""
        file = self.files.get(owner, asked.input_file_id)
        if file.purpose != "batch":
            raise RequestError(f"received the file of purpose {file.purpose!r}; allowed: 'batch'; upload one")
        self._make_room(owner)
        now = int(time.time())
        batch = BatchObject(
            id=new_id("batch"),
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_S,
            **asked.model_dump(),
        )
        try:
            self.folder_of(batch.id).mkdir(mode=0o700)
            self.save(StoredBatch(owner=owner, batch=batch))
        except OSError as error:
            shutil.rmtree(self.folder_of(batch.id), ignore_errors=True)
            raise StorageFullError(
                f"the batch cannot be kept: {error.strerror}; send it again later"
            ) from error
        return batch

    def _make_room(self, owner: str) -> None:
        """Forgets the batch that ended first, if there are too many. Raises OverloadedError if none has.

        Too many of one owner are its own loss.
        """
        stored = [each for name in self._names() if (each := self.read(name)) is not None]
        own, most = [each for each in stored if each.owner == owner], self.settings.max_batches
        is_beyond_share = not self.settings.has_share(len(stored), most, lambda: len(own))
        if len(stored) < most and not is_beyond_share:
            return
        whose = own if is_beyond_share and own else stored
        ended = [each.batch for each in whose if each.batch.status in FINAL]
        if not ended:
            raise OverloadedError(
                f"{len(whose)} batches have not ended; allowed: {most}, and of one client no more than are "
                "left; retry later",
                60.0,
            )
        shutil.rmtree(self.folder_of(min(ended, key=lambda each: each.created_at).id), ignore_errors=True)

    def owned_by(self, owner: str) -> list[BatchObject]:
        """Returns an owner's batches, in any order."""
        stored = (self.read(name) for name in self._names())
        return [self._shown(each) for each in stored if each is not None and each.owner == owner]

    def get(self, owner: str, batch_id: str) -> BatchObject:
        """Returns a batch. Raises NotFoundError for one of another owner too."""
        stored = self.read(check_id("batch", batch_id))
        if stored is None or stored.owner != owner:
            raise not_found("batch", batch_id)
        return self._shown(stored)

    def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Has a batch end without its other lines. Raises NotFoundError, RequestError if it has ended."""
        batch = self.get(owner, batch_id)
        if batch.status not in _CANCELLABLE:
            raise RequestError(
                f"received a batch that is {batch.status}; allowed: {', '.join(_CANCELLABLE)}; leave it"
            )
        self._cancel_path(batch_id).touch()
        return self.get(owner, batch_id)

    def is_cancelled(self, batch_id: str) -> bool:
        return self._cancel_path(batch_id).exists()

    def unfinished(self) -> list[str]:
        """Returns the ids of batches that have not ended, the oldest first."""
        found = []
        for name in self._names():
            stored = None if name in self._ended else self.read(name)
            if stored is not None and stored.batch.status in FINAL:
                self._ended.add(name)
            elif stored is not None:
                found.append((stored.batch.created_at, name))
        return [name for _, name in sorted(found)]

    @contextmanager
    def claimed(self, batch_id: str) -> Iterator[StoredBatch | None]:
        """Yields a batch for this thread alone; None if another one drives it, or it has ended."""
        with (self.folder_of(batch_id) / "lock").open("ab") as lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            stored = self.read(batch_id)
            yield None if stored is None or stored.batch.status in FINAL else stored

    def read(self, batch_id: str) -> StoredBatch | None:
        return read_record(self.folder_of(batch_id) / "batch.json", StoredBatch)

    def save(self, stored: StoredBatch) -> None:
        write_record(self.folder_of(stored.batch.id) / "batch.json", stored)

    def folder_of(self, batch_id: str) -> Path:
        return self._folder / batch_id

    def _names(self) -> list[str]:
        return [path.name for path in self._folder.glob("batch_*")]

    def _cancel_path(self, batch_id: str) -> Path:
        return self.folder_of(batch_id) / "cancel"

    def _shown(self, stored: StoredBatch) -> BatchObject:
        """Returns the batch, cancelling from when its client wants that until its driver has ended it."""
        batch = stored.batch
        if batch.status not in _CANCELLABLE or not self.is_cancelled(batch.id):
            return batch
        at = int(self._cancel_path(batch.id).stat().st_mtime)
        return batch.model_copy(update={"status": "cancelling", "cancelling_at": at})
