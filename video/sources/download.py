"""Fetches the bytes of a medium from a path, a `data:` URI or an http(s) URL, within limits and policy.

A download goes to a sink: from checked addresses, at a least rate, until cancelled.
"""

from __future__ import annotations

import http.client
import threading
import time
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

from epd.errors import (
    CancelledError,
    MediaForbiddenError,
    MediaLimitError,
    MediaNotFoundError,
    UnsupportedMediaError,
)
from epd.video.sources.addresses import PinnedConnection, PinnedTLSConnection, checked_addresses
from epd.video.sources.data_uri import read_data_uri
from epd.video.sources.local_files import allowed_file, check_size
from epd.video.sources.policy import DEFAULT_POLICY, BytesSink, FetchPolicy, Sink

REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK_BYTES = 1 << 16


class Download:
    """Follows redirects, each checked like the first, under one deadline."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._began_s = time.monotonic()
        self._num_bytes = 0
        self._connection: PinnedConnection | None = None
        self._ended = threading.Event()
        self._is_cancelled = False
        self._trusted_host: str | None = None

    def run(self, url: str, sink: Sink) -> None:
        """Writes the body. Raises MediaError, CancelledError, and what the sink raises."""
        self._trusted_host = _split(url).hostname if self._policy.trusts_urls else None
        watchdog = threading.Thread(target=self._watch, name="media-watchdog", daemon=True)
        watchdog.start()
        try:
            self._follow(url, sink)
        finally:
            self._ended.set()

    def cancel(self) -> None:
        """Makes `run` raise CancelledError soon, whatever it waits for on the network."""
        self._is_cancelled = True
        self._ended.set()
        self._abort()

    def _follow(self, url: str, sink: Sink) -> None:
        for _ in range(self._policy.max_redirects + 1):
            location = self._request(_split(url), sink)
            if location is None:
                return
            url = urljoin(url, location)
        raise MediaLimitError(
            f"more than {self._policy.max_redirects} redirects; allowed: up to that; give the final URL"
        )

    # Time

    @property
    def _due_s(self) -> float:
        """When the download becomes too slow unless more bytes come, on the monotonic clock."""
        policy = self._policy
        paced_s = policy.grace_s + self._num_bytes / policy.min_bytes_per_s
        return self._began_s + min(policy.max_s, paced_s)

    def _left_s(self) -> float:
        """Returns the seconds until it is too slow. Raises MediaLimitError when it is, CancelledError."""
        if self._is_cancelled:
            raise CancelledError("the download was cancelled: its client has left")
        left_s = self._due_s - time.monotonic()
        if left_s > 0:
            return left_s
        if time.monotonic() - self._began_s >= self._policy.max_s:
            raise MediaLimitError(
                f"the download took more than {self._policy.max_s:g} s; allowed: up to that; host it nearer"
            )
        raise MediaLimitError(
            f"the download gave {self._num_bytes} bytes in {time.monotonic() - self._began_s:.0f} s; "
            f"allowed: {self._policy.min_bytes_per_s:g} bytes a second after {self._policy.grace_s:g} s; "
            "host it nearer"
        )

    def _watch(self) -> None:
        """Cuts the connection when the download is too slow; what waits for it then fails."""
        while not self._ended.wait(max(0.0, self._due_s - time.monotonic())):
            if time.monotonic() >= self._due_s:
                self._abort()
                self._ended.wait(0.05)  # a connection still being made is cut once it exists

    def _abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    # HTTP

    def _request(self, parts: SplitResult, sink: Sink) -> str | None:
        """Writes the body, or returns where a redirect leads."""
        self._connection = connection = self._connect(parts)
        try:
            return self._exchange(connection, parts, sink)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._left_s()
            raise MediaNotFoundError(f"{_shown(parts)} cannot be read ({error!r}); check the URL") from error
        finally:
            connection.close()

    def _connect(self, parts: SplitResult) -> PinnedConnection:
        host = parts.hostname or ""
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        is_listed = self._check_host(host)
        addresses = checked_addresses(host, port, self._left_s(), is_listed, self._policy.resolver)
        return (PinnedTLSConnection if is_tls else PinnedConnection)(host, port, addresses, self._left_s())

    def _check_host(self, host: str) -> bool:
        """Returns whether the host may be private. Raises MediaForbiddenError if an allow-list omits it."""
        allowed = self._policy.allowed_hosts
        if allowed is None:
            return host == self._trusted_host
        name = host.lower().rstrip(".")
        if not any(name == one or (one.startswith(".") and name.endswith(one)) for one in allowed):
            raise MediaForbiddenError(
                f"received the host {host}; allowed: {sorted(allowed)}; name it in --allowed-media-hosts"
            )
        return True

    def _exchange(self, connection: PinnedConnection, parts: SplitResult, sink: Sink) -> str | None:
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
            self._copy(response, _shown(parts), sink)
            return None

    def _copy(self, response: http.client.HTTPResponse, name: str, sink: Sink) -> None:
        """Copies the whole body; refuses it as soon as it is too large or too slow."""
        announced = int(response.getheader("Content-Length") or 0)
        check_size(name, announced, self._policy.max_bytes)
        sink.expect(announced)
        num_bytes = 0
        while chunk := response.read1(CHUNK_BYTES):
            num_bytes += len(chunk)
            check_size(name, num_bytes, self._policy.max_bytes)
            sink.write(chunk)
            self._num_bytes = num_bytes
            self._left_s()
        self._left_s()  # what the watchdog cut off looks like an end
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)


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
    """Returns the URL without its query, which may hold a secret."""
    return f"{parts.scheme}://{parts.hostname}{parts.path}"


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
