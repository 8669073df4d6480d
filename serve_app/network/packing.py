"""Copies offers out of their pool, and sends them in parts, to receivers that cannot reach the pool.

Blocks of a part become a small pool of exactly their number, and are renumbered in its offer:

    pool of the sender   | . | a | . | b | c |      source: blocks (1, 3, 4)
    first part           | a | b |                  source: blocks (0, 1)
    second part          | c |                      source: blocks (0)

Parts are sent through a bounded space: each waits for room, and a receipt gives its room back.

    add: parts of an offer  ->  queue of its receiver  ->  ship: there is room
                                                       <-  answer: a receipt; the last one ends the offer

Receivers take turns, and none may have more than half of the space: one that hangs stops no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epd.encode.encoder_cache import CachedGroup
from epd.stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from epd.stages.engine.kv_pool import KVGroupShape, KVPools, KVPoolsShape
from epd.stages.engine.state_pool import StatesShape
from epd.transfer.connectors import AnySource, KVChunk, KVSpan, Offer, Receipt, TransferOutcome
from epd.transfer.staging import StagingSpace
from epd.types import UInt8Array

AnyShape = EncoderPoolShape | KVPoolsShape
AnyPool = EncoderPool | KVPools


@dataclass(frozen=True, slots=True)
class Part:
    """Describes a part of an offer, and the small pool that it is copied to.

    source: the part of what is offered, with the blocks of the small pool
    blocks: of each layer group, or of the one pool of embeddings, those of the sender, in that order
    state_slot: of the sender, where a recurrent state is; None for a part without
    """

    shape: AnyShape
    source: AnySource
    blocks: tuple[tuple[int, ...], ...]
    state_slot: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.shape.num_bytes

    def copy(self, pool: AnyPool, memory: Tensor) -> None:
        """Copies the part's blocks from the pool to memory of the host, uint8 [num_bytes].

        From a GPU, the copies are queued, and not waited for if the memory is pinned.
        """
        if not self.num_bytes:
            return
        target = self.shape.over(memory)
        if isinstance(pool, EncoderPool) and isinstance(target, EncoderPool):
            target.fill(pool, self.blocks[0])
        elif isinstance(pool, KVPools) and isinstance(target, KVPools):
            pool.copy_whole(target, self.blocks, self.state_slot)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A part in transit. contents: uint8 [n], the memory of its small pool."""

    shape: AnyShape
    contents: UInt8Array


def parts_of(pool: Any, source: Any, max_bytes: int) -> list[Part]:
    """Cuts what is offered at `source` in an EncoderPool or KVPools into parts of at most max_bytes.

    Only whole blocks are cut off, and a group of embeddings is never cut: such a part may be larger.
    """
    if isinstance(pool, EncoderPool) and isinstance(source, CachedGroup):
        return [_embeddings(pool, source)]
    if isinstance(pool, KVPools) and isinstance(source, KVChunk):
        bites = list(_bites(pool, source, max_bytes)) or [[]]
        chunks = [KVChunk(tuple(spans)) for spans in bites[:-1]]
        return [_keys_and_values(pool, each) for each in (*chunks, replace(source, spans=tuple(bites[-1])))]
    raise TypeError(f"cannot pack {type(source).__name__} of {type(pool).__name__}")


def pack(pool: AnyPool, part: Part) -> Packed:
    """Copies a part to memory of its own, pinned if the pool is a GPU's: the copy is not waited for then."""
    memory = torch.empty(part.num_bytes, dtype=torch.uint8, pin_memory=pool.device.type != "cpu")
    part.copy(pool, memory)
    return Packed(part.shape, memory.numpy())


def unpack(packed: Packed, device: torch.device) -> AnyPool:
    """Returns the small pool of a part, on a device."""
    if not packed.contents.size:  # torch cannot view an empty array as another type
        return packed.shape.over(torch.empty(0, dtype=torch.uint8, device=device))
    return opened(packed.shape, torch.from_numpy(packed.contents), device)


