"""Offers and receipts of a device that works later than it is asked to: stories with events of our own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from epd.stages.connectors import mailbox
from epd.stages.connectors.mailbox import InProcessConnector, InProcessHub
from epd.stages.engine.kv_pool import KVPools
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket, TransferOutcome
from tests.stages.handover_workers import pools_shape
from tests.stages.kv_values import put_tokens, tokens_at


@dataclass
class Event:
    is_set: bool = False

    def is_done(self) -> bool:
        return self.is_set


@dataclass
class Device:
    """Stands for a device on which nothing is done until the test says so."""

    events: list[Event] = field(default_factory=list)

    def recorded(self, _device: torch.device) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def finish(self, number: int) -> None:
        self.events[number].is_set = True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(mailbox, "recorded", device.recorded)
    return device


End = InProcessConnector[KVTicket, KVChunk]
TICKET = KVTicket("t", "d", "p", "r", 0, 4, ((0, 1), (0, 1)))
CHUNK = KVChunk((KVSpan(0, 0, 4, (2,)),))


@pytest.fixture
def ends() -> tuple[End, End, KVPools, KVPools]:
    hub = InProcessHub()
    theirs, ours = pools_shape(4, 4).build(), pools_shape(4, 2).build()
    return hub.connect("p", theirs), hub.connect("d", ours), theirs, ours


Ends = tuple[End, End, KVPools, KVPools]


def test_an_offer_is_made_when_the_kernels_have_written(device: Device, ends: Ends) -> None:
    sender, receiver, theirs, ours = ends
    receiver.expect(TICKET)
    sender.send(TICKET, CHUNK)
    assert list(receiver.recv()) == []
    # The kernels write only now; a receiver that had copied before would have zeros.
    put_tokens(theirs.groups[0], torch.arange(8, 12), torch.full((1, 2, 4, 2, 2), 7.0))
    sender.poll()
    assert list(receiver.recv()) == []
    device.finish(0)
    sender.poll()
    assert len(receiver.recv()) == 1
    assert (tokens_at(ours.groups[0], torch.arange(4)) == 7.0).all()


def test_a_receipt_is_given_when_the_copy_is_done(device: Device, ends: Ends) -> None:
    sender, receiver, _, _ = ends
    receiver.expect(TICKET)
    sender.send(TICKET, CHUNK)
    device.finish(0)
    assert list(sender.poll()) == []
    assert len(receiver.recv()) == 1  # who reads it does so in the stream of the copy
    assert list(sender.poll()) == []
    receiver.poll()
    assert list(sender.poll()) == []
    device.finish(1)
    receiver.poll()
    assert [receipt.outcome for receipt in sender.poll()] == [TransferOutcome.DELIVERED]


def test_messages_keep_their_order(device: Device, ends: Ends) -> None:
    sender, receiver, _, _ = ends
    receiver.expect(TICKET)
    numbers = [sender.send(TICKET, CHUNK) for _ in range(3)]
    device.finish(1)
    sender.poll()
    assert list(receiver.recv()) == []
    device.finish(0)
    sender.poll()
    assert [offer.number for offer in receiver.recv()] == numbers[:2]


def test_a_cpu_delays_nothing(ends: Ends) -> None:
    sender, receiver, _, _ = ends
    receiver.expect(TICKET)
    sender.send(TICKET, CHUNK)
    assert len(receiver.recv()) == 1
    assert [receipt.outcome for receipt in sender.poll()] == [TransferOutcome.DELIVERED]
