"""Keeps pieces as files of one folder, which processes and machines may share.

    folder/models.json                     digests of models' files
    folder/<namespace>/about.json          what the namespace is of, for people, from its first piece on
    folder/<namespace>/<1 of key>/<key>    a file with the piece: see `file_format`

The name of a piece stands for its content, so it never changes, and two writers write the same. Small pieces
that are written at once share a file, which has the name of each: a name costs a tenth of a file, and less.
One that does not match its header is a miss, and its name is removed. The time of a file is that of its last
use. Where room is short, those go that were not used for longest. A prompt's first pieces are dated later
than those after them, which are worth nothing alone.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Protocol

from epd import __version__
from epd.errors import RequestError
from epd.store.file_format import Payload, date, fill, header_of, piece_digest, runs, written
from epd.types import Reuse, Tier, ceil_div

ABOUT = "about.json"
_DIGESTS = "models.json"
# Of the files of this room. Another number is another namespace.
_FORMAT = 4
_NAME_BYTES = 16
# Of the files that a model consists of.
_SUFFIXES = frozenset((".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".tiktoken", ".ttf"))
# Bytes of the pieces that share a file.
_SHARED_BYTES = 1 << 20
# Errors of file systems that give a file one name.
_ONE_NAME = frozenset((errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK))
# Of the room, what stays after some were removed: so that not every write removes.
_LEFT = 0.9
# Bytes written by this process after which those of others are counted again.
_RECOUNT = 1 << 28


@dataclass(slots=True)
class StoreCounts:
    """Counts so far. num_failed: pieces that were expected and not there, or not whole.

    left_tokens: that are kept, and were computed since that was quicker.
    objects_read_bytes: of read_bytes, from an object store. objects_written_bytes: beside written_bytes.
    """

    read_tokens: int = 0
    left_tokens: int = 0
    read_bytes: int = 0
    objects_read_bytes: int = 0
    written_bytes: int = 0
    objects_written_bytes: int = 0
    num_failed: int = 0

    def found(self, reuse: Reuse) -> Reuse:
        """Counts what was read, or left, and returns it."""
        if reuse.tier == "left":
            self.left_tokens += reuse.num
            return reuse
        self.read_tokens += reuse.num
        self.read_bytes += reuse.num_bytes
        self.objects_read_bytes += reuse.num_bytes if reuse.tier == "objects" else 0
        return reuse


class Beneath(Protocol):
    """Keeps the pieces of one namespace beneath files, for other machines too: see `slabs.Slabs`."""

    counts: StoreCounts

    def __contains__(self, key: str) -> bool: ...
    def read(self, key: str, payload: memoryview) -> bool:
        """Fills a payload, of the right number of bytes. False for one that is not there or not whole."""
        ...

    def add(self, key: str, payload: memoryview, digest: bytes) -> None:
        """Queues a payload, which is not written to meanwhile, with its `piece_digest`. Never waits."""
        ...

    def close(self) -> None:
        """Ends once what waits is written, or after some time."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Describes a name of a file.

    num_bytes: its share of the file. used_s: Unix time of the file's last use. file: what its names share.
    """

    path: Path
    num_bytes: int
    used_s: float
    file: int


@dataclass(frozen=True, slots=True)
class Contents:
    """Describes what a namespace has. about: what it is of. used_s: Unix time of its last use."""

    namespace: str
    about: Mapping[str, str]
    num_files: int
    num_bytes: int
    used_s: float


class PieceFiles:
    """Reads and writes the pieces of one namespace. A reader and a writer may have threads."""

    def __init__(
        self,
        folder: Path,
        namespace: str,
        max_bytes: int,
        about: Mapping[str, str],
        beneath: Beneath | None = None,
    ) -> None:
        """Makes the folders. max_bytes: of all namespaces together. Raises as `make_folder`.

        beneath: has what the files have not, and gets what they get.
        """
        self.folder = folder
        self.counts = StoreCounts()
        self._beneath = beneath
        if beneath is not None:
            beneath.counts = self.counts
        self.max_bytes = max_bytes
        self._own = folder / namespace
        self._num_bytes: int | None = None  # of all files, once they were counted
        self._num_uncounted = 0
        self._made: set[str] = set()  # folders that are there
        self._about = json.dumps(dict(about), indent=1).encode()
        make_folder(self._own)

    def __contains__(self, key: str) -> bool:
        return self.tier_of(key) is not None

    def tier_of(self, key: str) -> Tier | None:
        """Returns where a piece is; None if it is not there."""
        if os.path.exists(self._path(key)):
            return "disk"
        return "objects" if self._beneath is not None and key in self._beneath else None

    def _path(self, key: str) -> str:
        """Returns a text: a `Path` takes longer to make than its file to find."""
        return f"{self._own}/{key[:1]}/{key}"

    def read(self, key: str, index: int, payload: memoryview) -> Tier | None:
        """Fills a payload, of the right number of bytes. None, for one that is not there or not whole.

        index: of the piece in its prompt.
        """
        path = self._path(key)
        if fill(path, self._own.name, key, payload):
            date(path, index)
            return "disk"
        self.remove(key)
        if self._beneath is not None and self._beneath.read(key, payload):
            return "objects"
        return None

    def remove(self, key: str) -> None:
        """Removes a piece from the folder, if it is there."""
        with suppress(OSError):
            os.unlink(self._path(key))

    def write(self, pieces: Mapping[str, memoryview], index: int = 0) -> int:
        """Keeps payloads by key. Returns the bytes written: none for those there, or larger than the room.

        index: see `read`. Raises OSError for a disk that does not take them.
        """
        new = [each for key, data in pieces.items() if (each := self._new(key, data)) is not None]
        together = runs(new, min(_SHARED_BYTES, self.max_bytes // 16))
        return sum(self._write_together(each, index) for each in together)

    def _new(self, key: str, data: memoryview) -> Payload | None:
        """Returns what is to be written. Gives it on, with its digest."""
        is_there = os.path.exists(self._path(key))
        if is_there and (self._beneath is None or key in self._beneath):
            return None
        digest = piece_digest(self._own.name, key, data)
        if self._beneath is not None:
            self._beneath.add(key, data, digest)
        return None if is_there else Payload(key, data, digest)

    def _write_together(self, pieces: Sequence[Payload], index: int) -> int:
        """Writes a file for some pieces. Returns its bytes."""
        header = header_of(pieces)
        size = len(header) + sum(len(each.data) for each in pieces)
        if not self._has_room(size):
            return 0
        try:
            self._make_folders(pieces)
            own = written(self._own, header, *(each.data for each in pieces), index=index)
            if not _name(own, [self._path(each.key) for each in pieces]):
                return sum(self._write_together([each], index) for each in pieces)
        except FileNotFoundError:  # another writer needed the room, or somebody removed folders
            self._made.clear()
            return 0
        self._num_bytes = (self._num_bytes or 0) + size
        self._num_uncounted += size
        return size

    def _make_folders(self, pieces: Sequence[Payload]) -> None:
        if not self._made:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self._own / ABOUT).exists():
                _name(written(self._own, memoryview(self._about)), [f"{self._own}/{ABOUT}"])
        for name in {each.key[:1] for each in pieces} - self._made:
            (self._own / name).mkdir(mode=0o700, exist_ok=True)
            self._made.add(name)

    def close(self) -> None:
        """Ends what is beneath."""
        if self._beneath is not None:
            self._beneath.close()

    def _has_room(self, size: int) -> bool:
        """Makes room for a file. Returns False for one that is larger than all room."""
        if size > self.max_bytes:
            return False
        if self._num_bytes is None or self._num_uncounted > _RECOUNT:
            self._num_bytes, self._num_uncounted = sum(each.num_bytes for each in stored(self.folder)), 0
        if self._num_bytes + size > self.max_bytes:
            self._num_bytes = remove_oldest(self.folder, int(self.max_bytes * _LEFT) - size)
        return True


def make_folder(folder: Path) -> None:
    """Makes a folder, for this user alone. Raises RequestError for one that cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        NamedTemporaryFile(dir=folder).close()
    except OSError as error:
        raise RequestError(
            f"received the cache directory '{folder}', which cannot be written: {error.strerror}; allowed: a "
            "folder of this user; choose another"
        ) from error


