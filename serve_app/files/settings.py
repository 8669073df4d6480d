"""Defines the limits of files and batches, and the ids they go by."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel

from epd.errors import NotFoundError, RequestError

Kind = Literal["file", "batch", "upload", "part"]
_PREFIXES: dict[Kind, str] = {"file": "file-", "batch": "batch_", "upload": "upload_", "part": "part_"}
_ID = re.compile(r"(file-|batch_|upload_|part_)[0-9a-f]{24}")
_ID_BYTES = 12
MAX_LISTED, MAX_LISTED_FILES = 100, 10_000  # as OpenAI's


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Says where files and batches are kept, and how many.

    folder: created if needed; all servers that use it share its files and batches
    max_file_bytes: of a file that comes in one request, and of the input of a batch
    max_upload_bytes, max_part_bytes: of a medium that comes in parts, and of one of these
    max_uploads: that are not complete
    max_folder_bytes: of everything in the folder; results of batches are written beyond it
    max_files, max_batches: kept at once
    max_lines, max_line_bytes: of the input of one batch, and of one of its lines
    num_in_flight: lines of batches that a server answers at once
    is_shared: whether clients are known by name, and keep no more of anything than they leave free
    """

    folder: Path
    max_file_bytes: int = 128 << 20
    max_upload_bytes: int = 8 << 30
    max_part_bytes: int = 64 << 20
    max_uploads: int = 256
    max_folder_bytes: int = 16 << 30
    max_files: int = 10_000
    max_batches: int = 1000
    max_lines: int = 50_000
    max_line_bytes: int = 16 << 20
    num_in_flight: int = 4
    is_shared: bool = False

    @property
    def files_folder(self) -> Path:
        """Returns where the bytes of files are, each as ID.data."""
        return self.folder / "files"

    def has_share(self, num_taken: int, most: int, count_own: Callable[[], int]) -> bool:
        """Returns whether a client may keep more: so that a new one always finds room, as much as is free.

        num_taken: of `most`, by all. count_own: counts what the client has; asked once half is taken
        """
        return not self.is_shared or 2 * num_taken < most or count_own() < most - num_taken

    def limits(self) -> dict[str, int | None]:
        """Returns the bytes that a client may send, by name."""
        names = ("max_file_bytes", "max_upload_bytes", "max_part_bytes")
        return {name: getattr(self, name) for name in names}


def new_id(kind: Kind) -> str:
    return _PREFIXES[kind] + secrets.token_hex(_ID_BYTES)


def check_id(kind: Kind, name: str) -> str:
    """Returns an id that a client sent, safe as the name of a file. Raises NotFoundError for any other."""
    if _ID.fullmatch(name) is None or not name.startswith(_PREFIXES[kind]):
        raise not_found(kind, name)
    return name


def not_found(kind: Kind, name: str) -> NotFoundError:
    return NotFoundError(
        f"received the {kind} {name[:100]!r}; allowed: ids of {kind} objects of the same key; list them"
    )


class _Listed(BaseModel):
    id: str
    created_at: int


_T = TypeVar("_T", bound=BaseModel)


def page_of(
    records: Sequence[_T],
    limit: int,
    after: str | None,
    *,
    newest_first: bool = True,
    most: int = MAX_LISTED,
) -> tuple[list[_T], bool]:
    """Returns a page of records with an id and a time, and whether there are more. Raises RequestError.

    limit: of the page; no more than `most` are returned
    after: the id that the page before ended with
    """
    if limit < 1:
        raise RequestError(f"received a limit of {limit}; allowed: 1 to {most}; ask for a page")
    keys = [_Listed.model_validate(record, from_attributes=True) for record in records]
    order = sorted(range(len(keys)), key=lambda place: (keys[place].created_at, keys[place].id))
    order = order[::-1] if newest_first else order
    start = 0
    if after is not None:
        places = [rank for rank, place in enumerate(order) if keys[place].id == after]
        if not places:
            raise RequestError(f"received after={after[:100]!r}; allowed: the last id of a page; list again")
        start = places[0] + 1
    stop = start + min(limit, most)
    return [records[place] for place in order[start:stop]], stop < len(order)
