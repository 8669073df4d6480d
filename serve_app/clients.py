"""Says who asks: one record that turns, files, batches, names of media, rights and limits go by.

The keys of clients are read from a file, again whenever it changes: a line of JSON for each key.

{"name": "ann", "sha256": "5e88...", "rights": ["ask"], "requests_per_minute": 60, "expires": "2027-01-31"}
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from epd.errors import RequestError

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
    weight: how many of its requests are in a turn
    """

    share: str = ""
    owner: str = ""
    space: str = ""
    rights: frozenset[Right] = USER_RIGHTS
    name: str = ""
    priority: int = 0
    weight: int = 1

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


logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # for a change of the file


class ApiKey(BaseModel):
    """A key, by its hash, and what whoever has it may do. Keys of one name are one client.

    requests_per_minute, tokens_per_minute: of all answers to the name; None for no limit
    priority: of requests that say none; below 0 they come before others
    weight: how many requests come in a turn, where others have one
    expires: from when on the key is refused, in UTC where it says no zone
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    rights: frozenset[Right] = Field(default=USER_RIGHTS, min_length=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    weight: int = Field(default=1, ge=1, le=100)
    expires: datetime | None = None

    @field_validator("expires")
    @classmethod
    def _with_zone(cls, expires: datetime | None) -> datetime | None:
        return expires.replace(tzinfo=UTC) if expires is not None and expires.tzinfo is None else expires

    @property
    def is_valid(self) -> bool:
        return self.expires is None or datetime.now(UTC) < self.expires

    def line(self) -> str:
        """Returns the key's line of the file."""
        return self.model_dump_json(exclude_defaults=True)

    def is_like(self, other: ApiKey) -> bool:
        """Returns whether both give a client the same: all but the hash and the end may not differ."""
        shared = {"sha256", "expires"}
        return self.model_dump(exclude=shared) == other.model_dump(exclude=shared)


def check_keys(api_key: object, admin_api_key: object, file: Path | None) -> None:
    """Raises RequestError for keys of a server that exclude each other, or a file that cannot be read."""
    if api_key and api_key == admin_api_key:
        raise RequestError(
            "received the same admin_api_key and api_key; allowed: different keys; change one of them"
        )
    if api_key and file:
        raise RequestError(
            "received an api_key and an api_keys_file; allowed: one of them; add the key to the file"
        )
    if file:
        KeysFile(file)


def hash_of(key: bytes) -> str:
    return sha256(key).hexdigest()


class KeysFile:
    """Finds keys. A change that cannot be read is logged, and the keys before it stay."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError for a file that cannot be read."""
        self._path = path
        self._keys, self._names = _read(path)
        self._stamp = self._stamp_now()
        self._look_s = time.monotonic() + _LOOK_S

    def find(self, key: bytes) -> ApiKey | None:
        """Returns what a key may do; None for one that is unknown or has expired."""
        self._look()
        found = self._keys.get(hash_of(key))
        return found if found is not None and found.is_valid else None

    def names(self) -> dict[str, ApiKey]:
        """Returns a key of each name."""
        self._look()
        return self._names

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_S
        stamp = self._stamp_now()
        if stamp != self._stamp:
            self._stamp = stamp
            self._read_again()

    def _read_again(self) -> None:
        try:
            self._keys, self._names = _read(self._path)
        except RequestError as error:
            logger.warning("the keys stay as they were: %s", error)
        else:
            logger.info("read %d keys from '%s'", len(self._keys), self._path)

    def _stamp_now(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[dict[str, ApiKey], dict[str, ApiKey]]:
    """Returns the keys of a file by their hashes, and one of each name. Raises RequestError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read '{path}': {error}; allowed: a line of JSON for each key; make one with epd keys new"
        ) from None
    keys: dict[str, ApiKey] = {}
    names: dict[str, ApiKey] = {}
    for number, key in _lines(path, text):
        if key.sha256 in keys or not key.is_like(names.setdefault(key.name, key)):
            raise RequestError(
                f"'{path}' line {number}: received '{key.name}' with a key of an earlier line, or with other "
                "rights or limits than there; allowed: new keys, alike for one name; change the line"
            )
        keys[key.sha256] = key
    return keys, names


def _lines(path: Path, text: str) -> Iterator[tuple[int, ApiKey]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, ApiKey.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the line"
            raise RequestError(
                f"'{path}' line {number}: {place}: {first['msg']}; allowed: lines of epd keys new; change it"
            ) from None