def _name(own: Path, paths: Sequence[str]) -> bool:
    """Gives a written file its names. False, and none, where it cannot have several. Raises OSError."""
    first, *others = paths
    try:
        for path in others:
            with suppress(FileExistsError):  # another writer was sooner
                os.link(own, path)
        own.replace(first)
    except OSError as error:
        own.unlink(missing_ok=True)
        if others and error.errno in _ONE_NAME:
            return False
        raise
    return True


def contents(folder: Path) -> Iterator[Contents]:
    """Yields what each namespace of a folder has, by name."""
    for about in sorted(folder.glob(f"*/{ABOUT}")):
        files = list(stored(about.parent))
        num_bytes = sum(each.num_bytes for each in files)
        used_s = max((each.used_s for each in files), default=about.stat().st_mtime)
        yield Contents(about.parent.name, texts_of(about.read_bytes()), len(files), num_bytes, used_s)


def texts_of(data: bytes) -> dict[str, str]:
    """Returns the texts of a small file by name; none from one that is not whole."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def stored(folder: Path) -> Iterator[StoredFile]:
    """Yields the files of all namespaces, also those that are being written or were left by a writer."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.suffix != ".json":
                with suppress(OSError):
                    stat = path.stat()
                    share = ceil_div(stat.st_size, max(1, stat.st_nlink))
                    yield StoredFile(path, share, stat.st_mtime, stat.st_ino)


