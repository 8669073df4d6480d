"""Keeps files of clients in a folder: each its bytes, and a record that is written last.

files/ID.data      the bytes
files/ID.json      whose it is, its name, its size; without it there is no file. Its time is when it expires
files/ID.part      an upload that is under way, or was when its server ended

`upload_store.py` keeps uploads in parts beside them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec

from epd.errors import NotFoundError, OverloadedError, RequestError, RequestLimitError
from epd.serve_app.fair_threads import FairThreads, ResultT
from epd.serve_app.files.records import (
    MEDIA_PURPOSES,
    FileObject,
    Purpose,
    StoredFile,
    read_record,
    write_record,
)
from epd.serve_app.files.settings import FileSettings, check_id, new_id, not_found

P = ParamSpec("P")

_ABANDONED_S = 24 * 3600.0
_NEVER_S = 2**31 - 1  # the latest time of every file system
# Threads for what blocks, and those that one owner may have.
_NUM_THREADS, _MAX_PER_OWNER = 8, 4


class FolderRoom:
    """Holds the folder of files, and each owner's, to what they may take."""

    def __init__(self, settings: FileSettings, owned_by: Callable[[str], list[FileObject]]) -> None:
        """owned_by: lists an owner's files"""
        self._settings, self._owned_by = settings, owned_by
        self._folder = settings.files_folder

    def check_number(self, owner: str) -> None:
        """Raises OverloadedError if there are as many files as allowed, of all or of the owner."""
        num_files, most = sum(1 for _ in self._folder.glob("file-*.json")), self._settings.max_files
        if num_files >= most:
            raise OverloadedError(f"the server keeps {num_files} files; allowed: {most}; delete some")
        if not self._settings.has_share(num_files, most, lambda: len(self._owned_by(owner))):
            raise OverloadedError(
                f"you keep as many files as are free ({most - num_files}); allowed: fewer; delete some"
            )

    def check_share(self, owner: str, num_bytes: int) -> None:
        """Raises RequestLimitError for an owner with more bytes than are free.

        num_bytes: of the owner's that are there and no file yet
        """
        taken, most = self._num_bytes(), self._settings.max_folder_bytes
        own = partial(self._num_own_bytes, owner, num_bytes)
        if not self._settings.has_share(taken, most, own):
            raise RequestLimitError(
                f"your files would have more bytes than are left free, {max(0, most - taken)}; allowed: "
                "fewer; delete some"
            )

    def check_bytes(self) -> None:
        """Raises RequestLimitError if the folder holds more than it may."""
        num_bytes = self._num_bytes()
        if num_bytes > self._settings.max_folder_bytes:
            raise RequestLimitError(
                f"all files would have {num_bytes} bytes; allowed: {self._settings.max_folder_bytes}; "
                "delete some, or start the server with a larger --max-files-bytes"
            )

    def _num_own_bytes(self, owner: str, more: int) -> int:
        return more + sum(file.bytes for file in self._owned_by(owner))

    def _num_bytes(self) -> int:
        num_bytes = 0
        for path in self._folder.iterdir():
            with suppress(OSError):
                num_bytes += path.stat().st_size
        return num_bytes


