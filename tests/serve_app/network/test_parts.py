"""Offers in parts: nothing is lost by cutting, and parts wait for room, receipts and each other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.encode.encoder_cache import CachedGroup
from epd.serve_app.network.packing import Part, PartQueue, Shipment, pack, parts_of, unpack
from epd.stages.encode.encoder_pool import EmbeddingLayout, EncoderPoolShape
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPoolsShape
from epd.stages.engine.slot_copies import token_slots
from epd.stages.engine.state_pool import StateLayout, StatesShape
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket, Offer, Receipt, TransferOutcome
from epd.transfer.staging import ALIGNMENT, StagingSpace
from tests.stages.kv_values import put_tokens, tokens_at

CPU = torch.device("cpu")
BLOCK = 4
LAYOUTS = (KVLayout(1, 1, 2, torch.float32), KVLayout(2, 1, 2, torch.float32))
SHAPE = KVPoolsShape(tuple(KVGroupShape(12, layout) for layout in LAYOUTS), BLOCK, "heads")
BLOCK_BYTES = tuple(BLOCK * layout.bytes_per_token for layout in LAYOUTS)


@given(
    start=st.integers(0, 20),
    length=st.integers(1, 24),
    max_blocks=st.integers(0, 9),
    table=st.permutations(range(12)),
)
def test_parts_hold_every_token_once_and_are_small(
    start: int, length: int, max_blocks: int, table: list[int]
) -> None:
    source, target = SHAPE.build(), SHAPE.build()
    for number, group in enumerate(source.groups):
        slots = torch.arange(12 * BLOCK)
        values = (slots + 100 * number).float().view(1, 1, -1, 1, 1)
        put_tokens(group, slots, values.expand_as(tokens_at(group, slots)))
    stop, first = start + length, start // BLOCK
    blocks = tuple(table[first : -(-stop // BLOCK)])
    chunk = KVChunk(tuple(KVSpan(group, start, stop, blocks) for group in (0, 1)), num_kv_tokens=(stop, stop))
    ticket = KVTicket("t", "d", "p", "r", 0, stop, (tuple(range(12)), tuple(range(12))))
    parts = parts_of(source, chunk, max_blocks * BLOCK_BYTES[0])
    for part in parts:
        is_single = sum(map(len, part.blocks)) == 1
        assert part.num_bytes <= max_blocks * BLOCK_BYTES[0] or is_single
        small = unpack(pack(source, part), CPU)
        assert part.num_bytes == small.memory.nbytes
        target.receive(ticket, part.source, small)  # type: ignore[arg-type]
    assert [each.source.num_kv_tokens for each in parts] == [()] * (len(parts) - 1) + [(stop, stop)]  # type: ignore[union-attr]
    for theirs, ours in zip(source.groups, target.groups, strict=True):
        got = tokens_at(ours, torch.arange(12 * BLOCK))
        expected = torch.zeros_like(got)
        expected[:, :, start:stop] = tokens_at(theirs, token_slots(table, start, stop, BLOCK))
        assert torch.equal(got, expected)


def test_values_in_8_bits_take_three_quarters_of_the_bytes_on_the_wire() -> None:
    """Of heads of 128 channels; the scales are what is above."""
    span, num_bytes = KVSpan(0, 0, 64, tuple(range(4))), []
    ticket = KVTicket("t", "d", "p", "r", 0, 64, (tuple(range(4)),))
    for int8_values in (False, True):
        layout = KVLayout(2, 4, 128, torch.bfloat16, int8_values)
        shape = KVPoolsShape((KVGroupShape(4, layout),), 16)
        source, target = shape.build(), shape.build()
        source.memory.random_(generator=torch.Generator().manual_seed(1))
        sent = [pack(source, part) for part in parts_of(source, KVChunk((span,)), 20_000)]
        num_bytes.append(sum(each.contents.nbytes for each in sent))
        for part, packed in zip(parts_of(source, KVChunk((span,)), 20_000), sent, strict=True):
            target.receive(ticket, part.source, unpack(packed, CPU))  # type: ignore[arg-type]
        assert torch.equal(target.memory, source.memory)
    assert 0.75 < num_bytes[1] / num_bytes[0] < 0.76


@pytest.mark.parametrize("max_blocks", [0, 100])
def test_a_recurrent_state_comes_with_the_last_part(max_blocks: int) -> None:
    layout = StateLayout(2, 6, 3, 2, 4, 4, torch.bfloat16)
    shape = replace(SHAPE, states=StatesShape(5, layout))
    source, target = shape.build(), shape.build()
    assert source.states is not None
    assert target.states is not None
    for each in (source.states.tails, source.states.matrices):
        each.copy_(torch.arange(each.numel()).view(each.shape) % 97)
    spans = (KVSpan(0, 0, 8, (3, 7)), KVSpan(1, 0, 8, (2, 5)))
    parts = parts_of(source, KVChunk(spans, num_kv_tokens=(8, 8), state_slot=4), max_blocks * BLOCK_BYTES[0])
    ticket = KVTicket("t", "d", "p", "r", 0, 8, ((0, 1), (0, 1)), 2)
    for part in parts:
        target.receive(ticket, part.source, unpack(pack(source, part), CPU))  # type: ignore[arg-type]
    for ours, theirs in zip(
        (target.states.tails, target.states.matrices),
        (source.states.tails, source.states.matrices),
        strict=True,
    ):
        assert torch.equal(ours[2], theirs[4])
        assert not ours[[0, 1, 3, 4]].any()
    assert [part.state_slot for part in parts] == [None] * (len(parts) - 1) + [4]
    with pytest.raises(ValueError, match="cannot copy from pools"):
        SHAPE.build().receive(ticket, parts[-1].source, unpack(pack(source, parts[-1]), CPU))  # type: ignore[arg-type]


def test_a_chunk_without_tokens_is_a_part_without_bytes() -> None:
    source = SHAPE.build()
    (part,) = parts_of(source, KVChunk((), num_kv_tokens=(3, 3)), 1000)
    assert part.num_bytes == 0
    ticket = KVTicket("t", "d", "p", "r", 3, 3, ((0,), (0,)))
    SHAPE.build().receive(ticket, part.source, unpack(pack(source, part), CPU))  # type: ignore[arg-type]


def test_a_group_of_embeddings_is_one_part() -> None:
    pool = EncoderPoolShape(6, 4, EmbeddingLayout(8, torch.float32)).build()
    (part,) = parts_of(pool, CachedGroup(7, (5, 2)), 1)
    assert part.source == CachedGroup(7, (0, 1))
    assert part.num_bytes == 2 * 4 * 8 * 4


# The queue


class Queue:
    """A queue of parts with a size given in units, and what it has shipped."""

    def __init__(self, num_units: int) -> None:
        self.shipped: list[Shipment] = []
        self.space = StagingSpace(num_units * ALIGNMENT)
        self.queue = PartQueue(self.space, itertools.count(100), lambda each: self.shipped.append(each))

    def _ship(self, shipment: Shipment) -> None:
        self.shipped.append(shipment)

    def add(self, receiver: str, number: int, *units: int) -> None:
        offer = Offer(f"t{number}", number, "p", "pool", KVChunk(()))
        self.queue.add(receiver, offer, [part(each) for each in units])

    def take(self) -> list[tuple[str, int]]:
        """What was shipped since the last time: receivers and the units of parts."""
        shipped, self.shipped = self.shipped, []
        self.last = shipped
        return [(each.receiver, each.part.num_bytes // ALIGNMENT) for each in shipped]

    def answer(
        self, shipment: Shipment, outcome: TransferOutcome = TransferOutcome.DELIVERED
    ) -> list[Receipt]:
        ended = self.queue.answer(Receipt(shipment.offer.transfer_id, shipment.number, outcome, "why"))
        self.queue.advance()
        return ended


def part(num_units: int) -> Part:
    layout = EmbeddingLayout(ALIGNMENT, torch.uint8)
    return Part(EncoderPoolShape(num_units, 1, layout), CachedGroup(num_units, (0,)), ((0,),))


def test_parts_wait_for_the_receipts_of_those_before_them() -> None:
    queue = Queue(4)
    queue.add("d0", 1, 1, 1, 1)
    assert queue.take() == [("d0", 1), ("d0", 1)]
    first, second = queue.last
    assert queue.answer(first) == []
    assert queue.take() == [("d0", 1)]
    (third,) = queue.last
    assert queue.answer(third) == []
    assert queue.answer(second) == [Receipt("t1", 1, TransferOutcome.DELIVERED)]
    assert len(queue.queue) == queue.space.num_taken == 0


def test_what_the_receiver_does_not_want_is_not_sent_to_its_end() -> None:
    queue = Queue(4)
    queue.add("d0", 1, 1, 1, 1, 1)
    queue.add("d0", 2, 1)
    assert len(queue.take()) == 2
    first, second = queue.last
    assert queue.answer(first, TransferOutcome.CANCELLED) == []
    assert queue.take() == [("d0", 1)]
    assert queue.last[0].offer.transfer_id == "t2"
    assert queue.answer(second, TransferOutcome.CANCELLED) == [
        Receipt("t1", 1, TransferOutcome.CANCELLED, "why")
    ]
    assert queue.answer(queue.last[0]) == [Receipt("t2", 2, TransferOutcome.DELIVERED)]
    assert len(queue.queue) == queue.space.num_taken == 0


def test_a_receiver_that_hangs_stops_no_other_and_takes_nothing_with_it() -> None:
    queue = Queue(8)
    queue.add("hangs", 1, 2, 2, 2, 2, 2)
    assert len(queue.take()) == 2
    queue.add("d1", 2, 2, 2, 2)
    assert queue.take() == [("d1", 2), ("d1", 2)]
    for shipment in queue.last:
        queue.answer(shipment)
    assert queue.take() == [("d1", 2)]
    (last,) = queue.last
    queue.queue.forget("hangs")
    assert queue.take() == []
    assert queue.answer(last) == [Receipt("t2", 2, TransferOutcome.DELIVERED)]
    assert len(queue.queue) == queue.space.num_taken == 0


def test_a_part_that_cannot_be_read_goes_by_another_queue_and_its_offer_ends_once() -> None:
    here, there = Queue(4), Queue(4)
    here.add("d0", 1, 2, 1)
    assert here.take() == [("d0", 2)]
    (unread,) = here.last
    there.queue.repeat(here.queue.withdraw(unread.number))
    assert there.take() == [("d0", 2)]
    (repeated,) = there.last
    here.queue.advance()
    assert here.take() == [("d0", 1)]
    assert here.answer(here.last[0]) == []
    assert there.answer(repeated) == [Receipt("t1", 1, TransferOutcome.DELIVERED)]
    assert len(here.queue) == len(there.queue) == here.space.num_taken == there.space.num_taken == 0


def test_receivers_take_turns() -> None:
    queue = Queue(4)
    queue.add("d0", 1, 2, 1, 1)
    queue.add("d1", 2, 2, 1)
    assert queue.take() == [("d0", 2), ("d1", 2)]
    for shipment in queue.last:
        queue.answer(shipment)
    assert [receiver for receiver, _ in queue.take()] == ["d0", "d0", "d1"]


def test_a_part_that_never_fits_is_refused() -> None:
    queue = Queue(4)
    with pytest.raises(ValueError, match="larger than the space"):
        queue.add("d0", 1, 3)
    assert not queue.queue.fits([part(1), part(3)])
