"""Where load goes: a server of the OpenAI chat API, with a name for tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import httpx

from epd.errors import RequestError

_OPEN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server. url: up to but not including /v1. api_key: sent, never shown."""

    name: str
    url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)

    @property
    def shown_url(self) -> str:
        """Without a user's name and password, which a URL may hold."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def parse_endpoints(texts: Sequence[str], *, model: str = "", api_key: str | None = None) -> list[Endpoint]:
    """Endpoints from URLs or NAME=URL; without a name it is the host and port.

    Raises RequestError for what is no http URL, and for a name that is given twice.
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
        raise RequestError(f"{text!r} is no endpoint; write http://HOST:PORT or NAME=http://HOST:PORT")
    url = match["url"].rstrip("/").removesuffix("/v1").rstrip("/")
    return Endpoint(match["name"] or host, url, model, api_key)


async def find_model(endpoint: Endpoint) -> str:
    """Returns the first model that a server lists. Raises RequestError when it cannot be asked or lists
    none.
    """
    url = f"{endpoint.url}/v1/models"
    advice = "is it running, and an OpenAI server? With --model it is not asked"
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=_OPEN_TIMEOUT_S) as client:
            answer = await client.get(url, headers=endpoint.headers)
            answer.raise_for_status()
            listed = answer.json()["data"]
            return str(listed[0]["id"])
    except httpx.HTTPStatusError as error:
        reason = f"status {error.response.status_code}"
    except httpx.HTTPError as error:
        reason = type(error).__name__
    except (ValueError, LookupError, TypeError):
        reason = "no list of models"
    raise RequestError(f"{endpoint.shown_url}/v1/models gave {reason}; {advice}")
