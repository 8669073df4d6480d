"""Reads memory of processes on other machines with NIXL: by RDMA where UCX finds any, else over TCP.

    sender: register memory  --metadata, address-->  receiver: read it, into memory that it has registered

NIXL's own thread keeps a core busy as long as its agent lives, also when it is idle. The agent of this module
has a thread that sleeps while nothing is on its way.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from epd.errors import UnavailableError
from epd.types import UInt8Array

logger = logging.getLogger(__name__)

_PROGRESS_S = 0.0001  # between looks at what is on its way
_MEMORY = "DRAM"
_LEAST_BYTES = 1 << 20  # of memory for a read; powers of two, so that there are few sizes


@dataclass(frozen=True, slots=True)
class RegisteredPlace:
    """Says where registered memory is. metadata: of the agent that reads it. address: in its process."""

    metadata: bytes
    address: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Read:
    """A read on its way. done: None once it was called. buffer: that is written to."""

    place: RegisteredPlace
    is_there: Callable[[], bool]
    done: Callable[[UInt8Array | None], None] | None
    buffer: Tensor | None = None
    handle: Any = None


class _Buffers:
    """Keeps memory for reads that an agent has registered."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Returns registered memory of at least so many bytes, uint8."""
        for index, buffer in enumerate(self._free):
            if buffer.nbytes >= num_bytes:
                return self._free.pop(index)
        buffer = torch.empty(max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()), dtype=torch.uint8)
        self._agent.register_memory(_regions(buffer), _MEMORY)
        return buffer

    def contents(self, read: _Read) -> UInt8Array:
        """Returns what was read. Its buffer is free again when that is dropped."""
        assert read.buffer is not None
        contents: UInt8Array = read.buffer[: read.place.num_bytes].numpy()
        weakref.finalize(contents, self._free.append, read.buffer)
        return contents


class NixlAgent:
    """Reads memory of other agents, and registers memory of this process for them. Thread-safe."""

    def __init__(self, name: str, is_read: Callable[[], bool]) -> None:
        """Starts its thread.

        name: that no other agent has. is_read: whether others may be reading, which this process helps with
        Raises UnavailableError where NIXL does not start.
        """
        self._agent, self._errors = _new_agent(name)
        self._is_read = is_read
        self._begun: deque[_Read] = deque()
        self._reads: list[_Read] = []
        self._metadata = b""
        self._buffers = _Buffers(self._agent)
        self._remote: dict[bytes, tuple[str, Callable[[], bool]]] = {}  # names, by metadata
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def register(self, memory: Tensor) -> None:
        """Lets others read memory of the host, uint8."""
        self._agent.register_memory(_regions(memory), _MEMORY)
        self._metadata = self._agent.get_agent_metadata()

    def deregister(self, memory: Tensor) -> None:
        """Ends what `register` began."""
        self._agent.deregister_memory(self._agent.get_reg_descs(_regions(memory), _MEMORY))

    def place(self, memory: Tensor) -> RegisteredPlace:
        """Returns where a part of registered memory is."""
        return RegisteredPlace(self._metadata, memory.data_ptr(), memory.nbytes)

    def read(
        self, place: RegisteredPlace, is_there: Callable[[], bool], done: Callable[[UInt8Array | None], None]
    ) -> None:
        """Begins to read.

        is_there: False once the process is gone, and a read that has not ended never will
        done: called once by the agent's thread, with uint8 [num_bytes], or None if it cannot be read
        """
        self._begun.append(_Read(place, is_there, done))
        self._wake.set()
        if self._is_closed:
            self._thread.join()
            self._fail_all()

    def wake(self) -> None:
        """Tells the thread that others may be reading from now on."""
        self._wake.set()

    def close(self) -> None:
        """Ends the agent. What is being read has failed."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._reads.clear()
        self._agent, self._buffers = None, _Buffers(None)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                if self._begun or self._reads or self._is_read():
                    self._advance()
                    time.sleep(_PROGRESS_S)
                else:
                    self._wake.wait()
                    self._wake.clear()
        finally:
            self._is_closed = True
            self._fail_all()

    def _advance(self) -> None:
        while self._begun:
            self._begin(self._begun.popleft())
        with suppress(*self._errors):
            self._agent.get_new_notifs()  # nobody notifies: it lets others read on
        self._reads = [each for each in self._reads if not self._has_ended(each)]

    def _begin(self, read: _Read) -> None:
        place = read.place
        self._reads.append(read)
        try:
            read.buffer = self._buffers.take(place.num_bytes)
            sides = [
                self._agent.get_xfer_descs([(address, place.num_bytes, 0)], _MEMORY)
                for address in (read.buffer.data_ptr(), place.address)
            ]
            read.handle = self._agent.initialize_xfer("READ", *sides, self._remote_of(read), b"")
            self._agent.transfer(read.handle)
        except self._errors as error:
            logger.warning("NIXL cannot begin to read: %s", error)

    def _remote_of(self, read: _Read) -> str:
        """Returns the name of the agent to read from; forgets those of processes that are gone."""
        metadata = read.place.metadata
        if metadata not in self._remote:
            gone = {name for name, is_there in self._remote.values() if not is_there()}
            self._remote = {key: each for key, each in self._remote.items() if each[0] not in gone}
            for name in gone:
                self._agent.remove_remote_agent(name)
            self._remote[metadata] = self._agent.add_remote_agent(metadata).decode(), read.is_there
        return self._remote[metadata][0]

    def _has_ended(self, read: _Read) -> bool:
        """Reports the end of a read. Returns whether nothing is written to its buffer any more."""
        if read.done is not None:
            state = self._state(read)
            if state == "PROC" and read.is_there():
                return False
            done, read.done = read.done, None
            done(self._buffers.contents(read) if state == "DONE" else None)
        return self._is_released(read)

    def _state(self, read: _Read) -> str:
        if read.handle is None:
            return "ERR"
        try:
            return str(self._agent.check_xfer_state(read.handle))
        except self._errors as error:
            logger.warning("NIXL cannot read: %s", error)
            return "ERR"

    def _is_released(self, read: _Read) -> bool:
        try:
            if read.handle is not None:
                self._agent.release_xfer_handle(read.handle)
        except self._errors:  # it is still being cancelled
            return False
        return True

    def _fail_all(self) -> None:
        """Reports all that has not been read: nobody reads it any more."""
        while self._begun:
            self._reads.append(self._begun.popleft())
        for read in self._reads:
            done, read.done = read.done, None
            if done is not None:
                done(None)


def _new_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """Returns an agent of NIXL, and the errors that it raises. Raises UnavailableError."""
    errors: tuple[type[Exception], ...] = (ImportError,)
    try:
        api = import_module("nixl")
        kinds = vars(api._bindings).values()
        errors += tuple(each for each in kinds if isinstance(each, type) and issubclass(each, Exception))
        logging.getLogger("nixl").setLevel(logging.WARNING)
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, sync_mode=strict)), errors
    except errors as error:
        raise UnavailableError(
            f"received connector nixl, which does not start here: {error}; install epd-vlm[nixl] on every "
            "machine, or leave the connector at link"
        ) from error


def _regions(memory: Tensor) -> list[tuple[int, int, int, str]]:
    return [(memory.data_ptr(), memory.nbytes, 0, "")]
