"""The transport between worker processes, without Ray: pools that are mapped, and contents that travel."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.encode.encoder_cache import CachedGroup, GroupKey
from epd.encoders.adapter import Embeddings
from epd.errors import InfeasibleError
from epd.serve_app.network import memory as shared_memory
from epd.serve_app.network.connector import Envelope, ProcessConnector, TransportConfig
from epd.serve_app.network.memory import PoolFiles, new_fleet_id, open_pool
from epd.serve_app.network.packing import Packed
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import Access, PeerPlace, Registered, Route, map_pool
from epd.stages.encode.encoder_pool import EmbeddingLayout, EncoderPoolShape
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPoolsShape
from epd.stages.engine.pool_memory import pool_memory
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket, Offer, Ticket, TransferOutcome
from tests.serve_app.deployments import NEVER_S
from tests.serve_app.network.fake_gpu import FakeGpuMemory

MIB = 1 << 20
CLAIMS = shared_memory._claims
BF16 = torch.bfloat16
ENCODER = EncoderPoolShape(6, 4, EmbeddingLayout(8, BF16, num_deepstack=1))
RECEIVER = EncoderPoolShape(10, 3, EmbeddingLayout(8, BF16, num_deepstack=1))
GROUPS = (KVLayout(2, 2, 4, BF16), KVLayout(1, 2, 4, BF16))
PREFILL = KVPoolsShape(tuple(KVGroupShape(8, layout) for layout in GROUPS), 4, "heads")
DECODE = KVPoolsShape(tuple(KVGroupShape(12, layout) for layout in GROUPS), 3)


HAS_NIXL = find_spec("nixl") is not None
WITH_NIXL = pytest.param(
    Route.NIXL, marks=pytest.mark.skipif(not HAS_NIXL, reason="needs epd-vlm[nixl]: CI has none")
)
ROUTES = (Route.SHARED_MEMORY, Route.STAGING, Route.CUDA_IPC, Route.LINK, WITH_NIXL)
BETWEEN_MACHINES = (Route.LINK, Route.NIXL)


class Workers:
    """Transports of workers between which data takes one route, with a copy made of every message.

    accesses: of the offers that were posted, in order
    """

    def __init__(self, files: PoolFiles, route: Route, **config: Any) -> None:
        self.files = files
        self.route = route
        self.gpu = FakeGpuMemory() if route is Route.CUDA_IPC else None
        self.accesses: list[Access] = []
        self.gone: set[str] = set()
        sizes = {"staging_bytes": 1 << 14, "link_bytes": 1 << 14, "part_bytes": 1 << 12, **config}
        between = route if route in BETWEEN_MACHINES else Route.LINK
        self._config = TransportConfig(**sizes, is_staged=route is Route.STAGING, between_machines=between)
        self._num_reading = 0
        self._read = threading.Semaphore(0)  # parts that NIXL has read and delivered
        self._transports: dict[str, ProcessTransport] = {}

    def __getitem__(self, name: str) -> ProcessTransport:
        if name not in self._transports:
            self._transports[name] = ProcessTransport(
                self._post, self.find, self.files, self.place(name),
                gpu_memory=self.gpu, config=self._config, wake=self._read.release,
            )  # fmt: skip
        return self._transports[name]

    def find(self, name: str) -> PeerPlace | None:
        return None if name in self.gone else self.place(name)

    def place(self, name: str) -> PeerPlace:
        return PeerPlace(f"{name} 1", name if self.route in BETWEEN_MACHINES else "here", ("GPU-a",))

    def settle(self) -> None:
        """Waits until NIXL has read what was offered."""
        while self._num_reading:
            assert self._read.acquire(timeout=NEVER_S)
            self._num_reading -= 1

    def received(self, receiver: Any) -> list[Offer[Any]]:
        """Takes what was offered, once it has been read."""
        self.settle()
        return list(receiver.recv())

    def close(self) -> None:
        for transport in self._transports.values():
            for name in {name for name, _ in transport._ends}:
                transport.close(name)

    def _post(self, worker: str, envelope: Envelope) -> None:
        if envelope.access is not None:
            self.accesses.append(envelope.access)
        there = self[worker]
        self._num_reading += isinstance(envelope.access, Registered) and there._nixl is not None
        there.deliver(pickle.loads(pickle.dumps(envelope, protocol=5)))


@pytest.fixture
def files() -> Iterator[PoolFiles]:
    files = PoolFiles(new_fleet_id())
    yield files
    files.release()
    assert files.paths() == []


@pytest.fixture(params=ROUTES, ids=str)
def workers(request: pytest.FixtureRequest, files: PoolFiles) -> Iterator[Workers]:
    workers = Workers(files, request.param)
    yield workers
    workers.close()


def group(num_embeddings: int) -> Embeddings:
    draw = torch.Generator().manual_seed(num_embeddings)
    rows = torch.randn(2, num_embeddings, 8, generator=draw).to(BF16)
    return Embeddings(rows[0], (rows[1],))


def ticket(transfer_id: str, target: CachedGroup) -> Ticket:
    return Ticket(transfer_id, "p0.prefill", GroupKey(transfer_id, (), (0, 1), (8, 8), "m"), target)


def outcomes(end: Any) -> list[TransferOutcome]:
    return [receipt.outcome for receipt in end.poll()]


def test_embeddings_arrive_as_they_were_sent(workers: Workers) -> None:
    pool, sender = workers["e0"].embeddings("e0.encode", ENCODER)
    target_pool, receiver = workers["p0"].embeddings("p0.prefill", RECEIVER)
    source, target = CachedGroup(7, (5, 2), places=(0, 3, 4, 5, 9, 12, 40)), CachedGroup(7, (9, 0, 4))
    embeddings = group(7)
    pool.write(source, embeddings)
    receiver.expect(ticket("t", target))
    sender.send(ticket("t", target), source)
    assert [(offer.error, offer.source and offer.source.places) for offer in workers.received(receiver)] == [
        ("", source.places)
    ]
    got = target_pool.read(target)
    assert torch.equal(got.rows, embeddings.rows)
    assert torch.equal(got.deepstack[0], embeddings.deepstack[0])
    assert outcomes(sender) == [TransferOutcome.DELIVERED]
    assert workers["e0"].routes() == {"p0": workers.route}
    assert len(workers.accesses) == 1


@pytest.mark.skipif(not HAS_NIXL, reason="needs epd-vlm[nixl]: CI has none")
def test_what_nixl_cannot_read_is_sent_over_the_link_from_then_on(files: PoolFiles) -> None:
    """The first of two offers needs several parts."""
    workers = Workers(files, Route.NIXL, part_bytes=600)
    pools, sender = workers["p0"].kv("p0.prefill", PREFILL)
    target_pools, receiver = workers["d0"].kv("d0.decode", DECODE)
    for each in pools.groups:
        each.storage.normal_()
    agent, workers["d0"]._nixl = workers["d0"]._nixl, None  # it reads nothing
    for number in range(2):
        to = KVTicket(f"t{number}", "d0.decode", "p0.prefill", "r", 0, 8, ((11, 3, 5), (1, 2, 3)))
        receiver.expect(to)
        workers.accesses.clear()
        sender.send(to, KVChunk((KVSpan(0, 0, 8, (7, 1)), KVSpan(1, 0, 8, (0, 2)))))
        errors = [offer.error for offer in receiver.recv()]
        assert outcomes(sender) == [TransferOutcome.DELIVERED] * number  # else reads that nothing was read
        errors += [offer.error for offer in receiver.recv()]
        assert set(errors) == {""}
        assert outcomes(sender) == [TransferOutcome.DELIVERED] * (1 - number)
        for token in range(8):
            theirs = pools.groups[0].storage[(7, 1)[token // 4], :, :, token % 4]
            assert torch.equal(
                target_pools.groups[0].storage[(11, 3, 5)[token // 3], :, :, token % 3], theirs
            )
        kinds = [type(access) for access in workers.accesses]
        assert kinds.count(Packed) > 1
        assert kinds.count(Registered) == (0 if number else kinds.count(Packed))
    assert workers["p0"].routes() == {"d0": Route.LINK}
    assert len(sender._staging) == sender._staging._space.num_taken == 0  # type: ignore[attr-defined]
    workers["d0"]._nixl = agent
    workers.close()


def test_the_pool_of_a_role_that_was_given_up_is_not_kept(
    files: PoolFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is gone takes memory for as long as anybody has it mapped."""
    monkeypatch.setattr("epd.serve_app.network.routes._LOOK_EVERY_S", 0.0)
    workers = Workers(files, Route.SHARED_MEMORY)
    pool, sender = workers["e0"].embeddings("e0.encode", ENCODER)
    _, receiver = workers["p0"].embeddings("p0.prefill", RECEIVER)
    pool.write(CachedGroup(7, (5, 2)), group(7))
    receiver.expect(ticket("t", CachedGroup(7, (9, 0, 4))))
    sender.send(ticket("t", CachedGroup(7, (9, 0, 4))), CachedGroup(7, (5, 2)))
    assert [offer.error for offer in receiver.recv()] == [""]
    workers["e0"].close("e0.encode")
    del pool, sender
    gc.collect()
    assert num_mappings(files, "e0.encode") > 0
    receiver.recv()
    gc.collect()
    assert num_mappings(files, "e0.encode") == 0


