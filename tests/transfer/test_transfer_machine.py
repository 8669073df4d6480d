"""Cache, pool and transfer under any sequence of steps, cancellations, failures and lost encoders.

Two receivers with little room, encoders with less, real stages and real tensors, a family without a model.
What is taken must be what was asked for, whatever blocks it has been through, and nothing may leak.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from epd.encode.encoder_cache import EncoderCacheManager, GroupSpec
from epd.encoders.groups import FrameEncoder
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.encode.encoder import EncodeJob, EncodeStage
from epd.stages.encode.encoder_pool import EmbeddingLayout, EmbeddingReceiver, EncoderPool
from epd.transfer.connectors import Ticket
from tests.encoders.fakes import NUM_CHANNELS, POISON, FakeFamily, fake_frames, fake_key, fake_plan

LAYOUT = EmbeddingLayout(NUM_CHANNELS, torch.float32)
BLOCK_SIZE = 2
RECEIVERS = ("p0", "p1")
# What is wanted: (value of its frames, units). Few, so that requests often want the same.
GROUPS = st.sampled_from([(value, 1 + value % 4) for value in range(6)])
ENCODERS = st.sampled_from(["e0", "e1"])
POISONS = st.none() | st.integers(0, 5)


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.hub = InProcessHub()
        self.encoders: dict[str, EncodeStage] = {}
        self.receivers: dict[str, EmbeddingReceiver] = {}
        self.wanted: dict[str, tuple[str, Sequence[tuple[int, int]]]] = {}
        self.taken: dict[str, int] = {}
        self.assigned: dict[str, tuple[str, Ticket]] = {}
        self.num_started = 0
        for name in ("e0", "e1"):
            self.start_encoder(name)
        for name in RECEIVERS:
            cache, pool = EncoderCacheManager(6, BLOCK_SIZE), EncoderPool(6, BLOCK_SIZE, LAYOUT)
            self.receivers[name] = EmbeddingReceiver(cache, pool, self.hub.connect(name, pool))

    def start_encoder(self, name: str) -> None:
        cache, pool = EncoderCacheManager(4, BLOCK_SIZE), EncoderPool(4, BLOCK_SIZE, LAYOUT)
        end = self.hub.connect(name, pool)
        encoder = FrameEncoder(FakeFamily(), nn.Identity(), max_patches=5)
        self.encoders[name] = EncodeStage(encoder, cache, pool, end)

    def submit(self, encoder: str, ticket: Ticket, value: int) -> None:
        units = ticket.target.num_embeddings
        job = EncodeJob(ticket, fake_plan(units), lambda: fake_frames(value, units))
        self.encoders[encoder].submit(job)
        self.assigned[ticket.transfer_id] = (encoder, ticket)

    @rule(
        receiver=st.sampled_from(RECEIVERS),
        groups=st.lists(GROUPS, min_size=1, max_size=4),
        encoder=ENCODERS,
        poison=POISONS,
    )
    def open_request(
        self, receiver: str, groups: list[tuple[int, int]], encoder: str, poison: int | None
    ) -> None:
        self.num_started += 1
        request_id = f"r{self.num_started}"
        specs = [GroupSpec(fake_key(value, units), units, units) for value, units in groups]
        self.receivers[receiver].open(request_id, specs)
        self.wanted[request_id] = (receiver, groups)
        self.taken[request_id] = 0
        self.assign(receiver, encoder, poison)

    @rule(receiver=st.sampled_from(RECEIVERS), encoder=ENCODERS, poison=POISONS)
    def assign(self, receiver: str, encoder: str, poison: int | None) -> None:
        """Whatever has got room goes to one encoder; the frames of one value may be beyond encoding."""
        for grant in self.receivers[receiver].grant():
            value = int(grant.ticket.key.mm_hash.split()[1])
            self.submit(encoder, grant.ticket, POISON if value == poison else value)

    @rule(encoder=ENCODERS)
    def encode(self, encoder: str) -> None:
        self.encoders[encoder].step()

    @rule(receiver=st.sampled_from(RECEIVERS), encoder=ENCODERS)
    def receive(self, receiver: str, encoder: str) -> None:
        for key in self.receivers[receiver].poll():
            ticket = self.receivers[receiver].reissue(key)
            self.submit(encoder, ticket, int(key.mm_hash.split()[1]))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), is_released=st.booleans())
    def take(self, data: st.DataObject, is_released: bool) -> None:
        self.take_of(data.draw(st.sampled_from(sorted(self.wanted))), is_released)

    def take_of(self, request_id: str, is_released: bool) -> None:
        receiver, groups = self.wanted[request_id]
        for group, embeddings, _ in self.receivers[receiver].take(request_id):
            value, units = groups[group]
            assert group == self.taken[request_id]
            assert torch.equal(embeddings.rows, torch.full((units, NUM_CHANNELS), float(value)))
            self.taken[request_id] += 1
        if is_released:
            self.receivers[receiver].release(request_id, self.taken[request_id])

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), encoders_are_told=st.booleans())
    def close(self, data: st.DataObject, encoders_are_told: bool) -> None:
        self.close_request(data.draw(st.sampled_from(sorted(self.wanted))), encoders_are_told)

    def close_request(self, request_id: str, encoders_are_told: bool = True) -> None:
        receiver, _ = self.wanted.pop(request_id)
        unwanted = {ticket.transfer_id for ticket in self.receivers[receiver].close(request_id)}
        for encoder in self.encoders.values() if encoders_are_told else ():
            for transfer_id in unwanted:
                encoder.cancel(transfer_id)

    @rule(name=ENCODERS)
    def lose_encoder(self, name: str) -> None:
        """The encoder restarts empty; whatever it had not delivered is asked for again, of the same name."""
        self.start_encoder(name)
        for encoder, ticket in list(self.assigned.values()):
            receiver = self.receivers[ticket.receiver]
            is_open = receiver.reception.inbox.find(ticket.transfer_id) is not None
            if encoder == name and is_open:
                self.submit(name, receiver.reissue(ticket.key), int(ticket.key.mm_hash.split()[1]))

    @invariant()
    def nothing_is_broken(self) -> None:
        for encoder in self.encoders.values():
            encoder.check_integrity()
        for receiver in self.receivers.values():
            receiver.check_integrity()

    def work_off(self) -> None:
        """Every request that is left ends, in at most so many rounds as there can be work."""
        for _ in range(400):
            for name in RECEIVERS:
                self.assign(name, "e1", None)
                self.receive(name, "e0")
            for encoder in self.encoders.values():
                encoder.step()
            for request_id in sorted(self.wanted):
                self.take_of(request_id, is_released=True)
                if self.taken[request_id] == len(self.wanted[request_id][1]):
                    self.close_request(request_id)
            if not self.wanted:
                return
        raise AssertionError(f"requests never ended: {self.wanted}")

    def teardown(self) -> None:
        self.work_off()
        for _ in range(60):  # jobs that nobody wants any more, late offers, then their receipts
            for name in RECEIVERS:
                self.receive(name, "e0")
            for encoder in self.encoders.values():
                encoder.step()
        assert not any(encoder.has_work() for encoder in self.encoders.values())
        caches = [worker.cache for worker in (*self.encoders.values(), *self.receivers.values())]
        assert [cache.num_held for cache in caches] == [0] * len(caches)
        for cache in caches:
            for key in cache.eviction_order():
                cache._evict(key)
            assert cache.num_free_blocks == cache.num_blocks


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
