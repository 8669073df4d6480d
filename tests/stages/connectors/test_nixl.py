"""Memory of other processes read with NIXL, over TCP and by the kernel, also of processes that are lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from epd.errors import UnavailableError
from epd.stages.connectors import nixl
from epd.stages.connectors.nixl import NixlAgent, RegisteredPlace
from epd.types import UInt8Array
from tests.serve_app.deployments import NEVER_S
from tests.serve_app.network.test_two_processes import WORKERS

NUM_BYTES = 8 << 20


@pytest.fixture(params=["tcp", "tcp,shm"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What UCX may use: messages need TCP, as shared memory tells it of no lost peer.

    CI has no NIXL: these run where epd-vlm[nixl] is installed.
    """
    pytest.importorskip("nixl", reason="needs epd-vlm[nixl]: CI has none")
    monkeypatch.setenv("UCX_TLS", f"{request.param},self")
    return str(request.param)


def register(pipe: Connection, transport: str, name: str) -> None:
    """Registers bytes, and lets them be read until the pipe ends."""
    os.environ["UCX_TLS"] = f"{transport},self"
    agent = NixlAgent(name, lambda: True)
    memory = contents()
    agent.register(memory)
    agent.wake()
    pipe.send(agent.place(memory))
    pipe.poll(NEVER_S)
    agent.close()


def contents() -> torch.Tensor:
    return torch.arange(NUM_BYTES // 8).view(torch.uint8)


class Other:
    """A process with registered memory."""

    def __init__(self, transport: str, name: str) -> None:
        self.pipe, theirs = WORKERS.Pipe()
        self.process = WORKERS.Process(target=register, args=(theirs, transport, name), daemon=True)
        self.process.start()
        theirs.close()
        self.place: RegisteredPlace = self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Reader:
    """An agent of this process, and what it has read, by number."""

    def __init__(self) -> None:
        self.agent = NixlAgent("reader", lambda: False)
        self.ended: dict[int, UInt8Array | None] = {}
        self.is_there = True
        self._changed = threading.Condition()

    def read(self, number: int, place: RegisteredPlace) -> None:
        def done(read: UInt8Array | None) -> None:
            with self._changed:
                assert number not in self.ended
                self.ended[number] = read
                self._changed.notify_all()

        self.agent.read(place, lambda: self.is_there, done)

    def until(self, num_ended: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ended) == num_ended, NEVER_S)


@pytest.fixture
def reader(transport: str) -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.agent.close()


@pytest.fixture
def other(transport: str) -> Iterator[Other]:
    other = Other(transport, "other")
    yield other
    other.kill()


def test_parts_are_read_as_they_are(reader: Reader, other: Other) -> None:
    whole, part = other.place, 3 << 20
    for number, start in enumerate((0, part, 17)):
        reader.read(number, RegisteredPlace(whole.metadata, whole.address + start, part))
    reader.until(3)
    for number, start in enumerate((0, part, 17)):
        read = reader.ended[number]
        assert read is not None
        assert torch.equal(torch.from_numpy(read), contents()[start : start + part])


def test_the_memory_of_what_was_read_is_used_again_when_that_is_dropped(reader: Reader, other: Other) -> None:
    reader.read(0, other.place)
    reader.until(1)
    kept = reader.ended[0]
    assert kept is not None
    address = kept.ctypes.data
    reader.read(1, other.place)
    reader.until(2)
    second = reader.ended[1]
    assert second is not None
    assert second.ctypes.data != address
    assert torch.equal(torch.from_numpy(kept), contents())
    reader.ended[0] = kept = None
    reader.read(2, other.place)
    reader.until(3)
    third = reader.ended[2]
    assert third is not None
    assert third.ctypes.data == address


@pytest.mark.parametrize("loss", ["killed", "hangs"])
def test_a_process_that_is_lost_while_it_is_read_fails_that_read_and_no_other(
    loss: str, reader: Reader, other: Other, transport: str
) -> None:
    """It is stopped before, so that the read is in its middle; but the kernel asks no process for memory."""
    reader.read(0, other.place)
    reader.until(1)
    other.signal(signal.SIGSTOP)
    reader.read(1, other.place)
    another = Other(transport, "another")
    reader.read(2, another.place)
    if transport == "tcp":
        reader.until(2)
        assert reader.ended[2] is not None
        if loss == "killed":  # UCX notices it
            other.kill()
        else:  # the board declares it lost
            reader.is_there = False
        reader.until(3)
        assert reader.ended[1] is None
        reader.is_there = True
    reader.until(3)
    other.kill()
    reader.read(3, another.place)
    reader.until(4)
    assert reader.ended[3] is not None
    another.kill()


def test_what_is_gone_before_it_is_read_is_reported(reader: Reader, other: Other) -> None:
    other.kill()
    reader.is_there = False
    reader.read(0, other.place)
    reader.until(1)
    assert reader.ended[0] is None


def test_reads_that_an_agent_leaves_behind_are_reported(reader: Reader, other: Other) -> None:
    other.signal(signal.SIGSTOP)
    reader.read(0, other.place)
    reader.agent.close()
    reader.read(1, other.place)
    assert reader.ended == {0: None, 1: None}
    reader.agent = NixlAgent("reader", lambda: False)


def test_nixl_that_is_not_there_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(UnavailableError, match=r"install epd-vlm\[nixl\] on every machine"):
        nixl.NixlAgent("reader", lambda: False)
