"""Fetches the bytes of a medium from a path, a `data:` URI or an http(s) URL, within limits and policy."""

from __future__ import annotations

from pathlib import Path

from epd.errors import MediaNotFoundError, UnsupportedMediaError
from epd.video.sources.data_uri import read_data_uri
from epd.video.sources.download import Download
from epd.video.sources.local_files import allowed_file
from epd.video.sources.policy import DEFAULT_POLICY, BytesSink, FetchPolicy


def fetch(source: str | Path, policy: FetchPolicy = DEFAULT_POLICY) -> bytes:
    """Returns the bytes at a path, `file:` URL, `data:` URI or http(s) URL.

    Raises MediaForbiddenError for what policy does not allow, MediaLimitError for too many bytes or seconds,
    MediaNotFoundError for no file or no answer, UnsupportedMediaError for other schemes.
    """
    if isinstance(source, Path):
        return _read_local(source, policy)
    scheme = source.partition(":")[0].lower() if ":" in source[:12] else ""
    if scheme in ("data", "http", "https"):
        sink = BytesSink()
        if scheme == "data":
            read_data_uri(source, policy.max_bytes, sink)
        else:
            Download(policy).run(source, sink)
        return sink.body
    if scheme == "file":
        return _read_local(source, policy)
    if "://" in source[:32]:
        raise UnsupportedMediaError(
            f"received the scheme {scheme}:; allowed http, https, data, file; use one of them"
        )
    return _read_local(source, policy)


def _read_local(source: str | Path, policy: FetchPolicy) -> bytes:
    path = allowed_file(source, policy.media_folder, policy.max_bytes)
    try:
        with path.open("rb") as file:
            return file.read(policy.max_bytes)
    except OSError as error:
        raise MediaNotFoundError(
            f"cannot read {source}: {error.strerror}; give the path of a readable file"
        ) from error
