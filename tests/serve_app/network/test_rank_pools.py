"""Keys and values between workers of several ranks: each head arrives once, whatever the route."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from epd.serve_app.network.memory import PoolFiles
from epd.serve_app.network.routes import InRanks, Packed, Route, Staged
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPools, KVPoolsShape
from epd.stages.engine.state_pool import StateLayout, StatesShape
from epd.stages.rank import ALONE, Rank
from epd.stages.ranks.group_pools import PoolSharing
from epd.stages.ranks.shared_pools import ReceiveTokens, SharedPools, SharePools, receive_together
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket, TransferOutcome
from tests.serve_app.network.test_connector import Workers, files, outcomes
from tests.stages.kv_values import tokens_at

__all__ = ["files"]

LAYOUTS = (KVLayout(2, 4, 4, torch.float32), KVLayout(1, 2, 2, torch.float32))
STATE = StateLayout(2, 16, 3, 4, 2, 2, torch.float32)  # heads of keys have 4 channels, as many as values two
CHUNK = KVChunk((KVSpan(0, 0, 6, (3, 1)), KVSpan(1, 2, 6, (5, 0))), num_kv_tokens=(6, 6), state_slot=1)
TICKET = KVTicket("d0.decode#1-1", "d0.decode", "p0.prefill", "r", 0, 6, ((4, 2, 0), (1, 5, 2)), 2)
# The slots that tokens [0, 6) and [2, 6) of the two layer groups come from, and go to.
SENT = (torch.tensor([12, 13, 14, 15, 4, 5]), torch.tensor([22, 23, 0, 1]))
ARRIVED = (torch.tensor([12, 13, 14, 6, 7, 8]), torch.tensor([5, 15, 16, 17]))


class HereRanks:
    """A group whose other rank does in this process what it is told, at once. other: its pools."""

    def __init__(self, shape: KVPoolsShape) -> None:
        self.rank = Rank(0, 2)
        self.other = SharedPools(replace(shape, rank=Rank(1, 2)))

    def tell(self, step: object) -> None:
        if isinstance(step, ReceiveTokens):
            receive_together(None, self.other, step)

    def ask(self, step: object) -> list[Any]:
        assert isinstance(step, SharePools)
        return [self.other.place(step.num_readers)]

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def add_up(self, tensor: Tensor) -> None: ...
    def share(self, tensor: Tensor) -> None: ...
    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


def worker(workers: Workers, name: str, num_ranks: int, block_size: int) -> tuple[list[KVPools], Any]:
    """The pools of each rank of a worker, and its end."""
    layouts = [replace(each, num_kv_heads=each.num_kv_heads // num_ranks) for each in LAYOUTS]
    state = replace(STATE, num_channels=16 // num_ranks, num_heads=4 // num_ranks)
    groups = tuple(KVGroupShape(6, each) for each in layouts)
    shape = KVPoolsShape(groups, block_size, "heads", states=StatesShape(3, state))
    ranks = HereRanks(shape) if num_ranks == 2 else None
    pools, end = workers[name[:2]].kv(name, shape, torch.device("cpu"), PoolSharing(ranks, 2))
    assert pools.shape.rank == (ALONE if ranks is None else ranks.rank)
    return [pools, *([] if ranks is None else [ranks.other])], end


def heads_of(ranks: list[KVPools], group: int, slots: Tensor) -> Tensor:
    return torch.cat([tokens_at(pools.groups[group], slots) for pools in ranks], dim=3)


def state_of(ranks: list[KVPools], slot: int) -> tuple[Tensor, Tensor]:
    """The tails and matrices of all ranks: channels of queries of both, then those of keys and of values."""
    states = [pools.states for pools in ranks if pools.states is not None]
    widths = [width // len(ranks) for width in (4, 4, 8)]
    kinds = zip(*(each.tails[slot].split(widths, dim=-1) for each in states), strict=True)
    tails = torch.cat([torch.cat(kind, dim=-1) for kind in kinds], dim=-1)
    return tails, torch.cat([each.matrices[slot] for each in states], dim=1)


def check_state(ours: list[KVPools], theirs: list[KVPools]) -> None:
    for here, there in zip(state_of(ours, 2), state_of(theirs, 1), strict=True):
        assert torch.equal(here, there)
    assert not any(part.any() for slot in (0, 1) for part in state_of(ours, slot))


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("route", [Route.SHARED_MEMORY, Route.STAGING, Route.LINK], ids=str)
def test_a_state_without_tokens_arrives(files: PoolFiles, route: Route, sizes: tuple[int, int]) -> None:
    """The last of a prompt's chunks may have no tokens."""
    workers = Workers(files, route)
    theirs, sender = worker(workers, "p0.prefill", sizes[0], 4)
    ours, receiver = worker(workers, "d0.decode", sizes[1], 3)
    for pools in theirs:
        pools.memory.view(torch.float32).normal_()
    receiver.expect(TICKET)
    sender.send(TICKET, replace(CHUNK, spans=()))
    while not outcomes(sender):
        assert all(offer.error == "" for offer in receiver.recv())
    check_state(ours, theirs)
    assert not any(pool.storage.any() for pools in ours for pool in pools.groups)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("route", [Route.SHARED_MEMORY, Route.STAGING, Route.LINK], ids=str)
def test_every_head_arrives(files: PoolFiles, route: Route, sizes: tuple[int, int]) -> None:
    workers = Workers(files, route, part_bytes=600)
    theirs, sender = worker(workers, "p0.prefill", sizes[0], 4)
    ours, receiver = worker(workers, "d0.decode", sizes[1], 3)
    for pools in theirs:
        pools.memory.view(torch.float32).normal_()
    receiver.expect(TICKET)
    sender.send(TICKET, CHUNK)
    while not (ended := outcomes(sender)):
        assert all(offer.error == "" for offer in receiver.recv())
    assert ended == [TransferOutcome.DELIVERED]
    for group in (0, 1):
        assert torch.equal(heads_of(ours, group, ARRIVED[group]), heads_of(theirs, group, SENT[group]))
        untouched = torch.ones(18, dtype=torch.bool)
        untouched[ARRIVED[group]] = False
        assert not heads_of(ours, group, untouched.nonzero().flatten()).any()
    check_state(ours, theirs)
    kind = {Route.STAGING: Staged, Route.LINK: Packed}.get(route, InRanks)
    assert {type(access) for access in workers.accesses} == {kind}
    assert (len(workers.accesses) > 1) == (kind is not InRanks), "parts are small"


def test_pools_of_a_worker_that_is_gone_are_lost(files: PoolFiles) -> None:
    workers = Workers(files, Route.SHARED_MEMORY)
    _, sender = worker(workers, "p0.prefill", 2, 4)
    _, receiver = worker(workers, "d0.decode", 2, 3)
    receiver.expect(TICKET)
    sender.send(TICKET, CHUNK)
    workers["p0"].close("p0.prefill")
    (offer,) = receiver.recv()
    assert offer.is_lost
    assert offer.source is None