@pytest.mark.parametrize("closed", ["before", "unread", "read"])
def test_an_offer_to_an_end_that_is_closed_is_answered(workers: Workers, closed: str) -> None:
    """Else its sender keeps the data for good, if it never hears that the end was closed."""
    pool, sender = workers["e0"].embeddings("e0.encode", ENCODER)
    _, receiver = workers["p0"].embeddings("p0.prefill", RECEIVER)
    pool.write(CachedGroup(7, (5, 2)), group(7))
    receiver.expect(ticket("t", CachedGroup(7, (9, 0, 4))))
    if closed == "before":
        workers["p0"].close("p0.prefill")
    sender.send(ticket("t", CachedGroup(7, (9, 0, 4))), CachedGroup(7, (5, 2)))
    if closed == "read":
        workers.settle()
        receiver.poll()
    workers["p0"].close("p0.prefill")
    assert outcomes(sender) == [TransferOutcome.CANCELLED]
    assert len(sender._staging) == len(sender._linking) == len(sender._exported) == 0  # type: ignore[attr-defined]


def test_a_receipt_for_an_end_that_is_closed_is_not_answered(workers: Workers) -> None:
    _, sender = workers["e0"].embeddings("e0.encode", ENCODER)
    _, receiver = workers["p0"].embeddings("p0.prefill", RECEIVER)
    sender.send(ticket("t", CachedGroup(1, (0,))), CachedGroup(1, (0,)))
    workers["e0"].close("e0.encode")
    assert list(receiver.recv()) == []
    assert outcomes(receiver) == []


