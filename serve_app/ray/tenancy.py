"""Decides where an application goes on a cluster that others use too, and whose an application is.

    who is there --> free_place --> where ours goes, or one line that says what it would have touched

One Ray cluster has one Serve, and its proxy one address, which the first start sets. On it, applications have
names and route prefixes of their own. At another port, fronts listen themselves, on the command's machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from epd.errors import RequestError, UnavailableError
from epd.serve_app.http.address import ROOT, HttpAddress
from epd.serve_app.ray.front import OWNER, front_address

APP_NAME = "epd"
# Serve's status of an application that was deleted, until its replicas have ended.
DELETING = "DELETING"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# Whoever has made the actor of this name looks, and deploys; others wait for their turn.
_TURN, _NAMESPACE = "epd-turn-to-deploy", "epd"
_TURN_S, _TRY_AGAIN_S = 60.0, 0.2


def checked_name(name: str) -> str:
    """Returns the name of an application. Raises RequestError."""
    if _NAME.fullmatch(name):
        return name
    raise RequestError(
        f"received the application name {name[:100]!r}; allowed: letters, digits and ._- and 63 of them at "
        "most; change --name"
    )


@dataclass(frozen=True, slots=True)
class Tenant:
    """Is an application on a cluster. route_prefix: at Serve's proxy, None for none.

    fronts: where its fronts listen themselves; None for behind the proxy
    owner: the command that has deployed it; empty for none of ours
    """

    name: str
    status: str
    route_prefix: str | None = ROOT
    fronts: HttpAddress | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Is what runs on Serve. proxy: where its proxy listens; None where it does not run, or has none."""

    tenants: Sequence[Tenant] = ()
    proxy: HttpAddress | None = None
    has_serve: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Says where an application goes. route_prefix: at the proxy. fronts: where they listen themselves."""

    route_prefix: str | None
    fronts: HttpAddress | None = None


def free_place(there: Cluster, name: str, http: HttpAddress) -> Place:
    """Returns where an application of that name goes so that it is reached at `http`.

    Raises UnavailableError if another has its name or its route.
    """
    taken = next((each for each in there.tenants if each.name == name), None)
    if taken is not None:
        raise UnavailableError(
            f"the Ray cluster already has an application '{name}' ({taken.status}), which is left as it is; "
            "give this one another --name, and another --route-prefix or --port"
        )
    is_own_port = there.has_serve and (there.proxy is None or not _is_same(there.proxy, http))
    route = None if is_own_port and http.prefix == ROOT else http.prefix
    holder = next(
        (each.name for each in there.tenants if route is not None and each.route_prefix == route), None
    )
    if holder is not None:
        raise UnavailableError(
            f"the route '{route}' at the Ray cluster's proxy is that of the application '{holder}', which is "
            "left as it is; give this one another --route-prefix, such as "
            f"/{name}, or another --port with the route prefix /"
        )
    return Place(route, http if is_own_port else None)


def _is_same(proxy: HttpAddress, http: HttpAddress) -> bool:
    return (proxy.host, proxy.port) == (http.host, http.port)


def cluster_now() -> Cluster:
    """Returns what runs on the Serve of the connected cluster. Raises UnavailableError without an answer."""
    try:
        client = _get_global_client()
    except RayServeException:
        return Cluster()
    if client is None:
        return Cluster()
    try:
        return cluster_of(client.get_serve_details())
    except RayError as error:
        raise UnavailableError(f"the cluster's Serve does not answer: {type(error).__name__}") from error


def cluster_of(details: Mapping[str, Any]) -> Cluster:
    """Returns what Serve's details of its instance say."""
    options = details.get("http_options") or {}
    default = HttpAddress()
    proxy = HttpAddress(options.get("host") or default.host, options.get("port") or default.port)
    tenants = [_tenant(name, each) for name, each in details.get("applications", {}).items()]
    has_proxy = _text(details.get("proxy_location")) != "Disabled"
    return Cluster(tenants, proxy if has_proxy else None, has_serve=True)


def _tenant(name: str, details: Mapping[str, Any]) -> Tenant:
    front = details.get("deployments", {}).get("Front") or {}
    config = (front.get("deployment_config") or {}).get("user_config")
    route, status = details.get("route_prefix"), _text(details.get("status"))
    if not isinstance(config, Mapping):
        return Tenant(name, status, route)
    with suppress(RequestError):  # of an application that is not ours
        return Tenant(name, status, route, front_address(config), str(config.get(OWNER, "")))
    return Tenant(name, status, route)


def _text(value: Any) -> str:
    """Returns the text of a field that is an enumeration of Serve's, or its value."""
    return str(getattr(value, "value", value))


def url_at(there: Cluster, name: str, head: str) -> str | None:
    """Returns the URL of an application; None if it is not there, or has none. head: machine of the proxy."""
    tenant = next((each for each in there.tenants if each.name == name), None)
    if tenant is None:
        return None
    address = tenant.fronts
    if address is None and there.proxy is not None and tenant.route_prefix is not None:
        address = replace(there.proxy, prefix=tenant.route_prefix)
    if address is None:
        return None
    return (replace(address, host=head) if address.host in ("0.0.0.0", "::") else address).url


def is_of(there: Cluster, name: str, owner: str) -> bool:
    """Returns whether the application of that name is the owner's, and nobody has replaced it since."""
    return any(each.name == name and each.owner == owner for each in there.tenants)


def is_left(there: Cluster, name: str, owner: str) -> bool:
    """Returns whether the owner's application is there, or one of its name still ends, of any owner."""
    return is_of(there, name, owner) or any(
        each.name == name and each.status == DELETING for each in there.tenants
    )


def is_taken(name: str, owner: str) -> bool:
    """Returns whether others have deleted or replaced the owner's application; False without an answer."""
    try:
        there = cluster_now()
    except UnavailableError:
        return False
    return there.has_serve and not is_of(there, name, owner)


@contextmanager
def turn_to_deploy(within_s: float = _TURN_S) -> Iterator[None]:
    """Is open to one command on the cluster at a time: what it sees there is still so when it deploys.

    Raises UnavailableError if it is somebody else's for too long.
    """
    end_s = time.monotonic() + within_s
    while (turn := _taken_turn()) is None:
        if time.monotonic() > end_s:
            raise UnavailableError(
                f"another command has been deploying on the cluster for {within_s:.0f} s; try again"
            )
        time.sleep(_TRY_AGAIN_S)
    try:
        yield
    finally:
        ray.kill(turn)


class _Turn:
    """Does nothing; its name can be had once, and ends with the process that has it."""


def _taken_turn() -> Any:
    try:
        return ray.remote(_Turn).options(name=_TURN, namespace=_NAMESPACE, num_cpus=0).remote()
    except ValueError:  # the name is taken
        return None
