"""Which Host headers are answered: DNS rebinding asks a server on loopback under a name of the attacker's.

A page at http://evil.example whose name suddenly leads to 127.0.0.1 may read answers of a server there as
its own. Its requests still say `Host: evil.example`, so a server that knows its names can tell. An address
cannot be rebound, and is always let in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.types import Scope

from epd.errors import RequestError


def served_hosts(bound_host: str, *, has_key: bool, extra: Iterable[str] = ()) -> frozenset[str] | None:
    """The names to answer to, None for any.

    Those in `extra` if there are some, and the bound one. Without them, loopback names for a server on
    loopback that asks for no key; any name for others: their names are not known here, or their key protects
    them. A name that begins with a dot stands for every host below it.
    Raises RequestError for what is no host name.
    """
    names = frozenset(_checked(name) for name in extra)
    if not names and (has_key or not _is_loopback(bound_host)):
        return None
    return names | {bound_host.lower()}


def _checked(name: str) -> str:
    if not name.strip(".") or any(letter in name for letter in "/:*, "):
        raise RequestError(
            f"received the host {name[:100]!r}; allowed: NAME, or .NAME for every host below it; "
            "give it without scheme and port"
        )
    return name.lower().rstrip(".")


def has_allowed_host(scope: Scope, allowed: frozenset[str]) -> bool:
    """Whether every Host header is allowed. One without any is no browser's."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return all(_is_allowed(_name_of(value), allowed) for value in values)


def _is_allowed(name: str, allowed: frozenset[str]) -> bool:
    if _is_address(name) or name == "localhost" or name.endswith(".localhost") or name in allowed:
        return True
    return any(one.startswith(".") and name.endswith(one) for one in allowed)


def _name_of(value: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if _is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")
