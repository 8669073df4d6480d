"""Checks the files that requests name as media: `file-ID` where a URL may stand."""

from __future__ import annotations

from collections.abc import Sequence

from epd.errors import NotFoundError, RequestError
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import MEDIA_PURPOSES


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
