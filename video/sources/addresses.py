"""Decides which network addresses media may be fetched from, and connects to the checked address only.

A name is resolved once, every address it resolves to is checked, and the connection is made to a checked
address: a name that changes its address in between (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from epd.errors import MediaForbiddenError, MediaNotFoundError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int, float], list[str]]
MAX_ADDRESSES = 4  # of a host that are tried


def is_public(address: str) -> bool:
    """Returns whether an address is of the open internet: not private, loopback, link-local, multicast or
    reserved.

    IPv6 forms that carry an IPv4 address (mapped, 6to4, Teredo, NAT64) are judged by that address too.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    carried = [parsed, *_carried(parsed)]
    return all(one.is_global and not one.is_multicast and not one.is_reserved for one in carried)


def _carried(address: IPAddress) -> list[IPAddress]:
    if isinstance(address, ipaddress.IPv4Address):
        return []
    teredo = address.teredo or ()
    nat64 = ipaddress.ip_network("64:ff9b::/96")
    embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in nat64 else None
    return [one for one in (address.sixtofour, *teredo, embedded) if one is not None]


def resolve(host: str, port: int, timeout_s: float) -> list[str]:
    """Returns every address of a host, in the resolver's order, within a time limit.

    Raises MediaNotFoundError for a name without an address or a resolver without an answer.
    """
    found: list[str] = []
    thread = threading.Thread(target=_look_up, args=(host, port, found), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise MediaNotFoundError(f"no address for the host {host} within {timeout_s:.1f} s; check its name")
    return list(dict.fromkeys(found))


def _look_up(host: str, port: int, found: list[str]) -> None:
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    found.extend(str(answer[4][0]) for answer in answers)


def checked_addresses(
    host: str, port: int, timeout_s: float, may_be_private: bool, resolver: Resolver
) -> list[str]:
    """Returns the addresses of the host to connect to, in the resolver's order, all found allowed; at least
    one.

    Raises MediaForbiddenError if one of them is not public, unless `may_be_private`.
    """
    addresses = resolver(host, port, timeout_s)
    refused = [address for address in addresses if not (may_be_private or is_public(address))]
    if refused:
        raise MediaForbiddenError(
            f"the host {host} resolves to {refused[0]}, which is not a public address; "
            "allowed: public addresses, and hosts of --allowed-media-hosts; name it there if it is meant"
        )
    return addresses[:MAX_ADDRESSES]


class PinnedConnection(http.client.HTTPConnection):
    """HTTP to the first of some addresses that answers, whatever the name of the host resolves to by now."""

    def __init__(self, host: str, port: int, addresses: Sequence[str], timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._open_socket: socket.socket | None = None  # http.client drops its own before the body is read

    def abort(self) -> None:
        """Make whatever waits for the other side fail now; safe to call from another thread."""
        if self._open_socket is not None:
            with contextlib.suppress(OSError):
                self._open_socket.shutdown(socket.SHUT_RDWR)

    def connect(self) -> None:
        """Connect to the pinned addresses in turn. Raises the last one's OSError."""
        share_s = self._timeout_s / len(self._addresses)
        for address in self._addresses[:-1]:
            with contextlib.suppress(OSError):
                return self._connect_to(address, share_s)
        return self._connect_to(self._addresses[-1], share_s)

    def _connect_to(self, address: str, timeout_s: float) -> None:
        self.sock = self._open_socket = socket.create_connection((address, self.port), timeout_s)
        self.sock.settimeout(self._timeout_s)


class PinnedTLSConnection(PinnedConnection):
    """HTTPS to one address, with the certificate checked against the host's name."""

    default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        """Connect to one of the pinned addresses and agree on encryption."""
        super().connect()
        context = ssl.create_default_context()
        self.sock = self._open_socket = context.wrap_socket(self.sock, server_hostname=self.host)
