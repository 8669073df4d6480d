"""Transports between two real processes: the same bytes, receipts, cancellation, loss of either, no leaks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from epd.serve_app.network.connector import Envelope, TransportConfig
from epd.serve_app.network.memory import PoolFiles, new_fleet_id, remove_orphans
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import PeerPlace, Route
from epd.transfer.connectors import KVTicket, TransferOutcome
from tests.serve_app.network.test_connector import BETWEEN_MACHINES, WITH_NIXL
from tests.stages.handover_workers import DecodeWorker, PrefillWorker, pools_shape

# One process imports torch and this module, and each worker is a copy of it.
WORKERS: ForkServerContext = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload([__name__])
DEADLINE_S = 200.0  # the first of them imports torch, beside whatever else runs here
PROMPTS = {"a": list(range(1, 120)), "b": [5, 4, 3, 2, 1], "c": list(range(1, 90))}
# A few blocks pass at a time, of 64 and 32 bytes a token: a prompt needs the room many times.
SIZES = {"staging_bytes": 4096, "link_bytes": 4096, "part_bytes": 700}
ROUTES = (Route.SHARED_MEMORY, Route.STAGING, Route.LINK, WITH_NIXL)


class Process:
    """A worker in this process: its transport, and a pipe to the other one."""

    def __init__(self, name: str, pipe: Connection, fleet_id: str, route: Route) -> None:
        self.name = name
        self.route = route
        self.files = PoolFiles(fleet_id)
        self.files.hold()
        self._pipe = pipe
        between = route if route in BETWEEN_MACHINES else Route.LINK
        config = TransportConfig(**SIZES, is_staged=route is Route.STAGING, between_machines=between)
        self.transport = ProcessTransport(
            self._post, self._place, self.files, self._place(name), config=config
        )
        self.end: Any = None
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _place(self, name: str) -> PeerPlace:
        return PeerPlace(f"{name} 1", name if self.route in BETWEEN_MACHINES else "here")

    def _post(self, _worker: str, envelope: Envelope) -> None:
        try:
            self._pipe.send(envelope)
        except OSError:  # the other one is gone
            return

    def _read(self) -> None:
        while True:
            try:
                self.transport.deliver(self._pipe.recv())
            except (EOFError, OSError):
                return

    def prefill(self) -> PrefillWorker:
        pools, self.end = self.transport.kv("p0.prefill", pools_shape(100, 4))
        return PrefillWorker(pools, self.end)

    def decode(self) -> DecodeWorker:
        pools, self.end = self.transport.kv("d0.decode", pools_shape(140, 2))
        return DecodeWorker(pools, self.end)

    def close(self) -> None:
        self._pipe.close()
        self.transport.close("p0.prefill")
        self.transport.close("d0.decode")
        self.files.release()


def prefill_all(pipe: Connection, fleet_id: str, route: Route, tickets: list[KVTicket]) -> None:
    """A prefill worker that computes all prompts until all is answered, "c" in chunks that wait for that."""
    with_ends: dict[str, TransferOutcome] = {}
    before = num_descriptors()
    process = Process("p0", pipe, fleet_id, route)
    worker = process.prefill()
    for ticket in tickets:
        assert worker.start(ticket.request_id, PROMPTS[ticket.request_id])
        worker.outbox.open(ticket)
    while worker.prompts:
        time.sleep(0.002)
        for request_id, (token_ids, _) in worker.prompts.items():
            is_due = request_id != "c" or worker.outbox.is_settled("c")
            if is_due and worker.cache.num_tokens(request_id) < len(token_ids):
                worker.compute(request_id, 11 if request_id == "c" else 1000)
        with_ends |= {end.request_id: end.outcome for end in worker.outbox.poll()}
        for request_id in [each for each in with_ends if each in worker.prompts]:
            worker.free_if_settled(request_id)
    worker.check()
    assert num_on_the_way(process) == 0
    pipe.send(Envelope("", "kv", with_ends))  # type: ignore[arg-type]
    process.close()
    del worker, process
    gc.collect()
    assert num_descriptors() <= before


def prefill_a_part(pipe: Connection, fleet_id: str, route: Route, tickets: list[KVTicket]) -> None:
    """A prefill worker that offers a chunk of each prompt and then hangs."""
    worker = Process("p0", pipe, fleet_id, route).prefill()
    for ticket in tickets:
        worker.start(ticket.request_id, PROMPTS[ticket.request_id])
        worker.outbox.open(ticket)
        worker.compute(ticket.request_id, 3)
    time.sleep(2 * DEADLINE_S)


def receive_a_part(pipe: Connection, fleet_id: str, route: Route, request_ids: list[str]) -> None:
    """A decode worker that reserves, takes the first offers, and then hangs without answering more."""
    process = Process("d0", pipe, fleet_id, route)
    worker = process.decode()
    for request_id in request_ids:
        pipe.send(worker.reserve(request_id, "p0.prefill", PROMPTS[request_id]))
    time.sleep(2 * DEADLINE_S)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_on_the_way(process: Process) -> int:
    """Parts that wait or have no receipt, and bytes that are taken for them."""
    end = process.end
    queues = (end._staging, end._linking)
    return sum(len(queue) + queue._space.num_taken for queue in queues) + len(end._exported)


def leftovers(fleet_id: str) -> list[Path]:
    return [path for parent in ("/dev/shm", "/tmp") for path in Path(parent).glob(f"*{fleet_id}*")]


def wait_until(is_done: Callable[[], bool], process: BaseProcess | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_done():
        assert process is None or process.exitcode in (None, 0), f"it ended with {process.exitcode}"
        assert time.monotonic() < deadline, "nothing came in time"
        time.sleep(0.002)


@pytest.fixture
def fleet_id() -> Iterator[str]:
    """The name of a fleet. Afterwards nothing of it is left, neither files nor descriptors."""
    forkserver.ensure_running()  # it and the resource tracker leave pipes open
    gc.collect()
    before, fleet_id = num_descriptors(), new_fleet_id()
    yield fleet_id
    gc.collect()
    remove_orphans()
    assert leftovers(fleet_id) == []
    wait_until(lambda: num_descriptors() <= before)


class Other:
    """The other process, and this end of the pipe to it."""

    def __init__(self, target: Callable[..., None], fleet_id: str, route: Route, *args: object) -> None:
        self.pipe, theirs = WORKERS.Pipe()
        self.process = WORKERS.Process(target=target, args=(theirs, fleet_id, route, *args), daemon=True)
        self._begin = theirs

    def start(self) -> BaseProcess:
        self.process.start()
        self._begin.close()
        return self.process

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._begin.close()


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_prompts_arrive_as_they_were_sent_and_one_is_cancelled_in_the_middle(
    route: Route, fleet_id: str
) -> None:
    tickets: list[KVTicket] = []
    other = Other(prefill_all, fleet_id, route, tickets)
    here = Process("d0", other.pipe, fleet_id, route)
    ended: dict[str, TransferOutcome] = {}
    here.transport.deliver = caught(here.transport.deliver, ended)  # type: ignore[method-assign]
    worker = here.decode()
    tickets += [worker.reserve(each, "p0.prefill", PROMPTS[each]) for each in PROMPTS]  # type: ignore[misc]
    process = other.start()
    arrived: set[str] = set()

    def poll() -> bool:
        arrived.update(end.request_id for end in worker.poll() if end.outcome is TransferOutcome.DELIVERED)
        if "c" in worker.reception._open and worker.reception.num_missing("c") < 70:
            worker.reception.cancel("c")
        return len(arrived) == 2 and bool(ended)

    wait_until(poll, process)
    assert ended == {
        "a": TransferOutcome.DELIVERED, "b": TransferOutcome.DELIVERED, "c": TransferOutcome.CANCELLED,
    }  # fmt: skip
    assert all(worker.holds(each, PROMPTS[each]) for each in arrived)
    worker.check()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    here.close()
    other.end()


def caught(
    deliver: Callable[[Envelope], None], ended: dict[str, TransferOutcome]
) -> Callable[[Envelope], None]:
    """Passes envelopes on, but for the last one of the other process: how its hand-overs ended."""

    def pass_on(envelope: Envelope) -> None:
        if isinstance(envelope.message, dict):
            ended.update(envelope.message)
        else:
            deliver(envelope)

    return pass_on


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_a_sender_that_is_killed_leaves_nothing(route: Route, fleet_id: str) -> None:
    tickets: list[KVTicket] = []
    other = Other(prefill_a_part, fleet_id, route, tickets)
    here = Process("d0", other.pipe, fleet_id, route)
    worker = here.decode()
    tickets += [worker.reserve(each, "p0.prefill", PROMPTS[each]) for each in ("a", "b")]  # type: ignore[misc]
    process = other.start()

    def has_begun() -> bool:
        assert worker.poll() == []
        return worker.reception.num_missing("b") == len(PROMPTS["b"]) - 3

    wait_until(has_begun, process)
    other.end()
    here.files.remove_of("p0")
    assert sorted(worker.reception.fail_sender("p0.prefill")) == ["a", "b"]
    assert [worker.cache.num_free_blocks(group) for group in (0, 1)] == [140, 140]
    assert [path for path in leftovers(fleet_id) for path in path.iterdir() if "p0" in path.name] == []
    here.close()


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_a_receiver_that_is_killed_holds_nothing_back(route: Route, fleet_id: str) -> None:
    other = Other(receive_a_part, fleet_id, route, ["a", "c"])
    other.start()
    tickets = [other.pipe.recv(), other.pipe.recv()]
    here = Process("p0", other.pipe, fleet_id, route)
    worker = here.prefill()
    for ticket in tickets:
        worker.start(ticket.request_id, PROMPTS[ticket.request_id])
        worker.outbox.open(ticket)
        worker.compute(ticket.request_id)
    assert not any(worker.outbox.is_settled(each) for each in ("a", "c"))
    other.end()
    assert sorted(worker.outbox.drop_receiver("d0.decode")) == ["a", "c"]
    assert all(worker.outbox.is_settled(each) for each in ("a", "c"))
    assert num_on_the_way(here) == 0
    worker.check()
    here.close()
