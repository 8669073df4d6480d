"""Sends files to a server in parts, where they are too large for a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.client.endpoint import Endpoint
from epd.errors import RequestError, UnavailableError
from epd.late_module import LateModule

if TYPE_CHECKING:
    import httpx
else:
    httpx = LateModule("httpx")

_PART_BYTES = 16 << 20
_KEPT_S = 24 * 3600  # by the server, for later questions
_TRIES = 3
_TIMEOUT_S, _CONNECT_S = 600.0, 30.0


@dataclass(frozen=True, slots=True)
class Uploader:
    """Uploads files to a server that takes parts of `max_part_bytes`."""

    endpoint: Endpoint
    max_part_bytes: int

    def upload(self, path: Path) -> str:
        """Returns the id of a file that the server has then, for a day; a part that is cut is sent again.

        Raises RequestError where the server refuses it, UnavailableError where it does not answer, OSError.
        """
        num_bytes = path.stat().st_size
        asked = {
            "filename": path.name,
            "bytes": num_bytes,
            "purpose": "user_data",
            "mime_type": "application/octet-stream",
            "expires_after": {"anchor": "created_at", "seconds": _KEPT_S},
        }
        begun = self._post("uploads", json=asked)["id"]
        parts = [
            self._post(f"uploads/{begun}/parts", files={"data": ("part", part)})["id"]
            for part in _pieces(path, min(_PART_BYTES, self.max_part_bytes))
        ]
        return str(self._post(f"uploads/{begun}/complete", json={"part_ids": parts})["file"]["id"])

    def _post(self, path: str, **content: Any) -> dict[str, Any]:
        shown, url = self.endpoint.shown_url, f"{self.endpoint.url}/v1/{path}"
        timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
        for left in reversed(range(_TRIES)):
            try:
                reply = httpx.post(
                    url, headers=self.endpoint.headers, timeout=timeout, trust_env=False, **content
                )
            except httpx.HTTPError as error:
                if not left:
                    raise UnavailableError(
                        f"{shown} gave {type(error).__name__} while a file was sent; ask again"
                    ) from None
                continue
            if reply.status_code != HTTPStatus.OK:
                raise RequestError(
                    f"{shown} refused the file with status {reply.status_code}: {reply.text[:300]}"
                )
            break
        answer: dict[str, Any] = reply.json()
        return answer


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """Yields a file's bytes, `size` at a time."""
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece
