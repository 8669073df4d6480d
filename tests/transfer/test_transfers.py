"""Transfers told as stories: what is late, lost, unwanted or in another process.

Modules: `epd/transfer/connectors.py`.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from epd.encode.encoder_cache import CachedGroup, EncoderCacheManager, GroupSpec
from epd.encoders.groups import FrameEncoder
from epd.errors import InfeasibleError
from epd.stages.connectors.mailbox import InProcessHub, MailboxConnector
from epd.stages.encode.encoder import EncodeJob, EncodeStage
from epd.stages.encode.encoder_pool import EmbeddingLayout, EmbeddingReceiver, EncoderPool, EncoderPoolShape
from epd.transfer.connectors import Ticket
from epd.transfer.transfers import Inbox, Reception
from tests.encoders.fakes import NUM_CHANNELS, FakeFamily, fake_frames, fake_key, fake_plan
from tests.stages.connectors.shared_memory import MessageQueue, SharedMemoryConnector, SharedPoolFile

LAYOUT = EmbeddingLayout(NUM_CHANNELS, torch.float32)
NUM_BLOCKS, BLOCK_SIZE = 4, 2
SHAPE = EncoderPoolShape(NUM_BLOCKS, BLOCK_SIZE, LAYOUT)


@dataclass
class Story:
    """One receiver with room for two groups of four, and two encoders."""

    hub: InProcessHub
    receiver: EmbeddingReceiver
    encoders: dict[str, EncodeStage]

    def ask(self, request_id: str, value: int, num_units: int = 4) -> Ticket:
        """Opens a request for one group; the ticket that it needs."""
        self.receiver.open(request_id, [GroupSpec(fake_key(value, num_units), num_units, num_units)])
        (grant,) = self.receiver.grant()
        return grant.ticket

    def submit(self, encoder: str, ticket: Ticket) -> None:
        value, units = int(ticket.key.mm_hash.split()[1]), ticket.target.num_embeddings
        job = EncodeJob(ticket, fake_plan(units), lambda: fake_frames(value, units))
        self.encoders[encoder].submit(job)

    def taken(self, request_id: str) -> list[float]:
        """The first value of each group that is there."""
        return [float(embeddings.rows[0, 0]) for _, embeddings, _ in self.receiver.take(request_id)]


def new_encoder(connector: MailboxConnector) -> EncodeStage:
    cache = EncoderCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    encoder = FrameEncoder(FakeFamily(), nn.Identity(), max_patches=100)
    return EncodeStage(encoder, cache, connector.pool, connector)


def new_pool() -> EncoderPool:
    return EncoderPool(NUM_BLOCKS, BLOCK_SIZE, LAYOUT)


@pytest.fixture
def story() -> Story:
    hub = InProcessHub()
    end = hub.connect("p", new_pool())
    receiver = EmbeddingReceiver(EncoderCacheManager(NUM_BLOCKS, BLOCK_SIZE), end.pool, end)
    return Story(hub, receiver, {name: new_encoder(hub.connect(name, new_pool())) for name in ("e0", "e1")})


def test_a_late_offer_cannot_write_into_blocks_that_were_given_to_another(story: Story) -> None:
    story.submit("e0", story.ask("cancelled", 1))
    story.receiver.close("cancelled")
    for request_id, value in (("a", 2), ("b", 3)):  # together they need every block
        story.submit("e1", story.ask(request_id, value))
    story.encoders["e1"].step()
    story.receiver.poll()
    story.encoders["e0"].step()
    story.receiver.poll()
    assert story.taken("a") == [2.0]
    assert story.taken("b") == [3.0]


def test_the_sender_keeps_its_copy_until_the_receipt_and_not_longer(story: Story) -> None:
    story.submit("e0", story.ask("a", 1))
    encoder = story.encoders["e0"]
    encoder.step()
    assert encoder.cache.num_held == 1
    encoder.step()
    assert encoder.cache.num_held == 1
    story.receiver.poll()
    encoder.step()
    assert encoder.cache.num_held == 0
    assert not encoder.has_work()


def test_an_unwanted_offer_gets_a_receipt_too(story: Story) -> None:
    story.submit("e0", story.ask("a", 1))
    story.encoders["e0"].step()
    story.receiver.close("a")
    story.receiver.poll()
    story.encoders["e0"].step()
    assert story.encoders["e0"].cache.num_held == 0


def test_a_cancelled_job_is_never_encoded(story: Story) -> None:
    story.submit("e0", story.ask("a", 1))
    for ticket in story.receiver.close("a"):
        story.encoders["e0"].cancel(ticket.transfer_id)
    assert not story.encoders["e0"].step()
    assert story.encoders["e0"].counts.num_groups == 0


def test_a_request_that_wants_the_same_keeps_a_cancelled_transfer_alive(story: Story) -> None:
    ticket = story.ask("a", 1)
    story.receiver.open("b", [GroupSpec(ticket.key, 4, 4)])
    assert story.receiver.grant() == []
    assert story.receiver.close("a") == []
    story.submit("e0", ticket)
    story.encoders["e0"].step()
    story.receiver.poll()
    assert story.taken("b") == [1.0]


def test_an_encoder_that_is_lost_is_replaced_without_asking_the_request_again(story: Story) -> None:
    ticket = story.ask("a", 1)
    story.submit("e0", ticket)
    story.hub.disconnect("e0")
    story.submit("e1", story.receiver.reissue(ticket.key))
    story.encoders["e1"].step()
    story.receiver.poll()
    assert story.taken("a") == [1.0]
    story.receiver.check_integrity()


def test_an_encoder_that_was_replaced_and_answers_late_writes_nothing(story: Story) -> None:
    ticket = story.ask("a", 1)
    story.submit("e0", ticket)
    story.submit("e1", story.receiver.reissue(ticket.key))
    story.encoders["e1"].step()
    story.receiver.poll()
    assert story.taken("a") == [1.0]
    story.receiver.close("a")
    for request_id, value in (("b", 2), ("c", 3)):  # together they need every block
        story.submit("e1", story.ask(request_id, value))
    story.encoders["e1"].step()
    story.receiver.poll()
    story.encoders["e0"].step()
    story.receiver.poll()
    assert story.taken("b") + story.taken("c") == [2.0, 3.0]


def test_an_offer_of_an_encoder_that_is_gone_fails_and_can_be_reissued(story: Story) -> None:
    ticket = story.ask("a", 1)
    story.submit("e0", ticket)
    story.encoders["e0"].step()
    story.hub.disconnect("e0")
    ((key, error),) = story.receiver.poll().items()
    assert (key, story.receiver.reception.waiting_for(key)) == (ticket.key, ["a"])
    assert "sender 'e0' is gone" in error
    story.submit("e1", story.receiver.reissue(key))
    story.encoders["e1"].step()
    story.receiver.poll()
    assert story.taken("a") == [1.0]


def test_a_receiver_that_is_gone_holds_nothing_at_the_sender(story: Story) -> None:
    story.submit("e0", story.ask("a", 1))
    story.encoders["e0"].step()
    story.submit("e0", story.ask("b", 2))
    story.hub.disconnect("p")
    story.encoders["e0"].drop_receiver("p")
    assert not story.encoders["e0"].has_work()
    assert story.encoders["e0"].cache.num_held == 0


def test_a_request_waits_for_room_and_gets_it(story: Story) -> None:
    for request_id, value in (("a", 1), ("b", 2)):
        story.submit("e0", story.ask(request_id, value))
    story.receiver.open("c", [GroupSpec(fake_key(3, 4), 4, 4)])
    assert story.receiver.grant() == []
    story.encoders["e0"].step()
    story.receiver.poll()
    assert story.taken("a") == [1.0]
    story.receiver.release("a", 1)
    (grant,) = story.receiver.grant()
    assert grant.request_id == "c"


def test_the_oldest_request_gets_room_first(story: Story) -> None:
    story.receiver.open("old", [GroupSpec(fake_key(value, 4), 4, 4) for value in (1, 2, 3)])
    story.receiver.open("young", [GroupSpec(fake_key(9, 1), 1, 1)])
    assert [(grant.request_id, grant.group) for grant in story.receiver.grant()] == [("old", 0), ("old", 1)]


def test_groups_cannot_be_released_before_they_are_taken(story: Story) -> None:
    story.ask("a", 1)
    with pytest.raises(ValueError, match="cannot release 1 groups of 'a', only 0 are taken"):
        story.receiver.release("a", 1)


@pytest.mark.parametrize("num_embeddings", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("num_deepstack", [0, 2])
def test_a_pool_gives_back_what_was_put_into_it(num_embeddings: int, num_deepstack: int) -> None:
    from epd.encoders.adapter import Embeddings

    layout = EmbeddingLayout(3, torch.bfloat16, num_deepstack)
    pools = EncoderPool(NUM_BLOCKS, BLOCK_SIZE, layout), EncoderPool(2, 4, layout)
    rows = torch.randn(num_embeddings, 3, 1 + num_deepstack).bfloat16()
    layers = rows.unbind(2)
    here = CachedGroup(num_embeddings, (3, 0, 2, 1)[: -(-num_embeddings // BLOCK_SIZE)])
    there = CachedGroup(num_embeddings, (1, 0)[: -(-num_embeddings // 4)])
    pools[0].write(here, Embeddings(layers[0], tuple(layers[1:])))
    pools[1].copy(pools[0], here, there)
    back = pools[1].read(there)
    assert torch.equal(back.rows, layers[0])
    assert all(map(torch.equal, back.deepstack, layers[1:]))


def test_pools_of_different_layouts_do_not_mix() -> None:
    place = CachedGroup(1, (0,))
    with pytest.raises(ValueError, match="cannot copy rows"):
        new_pool().copy(EncoderPool(1, 1, EmbeddingLayout(5, torch.float32)), place, place)


def encode_elsewhere(
    queues: dict[str, MessageQueue], pools: dict[str, SharedPoolFile], tickets: list[Ticket]
) -> None:
    """What the other process does: one encoder that works until every receipt has come."""
    story = Story(InProcessHub(), None, {})  # type: ignore[arg-type] # it only submits
    story.encoders["e"] = new_encoder(SharedMemoryConnector("e", queues, pools))
    for ticket in tickets:
        story.submit("e", ticket)
    while story.encoders["e"].has_work():
        story.encoders["e"].step()
    story.encoders["e"].check_integrity()


def test_embeddings_come_from_another_process_through_shared_memory() -> None:
    context = multiprocessing.get_context("spawn")
    queues = {name: context.Queue() for name in ("e", "p")}
    with (
        SharedPoolFile.create(SHAPE) as theirs,
        SharedPoolFile.create(SHAPE) as ours,
    ):
        pools = {"e": theirs, "p": ours}
        end = SharedMemoryConnector("p", queues, pools)
        receiver = EmbeddingReceiver(EncoderCacheManager(NUM_BLOCKS, BLOCK_SIZE), end.pool, end)
        story = Story(InProcessHub(), receiver, {})
        tickets = [story.ask("a", 7, 3), story.ask("b", 9, 4)]
        process = context.Process(target=encode_elsewhere, args=(queues, pools, tickets))
        process.start()
        seen: dict[str, list[float]] = {"a": [], "b": []}
        while process.is_alive() or not all(seen.values()):
            receiver.poll()
            for request_id, values in seen.items():
                values += story.taken(request_id)
            process.join(0.01)
            assert process.exitcode in (None, 0)
    assert seen == {"a": [7.0], "b": [9.0]}
    assert not theirs.path.exists()


def test_a_pool_file_that_is_gone_is_a_failed_group() -> None:
    queues = {name: multiprocessing.get_context("spawn").Queue() for name in ("e", "p")}
    with SharedPoolFile.create(SHAPE) as ours:
        theirs = SharedPoolFile.create(SHAPE)
        pools = {"e": theirs, "p": ours}
        end = SharedMemoryConnector("p", queues, pools)
        receiver = EmbeddingReceiver(EncoderCacheManager(NUM_BLOCKS, BLOCK_SIZE), end.pool, end)
        story = Story(InProcessHub(), receiver, {"e": new_encoder(SharedMemoryConnector("e", queues, pools))})
        story.submit("e", story.ask("a", 7))
        story.encoders["e"].step()
        theirs.unlink()
        while not (failed := receiver.poll()):
            time.sleep(0.001)
    assert "sender 'e' is gone" in next(iter(failed.values()))


def group(value: int, num_embeddings: int = 4) -> GroupSpec:
    return GroupSpec(fake_key(value, num_embeddings), num_embeddings, num_embeddings)


class Receiver(Reception):
    def __init__(self) -> None:
        cache = EncoderCacheManager(4, 2)
        super().__init__(cache, Inbox(cache, "p0"))

    def granted(self) -> list[tuple[str, int]]:
        """Which groups of which requests are granted a ticket now."""
        grants = [(grant.request_id, grant.group) for grant in self.grant()]
        self.check_integrity()
        return grants

    def arrive(self, spec: GroupSpec) -> None:
        """An encoder has written the group."""
        ticket = next(ticket for ticket in self.inbox._open.values() if ticket.key == spec.key)
        self.inbox.deliver(ticket)
        self.check_integrity()

    def taken(self, request_id: str) -> list[int]:
        groups = [number for number, _ in self.take(request_id)]
        self.check_integrity()
        return groups


A, B, C, D = (group(value) for value in range(4))


def test_the_oldest_request_gets_all_its_groups_before_a_younger_gets_its_next() -> None:
    receiver = Receiver()
    receiver.open("old", [A, B, C])
    receiver.open("young", [D])
    assert receiver.granted() == [("old", 0), ("old", 1)]
    receiver.arrive(A)
    assert receiver.taken("old") == [0]
    receiver.release("old", 1)
    assert receiver.granted() == [("old", 2)], "what the old one has prefilled makes room for its next group"
    receiver.close("old")
    assert receiver.granted() == [("young", 0)]


def test_a_small_group_does_not_overtake_a_large_one() -> None:
    receiver = Receiver()
    receiver.open("large", [A, group(9, 6)])
    receiver.open("small", [group(8, 2)])
    assert receiver.granted() == [("large", 0)]


def test_groups_arrive_in_any_order_and_are_taken_in_order_once() -> None:
    receiver = Receiver()
    receiver.open("r", [A, B])
    receiver.grant()
    receiver.arrive(B)
    assert receiver.taken("r") == [], "the first is still missing"
    receiver.arrive(A)
    assert receiver.taken("r") == [0, 1]
    assert receiver.taken("r") == []


def test_a_group_that_two_requests_want_is_encoded_once() -> None:
    receiver = Receiver()
    receiver.open("first", [A])
    receiver.open("second", [A])
    assert receiver.granted() == [("first", 0)]
    assert receiver.waiting_for(A.key) == ["first", "second"]
    receiver.arrive(A)
    assert receiver.taken("first") == receiver.taken("second") == [0]
    assert receiver.waiting_for(A.key) == []


def test_what_is_cached_already_needs_no_ticket() -> None:
    receiver = Receiver()
    receiver.open("first", [A])
    receiver.grant()
    receiver.arrive(A)
    receiver.close("first")
    receiver.open("second", [A, B])
    assert receiver.granted() == [("second", 1)]
    assert receiver.taken("second") == [0]


def test_closing_withdraws_only_the_tickets_that_nobody_else_wants() -> None:
    receiver = Receiver()
    receiver.open("cancelled", [A, B])
    receiver.open("other", [B])
    receiver.grant()
    (withdrawn,) = receiver.close("cancelled")
    assert withdrawn.key == A.key
    receiver.check_integrity()
    receiver.arrive(B)
    assert receiver.taken("other") == [0]


def test_a_closed_request_leaves_nothing_held() -> None:
    receiver = Receiver()
    receiver.open("r", [A, B])
    receiver.grant()
    receiver.arrive(A)
    receiver.taken("r")
    receiver.close("r")
    receiver.check_integrity()
    assert receiver.cache.num_held == 0
    assert receiver.cache.eviction_order() == [A.key], "what has arrived stays, as long as there is room"


def test_a_group_larger_than_the_cache_is_refused_with_its_request() -> None:
    receiver = Receiver()
    with pytest.raises(InfeasibleError, match="9 embeddings do not fit into an encoder cache of 8"):
        receiver.open("r", [A, group(9, 9)])
    receiver.open("r", [A])
    with pytest.raises(ValueError, match="request 'r' is open already"):
        receiver.open("r", [A])


def test_groups_are_released_only_after_they_were_taken() -> None:
    receiver = Receiver()
    receiver.open("r", [A])
    receiver.grant()
    with pytest.raises(ValueError, match="cannot release 1 groups of 'r', only 0 are taken"):
        receiver.release("r", 1)