def opened(shape: AnyShape, memory: Tensor, device: torch.device) -> AnyPool:
    """Returns the pool in memory of the host, which is copied as it is if the pool is to be on a GPU."""
    return shape.over(memory.to(device, non_blocking=True))


def _embeddings(pool: EncoderPool, source: CachedGroup) -> Part:
    num_blocks = len(source.block_ids)
    shape = EncoderPoolShape(num_blocks, pool.block_size, pool.layout)
    place = replace(source, block_ids=tuple(range(num_blocks)))
    return Part(shape, place, (tuple(source.block_ids),))


def _keys_and_values(pool: KVPools, source: KVChunk) -> Part:
    blocks: list[list[int]] = [[] for _ in pool.groups]
    spans: list[KVSpan] = []
    for span in source.spans:
        ids = blocks[span.layer_group]
        spans.append(replace(span, blocks=tuple(range(len(ids), len(ids) + len(span.blocks)))))
        ids += span.blocks
    shape = KVPoolsShape(
        tuple(KVGroupShape(len(ids), each) for ids, each in zip(blocks, pool.shape.layouts, strict=True)),
        pool.block_size,
        states=_states_of(pool, source),
    )
    slot = None if source.state_slot is None else 0
    packed = replace(source, spans=tuple(spans), state_slot=slot)
    return Part(shape, packed, tuple(map(tuple, blocks)), source.state_slot)


def _states_of(pool: KVPools, source: KVChunk) -> StatesShape | None:
    """Returns the room of a part for the recurrent state that comes with the last one."""
    layout = pool.shape.state_layout
    return None if layout is None else StatesShape(int(source.state_slot is not None), layout)


