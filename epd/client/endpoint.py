"""Describes a server of the OpenAI chat API, with a name for tables, and checks whether it answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from epd.errors import EPDError, RequestError, UnavailableError
from epd.late_module import LateModule

if TYPE_CHECKING:
    import httpx
else:
    httpx = LateModule("httpx")

_TIMEOUT_S = 30.0
_LAST_PORT = 65535
_LIMITS = ("max_body_bytes", "max_part_bytes")


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
            f"{endpoint.url}{path}", headers=endpoint.headers, timeout=_TIMEOUT_S, trust_env=False
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
    """

    name: str
    max_body_bytes: int | None = None
    max_part_bytes: int | None = None


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
        return ServedModel(name or str(entry["id"]), **told)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"{endpoint.shown_url}/v1/models gave no list of models; {advice}") from None