def remove_oldest(folder: Path, most_bytes: int, before_s: float = math.inf) -> int:
    """Removes the files that were not used for longest, until `most_bytes` are left. Returns what is left.

    before_s: Unix time; those that were used later stay.
    """
    files = sorted(stored(folder), key=lambda each: (each.used_s, each.file))
    left, removed = sum(each.num_bytes for each in files), None
    for each in files:
        if (left <= most_bytes and each.file != removed) or each.used_s > before_s:
            break
        removed = each.file  # with all of its names, or no room is won
        with suppress(OSError):
            each.path.unlink(missing_ok=True)
        left -= each.num_bytes
    return left


def namespace(facts: Mapping[str, str]) -> str:
    """Returns the name of a namespace: a digest of these facts, of this version and of the files' format.

    facts: all that keys and values depend on besides the tokens, so that no model reads those of another.
    """
    text = json.dumps({"epd": __version__, "format": _FORMAT, **facts}, sort_keys=True)
    return blake2b(text.encode(), digest_size=_NAME_BYTES).hexdigest()


def model_digest(model: Path, folder: Path) -> str:
    """Returns a digest of a model's files, weights and settings. folder: where digests of files are kept.

    Files are read once. Their digests are kept by path, inode, size and time.
    """
    whole = blake2b(digest_size=_NAME_BYTES)
    known = _known_digests(folder / _DIGESTS)
    found = {}
    for file in sorted(each for each in model.iterdir() if each.suffix in _SUFFIXES and each.is_file()):
        stat = file.stat()
        place = f"{file.resolve()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"
        found[place] = known.get(place) or _digest_of(file)
        whole.update(f"{file.name} {found[place]}\n".encode())
    if not found.keys() <= known.keys():
        _keep_digests(folder / _DIGESTS, known | found)
    return whole.hexdigest()


def _digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _known_digests(file: Path) -> dict[str, str]:
    """Reads digests; none from a file that is not there or not whole."""
    try:
        return texts_of(file.read_bytes())
    except OSError:
        return {}


def _keep_digests(file: Path, digests: Mapping[str, str]) -> None:
    """Keeps digests, if the disk takes them: else they are made again."""
    own = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        own.write_text(json.dumps(digests, indent=1), encoding="utf-8")
        own.replace(file)
        return
    with suppress(OSError):
        own.unlink(missing_ok=True)