class _PausedMail(deque[Envelope]):
    """Lets another thread close the end just before a message is put into its mail."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.closed = threading.Event(), threading.Event()

    def append(self, envelope: Envelope) -> None:
        self.reached.set()
        assert self.closed.wait(NEVER_S)
        super().append(envelope)


def test_an_end_that_is_closed_while_an_offer_is_delivered_answers_it_once(files: PoolFiles) -> None:
    """The event loop delivers while the worker's thread closes."""
    workers = Workers(files, Route.SHARED_MEMORY)
    pool, sender = workers["e0"].embeddings("e0.encode", ENCODER)
    _, receiver = workers["p0"].embeddings("p0.prefill", RECEIVER)
    pool.write(CachedGroup(7, (5, 2)), group(7))
    assert isinstance(receiver, ProcessConnector)
    mail = receiver.inbox = _PausedMail()
    to = ticket("t", CachedGroup(7, (9, 0, 4)))
    delivering = threading.Thread(target=sender.send, args=(to, CachedGroup(7, (5, 2))))
    delivering.start()
    assert mail.reached.wait(NEVER_S)
    workers["p0"].close("p0.prefill")
    mail.closed.set()
    delivering.join()
    assert outcomes(sender) == [TransferOutcome.CANCELLED]


def num_mappings(fleet: PoolFiles, name: str) -> int:
    """Of pools of a fleet's end, in this process. Other tests may have left some of theirs."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"{fleet._name}-{name}-" in line for line in maps)


def test_keys_and_values_arrive_as_they_were_sent(workers: Workers) -> None:
    pools, sender = workers["p0"].kv("p0.prefill", PREFILL)
    target_pools, receiver = workers["d0"].kv("d0.decode", DECODE)
    for each in pools.groups:
        each.storage.normal_(generator=torch.Generator().manual_seed(1))
    tables = ((7, 1, 3), (0, 2, 4))
    to = KVTicket("t", "d0.decode", "p0.prefill", "r", 2, 10, ((11, 3, 5, 0), (1, 2, 3, 4)))
    # Tokens [2, 10) of each layer group, group 0 in two pieces.
    spans = (KVSpan(0, 2, 5, (7, 1)), KVSpan(0, 5, 10, (1, 3)), KVSpan(1, 2, 10, (0, 2, 4)))
    receiver.expect(to)
    sender.send(to, KVChunk(spans))
    assert [offer.error for offer in workers.received(receiver)] == [""]
    for index, table in enumerate(tables):
        for token in range(2, 10):
            theirs = pools.groups[index].storage[table[token // 4], :, :, token % 4]
            ours = target_pools.groups[index].storage[to.block_tables[index][token // 3], :, :, token % 3]
            assert torch.equal(theirs, ours)
    assert outcomes(sender) == [TransferOutcome.DELIVERED]


def test_an_end_point_has_an_end_of_each_kind(workers: Workers) -> None:
    _, embeddings = workers["p0"].embeddings("p0.prefill", RECEIVER)
    _, kv = workers["p0"].kv("p0.prefill", PREFILL)
    _, encoder = workers["e0"].embeddings("e0.encode", ENCODER)
    encoder.send(ticket("t", CachedGroup(1, (0,))), CachedGroup(1, (0,)))
    assert workers.received(kv) == []
    assert workers.received(embeddings) == []
    assert outcomes(encoder) == [TransferOutcome.CANCELLED]
    workers["p0"].close("p0.prefill")
    encoder.send(ticket("t", CachedGroup(1, (0,))), CachedGroup(1, (0,)))
    assert outcomes(encoder) == [TransferOutcome.CANCELLED]
    assert {path.name.split("-")[0] for path in workers.files.paths()} <= {"e0.encode"}


def test_the_pool_of_a_sender_that_is_gone_is_not_made_anew(files: PoolFiles) -> None:
    workers = Workers(files, Route.SHARED_MEMORY)
    _, sender = workers["e0"].embeddings("e0.encode", ENCODER)
    _, receiver = workers["p0"].embeddings("p0.prefill", RECEIVER)
    receiver.expect(ticket("t", CachedGroup(1, (0,))))
    sender.send(ticket("t", CachedGroup(1, (0,))), CachedGroup(1, (0,)))
    files.remove_of("e0")
    assert [offer.error for offer in receiver.recv()] == ["sender 'e0.encode' is gone"]
    assert len(files.paths()) == 1


def test_a_worker_that_comes_again_has_another_pool(files: PoolFiles) -> None:
    workers = Workers(files, Route.SHARED_MEMORY)
    target_pool, receiver = workers["p0"].embeddings("p0.prefill", RECEIVER)
    for number in (1, 2):
        pool, sender = workers["e0"].embeddings("e0.encode", ENCODER)
        embeddings = group(number)
        pool.write(CachedGroup(number, (0,)), embeddings)
        to = ticket(f"t{number}", CachedGroup(number, (number,)))
        receiver.expect(to)
        sender.send(to, CachedGroup(number, (0,)))
        assert len(receiver.recv()) == 1
        assert torch.equal(target_pool.read(to.target).rows, embeddings.rows)
        workers["e0"].close("e0.encode")


def test_what_nobody_waits_for_is_not_kept(files: PoolFiles) -> None:
    workers = Workers(files, Route.LINK)
    _, sender = workers["e0"].embeddings("e0.encode", ENCODER)
    _, receiver = workers["p0"].embeddings("p0.prefill", RECEIVER)
    sender.send(ticket("t", CachedGroup(1, (0,))), CachedGroup(1, (0,)))
    receiver.recv()
    assert vars(receiver)["_access"] == {}


def test_pools_that_do_not_fit_together_are_refused_in_words(
    files: PoolFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would fit alone; both, once they are full, would not."""
    monkeypatch.setattr(shared_memory, "_claims", lambda: iter(of_this_test(files)))
    monkeypatch.setattr(shared_memory, "available_memory_bytes", lambda: 100 * MIB)
    files.create("p0.prefill-kv", 60 * MIB)
    said = r"'d0.decode-kv' asks for 60 MiB of memory; 100 MiB are available, 60 MiB of them for 1 pools"
    with pytest.raises(InfeasibleError, match=said):
        files.create("d0.decode-kv", 60 * MIB)
    assert len(files.paths("d0")) == 0
    assert len(files.paths(files.create("d0.decode-kv", 40 * MIB).name)) == 1


