"""Checks Host headers against DNS rebinding, which reaches a loopback server under an attacker's name.

A page at http://evil.example whose name suddenly resolves to 127.0.0.1 may read answers of a server there as
its own. Its requests still carry `Host: evil.example`, so a server that knows its names can detect them. An
address cannot be rebound, and is always allowed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from functools import lru_cache

from starlette.types import Scope

from epd.errors import RequestError

# Clients choose the names they send: 64 of them, of the size of a header, are the most that is kept.
_MAX_KNOWN_NAMES = 64


class HostCheck:
    """Decides whether a request may be answered under the name it calls the server by."""

    def __init__(self, names: Iterable[str] | None = None, *, has_key: bool = False) -> None:
        """Takes names that clients may use, beside localhost and addresses; ".NAME" is any host below NAME.

        Without names, a request over a loopback address must use localhost or an address, unless a key
        protects the server; one over another address may use any name, as this machine's are not known here.
        Raises RequestError for an invalid host name.
        """
        self._names = None if names is None else checked_hosts(names)
        self._has_key = has_key

    def allows(self, scope: Scope) -> bool:
        if self._names is not None:
            return _has_allowed_host(scope, self._names)
        return self._has_key or not _is_over_loopback(scope) or _has_allowed_host(scope, frozenset())


def checked_hosts(names: Iterable[str]) -> frozenset[str]:
    """Returns the names in lower case. Raises RequestError for an invalid host name."""
    return frozenset(_checked(name) for name in names)


def names_for(host: str, allowed: Collection[str], *, has_key: bool) -> frozenset[str] | None:
    """Returns the names that a server bound to host answers to, including host. Raises RequestError.

    Returns None if they depend on the address that a request comes to, see `HostCheck`.
    """
    if allowed or not (has_key or is_address(host)):
        return checked_hosts(allowed) | {host.lower()}
    return None


def _checked(name: str) -> str:
    if not name.strip(".") or any(letter in name for letter in "/:*, "):
        raise RequestError(
            f"received the host {name[:100]!r}; allowed: NAME, or .NAME for every host below it; "
            "give it without scheme and port"
        )
    return name.lower().rstrip(".")


def _has_allowed_host(scope: Scope, allowed: frozenset[str]) -> bool:
    """Returns whether every Host header is allowed. A request without any is not from a browser."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return all(_is_allowed(_name_of(value), allowed) for value in values)


def _is_allowed(name: str, allowed: frozenset[str]) -> bool:
    if is_address(name) or name == "localhost" or name.endswith(".localhost") or name in allowed:
        return True
    return any(one.startswith(".") and name.endswith(one) for one in allowed)


def _name_of(value: str) -> str:
    """Returns the host name without the port, and without the brackets of an IPv6 address."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].lower().removesuffix(".")


@lru_cache(_MAX_KNOWN_NAMES)
def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_over_loopback(scope: Scope) -> bool:
    """Returns whether the connection is to a loopback address of this machine; False for a Unix socket."""
    return _is_loopback((scope.get("server") or ("", 0))[0])


@lru_cache(_MAX_KNOWN_NAMES)
def _is_loopback(address: str) -> bool:
    return is_address(address) and ipaddress.ip_address(address).is_loopback
