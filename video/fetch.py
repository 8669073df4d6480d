"""`fetch`: the bytes of a medium from a path, a `data:` URI or an http(s) URL, within limits and policy."""

from __future__ import annotations

import base64
import binascii
import http.client
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from epd.errors import MediaForbiddenError, MediaLimitError, MediaNotFoundError, UnsupportedMediaError
from video.addresses import PinnedConnection, PinnedTLSConnection, Resolver, checked_address, resolve
from video.local_files import allowed_file, check_size

REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Where media may come from, and how much of it.

    allowed_hosts: None lets every host with public addresses be asked; a set lets only those be asked, and
    they may have private addresses. A name that begins with a dot stands for every host below it.
    media_folder: the only folder that local files are read from; None reads no local file.
    """

    allowed_hosts: frozenset[str] | None = None
    media_folder: Path | None = None
    max_bytes: int = 2 << 30
    max_s: float = 120.0
    max_redirects: int = 5
    resolver: Resolver = field(default=resolve)


DEFAULT_POLICY = FetchPolicy()


def fetch(source: str | Path, policy: FetchPolicy = DEFAULT_POLICY) -> bytes:
    """The bytes at a path, `file:` URL, `data:` URI or http(s) URL.

    Raises MediaForbiddenError for what policy does not allow, MediaLimitError for too many bytes or seconds,
    MediaNotFoundError for no file or no answer, UnsupportedMediaError for other schemes.
    """
    if isinstance(source, Path):
        return _read_local(source, policy)
    scheme = source.partition(":")[0].lower() if ":" in source[:12] else ""
    if scheme == "data":
        return _read_data_uri(source, policy)
    if scheme in ("http", "https"):
        return _Download(policy).get(source)
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


def _read_data_uri(uri: str, policy: FetchPolicy) -> bytes:
    head, comma, payload = uri.partition(",")
    if not comma:
        raise UnsupportedMediaError(
            "received a data: URI without a comma; allowed data:TYPE;base64,DATA; mend it"
        )
    check_size("the data: URI", len(payload) * 3 // 4 - 2, policy.max_bytes)
    try:
        if head.lower().endswith(";base64"):
            data = base64.b64decode(unquote(payload), validate=True)
        else:
            data = unquote_to_bytes(payload)
    except (binascii.Error, ValueError) as error:
        raise UnsupportedMediaError(
            f"received a data: URI that is not base64 ({error}); allowed: base64; encode it"
        ) from error
    check_size("the data: URI", len(data), policy.max_bytes)
    return data


class _Download:
    """One download: follows redirects, each checked like the first, under one deadline."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._end_s = time.monotonic() + policy.max_s

    def get(self, url: str) -> bytes:
        for _ in range(self._policy.max_redirects + 1):
            parts = _split(url)
            result = self._request(parts)
            if isinstance(result, bytes):
                return result
            url = urljoin(url, result)
        raise MediaLimitError(
            f"more than {self._policy.max_redirects} redirects; allowed that many; give the final URL"
        )

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise MediaLimitError(
                f"the download took more than {self._policy.max_s:g} s; allowed that much; host it nearer"
            )
        return left_s

    def _request(self, parts: SplitResult) -> bytes | str:
        """The body, or where a redirect leads."""
        connection = self._connect(parts)
        watchdog = threading.Timer(self._left_s(), connection.abort)
        watchdog.start()
        try:
            return self._exchange(connection, parts)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._left_s()
            raise MediaNotFoundError(f"{_shown(parts)} cannot be read ({error!r}); check the URL") from error
        finally:
            watchdog.cancel()
            connection.close()

    def _exchange(self, connection: PinnedConnection, parts: SplitResult) -> bytes | str:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept-Encoding": "identity", "User-Agent": "epd"})
        with connection.getresponse() as response:
            location = response.getheader("Location")
            if response.status in REDIRECTS and location:
                return location
            if response.status != http.client.OK:
                raise MediaNotFoundError(
                    f"{_shown(parts)} answered {response.status}; allowed 200; check the URL"
                )
            return self._body(response, _shown(parts))

    def _connect(self, parts: SplitResult) -> PinnedConnection:
        host = parts.hostname or ""
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        is_listed = self._check_host(host)
        address = checked_address(host, port, self._left_s(), is_listed, self._policy.resolver)
        return (PinnedTLSConnection if is_tls else PinnedConnection)(host, port, address, self._left_s())

    def _check_host(self, host: str) -> bool:
        """Whether the host is on the allow-list. Raises MediaForbiddenError if there is one without it."""
        allowed = self._policy.allowed_hosts
        if allowed is None:
            return False
        name = host.lower().rstrip(".")
        if not any(name == one or (one.startswith(".") and name.endswith(one)) for one in allowed):
            raise MediaForbiddenError(
                f"received the host {host}; allowed: {sorted(allowed)}; add it to allowed_hosts"
            )
        return True

    def _body(self, response: http.client.HTTPResponse, name: str) -> bytes:
        """The whole body, refused as soon as it is too large or too slow."""
        check_size(name, int(response.getheader("Content-Length") or 0), self._policy.max_bytes)
        body = bytearray()
        while chunk := response.read1(CHUNK_BYTES):
            body += chunk
            check_size(name, len(body), self._policy.max_bytes)
        self._left_s()  # what the watchdog cut off looks like an end
        if response.length:
            raise http.client.IncompleteRead(bytes(body[:0]), response.length)
        return bytes(body)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UnsupportedMediaError(
            f"received a URL that cannot be read ({error}); allowed http(s)://HOST/PATH"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MediaForbiddenError(
            f"a redirect leads to {parts.scheme}:; allowed http and https; give the final URL"
        )
    if parts.username or parts.password:
        raise MediaForbiddenError(
            "received a URL with a user name or password; allowed: URLs without; remove it"
        )
    return parts


def _shown(parts: SplitResult) -> str:
    """The URL without its query, which may hold a secret."""
    return f"{parts.scheme}://{parts.hostname}{parts.path}"
