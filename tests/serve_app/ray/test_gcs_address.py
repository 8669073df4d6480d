"""Addresses at which no GCS answers: each is told in one line, with exit code 3, before Ray tries it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc  # type: ignore[import-untyped]
import pytest

from epd.errors import UnavailableError, exit_code
from epd.serve_app.ray import gcs_address
from epd.serve_app.ray.gcs_address import checked_gcs
from tests.ports import free_port

ANSWER_S = 200.0  # of steps of seconds each, on a machine that may be busy; Ray tries for minutes


def refusal(address: str) -> str:
    start_s = time.monotonic()
    with pytest.raises(UnavailableError) as raised:
        checked_gcs(address)
    assert time.monotonic() - start_s < ANSWER_S
    assert exit_code(raised.value) == 3
    said = str(raised.value)
    assert f"'{address}'" in said
    assert "\n" not in said
    assert "\x1b" not in said
    return said


@contextmanager
def says(data: bytes) -> Iterator[int]:
    """A port that answers everything with the same, or nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer, args=(listener, data), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _closed(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _answer(listener: socket.socket, data: bytes) -> None:
    held = []
    while True:
        try:
            held.append(listener.accept()[0])
        except OSError:
            _closed(held)
            return
        if data:
            held[-1].sendall(data)


def test_nothing_listens() -> None:
    """A port that the system gives to nobody: from one of the others a client may connect to itself."""
    assert "Connection refused" in refusal(f"127.0.0.1:{free_port()}")


def test_a_host_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "the host's name does not resolve" in refusal("no-such-host:6379")


def test_a_port_of_http_as_the_dashboard_has() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        said = refusal(f"127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert "answers HTTP" in said


def test_a_port_of_grpc_as_rays_client_has() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "no GCS" in refusal(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("data", [b"", b"-ERR unknown command\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_a_port_that_says_nothing_or_something_else(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if not data:
        monkeypatch.setattr(gcs_address, "_STEP_S", 1.0)  # nothing ever comes
    with says(data) as port:
        assert "nothing that a GCS would say" in refusal(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://127.0.0.1:10001", "an address for Ray's client"),
        ("http://127.0.0.1:8265", "an address for http"),
        ("127.0.0.1", "no HOST:PORT"),
        ("127.0.0.1:", "no HOST:PORT"),
        (":6379", "no HOST:PORT"),
        ("127.0.0.1:99999", "no HOST:PORT"),
        ("127.0.0.1:gcs", "no HOST:PORT"),
    ],
)
def test_what_cannot_be_the_address_of_a_gcs(address: str, words: str) -> None:
    assert words in refusal(address)


def test_a_cluster_with_a_token_is_left_to_ray() -> None:
    """It is a GCS, and Ray itself says what is wrong with the token."""

    class Guarded(grpc.GenericRpcHandler):
        def service(self, _details: object) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(
                lambda _request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            )

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Guarded()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert checked_gcs(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
