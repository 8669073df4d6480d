"""Creates memory that other processes of the machine can map: without a file system, of a fixed size.

It is allocated page by page as it is written, and freed with the last process that has it; its place leads
through the process that has created it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Says where memory is. path: of a descriptor of its process. name: unique to it."""

    path: str
    name: str
    num_bytes: int

    def is_there(self) -> bool:
        """Reports whether its process has not ended; another one may have that one's id."""
        return leads_to(self.path, self.name)

    def open(self) -> int | None:
        """Returns a descriptor of the memory; None if its process has ended. Raises OSError."""
        try:
            return open_memory(self.path, self.name)
        except FileNotFoundError:
            return None


class SharedMemory:
    """Holds memory that this process has created. Its place is valid until this is dropped."""

    def __init__(self, num_bytes: int) -> None:
        name = f"epd-ranks-{secrets.token_hex(8)}"
        self.descriptor = new_memory(name, num_bytes)
        self.place = MemoryPlace(f"/proc/{os.getpid()}/fd/{self.descriptor}", name, num_bytes)
        weakref.finalize(self, os.close, self.descriptor)


def new_memory(name: str, num_bytes: int) -> int:
    """Returns the descriptor of new memory, whose size nobody can change. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_memory(path: str | Path, name: str) -> int | None:
    """Returns a descriptor of the memory that was created under a name; None if `path` leads elsewhere.

    That is so when its process is gone, and another one has its id. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if leads_to(f"/proc/self/fd/{descriptor}", name):
        return descriptor
    os.close(descriptor)
    return None


def leads_to(path: str, name: str) -> bool:
    """Returns whether what /proc shows at `path` is the memory that was created under that name."""
    with suppress(OSError):
        return os.readlink(path) == f"/memfd:{name} (deleted)"
    return False
