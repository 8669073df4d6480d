"""Pools of a GPU that other workers open: the policy, with a stand-in for the GPU. No GPU runs this."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epd.serve_app.network.memory import PoolFiles, new_fleet_id
from epd.serve_app.network.routes import Exported, Route, Staged
from epd.stages.connectors import mailbox
from epd.stages.engine.kv_pool import KVPools
from epd.transfer.connectors import KVChunk, KVConnector, KVSpan, KVTicket, TransferOutcome
from tests.serve_app.network.fake_gpu import FakeGpuMemory
from tests.serve_app.network.test_connector import DECODE, PREFILL, Workers, outcomes
from tests.stages.connectors.test_deferred import Device
from tests.stages.kv_values import tokens_at

CHUNK = KVChunk((KVSpan(0, 0, 4, (3,)), KVSpan(1, 0, 4, (5,))))


def ticket(transfer_id: str, receiver: str = "d0.decode") -> KVTicket:
    return KVTicket(transfer_id, receiver, "p0.prefill", "r", 0, 4, ((0, 1), (0, 1)))


class Pair:
    """A prefill worker with pools of a GPU, and decode workers beside it."""

    def __init__(self, files: PoolFiles) -> None:
        self.workers = Workers(files, Route.CUDA_IPC)
        assert self.workers.gpu is not None
        self.gpu: FakeGpuMemory = self.workers.gpu
        self.pools, self.sender = self.workers["p0"].kv("p0.prefill", PREFILL)
        for each in self.pools.groups:
            each.storage.normal_()

    def decode(self, name: str = "d0") -> tuple[KVPools, KVConnector]:
        return self.workers[name].kv(f"{name}.decode", DECODE)

    def has_arrived(self, pools: KVPools) -> bool:
        return all(
            torch.equal(
                tokens_at(ours, torch.arange(4)), tokens_at(theirs, torch.arange(4 * block, 4 * block + 4))
            )
            for ours, theirs, block in zip(pools.groups, self.pools.groups, (3, 5), strict=True)
        )


@pytest.fixture
def files() -> Iterator[PoolFiles]:
    files = PoolFiles(new_fleet_id())
    yield files
    files.release()


@pytest.fixture
def pair(files: PoolFiles, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr("epd.serve_app.network.routes._LOOK_EVERY_S", 0.0)
    return Pair(files)


def test_a_pool_is_opened_once_by_each_receiver(pair: Pair) -> None:
    for name in ("d0", "d1"):
        pools, receiver = pair.decode(name)
        for number in range(3):
            to = ticket(f"{name}{number}", f"{name}.decode")
            receiver.expect(to)
            pair.sender.send(to, CHUNK)
            assert [offer.error for offer in receiver.recv()] == [""]
            assert pair.has_arrived(pools)
    assert outcomes(pair.sender) == [TransferOutcome.DELIVERED] * 6
    assert pair.gpu.num_opened == len(pair.gpu.exported) == 2
    assert pair.workers["p0"].routes() == {"d0": Route.CUDA_IPC, "d1": Route.CUDA_IPC}


def test_a_handle_that_comes_with_an_unwanted_offer_is_not_lost(pair: Pair) -> None:
    pools, receiver = pair.decode()
    pair.sender.send(ticket("unwanted"), CHUNK)
    assert list(receiver.recv()) == []
    receiver.expect(ticket("t"))
    pair.sender.send(ticket("t"), CHUNK)
    assert [offer.error for offer in receiver.recv()] == [""]
    assert pair.has_arrived(pools)
    assert pair.workers["p0"].routes() == {"d0": Route.CUDA_IPC}
    assert pair.gpu.num_opened == 1


def test_a_receiver_that_comes_again_gets_another_handle(pair: Pair) -> None:
    pair.decode()
    pair.sender.send(ticket("t"), CHUNK)
    pair.sender.forget("d0.decode")
    pair.workers["d0"].close("d0.decode")
    pools, receiver = pair.decode()
    receiver.expect(ticket("u"))
    pair.sender.send(ticket("u"), CHUNK)
    assert [offer.error for offer in receiver.recv()] == [""]
    assert pair.has_arrived(pools)
    assert len(pair.gpu.exported) == 2


def test_what_cannot_be_opened_is_staged_from_then_on(pair: Pair) -> None:
    pools, receiver = pair.decode()
    pair.gpu.broken = True
    for number in range(2):
        receiver.expect(ticket(f"t{number}"))
        pair.sender.send(ticket(f"t{number}"), CHUNK)
        if number == 0:
            assert list(receiver.recv()) == []
            assert outcomes(pair.sender) == []  # reads that it could not be opened
        assert [offer.error for offer in receiver.recv()] == [""]
        assert pair.has_arrived(pools)
        assert outcomes(pair.sender) == [TransferOutcome.DELIVERED]
    assert [type(access) for access in pair.workers.accesses] == [Exported, Staged, Staged]
    assert pair.workers["p0"].routes() == {"d0": Route.STAGING}


def test_the_pool_of_a_lost_worker_is_not_read_and_forgotten(pair: Pair) -> None:
    _, receiver = pair.decode()
    receiver.expect(ticket("t"))
    pair.sender.send(ticket("t"), CHUNK)
    assert len(receiver.recv()) == 1
    receiver.expect(ticket("u"))
    pair.sender.send(ticket("u"), CHUNK)
    pair.workers.files.remove_of("p0")
    assert [offer.error for offer in receiver.recv()] == ["sender 'p0.prefill' is gone"]
    assert len(pair.workers["d0"]._means.opened) == 0


def test_offers_and_receipts_wait_for_the_gpu(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(mailbox, "recorded", device.recorded)
    pools, receiver = pair.decode()
    receiver.expect(ticket("t"))
    pair.sender.send(ticket("t"), CHUNK)
    assert pair.workers.accesses == []
    device.finish(0)
    assert outcomes(pair.sender) == []
    assert len(receiver.recv()) == 1
    receiver.poll()
    assert outcomes(pair.sender) == []
    device.finish(1)
    receiver.poll()
    assert outcomes(pair.sender) == [TransferOutcome.DELIVERED]
    assert pair.has_arrived(pools)


@pytest.mark.parametrize("route", [Route.STAGING, Route.LINK])
def test_parts_and_their_receipts_wait_for_the_gpu(
    files: PoolFiles, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(files, route, part_bytes=1)
    _, sender = workers["p0"].kv("p0.prefill", PREFILL)
    _, receiver = workers["d0"].kv("d0.decode", DECODE)
    device = Device()
    monkeypatch.setattr(mailbox, "recorded", device.recorded)
    receiver.expect(ticket("t"))
    sender.send(ticket("t"), CHUNK)
    assert workers.accesses == []  # both parts are being copied out of the pool
    device.finish(0)
    sender.poll()
    assert len(workers.accesses) == 1
    device.finish(1)
    sender.poll()
    assert len(receiver.recv()) == 2
    assert outcomes(sender) == []
    for number in (2, 3):
        device.finish(number)
        receiver.poll()
    assert outcomes(sender) == [TransferOutcome.DELIVERED]


def test_two_ends_of_a_worker_read_each_other(pair: Pair) -> None:
    """A handle cannot be opened by the process that has made it."""
    pools, receiver = pair.workers["p0"].kv("p0.decode", DECODE)
    receiver.expect(ticket("t", "p0.decode"))
    pair.sender.send(ticket("t", "p0.decode"), CHUNK)
    assert [offer.error for offer in receiver.recv()] == [""]
    assert pair.has_arrived(pools)
    assert pair.gpu.exported == {}
    assert pair.workers["p0"].routes() == {"p0": Route.SAME_PROCESS}
