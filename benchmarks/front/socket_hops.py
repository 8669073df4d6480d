"""Answers and asks hops over sockets, for `hops.py`: plain ones, the application's links, ZeroMQ.

Everything runs in event loops of processes that Ray has started, as in the application.
"""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import struct
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from epd.serve_app.network.calls import Answer, Channel
from epd.serve_app.network.link import Address, Link, connect, listen

HOST = "127.0.0.1"
KEY = b"the key of a benchmark, which is not one"
SIZE = struct.Struct(">I")
# A decode worker's report of one step with four answers.
MESSAGE: dict[str, Any] = {
    "worker": "d0",
    "outputs": [
        {"request_id": f"front-1/chatcmpl-{number:04d}#1", "tokens": [1000 + number], "finished": None}
        for number in range(4)
    ],
}
Ask = Callable[[], Awaitable[Any]]
_KEPT: list[Any] = []  # listeners and sockets, to the end of the process


async def serve_hops(kind: str) -> int:
    """Returns the port at which hops of a kind are answered with their own message."""
    return await {"socket": _serve_socket, "link": _serve_link, "ZeroMQ": _serve_zeromq}[kind]()


# Length-prefixed pickles


async def _serve_socket() -> int:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(_framed(await _read(reader)))

    server = await asyncio.start_server(answer, HOST, 0)
    _KEPT.append(server)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _read(reader: asyncio.StreamReader) -> Any:
    (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
    return pickle.loads(await reader.readexactly(size))


def _framed(value: Any) -> bytes:
    pickled = pickle.dumps(value, protocol=5)
    return SIZE.pack(len(pickled)) + pickled


async def _ask_socket(port: int) -> Ask:
    reader, writer = await asyncio.open_connection(HOST, port)
    return _numbered(lambda value: writer.write(_framed(value)), lambda: _read(reader))


def _numbered(send: Callable[[Any], Any], receive: Callable[[], Awaitable[Any]]) -> Ask:
    """Calls over anything that carries messages: replies find their callers by number."""
    numbers, waiting = count(), dict[int, asyncio.Future[Any]]()

    async def read() -> None:
        while True:
            number, value = await receive()
            waiting.pop(number).set_result(value)

    async def ask() -> Any:
        number = next(numbers)
        waiting[number] = asyncio.get_running_loop().create_future()
        send((number, MESSAGE))
        return await waiting[number]

    _KEPT.append(asyncio.get_running_loop().create_task(read()))
    return ask


# The application's links


async def _serve_link() -> int:
    def echo(value: Any, answer: Answer) -> None:
        answer(value)

    def accept(link: Link) -> None:
        channel = Channel(link)
        channel.on_call = echo
        _KEPT.append(channel)

    listener = await listen(HOST, KEY, accept)
    _KEPT.append(listener)
    return listener.address.port


async def _ask_link(port: int) -> Ask:
    channel = Channel(await connect(Address(HOST, port), KEY))
    return lambda: channel.call(MESSAGE)


# ZeroMQ


async def _serve_zeromq() -> int:
    from zmq import ROUTER
    from zmq.asyncio import Context

    router = Context.instance().socket(ROUTER)
    port: int = router.bind_to_random_port(f"tcp://{HOST}")

    async def answer() -> None:
        while True:
            client, pickled = await router.recv_multipart()
            await router.send_multipart([client, pickle.dumps(pickle.loads(pickled), protocol=5)])

    _KEPT.append(asyncio.get_running_loop().create_task(answer()))
    return port


async def _ask_zeromq(port: int) -> Ask:
    from zmq import DEALER
    from zmq.asyncio import Context

    dealer = Context.instance().socket(DEALER)
    dealer.connect(f"tcp://{HOST}:{port}")

    async def receive() -> Any:
        return pickle.loads(await dealer.recv())

    return _numbered(lambda value: dealer.send(pickle.dumps(value, protocol=5)), receive)


# By kind, what opens a way to ask at a port.
LINKS: dict[str, Callable[[int], Awaitable[Ask]]] = {"socket": _ask_socket, "link": _ask_link}
if importlib.util.find_spec("zmq") is not None:
    LINKS["ZeroMQ"] = _ask_zeromq
