"""Serves a model in the process of a command, for that command alone. Imports torch."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr

from epd import video
from epd.errors import RequestError
from epd.kv.drafting import DraftConfig
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.local.server import served_locally


@contextmanager
def server_here(
    paths: Sequence[str],
    model: Path | None,
    device: str,
    dtype: str,
    drafting: DraftConfig,
    tensor_parallel_size: int = 1,
    *,
    enforce_eager: bool = False,
    pixels: PixelSettings = AUTHORS_LIMITS,
) -> Iterator[tuple[str, str, list[str]]]:
    """Serves a model in this process while open. Yields its URL, its key, and the URLs of the files.

    It listens on this machine alone, for who has the key, which is new, and reads files of one folder: that
    which all of the given ones are in.
    """
    files = [_found(path) for path in paths]
    key = secrets.token_hex(16)
    args = AppArgs(
        topology="1epd",
        model=model,
        device=device,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=enforce_eager,
        draft=drafting.method,
        max_draft=drafting.max_draft,
        api_key=SecretStr(key),
        **pixels.given,
        allowed_media_path=Path(os.path.commonpath([file.parent for file in files])) if files else None,
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = HttpAddress(port=free.getsockname()[1])
    with served_locally(args, address):
        yield address.url, key, [file.as_uri() for file in files]


def _found(path: str) -> Path:
    if "://" in path:
        raise RequestError(f"received '{path}'; allowed: files; download it, or ask a server with --url")
    video.media_kind(path)  # raises RequestError for what is neither
    return Path(path).resolve()
