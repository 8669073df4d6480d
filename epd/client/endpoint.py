"""Describes a server of the OpenAI chat API, with a name for tables, and checks whether it answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlsplit, urlunsplit

import httpx

from epd.errors import EPDError, RequestError, UnavailableError

_TIMEOUT_S = 30.0


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

    Raises RequestError for an invalid http URL, and for a name that is used twice.
    """
    endpoints = [_parse(text, model, api_key) for text in texts]
    names = [endpoint.name for endpoint in endpoints]
    if len(set(names)) < len(names):
        raise RequestError(f"endpoints are named {', '.join(names)}; give each another name with NAME=URL")
    return endpoints


def _parse(text: str, model: str, api_key: str | None) -> Endpoint:
    match = re.fullmatch(r"(?:(?P<name>[^=/:]+)=)?(?P<url>https?://\S+)", text.strip())
    host = urlsplit(match["url"]).netloc.rpartition("@")[2] if match else ""
    if match is None or not host:
        raise RequestError(f"{text!r} is not an endpoint; write http://HOST:PORT or NAME=http://HOST:PORT")
    url = match["url"].rstrip("/").removesuffix("/v1").rstrip("/")
    return Endpoint(match["name"] or host, url, model, api_key)


def get(
    endpoint: Endpoint,
    path: str,
    advice: str,
    *,
    no_answer: type[EPDError] = UnavailableError,
    bad_answer: type[EPDError] = UnavailableError,
) -> httpx.Response:
    """Requests a path from a server; the reply has the status 200.

    advice: end of the message of an error.
    no_answer, bad_answer: the errors to raise when nothing answers, and for any other status.
    """
    shown = f"{endpoint.shown_url}{path}"
    try:
        answer = httpx.get(
            f"{endpoint.url}{path}", headers=endpoint.headers, timeout=_TIMEOUT_S, trust_env=False
        )
    except httpx.HTTPError as error:
        raise no_answer(f"{shown} gave {type(error).__name__}; {advice}") from None
    if answer.status_code != HTTPStatus.OK:
        raise bad_answer(f"{shown} gave status {answer.status_code}; {advice}")
    return answer


def find_model(endpoint: Endpoint) -> str:
    """Returns the first model that a server lists. Raises RequestError without an answer or a model."""
    advice = "start an OpenAI-compatible server there, or name the model with --model"
    answer = get(endpoint, "/v1/models", advice, no_answer=RequestError, bad_answer=RequestError)
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise RequestError(f"{endpoint.shown_url}/v1/models gave no list of models; {advice}") from None
