"""Messages between workers when the calls that carry them fail, hang or come twice, as drawn."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from epd.serve_app.network import peer_links
from epd.serve_app.network.peer_links import Delivery, OutgoingChannel, PeerLinks


@dataclass(frozen=True)
class FakePeer:
    epoch: str


class Network:
    """A receiver, and calls to it that are harmed at random until `is_harmed` is False."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.is_harmed = True
        self.epoch = "b1"
        self.receiver: PeerLinks[FakePeer] = PeerLinks("b", "b1", self.call)
        self.read: list[Any] = []

    async def call(self, peer: FakePeer, delivery: Delivery) -> int | None:
        """What a Ray actor's `deliver` does, at a worker that is reached badly."""
        harm = self.rng.choice(["", "before", "after", "late", "twice"]) if self.is_harmed else ""
        if harm == "before":
            raise ActorUnavailableError("not reached", b"0" * 16)
        if harm == "late":
            await asyncio.sleep(self.rng.uniform(0.0, 0.02))
        if peer.epoch != self.epoch:
            return None
        for _ in range(2 if harm == "twice" else 1):
            messages, next_number = self.receiver.take(delivery)
            self.read += messages
        if harm == "after":
            raise ActorUnavailableError("the answer is lost", b"0" * 16)
        return next_number


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "_TICK_S", 0.002)
    monkeypatch.setattr(
        peer_links,
        "OutgoingChannel",
        lambda: OutgoingChannel(max_in_flight=8, resend_s=0.01, max_resend_s=0.02),
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_message_is_read_once_and_in_order(seed: int) -> None:
    async def run() -> None:
        network = Network(seed)
        links: PeerLinks[FakePeer] = PeerLinks("a", "a1", network.call)
        links.meet({"b": FakePeer("b1")})
        resending = asyncio.create_task(links.run())
        for number in range(200):
            links.send("b", number)
            if number % 10 == 0:
                await asyncio.sleep(0)
        while links.num_unread():
            await asyncio.sleep(0.005)
        assert network.read == list(range(200))
        resending.cancel()
        await links.close()

    asyncio.run(run())


def test_a_worker_in_its_next_life_reads_nothing_of_the_former_one() -> None:
    async def run() -> None:
        network = Network(0)
        links: PeerLinks[FakePeer] = PeerLinks("a", "a1", network.call)
        links.send("b", "nobody is known yet")
        links.meet({"b": FakePeer("b1")})
        resending = asyncio.create_task(links.run())
        network.epoch, network.receiver = "b2", PeerLinks("b", "b2", network.call)
        links.send("b", "for the former epoch")
        await asyncio.sleep(0.02)
        links.meet({"b": FakePeer("b2")})
        links.send("b", "first")
        links.send("b", "second")
        while links.num_unread():
            await asyncio.sleep(0.005)
        assert network.read == ["first", "second"]
        resending.cancel()
        await links.close()

    asyncio.run(run())


def test_a_sender_in_its_next_life_is_read_from_its_first_message() -> None:
    receiver: PeerLinks[FakePeer] = PeerLinks("b", "b1", lambda *_: asyncio.sleep(0, None))
    assert receiver.take(Delivery("a", "a1", 0, "x")) == (["x"], 1)
    assert receiver.take(Delivery("a", "a2", 0, "y")) == (["y"], 1)
    assert receiver.take(Delivery("a", "a1", 1, "late")) == (["late"], 2)
    assert receiver.take(Delivery("a", "a3", 1, "z")) == ([], 0)