def _bites(pool: KVPools, source: KVChunk, max_bytes: int) -> Iterator[list[KVSpan]]:
    """Yields the spans of each part: as many blocks as max_bytes allow, and one at least."""
    left, spans = max_bytes, list[KVSpan]()
    for span in source.spans:
        block_bytes = pool.block_size * pool.shape.layouts[span.layer_group].bytes_per_token
        rest: KVSpan | None = span
        while rest is not None:
            num_blocks = max(0, left // block_bytes) or (0 if spans else 1)
            if num_blocks:
                head, rest = _cut(rest, num_blocks, pool.block_size)
                spans.append(head)
                left -= len(head.blocks) * block_bytes
            else:
                yield spans
                left, spans = max_bytes, []
    if spans:
        yield spans


def _cut(span: KVSpan, num_blocks: int, block_size: int) -> tuple[KVSpan, KVSpan | None]:
    """Cuts a span after that many of its blocks."""
    if num_blocks >= len(span.blocks):
        return span, None
    at = (span.start // block_size + num_blocks) * block_size
    head = replace(span, stop=at, blocks=span.blocks[:num_blocks])
    return head, replace(span, start=at, blocks=span.blocks[num_blocks:])


@dataclass(slots=True)
class _Whole:
    """An offer that travels in parts. num_open: parts without a receipt. end: of the first that failed."""

    offer: Offer[Any]
    receiver: str
    num_open: int
    end: Receipt | None = None


@dataclass(frozen=True, slots=True)
class Shipment:
    """A part for which there is room. number: of its own offer. offset: of the room, in bytes."""

    whole: _Whole
    part: Part
    number: int
    offset: int = 0

    @property
    def receiver(self) -> str:
        return self.whole.receiver

    @property
    def offer(self) -> Offer[Any]:
        """Returns the part's own offer."""
        whole = self.whole.offer
        return Offer(whole.transfer_id, self.number, whole.sender, whole.pool_id, self.part.source)


class PartQueue:
    """Holds what waits for room, and what is without a receipt."""

    def __init__(self, space: StagingSpace, numbers: Iterator[int], ship: Callable[[Shipment], None]) -> None:
        """Begins empty.

        numbers: of the offers to come
        ship: copies the part and posts its offer; called as soon as there is room
        """
        self._space = space
        self._numbers = numbers
        self._ship = ship
        self._waiting: dict[str, deque[tuple[_Whole, Part]]] = {}  # by receiver
        self._shipped: dict[int, Shipment] = {}  # by number

    def __len__(self) -> int:
        """Returns how many parts wait or are without a receipt."""
        return len(self._shipped) + sum(map(len, self._waiting.values()))

    def __contains__(self, number: int) -> bool:
        return number in self._shipped

    def fits(self, parts: Sequence[Part]) -> bool:
        """Returns whether the space is large enough for each of these parts."""
        return all(part.num_bytes <= self._space.max_bytes for part in parts)

    def add(self, receiver: str, offer: Offer[Any], parts: Sequence[Part]) -> None:
        """Sends an offer in these parts. Raises ValueError for one that never fits."""
        if not self.fits(parts):
            raise ValueError(
                f"a part of {max(part.num_bytes for part in parts)} bytes is larger than the space"
            )
        whole = _Whole(offer, receiver, len(parts))
        self._waiting.setdefault(receiver, deque()).extend((whole, part) for part in parts)
        self.advance()

    def advance(self) -> None:
        """Ships what there is room for, a part of each receiver in turn."""
        while sum(self._advance(receiver) for receiver in list(self._waiting)):
            pass

    def _advance(self, receiver: str) -> bool:
        queue = self._waiting[receiver]
        whole, part = queue[0]
        offset = self._space.take(receiver, part.num_bytes)
        if offset is None:
            return False
        queue.popleft()
        if not queue:
            del self._waiting[receiver]
        shipment = Shipment(whole, part, next(self._numbers), offset)
        self._shipped[shipment.number] = shipment
        self._ship(shipment)
        return True

    def answer(self, receipt: Receipt) -> list[Receipt]:
        """Takes the receipt of a part. Returns the receipt of its offer if no part of that is left."""
        shipment = self._shipped.pop(receipt.number)
        self._space.free(shipment.offset)
        whole = shipment.whole
        whole.num_open -= 1
        if receipt.outcome is not TransferOutcome.DELIVERED and whole.end is None:
            whole.end = receipt
            self._drop_waiting(whole)
        if whole.num_open:
            return []
        outcome, error = TransferOutcome.DELIVERED, ""
        if whole.end is not None:
            outcome, error = whole.end.outcome, whole.end.error
        return [Receipt(whole.offer.transfer_id, whole.offer.number, outcome, error)]

    def _drop_waiting(self, whole: _Whole) -> None:
        """Drops the parts of an offer that nobody wants any more."""
        queue = self._waiting.pop(whole.receiver, deque())
        kept = deque((each, part) for each, part in queue if each is not whole)
        whole.num_open -= len(queue) - len(kept)
        if kept:
            self._waiting[whole.receiver] = kept

    @property
    def has_shipped(self) -> bool:
        """Returns whether any part is without a receipt. Thread-safe."""
        return bool(self._shipped)

    def withdraw(self, number: int) -> Shipment:
        """Frees the room of a part that its receiver cannot read. `repeat` sends it by another queue."""
        shipment = self._shipped.pop(number)
        self._space.free(shipment.offset)
        return shipment

    def repeat(self, shipment: Shipment) -> None:
        """Sends a part that another queue has withdrawn."""
        self._waiting.setdefault(shipment.receiver, deque()).append((shipment.whole, shipment.part))
        self.advance()

    def forget(self, receiver: str) -> None:
        """Drops all parts for a receiver that is gone, which gives no receipts."""
        self._waiting.pop(receiver, None)
        for number in [n for n, shipment in self._shipped.items() if shipment.receiver == receiver]:
            self._space.free(self._shipped.pop(number).offset)
        self.advance()
