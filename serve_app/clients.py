"""Says who asks: one record that turns, files, batches, names of media, rights and limits go by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Right = Literal["ask", "files", "batches", "admin"]
USER_RIGHTS: frozenset[Right] = frozenset({"ask", "files", "batches"})
ADMIN_RIGHTS: frozenset[Right] = USER_RIGHTS | {"admin"}


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the server.

    share: who takes turns with others as one
    owner: of files and batches, empty where all have the same
    space: in which its names of media are its own
    rights: what it may do
    name: in the file of keys; empty where the server has none
    priority: of its requests that say none; it may ask for no lower one that is below 0
    """

    share: str = ""
    owner: str = ""
    space: str = ""
    rights: frozenset[Right] = USER_RIGHTS
    name: str = ""
    priority: int = 0

    @property
    def is_admin(self) -> bool:
        return "admin" in self.rights


THIS_PROCESS = Client()


def owner_with_key(key: bytes) -> str:
    """Names whoever has a key without telling it."""
    return hashlib.blake2b(key, digest_size=16, person=b"epd files").hexdigest()


def owner_named(name: str) -> str:
    """Names a client of the file of keys, whichever key it has."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"epd client").hexdigest()


def driver_of(owner: str) -> Client:
    """Returns who asks the lines of an owner's batches."""
    return Client(share=f"batches {owner}", owner=owner, space=owner)