def test_what_a_pool_has_taken_is_counted_once(files: PoolFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_claims", lambda: iter(of_this_test(files)))
    monkeypatch.setattr(shared_memory, "available_memory_bytes", lambda: 100 * MIB)
    path = files.create("p0.prefill-kv", 60 * MIB)
    pool_memory(60 * MIB, path).fill_(1)
    files.create("d0.decode-kv", 60 * MIB)  # 40 + 60 MiB were available, and 60 are taken


def test_a_pool_that_is_gone_is_not_claimed_any_more(
    files: PoolFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_claims", lambda: iter(of_this_test(files)))
    monkeypatch.setattr(shared_memory, "available_memory_bytes", lambda: 100 * MIB)
    for _ in range(3):
        files.remove(files.create("p0.prefill-kv", 60 * MIB))


def of_this_test(files: PoolFiles) -> list[Any]:
    """Other tests may run beside this one."""
    return [claim for claim in CLAIMS() if claim.path in files.paths()]


def test_a_pool_is_bound_by_no_file_system_and_cannot_be_cut_short(
    files: PoolFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The end of a file that is cut short, or finds no room, would end whoever touches it by a signal.

    Its name lies where other tests do not look: what it claims would leave no memory to them.
    """
    monkeypatch.setattr(shared_memory, "available_memory_bytes", lambda: 1 << 62)
    folder = shared_memory._MEMORY_FOLDER
    monkeypatch.setattr(shared_memory, "_MEMORY_FOLDER", tmp_path)
    path = files.create("e0.encode-kv", 2 * shutil.disk_usage(folder).total)
    pool_memory(8 * MIB, path).fill_(1)
    assert path.stat().st_blocks * 512 >= 8 * MIB
    assert path.stat().st_dev not in {
        each.stat().st_dev for each in (folder, tmp_path, Path(tempfile.gettempdir()))
    }
    descriptor = open_pool(path)
    assert descriptor is not None
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 10)
    os.close(descriptor)


def test_a_name_whose_number_another_file_has_by_now_is_no_pool(files: PoolFiles, tmp_path: Path) -> None:
    path = files.create("e0.encode-kv", 100)
    number = int(os.readlink(path).rpartition("/")[2])
    with (tmp_path / "other").open("w+b") as other:
        os.dup2(other.fileno(), number)
        assert open_pool(path) is None
    assert map_pool(path, ENCODER) is None


def test_weights_that_do_not_fit_in_memory_lie_on_the_disk_with_a_warning(
    files: PoolFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "_MEMORY_FOLDER", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = files.shared("weights", 3 * MIB, Path.touch)
    assert path.parent.parent == tmp_path
    assert files.paths() == [path]
    assert "weights takes 3 MiB" in caplog.text
    assert "--shm-size" in caplog.text
    with pytest.raises(OSError, match="no room for"):
        files.shared("more", 1 << 60, Path.touch)
