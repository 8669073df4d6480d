"""Describes a server of the OpenAI chat API: its name for tables, whether it answers, files sent in parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from epd.errors import EPDError, RequestError, UnavailableError
from epd.late_module import LateModule

if TYPE_CHECKING:
    import ssl

    import httpx
else:
    httpx = LateModule("httpx")

_TIMEOUT_S = 30.0
_LAST_PORT = 65535
_LIMITS = ("max_body_bytes", "max_part_bytes")
# Of files that are sent in parts.
_PART_BYTES = 16 << 20
_KEPT_S = 24 * 3600  # by the server, for later questions
_TRIES = 3
_UPLOAD_S, _CONNECT_S = 600.0, 30.0


@cache
def certificates() -> ssl.SSLContext:
    """Returns what HTTPS servers are known by. httpx would read it for each request, which takes 20 ms."""
    return httpx.create_ssl_context(trust_env=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Names a server. url: up to but not including /v1. api_key: sent, never shown."""

    name: str
    url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)

    @property
    def shown_url(self) -> str:
        """Returns the URL without a user's name and password, which it may hold."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def parse_endpoints(texts: Sequence[str], *, model: str = "", api_key: str | None = None) -> list[Endpoint]:
    """Returns endpoints from URLs or NAME=URL; without a name it is the host and port.

    Raises RequestError for an invalid http URL, a key that no header can hold, and a name that is used twice.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise RequestError("the API key has characters that HTTP cannot send; give it in printable ASCII")
    endpoints = [_parse(text, model, api_key) for text in texts]
    names = [endpoint.name for endpoint in endpoints]
    if len(set(names)) < len(names):
        raise RequestError(f"endpoints are named {', '.join(names)}; give each another name with NAME=URL")
    return endpoints


def _parse(text: str, model: str, api_key: str | None) -> Endpoint:
    match = re.fullmatch(r"(?:(?P<name>[^=/:]+)=)?(?P<url>https?://\S+)", text.strip())
    if match is None or not _is_address(match["url"]):
        raise RequestError(f"{text!r} is not an endpoint; write http://HOST:PORT or NAME=http://HOST:PORT")
    url = match["url"].rstrip("/").removesuffix("/v1").rstrip("/")
    return Endpoint(match["name"] or urlsplit(url).netloc.rpartition("@")[2], url, model, api_key)


def _is_address(url: str) -> bool:
    """Returns whether the client can send to a URL: it has a host, and a port that exists."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return bool(parsed.host) and (parsed.port is None or 0 < parsed.port <= _LAST_PORT)


def get(
    endpoint: Endpoint,
    path: str,
    advice: str,
    *,
    no_answer: type[EPDError] = UnavailableError,
    bad_answer: type[EPDError] = UnavailableError,
) -> httpx.Response:
    """Requests a path from a server; the reply has the status 200.

    advice: end of the message of an error, but for a key that the server does not know.
    no_answer, bad_answer: the errors to raise when nothing answers, and for any other status.
    """
    shown = f"{endpoint.shown_url}{path}"
    try:
        answer = httpx.get(
            f"{endpoint.url}{path}",
            headers=endpoint.headers,
            timeout=_TIMEOUT_S,
            trust_env=False,
            verify=certificates(),
        )
    except httpx.HTTPError as error:
        raise no_answer(f"{shown} gave {type(error).__name__}; {advice}") from None
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        advice = "give its --api-key"
    if answer.status_code != HTTPStatus.OK:
        raise bad_answer(f"{shown} gave status {answer.status_code}; {advice}")
    return answer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Names a model of a server.

    max_body_bytes: of one request; None where the server does not say
    max_part_bytes: of a part of a file that is uploaded; None if the server takes none
    knows: what the model knows, where the server says that this is little
    """

    name: str
    max_body_bytes: int | None = None
    max_part_bytes: int | None = None
    knows: str | None = None


def find_model(endpoint: Endpoint) -> str:
    """Returns the first model that a server lists. Raises RequestError without an answer or a model."""
    return served_model(endpoint).name


def served_model(endpoint: Endpoint, name: str = "") -> ServedModel:
    """Returns a model that a server lists, and what the server says of it; the first one without a name.

    Raises RequestError without an answer or a model.
    """
    advice = "start an OpenAI-compatible server there, or name the model with --model"
    answer = get(endpoint, "/v1/models", advice, no_answer=RequestError, bad_answer=RequestError)
    try:
        entries = answer.json()["data"]
        entry = next((each for each in entries if each["id"] == name), entries[0])
        limits = entry.get("limits") or {}
        told = {each: limits.get(each) for each in _LIMITS if type(limits.get(each)) is int}
        knows = entry.get("knows") if name in ("", entry["id"]) else None
        return ServedModel(name or str(entry["id"]), **told, knows=knows)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"{endpoint.shown_url}/v1/models gave no list of models; {advice}") from None


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
        timeout = httpx.Timeout(_UPLOAD_S, connect=_CONNECT_S)
        for left in reversed(range(_TRIES)):
            try:
                reply = httpx.post(
                    url,
                    headers=self.endpoint.headers,
                    timeout=timeout,
                    trust_env=False,
                    verify=certificates(),
                    **content,
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
