"""Manages memory shared by the workers of one machine: pools, and weights, named in a fleet's folder.

A pool is memory without a file system: it is allocated page by page as it is written, has no limit from
/dev/shm, cannot be truncated under processes that have mapped it, and is freed with the last of them. Its
name in the folder is a link to it, which its process removes with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from epd.errors import InfeasibleError
from epd.machine import available_memory_bytes
from epd.serve_app.held_folder import (
    CLUSTER_PREFIX,
    SPOOL_PREFIX,
    HeldFolder,
    abandoned,
    remove_abandoned,
)
from epd.stages.connectors.shared_memory import MemoryPlace, leads_to, new_memory, open_memory
from epd.types import ceil_div

logger = logging.getLogger(__name__)

_MEMORY_FOLDER = Path("/dev/shm")
_PREFIX = "epd-fleet-"
# Of the memory that is free when it is written, for what is kept there beside the copies of GPUs.
KEPT_SHARE = 0.5
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Claim:
    """The maximum size of a pool, and its allocated memory, in bytes."""

    path: Path
    num_bytes: int
    num_taken: int


class PoolFiles:
    """Creates and removes what one fleet shares on this machine. fleet_id: unique to the fleet."""

    def __init__(self, fleet_id: str) -> None:
        self._name = f"{_PREFIX}{fleet_id}"
        self._held: dict[Path, HeldFolder] = {}
        self._holding = threading.Lock()  # a folder held twice would never be released
        self._pools: dict[Path, int] = {}  # descriptors of this process's pools, by name

    def hold(self) -> None:
        """Marks the fleet's files as in use for as long as this process lives.

        Files of dead fleets are removed.
        """
        remove_orphans()
        self._folder(_memory_folder())

    def create(self, name: str, num_bytes: int) -> Path:
        """Creates a pool of zeros, which is allocated as it is written.

        Raises InfeasibleError if there is not enough memory for all of it beside what other pools of this
        machine may still allocate.
        """
        folder = self._folder(_memory_folder())
        path = folder / f"{name}-{secrets.token_hex(4)}"
        with _one_at_a_time(folder / "lock-claims"):
            _check_room(name, num_bytes)
            self._pools[path] = _new_memory(path, num_bytes)
        return path

    def shared(self, name: str, num_bytes: int, write: Callable[[Path], None]) -> Path:
        """Returns a file shared by the fleet's workers on this machine, written by the first that needs it.

        Raises OSError, and what `write` raises.
        """
        found = self.paths(name)
        if found:
            return found[0]
        folder = self._folder(_roomy_folder(name, num_bytes))
        path = folder / name
        with _one_at_a_time(self._folder(_memory_folder()) / f"lock-{name}"):
            found = self.paths(name)
            if not found:
                draft = folder / f"draft-{name}"
                try:
                    write(draft)
                    draft.rename(path)
                finally:
                    draft.unlink(missing_ok=True)
        return found[0] if found else path

    def place(self, path: Path) -> MemoryPlace:
        """Returns where the memory of one of this process's pools is."""
        return MemoryPlace(os.readlink(path), _memory_name(path), path.stat().st_size)

    def remove(self, path: Path) -> None:
        """Removes the name; processes that have mapped it keep the memory."""
        path.unlink(missing_ok=True)
        descriptor = self._pools.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def remove_of(self, worker: str) -> None:
        """Removes all files of a worker that is gone."""
        for path in self.paths(f"{worker}."):
            self.remove(path)

    def remove_ended(self, worker: str) -> None:
        """Removes the names of a lost worker's pools, but not those of a worker that has its name by now."""
        for path in self.paths(f"{worker}."):
            if not _is_there(path):
                self.remove(path)

    def release(self) -> None:
        """Removes the pools of this process, and the fleet's files with the last process that holds them."""
        for path in list(self._pools):
            self.remove(path)
        for held in self._held.values():
            held.release()
        self._held.clear()
        remove_orphans()

    def paths(self, name: str = "") -> list[Path]:
        """Returns pools and shared files whose names start with `name`."""
        found: list[Path] = []
        for parent in _parents():
            with contextlib.suppress(OSError):
                found += [path for path in (parent / self._name).iterdir() if path.name.startswith(name)]
        return sorted(path for path in found if not path.name.startswith((".", "lock-")))

    def _folder(self, parent: Path) -> Path:
        """Returns the fleet's folder there, held."""
        path = parent / self._name
        with self._holding:
            if path not in self._held:
                self._held[path] = HeldFolder(path)
        return path


def new_fleet_id() -> str:
    """Returns a name for the folder of a fleet; host and process are included for human readers."""
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_orphans() -> None:
    """Removes files of fleets that no longer have a process on this machine, and other abandoned folders."""
    for parent in _parents():
        remove_abandoned(parent, _PREFIX)
    for prefix in (SPOOL_PREFIX, CLUSTER_PREFIX):
        remove_abandoned(Path(tempfile.gettempdir()), prefix)


def check_kept(path: Path, num_bytes: int) -> None:
    """Checks, before a shared file is written, that memory may keep it beside all else; says so if it may.

    Raises OSError if it would lie on a disk, or take more than KEPT_SHARE of what is free.
    """
    free = available_memory_bytes()
    sizes = f"{num_bytes / 1e9:.2f} of the {free / 1e9:.2f} GB of memory that are free"
    if not path.is_relative_to(_MEMORY_FOLDER):
        raise OSError(errno.ENOSPC, f"{_MEMORY_FOLDER} has no room for {num_bytes / 1e9:.2f} GB", str(path))
    if num_bytes > KEPT_SHARE * free:
        allowed = f"{KEPT_SHARE:.0%} at most are kept for role switches"
        raise OSError(errno.ENOMEM, f"they take {sizes}, of which {allowed}", str(path))
    logger.info("keeps weights in %s, once for all workers of this machine: roles change from there", sizes)


def orphans() -> list[Path]:
    """Returns the folders of such fleets."""
    return [path for parent in _parents() for path in abandoned(parent, _PREFIX)]


def open_pool(path: Path) -> int | None:
    """Returns a descriptor of a pool created by any process of this machine; None if it is gone."""
    try:
        return open_memory(path, _memory_name(path))
    except OSError:
        return None


def _new_memory(path: Path, num_bytes: int) -> int:
    """Creates memory of a fixed size under a name: a link into this process, which ends with it."""
    descriptor = new_memory(_memory_name(path), num_bytes)
    try:
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _memory_name(path: Path) -> str:
    """Returns the name shown in maps and descriptors of a pool: the fleet's folder and the pool's name."""
    return f"{path.parent.name}-{path.name}"


def _is_there(path: Path) -> bool:
    """Returns whether the name still leads to its pool: the process that created it has not ended."""
    try:
        return leads_to(os.readlink(path), _memory_name(path))
    except OSError:
        return False


def _check_room(name: str, num_bytes: int) -> None:
    """Raises InfeasibleError if memory would not suffice once this pool and all others are full."""
    claims = list(_claims())
    promised = sum(max(0, claim.num_bytes - claim.num_taken) for claim in claims)
    available = available_memory_bytes()
    if num_bytes > available - promised:
        raise InfeasibleError(
            f"the pool '{name}' asks for {num_bytes / _MIB:,.0f} MiB of memory; {available / _MIB:,.0f} MiB "
            f"are available, {promised / _MIB:,.0f} MiB of them for {len(claims)} pools of this machine that "
            "are not full yet; give a smaller --num-kv-tokens, fewer workers, or more memory"
        )


def _claims() -> Iterator[_Claim]:
    """Yields the claims of all pools of all fleets on this machine, as far as this container sees them."""
    with contextlib.suppress(OSError):
        for path in _memory_folder().glob(f"{_PREFIX}*/*"):
            with contextlib.suppress(OSError):
                if _is_there(path):
                    status = path.stat()
                    yield _Claim(path, status.st_size, status.st_blocks * 512)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Excludes other processes that use the same file while this is open."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _parents() -> list[Path]:
    """Returns the folders that may contain folders of fleets."""
    return list(dict.fromkeys([_MEMORY_FOLDER, Path(tempfile.gettempdir())]))


def _memory_folder() -> Path:
    """Returns a folder in memory, if the machine has one: names need almost no memory."""
    return _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else Path(tempfile.gettempdir())


def _roomy_folder(name: str, num_bytes: int) -> Path:
    """Returns a folder where a file of that size fits: in memory if possible, to avoid writing to a disk.

    Raises OSError if the disk lacks room too.
    """
    disk = Path(tempfile.gettempdir())
    for parent in (_memory_folder(), disk):
        with contextlib.suppress(OSError):
            if shutil.disk_usage(parent).free >= num_bytes:
                if parent == disk != _MEMORY_FOLDER:
                    _warn_of_disk(name, num_bytes, disk)
                return parent
    raise OSError(errno.ENOSPC, f"no room for {num_bytes} bytes of {name}", str(disk))


def _warn_of_disk(name: str, num_bytes: int, disk: Path) -> None:
    logger.warning(
        "%s takes %d MiB, which %s has no room for: it lies in %s, on a disk perhaps; give the container a "
        "larger shared memory, such as --shm-size",
        name,
        ceil_div(num_bytes, _MIB),
        _MEMORY_FOLDER,
        disk,
    )
