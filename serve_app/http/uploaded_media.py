"""Finds the files that requests name as media: `file-ID` where a URL may stand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from fastapi import Request

from epd.errors import NotFoundError, RequestError
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import MEDIA_PURPOSES
from epd.serve_app.http.guard.http_guard import sent_key
from epd.serve_app.service import MediaReference

_PREFIX = "file-"


def owner_of(request: Request) -> str:
    """Returns a name of the key that a request came with; empty where the server has none."""
    if request.app.state.server.settings.api_key is None and not request.state.is_admin:
        return ""
    return hashlib.blake2b(sent_key(request) or b"", digest_size=16, person=b"epd files").hexdigest()


def names_file(reference: MediaReference) -> bool:
    return reference.url.startswith(_PREFIX)


def with_files(
    files: FileStore | None, owner: str, references: Sequence[MediaReference]
) -> tuple[MediaReference, ...]:
    """Returns the references; those that name a file of the owner may be read from the folder of files.

    files: of the server, None if it keeps none. Raises NotFoundError, RequestError for other purposes.
    """
    return tuple(_checked(files, owner, each) if names_file(each) else each for each in references)


def _checked(files: FileStore | None, owner: str, reference: MediaReference) -> MediaReference:
    if files is None:
        raise NotFoundError(
            f"{reference.label}: received a file's id; allowed: on servers that keep files; start the server "
            "with --files-dir FOLDER"
        )
    purpose = files.get(owner, reference.url).purpose
    if purpose not in MEDIA_PURPOSES:
        raise RequestError(
            f"{reference.label}: received a file of purpose {purpose!r}; allowed: "
            f"{', '.join(MEDIA_PURPOSES)}; upload it with one"
        )
    return replace(reference, is_upload=True)