class FileStore:
    """Finds and changes files. All but `run` blocks, and may be called by any thread of any server."""

    def __init__(self, settings: FileSettings) -> None:
        """Raises RequestError for a folder that cannot be written."""
        self.settings = settings
        self.folder = settings.files_folder
        self.room = FolderRoom(settings, self.owned_by)
        self._threads = FairThreads("files", _NUM_THREADS, _MAX_PER_OWNER)
        try:
            settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"cannot write '{settings.folder}': {error.strerror}; allowed: a folder of this user's; "
                "change --files-dir"
            ) from error
        self._remove_abandoned()

    async def run(
        self, owner: str, work: Callable[P, ResultT], *given: P.args, **options: P.kwargs
    ) -> ResultT:
        """Does what blocks in a thread, owners in turns. Used from one event loop; raises as `work` does."""
        return await self._threads.run(owner, partial(work, *given, **options))

    def close(self) -> None:
        """Ends the threads of `run`."""
        self._threads.close()

    def owned_by(self, owner: str, purpose: str | None = None) -> list[FileObject]:
        """Returns an owner's files, in any order."""
        found = (read_record(path, StoredFile) for path in self.folder.glob("file-*.json"))
        mine = [each.file for each in found if each is not None and each.owner == owner and _is_kept(each)]
        return [file for file in mine if purpose is None or file.purpose == purpose]

    def get(self, owner: str, file_id: str) -> FileObject:
        """Returns a file. Raises NotFoundError for one of another owner too."""
        stored = read_record(self.folder / f"{check_id('file', file_id)}.json", StoredFile)
        if stored is None or stored.owner != owner or not _is_kept(stored):
            raise not_found("file", file_id)
        return stored.file

    def path_of(self, file_id: str) -> Path:
        """Returns where a file's bytes are."""
        return self.folder / f"{file_id}.data"

    def delete(self, owner: str, file_id: str) -> None:
        """Deletes a file. Raises NotFoundError."""
        self.get(owner, file_id)
        self._remove(file_id)

    def remove_expired(self) -> None:
        """Removes files whose time is over. Their room is counted until then.

        Records whose time has not come are not read: uploads would take longer, the more files there are.
        """
        now = time.time()
        for path in self.folder.glob("file-*.json"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime <= now:
                    self._remove_expired(path)

    def _remove_expired(self, record: Path) -> None:
        """Removes a file that has expired; the record of another gets its time."""
        stored = read_record(record, StoredFile)
        if stored is not None and _is_kept(stored):
            _set_expiry(record, stored.file)
        elif stored is not None:
            self._remove(stored.file.id)

    def _remove(self, file_id: str) -> None:
        (self.folder / f"{file_id}.json").unlink(missing_ok=True)
        self.path_of(file_id).unlink(missing_ok=True)

    def new_part(self, owner: str = "") -> Path:
        """Returns where to write an upload. Raises OverloadedError if there is no room for one more file."""
        self.remove_expired()
        self.room.check_number(owner)
        return self.folder / f"{new_id('file')}.part"

    def keep(
        self, part: Path, owner: str, name: str, purpose: Purpose, kept_s: int | None = None
    ) -> FileObject:
        """Makes an upload a file. Raises RequestLimitError if the folder, or its owner, has too much."""
        self.room.check_bytes()
        self.room.check_share(owner, part.stat().st_size)
        return self.adopt(part, owner, part.stem, name, purpose, kept_s)

    def adopt(
        self,
        path: Path,
        owner: str,
        file_id: str,
        name: str,
        purpose: Purpose,
        kept_s: int | None = None,
    ) -> FileObject:
        """Moves a file of this file system here, under an id. Done again, it changes nothing more.

        kept_s: seconds until it expires, None for ever
        """
        data = self.path_of(file_id)
        if path.exists():
            path.replace(data)
        now = int(time.time())
        file = FileObject(
            id=file_id,
            bytes=data.stat().st_size,
            created_at=now,
            filename=name,
            purpose=purpose,
            expires_at=None if kept_s is None else now + kept_s,
        )
        record = self.folder / f"{file_id}.json"
        write_record(record, StoredFile(owner=owner, file=file))
        _set_expiry(record, file)
        return file

    def _remove_abandoned(self) -> None:
        """Removes uploads that ended with their servers."""
        for path in self.folder.glob("*.part"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    os.unlink(path)


def _set_expiry(record: Path, file: FileObject) -> None:
    """Gives a record the time at which its file expires."""
    expires_s = _NEVER_S if file.expires_at is None else file.expires_at
    with suppress(FileNotFoundError):  # it was deleted
        os.utime(record, (expires_s, expires_s))


def _is_kept(stored: StoredFile) -> bool:
    return stored.file.expires_at is None or time.time() < stored.file.expires_at


def names_file(url: str) -> bool:
    return url.startswith("file-")


def check_media(files: FileStore | None, owner: str, names: Sequence[str]) -> None:
    """Checks that an owner may ask about files. Raises NotFoundError, RequestError for other purposes.

    files: of the server, None if it keeps none
    """
    if files is None:
        raise NotFoundError(
            f"received the file {names[0][:100]!r} as a medium; allowed: on servers that keep files; start "
            "the server with --files-dir FOLDER"
        )
    for name in names:
        purpose = files.get(owner, name).purpose
        if purpose not in MEDIA_PURPOSES:
            raise RequestError(
                f"received the file {name} of purpose {purpose!r} as a medium; allowed: "
                f"{', '.join(MEDIA_PURPOSES)}; upload it with one"
            )
