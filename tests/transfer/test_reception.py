"""Reception, told as stories: who gets room for which group, and in which order groups are taken.

The receiver has 4 blocks of 2 embeddings. A group has 4 embeddings unless a story says otherwise, so two fit.
"""

from __future__ import annotations

import pytest

from epd.encode.encoder_cache import EncoderCacheManager, GroupSpec
from epd.errors import InfeasibleError
from epd.transfer.reception import Reception
from epd.transfer.transfers import Inbox
from tests.encoders.fakes import fake_key


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
