"""Finds out what answers at the address of a Ray cluster, before Ray tries it for minutes.

HOST:PORT --name--> address --TCP--> a program listens --gRPC--> it is a GCS, which `ray.init` is given
"""

from __future__ import annotations

import socket
from contextlib import suppress

import grpc  # type: ignore[import-untyped]

from epd.errors import EPDError, UnavailableError

AUTO = "auto"
# Of each step: the name, the connection, the first answer.
_STEP_S = 5.0
_LAST_PORT = 65535
_DASHBOARD = "HTTP, as Ray's dashboard does"
# Any GCS has it, and answers it with or without a token.
_IS_GCS = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_ADVICE = "give HOST:PORT of its GCS, as ray start --head prints it (port 6379 by default), or leave it out"


def checked_gcs(address: str) -> str:
    """Returns HOST:PORT of the GCS at an address, `auto` for that on this machine.

    Raises UnavailableError with the reason, within some seconds.
    """
    host, port = _host_and_port(_of_this_machine() if address == AUTO else address)
    try:
        with socket.create_connection((host, port), _STEP_S):
            pass
    except OSError as error:
        raise _no_cluster(address, _reason(error)) from error
    return _checked_answer(address, host, port)


def _of_this_machine() -> str:
    """Returns the address that Ray has noted on this machine. Raises UnavailableError without one."""
    from ray._private.services import canonicalize_bootstrap_address  # seconds, which a wrong address saves

    try:
        return canonicalize_bootstrap_address(AUTO, None) or AUTO
    except (ConnectionError, ValueError) as error:
        raise UnavailableError(f"received the Ray address 'auto': {error}; {_ADVICE}") from error


def _host_and_port(address: str) -> tuple[str, int]:
    """Raises UnavailableError for what cannot be an address of a GCS."""
    scheme, has_scheme, _ = address.partition("://")
    if has_scheme:
        what = "Ray's client" if scheme == "ray" else scheme
        raise _no_cluster(address, f"it is an address for {what}, through which nothing can be served")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise _no_cluster(address, "it is no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the host's name does not resolve"
    return "it does not answer" if isinstance(error, TimeoutError) else f"{error.strerror or error}"


def _checked_answer(address: str, host: str, port: int) -> str:
    """Returns HOST:PORT if a GCS answers there. Raises UnavailableError."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(_IS_GCS, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=_STEP_S)
        except grpc.RpcError as error:
            code = error.code()
        else:
            return place
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return place  # of a cluster with a token: `ray.init` says what is wrong with ours
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise _no_cluster(
            address, "what answers is another port of Ray's, or another gRPC server, and no GCS"
        )
    speaks = _DASHBOARD if _speaks_http(host, port) else "nothing that a GCS would say"
    raise _no_cluster(address, f"what listens there answers {speaks}")


def _speaks_http(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), _STEP_S) as connection:
        connection.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
        return connection.recv(5) == b"HTTP/"
    return False


def _no_cluster(address: str, reason: str) -> EPDError:
    return UnavailableError(f"no Ray cluster answers at '{address}': {reason}; {_ADVICE}")
