"""Opens object stores by URL, and namespaces in them: s3://, gs://, or a folder that machines share.

All of it goes through pyarrow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, urlsplit

from epd.errors import RequestError
from epd.late_module import LateModule

if TYPE_CHECKING:
    from pyarrow import fs
    from pyarrow.fs import FileSystem
else:
    fs = LateModule("pyarrow.fs")

SCHEMES = ("s3", "gs", "file")
_OPTIONS = ("endpoint_override", "region", "scheme")
_CONNECT_S, _REQUEST_S = 2.0, 10.0
_TRIES = 2
# Seconds for which a store that does not answer is left alone.
_SILENT_S = 30.0


def check_url(url: str | None) -> None:
    """Raises RequestError for a URL that is none of an object store."""
    if url is None:
        return
    parts = urlsplit(url)
    allowed = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX and file:///FOLDER"
    if parts.username or parts.password:
        raise RequestError(
            f"received an object store with a key in its URL; allowed: {allowed}; give the key by the "
            "environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    is_whole = bool(parts.path.strip("/")) if parts.scheme == "file" else bool(parts.netloc)
    if parts.scheme not in SCHEMES or not is_whole or (parts.scheme == "file" and parts.netloc):
        raise RequestError(f"received the object store '{url}'; allowed: {allowed}; give one of these")
    unknown = sorted(_options(parts).keys() - set(_OPTIONS))
    if unknown:
        raise RequestError(
            f"received the option '{unknown[0]}' of the object store '{url}'; allowed: "
            f"{', '.join(_OPTIONS)}; drop it"
        )


def open_store(url: str) -> tuple[FileSystem, str]:
    """Returns a file system and the path in it. Asks nothing of the store but the region of a bucket.

    Raises RequestError as `check_url`, and without pyarrow. Raises OSError for a store that is not there.
    """
    check_url(url)
    if find_spec("pyarrow") is None:
        raise RequestError(f"received the object store '{url}', which needs pyarrow; install epd-vlm[cloud]")
    parts = urlsplit(url)
    given = _options(parts)
    if parts.scheme == "file":
        path = Path(parts.path)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return fs.LocalFileSystem(), str(path)
    where = (parts.netloc + parts.path).rstrip("/")
    if parts.scheme == "gs":
        given.pop("region", None)
        return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=_REQUEST_S), **given), where
    given.setdefault("region", _region(given, parts.netloc))
    return (
        fs.S3FileSystem(
            connect_timeout=_CONNECT_S,
            request_timeout=_REQUEST_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_TRIES),
            **given,
        ),
        where,
    )


class Namespace:
    """Finds the objects of one namespace. A store that has not answered is left alone for a while."""

    def __init__(self, url: str, name: str) -> None:
        """Asks nothing of the store. Raises RequestError as `check_url`."""
        check_url(url)
        self.url, self.name = url, name
        self._store: tuple[FileSystem, str] | None = None
        self._silent_until_s = 0.0

    @property
    def is_silent(self) -> bool:
        return time.monotonic() < self._silent_until_s

    def leave_alone(self) -> None:
        self._silent_until_s = time.monotonic() + _SILENT_S

    @property
    def system(self) -> FileSystem:
        """Returns the store. Raises OSError if it cannot be opened."""
        return self._opened[0]

    def path(self, name: str) -> str:
        """Returns where an object is. Raises OSError if the store cannot be opened."""
        return f"{self._opened[1]}/{self.name}/{name}"

    @property
    def _opened(self) -> tuple[FileSystem, str]:
        self._store = self._store or open_store(self.url)
        return self._store


def put(system: FileSystem, path: str, parts: Sequence[memoryview]) -> None:
    """Writes an object as a whole, as far as the store can. Raises OSError."""
    if system.type_name == "local":
        system.create_dir(path.rpartition("/")[0], recursive=True)
    with system.open_output_stream(path) as stream:
        for part in parts:
            stream.write(part)


def read_whole(system: FileSystem, path: str) -> bytes:
    """Returns an object; nothing if it is not there. Raises OSError."""
    try:
        with system.open_input_file(path) as file:
            found: bytes = file.read()
            return found
    except FileNotFoundError:
        return b""


def _region(given: dict[str, str], bucket: str) -> str:
    """Returns the region of the environment, or of a bucket of Amazon. Raises OSError."""
    known = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if known or "endpoint_override" in given or "AWS_ENDPOINT_URL" in os.environ:
        return known or "us-east-1"
    return str(fs.resolve_s3_region(bucket))


def _options(parts: SplitResult) -> dict[str, str]:
    return dict(parse_qsl(parts.query, keep_blank_values=True))
