"""What a plain question waits while thousands of clients misuse their connections, all at once.

    python -m benchmarks.hostile_clients [--readers 8192] [--halves 640] [--urls 64]

    readers   ask for the schema several times on a connection, and read nothing
    halves    send half of a request
    urls      one request for media at so many addresses that answer byte by byte

The server is `epd serve --local` in a process of its own. Prints the time of plain questions, and of /health,
before and beside.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx

NUM_QUESTIONS = 20
_START_S = 180.0
_PIPELINED = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60
_HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
_QUESTION = {"model": "shapes-vl", "max_tokens": 4, "messages": [{"role": "user", "content": "How many?"}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--readers", type=int, default=8192)
    parser.add_argument("--halves", type=int, default=640)
    parser.add_argument("--urls", type=int, default=64)
    wanted = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with served() as (port, pid), dripping() as url, ExitStack() as attackers:
        show("before", port, pid)
        misuse(attackers, port, [_PIPELINED] * wanted.readers + [_HALF] * wanted.halves)
        threading.Thread(target=ask_about, args=(port, url, wanted.urls), daemon=True).start()
        for _ in range(3):
            show("beside", port, pid)


@contextmanager
def served(*options: str) -> Iterator[tuple[int, int]]:
    """Yields the port and the process of a server that is ready. options: more of `epd serve`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "epd", "serve", "shapes-vl", "--local", "--port", str(port)]
    command += ["--topology", "1epd", "--allowed-media-hosts", "127.0.0.1", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + _START_S
        while status(port, "GET", "/health") != 200:
            assert time.monotonic() < end_s, "the server does not start"
            time.sleep(0.5)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def misuse(attackers: ExitStack, port: int, requests: list[bytes]) -> None:
    """Opens a connection for each request, which stays as it is."""
    start_s, num_refused = time.monotonic(), 0
    for request in requests:
        try:
            sock = attackers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            sock.sendall(request)
        except OSError:
            num_refused += 1
    print(f"{len(requests)} connections in {time.monotonic() - start_s:.1f} s, {num_refused} closed early")


def ask_about(port: int, url: str, count: int) -> None:
    """Asks about many media that do not come."""
    content = [{"type": "image_url", "image_url": {"url": f"{url}?{number}"}} for number in range(count)]
    body = {**_QUESTION, "messages": [{"role": "user", "content": content}]}
    with suppress(httpx.HTTPError):
        httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=600, trust_env=False)


@contextmanager
def dripping() -> Iterator[str]:
    """Yields the URL of a server whose answers come byte by byte, for ever."""

    def drip(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                sock.sendall(b"x")
                time.sleep(0.2)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"


def status(port: int, method: str, path: str, body: object = None) -> int:
    """Returns the status of an answer over a connection of its own, 0 for none."""
    with suppress(httpx.HTTPError):
        url = f"http://127.0.0.1:{port}{path}"
        return httpx.request(method, url, json=body, timeout=60, trust_env=False).status_code
    return 0


def show(when: str, port: int, pid: int) -> None:
    """Prints how long questions and probes take, how many were answered, and the server's memory."""
    for name, method, path, body in (
        ("question", "POST", "/v1/chat/completions", _QUESTION),
        ("/health", "GET", "/health", None),
    ):
        seconds, answered = [], 0
        for _ in range(NUM_QUESTIONS):
            start_s = time.monotonic()
            answered += status(port, method, path, body) == 200
            seconds.append(time.monotonic() - start_s)
        print(
            f"{when:7} {name:9} median {statistics.median(seconds):6.3f} s, slowest {max(seconds):6.3f} s, "
            f"{answered} of {NUM_QUESTIONS} answered, server {resident_mb(pid)} MB",
            flush=True,
        )


def resident_mb(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


if __name__ == "__main__":
    main()
