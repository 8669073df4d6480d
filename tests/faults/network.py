"""Connects the processes of a simulation: bytes arrive in order, after drawn times; one way may be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from epd.serve_app.network.link import SILENT_S
from tests.faults.virtual_time import Process, VirtualLoop, process_now

_USUAL_S = (0.0002, 0.0005, 0.002, 0.002, 0.01)
_RARE_S = (0.03, 0.6)  # one message in fifty takes a time between these


class _Socket:
    """Stands for the socket of a connection, or of a listener."""

    def __init__(self, name: tuple[str, int]) -> None:
        self._name = name

    def setsockopt(self, *_options: Any) -> None: ...

    def fileno(self) -> int:
        return -1

    def getsockname(self) -> tuple[str, int]:
        return self._name


class Pipe:
    """One direction between two processes. Everything arrives in order."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network = network
        self._names = source, target
        self._rng = Random(f"{network.seed} {source} {target}")
        self._last_s = 0.0

    def deliver(self, work: Callable[[], object], context: Any) -> None:
        """Calls back in a context, after the time that a message takes now."""
        rng, loop = self._rng, self._network.loop
        late_s = rng.choice(_USUAL_S) if rng.random() > 0.02 else rng.uniform(*_RARE_S)
        start_s = max(loop.time(), self._network.cut_until_s.get(self._names, 0.0))
        self._last_s = max(self._last_s + 1e-6, start_s + late_s * self._network.slowness)
        loop.call_at(self._last_s, work, context=context)


class Connection(asyncio.Transport):
    """One end of a connection of two processes."""

    def __init__(self, network: Network, process: Process, protocol: Any) -> None:
        super().__init__()
        self.process = process
        self.protocol = protocol
        self.peer: Connection | None = None
        self.is_ended = False
        self._network = network
        self._context = process.context

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Socket((self.process.name, 0)) if name == "socket" else default

    def is_closing(self) -> bool:
        return self.is_ended

    def write(self, data: Any) -> None:
        if self.is_ended or self.peer is None:
            return
        peer, content = self.peer, bytes(data)
        pipe = self._network.pipe(self.process, peer.process)
        pipe.deliver(lambda: peer.take(content), peer.process.context)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(bytes(part) for part in list_of_data))

    def take(self, content: bytes) -> None:
        """Gives the protocol bytes that have come."""
        left = memoryview(content)
        while left and not self.is_ended:
            buffer = self.protocol.get_buffer(len(left))
            size = min(len(buffer), len(left))
            buffer[:size] = left[:size]
            self.protocol.buffer_updated(size)
            left = left[size:]

    def close(self) -> None:
        """Ends both ends: what was written before still arrives."""
        if self.is_ended:
            return
        self.end()
        peer = self.peer
        if peer is not None:
            self._network.pipe(self.process, peer.process).deliver(peer.end, peer.process.context)

    abort = close

    def end(self, reason: str = "") -> None:
        """Ends this end."""
        if not self.is_ended:
            self.is_ended = True
            error = ConnectionError(reason) if reason else None
            self._network.loop.call_soon(self.protocol.connection_lost, error, context=self.process.context)


class _Server:
    """A listener of asyncio."""

    def __init__(self, network: Network, name: tuple[str, int]) -> None:
        self.sockets = (_Socket(name),)
        self._network = network
        self._name = name

    def close(self) -> None:
        self._network.servers.pop(self._name, None)


class Network:
    """Connects processes. A process has a host of its own name.

    slowness: of everything that is sent
    cut_until_s: when each direction between two processes is whole again
    """

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.seed = seed
        self.slowness = 1.0
        self.cut_until_s: dict[tuple[str, str], float] = {}
        self.servers: dict[tuple[str, int], tuple[Process, Any]] = {}
        self._pipes: dict[tuple[str, str], Pipe] = {}
        self._connections: list[Connection] = []
        self._num_ports = 1000
        self._lost_machines: set[str] = set()

    def pipe(self, source: Process, target: Process) -> Pipe:
        names = source.name, target.name
        return self._pipes.get(names) or self._pipes.setdefault(names, Pipe(self, *names))

    def listen(self, factory: Any, host: str) -> _Server:
        process = process_now()
        assert process is not None
        self._num_ports += 1
        name = host, self._num_ports
        self.servers[name] = process, factory
        return _Server(self, name)

    async def connect(self, factory: Any, host: str, port: int) -> tuple[Connection, Any]:
        """Connects the process that runs now. Raises ConnectionError."""
        process, found = process_now(), self.servers.get((host, port))
        assert process is not None
        if found is None or found[0].is_dead:
            silent_s = SILENT_S if found is not None and found[0].machine in self._lost_machines else 0.001
            await asyncio.sleep(silent_s)
            raise ConnectionRefusedError("nobody listens there")
        target, server_factory = found
        arrived = self.loop.create_future()
        self.pipe(process, target).deliver(lambda: arrived.set_result(None), None)
        await arrived
        if target.is_dead:
            raise ConnectionRefusedError("nobody listens there any more")
        mine, theirs = Connection(self, process, factory()), Connection(self, target, None)
        mine.peer, theirs.peer = theirs, mine
        self._connections += [mine, theirs]
        theirs.protocol = target.context.copy().run(server_factory)
        mine.protocol.connection_made(mine)
        # At once, as a kernel does: a server that is frozen reads the rest later.
        self.loop.call_soon(theirs.protocol.connection_made, theirs, context=target.context)
        return mine, mine.protocol

    def lose(self, process: Process, *, with_machine: bool) -> None:
        """Ends the connections of a dead process: its kernel says so, unless the machine is lost too."""
        if with_machine:
            self._lost_machines.add(process.machine)
        for end in self._connections:
            if end.process is process and not end.is_ended:
                end.is_ended = True
                if end.peer is not None:
                    self._lose_peer(end, end.peer, with_machine=with_machine)
        self._connections = [each for each in self._connections if not each.is_ended]

    def _lose_peer(self, end: Connection, peer: Connection, *, with_machine: bool) -> None:
        context = peer.process.context
        if with_machine:
            self.loop.call_later(SILENT_S, peer.end, "its machine is silent", context=context)
        else:
            self.pipe(end.process, peer.process).deliver(lambda: peer.end(), context)

    def call(self, answer: asyncio.Future[Any], target: Process, work: Callable[[], Awaitable[Any]]) -> None:
        """Has another process do something. answer: gets what comes of it, in the process that runs now."""
        source = process_now()
        assert source is not None
        back = self.pipe(target, source)

        async def run() -> None:
            try:
                value, error = await work(), None
            except Exception as raised:  # noqa: BLE001 - the caller gets it
                value, error = None, raised
            back.deliver(lambda: _settle(answer, value, error), source.context)

        self.pipe(source, target).deliver(lambda: target.spawn(run()), target.context)


def _settle(answer: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if not answer.done():
        answer.set_result(value) if error is None else answer.set_exception(error)
