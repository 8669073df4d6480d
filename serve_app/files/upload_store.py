"""Keeps uploads that come in parts: a cut one goes on from its last part.

files/upload_ID.json          whose it is, and what it will be; its time is that of the last part
files/upload_ID.part_ID       a part, whole
files/part_ID.part            a part that is under way
files/upload_ID.whole         the parts joined so far, while the upload is completed
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from epd.errors import OverloadedError, RequestError, RequestLimitError
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import (
    MAX_PARTS,
    CompleteRequest,
    FileObject,
    PartObject,
    StoredUpload,
    UploadObject,
    UploadRequest,
    UploadState,
    read_record,
    write_record,
)
from epd.serve_app.files.settings import FileSettings, check_id, new_id, not_found

_PATIENCE_S = 6 * 3600
_COPIED_BYTES = 4 << 20


class UploadStore:
    """Finds and changes uploads. Its methods block, and may be called by any thread of any server."""

    def __init__(self, files: FileStore) -> None:
        """files: where complete uploads go."""
        self.files = files
        self.settings = files.settings
        self._folder = files.folder
        self._seen: dict[str, tuple[float, float]] = {}  # the last change, and since when it is known
        self.remove_expired()

    def create(self, owner: str, asked: UploadRequest) -> UploadObject:
        """Begins an upload. Raises RequestLimitError for too large a file, OverloadedError for too many."""
        self.remove_expired()
        _check_size(self.settings, asked)
        self._check_number(owner)
        self.files.room.check_number(owner)
        now = int(time.time())
        upload = UploadObject(
            id=new_id("upload"),
            bytes=asked.bytes,
            created_at=now,
            filename=asked.filename,
            purpose=asked.purpose,
            expires_at=now + _PATIENCE_S,
        )
        kept_s = None if asked.expires_after is None else asked.expires_after.seconds
        self._save(StoredUpload(owner=owner, upload=upload, kept_s=kept_s))
        return upload

    def get(self, owner: str, upload_id: str) -> UploadState:
        """Returns an upload and its parts. Raises NotFoundError for one of another owner too."""
        upload = self._stored(owner, upload_id).upload
        parts = sorted(_parts(self._folder, upload_id), key=lambda part: (part.created_at, part.id))
        return UploadState(**upload.model_dump(), parts=parts)

    def new_part(self, owner: str, upload_id: str) -> Path:
        """Returns where to write a part. Raises NotFoundError, RequestError, RequestLimitError."""
        self._pending(owner, upload_id)
        if sum(1 for _ in _parts(self._folder, upload_id)) >= MAX_PARTS:
            raise RequestLimitError(f"the upload has {MAX_PARTS} parts; allowed that many; send larger ones")
        return self._folder / f"{new_id('part')}.part"

    def keep_part(self, owner: str, upload_id: str, path: Path) -> PartObject:
        """Takes a part that was written. Raises as `new_part`, RequestLimitError beyond what was said."""
        upload = self._pending(owner, upload_id).upload
        num_bytes = sum(part.bytes for part in _parts(self._folder, upload_id)) + path.stat().st_size
        # One part may be there twice: its client did not learn that it had arrived.
        allowed = upload.bytes + self.settings.max_part_bytes
        if num_bytes > allowed:
            raise RequestLimitError(
                f"the parts have {num_bytes} bytes; allowed: {allowed} for a file of {upload.bytes}; begin "
                "an upload of the right size"
            )
        self.files.room.check_bytes()
        self.files.room.check_share(owner, num_bytes)
        kept = path.rename(self._folder / f"{upload_id}.{path.stem}")
        try:
            part = _part(kept)
            self._pending(owner, upload_id)  # who ends it removes the parts that are there by then
        except BaseException:
            kept.unlink(missing_ok=True)
            raise
        os.utime(_record(self._folder, upload_id))
        return part

    def complete(self, owner: str, upload_id: str, asked: CompleteRequest) -> UploadObject:
        """Makes the parts a file. Done again, it changes nothing more. Raises EPDError."""
        with self._alone(owner, upload_id) as stored:
            if stored.upload.status == "completed":
                return stored.upload
            self._pending(owner, upload_id)
            whole = _joined(self._folder, stored.upload, _listed(self._folder, stored.upload, asked.part_ids))
            if asked.md5 is not None:
                _check_md5(whole, asked.md5)
            return self._finish(stored, file=self._adopted(stored, whole), status="completed")

    def cancel(self, owner: str, upload_id: str) -> UploadObject:
        """Ends an upload and removes its parts. Raises NotFoundError, RequestError, OverloadedError."""
        with self._alone(owner, upload_id):
            return self._finish(self._pending(owner, upload_id), status="cancelled")

    def remove_expired(self) -> None:
        """Removes uploads without a part for hours, what is left of others, and files whose time is over.

        The hours are those that this server has watched: the clock on the wall may be set meanwhile.
        """
        self.files.remove_expired()
        uploads: dict[str, list[Path]] = {}
        for path in self._folder.glob("upload_*"):
            uploads.setdefault(path.name.partition(".")[0], []).append(path)
        now_s, before, seen_now = time.monotonic(), self._seen, dict[str, tuple[float, float]]()
        for upload_id, paths in uploads.items():
            changed_s = _changed_s(paths)
            seen = before.get(upload_id, (changed_s, now_s))
            since_s = seen[1] if seen[0] == changed_s else now_s
            if now_s - since_s <= _PATIENCE_S:
                seen_now[upload_id] = changed_s, since_s
                continue
            for path in paths:
                path.unlink(missing_ok=True)
        self._seen = seen_now

    # One upload

    def _save(self, stored: StoredUpload) -> None:
        write_record(_record(self._folder, stored.upload.id), stored)

    def _stored(self, owner: str, upload_id: str) -> StoredUpload:
        record = _record(self._folder, check_id("upload", upload_id))
        stored = read_record(record, StoredUpload)
        if stored is None or stored.owner != owner:
            raise not_found("upload", upload_id)
        if stored.upload.status != "pending":  # its client gets the same answer again
            return stored
        expires_at = int(record.stat().st_mtime) + _PATIENCE_S
        upload = stored.upload.model_copy(update={"expires_at": expires_at})
        return stored.model_copy(update={"upload": upload})

    def _pending(self, owner: str, upload_id: str) -> StoredUpload:
        stored = self._stored(owner, upload_id)
        if stored.upload.status != "pending":
            raise RequestError(
                f"received an upload that is {stored.upload.status}; allowed: pending; begin one"
            )
        return stored

    @contextmanager
    def _alone(self, owner: str, upload_id: str) -> Iterator[StoredUpload]:
        """Yields an upload that nobody else ends meanwhile. Raises OverloadedError if someone does."""
        self._stored(owner, upload_id)
        with (self._folder / f"{upload_id}.lock").open("ab") as lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OverloadedError(f"the upload {upload_id} is being ended; retry later", 1.0) from None
            yield self._stored(owner, upload_id)

    def _adopted(self, stored: StoredUpload, whole: Path) -> FileObject:
        upload = stored.upload
        file_id = f"file-{upload.id.removeprefix('upload_')}"
        return self.files.adopt(whole, stored.owner, file_id, upload.filename, upload.purpose, stored.kept_s)

    def _finish(self, stored: StoredUpload, **changes: object) -> UploadObject:
        """Keeps the end of an upload, which its client may ask for again, and none of its bytes."""
        upload = stored.upload.model_copy(update=changes)
        self._save(stored.model_copy(update={"upload": upload}))
        for path in self._folder.glob(f"{upload.id}.*"):
            if path.suffix not in (".json", ".lock"):
                path.unlink(missing_ok=True)
        return upload

    # Limits

    def _check_number(self, owner: str) -> None:
        uploads = (read_record(path, StoredUpload) for path in self._folder.glob("upload_*.json"))
        owners = [each.owner for each in uploads if each is not None and each.upload.status == "pending"]
        pending, most = len(owners), self.settings.max_uploads
        has_share = self.settings.has_share(pending, most, lambda: owners.count(owner))
        if pending >= most or not has_share:
            raise OverloadedError(
                f"{pending} uploads are not complete; allowed: {most}, and of one client no more than are "
                "left; cancel some",
                10.0,
            )


def _changed_s(paths: Sequence[Path]) -> float:
    """Returns when the file system says that one of them was changed last; 0 if all were removed."""
    times_s = [0.0]
    for path in paths:
        with suppress(FileNotFoundError):
            times_s.append(path.stat().st_mtime)
    return max(times_s)


def _record(folder: Path, upload_id: str) -> Path:
    return folder / f"{upload_id}.json"


def _parts(folder: Path, upload_id: str) -> Iterator[PartObject]:
    for path in folder.glob(f"{upload_id}.part_*"):
        with suppress(FileNotFoundError):
            yield _part(path)


def _listed(folder: Path, upload: UploadObject, part_ids: list[str]) -> list[Path]:
    """Returns the parts that are named. Raises NotFoundError, RequestError."""
    if len(set(part_ids)) < len(part_ids):
        raise RequestError("received a part twice in part_ids; allowed: each once; name them in order")
    paths = [folder / f"{upload.id}.{check_id('part', each)}" for each in part_ids]
    for path, part_id in zip(paths, part_ids, strict=True):
        if not path.exists():
            raise not_found("part", part_id)
    num_bytes = sum(path.stat().st_size for path in paths)
    if num_bytes != upload.bytes:
        raise RequestError(
            f"the parts have {num_bytes} bytes; allowed: the {upload.bytes} announced; send the others"
        )
    return paths


def _joined(folder: Path, upload: UploadObject, parts: list[Path]) -> Path:
    """Joins the parts; each is removed once it is copied, so that a file takes its room once."""
    whole = parts[0].rename(folder / f"{upload.id}.whole")
    with whole.open("ab") as joined:
        for path in parts[1:]:
            with path.open("rb") as part:
                shutil.copyfileobj(part, joined, _COPIED_BYTES)
            path.unlink()
        joined.flush()
        os.fsync(joined.fileno())
    return whole


def _check_size(settings: FileSettings, asked: UploadRequest) -> None:
    is_batch = asked.purpose == "batch"
    allowed = settings.max_file_bytes if is_batch else settings.max_upload_bytes
    if asked.bytes > allowed:
        flag = "--max-file-bytes" if is_batch else "--max-upload-bytes"
        raise RequestLimitError(
            f"received a file of {asked.bytes} bytes; allowed: {allowed}; split it, or start the server "
            f"with a larger {flag}"
        )


def _part(path: Path) -> PartObject:
    """Returns what a path of a part says."""
    upload_id, part_id = path.name.split(".")
    status = path.stat()
    return PartObject(id=part_id, created_at=int(status.st_mtime), upload_id=upload_id, bytes=status.st_size)


def _check_md5(path: Path, wanted: str) -> None:
    """Raises RequestError for other bytes, which are removed."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != wanted.lower():
        path.unlink()
        raise RequestError(f"the parts have the MD5 {found}; allowed: the one sent; upload the file again")
