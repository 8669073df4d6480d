"""Hand-overs of keys and values told as stories: chunks that are late, doubled, lost or not wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from epd.errors import InfeasibleError
from epd.stages.connectors.mailbox import InProcessHub
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket, TransferOutcome
from epd.transfer.handover import HandoverEnd, merged
from tests.stages.handover_workers import DecodeWorker, PrefillWorker, kv_of, pools_shape, state_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
OTHER = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]
DELIVERED, CANCELLED, FAILED = (
    TransferOutcome.DELIVERED,
    TransferOutcome.CANCELLED,
    TransferOutcome.FAILED,
)


@dataclass
class Story:
    """Two prefill workers with blocks of 4 tokens; two decode workers with 8 blocks of 2."""

    hub: InProcessHub
    prefill: dict[str, PrefillWorker]
    decode: dict[str, DecodeWorker]
    num_states: int = 0

    def connect_prefill(self, name: str) -> PrefillWorker:
        pools = pools_shape(10, 4, self.num_states).build()
        self.prefill[name] = PrefillWorker(pools, self.hub.connect(name, pools))
        return self.prefill[name]

    def connect_decode(self, name: str) -> DecodeWorker:
        pools = pools_shape(8, 2, self.num_states).build()
        self.decode[name] = DecodeWorker(pools, self.hub.connect(name, pools))
        return self.decode[name]

    def start(self, request_id: str, token_ids: Sequence[int], p: str = "p0", d: str = "d0") -> KVTicket:
        """Room on both sides; the ticket of the hand-over that is open now."""
        ticket = self.decode[d].reserve(request_id, p, token_ids)
        assert ticket is not None
        assert self.prefill[p].start(request_id, token_ids)
        self.prefill[p].outbox.open(ticket)
        return ticket


@pytest.fixture
def story() -> Story:
    story = Story(InProcessHub(), {}, {})
    for name in ("p0", "p1"):
        story.connect_prefill(name)
    for name in ("d0", "d1"):
        story.connect_decode(name)
    return story


def outcomes(ends: Sequence[HandoverEnd]) -> list[tuple[str, TransferOutcome]]:
    return [(end.request_id, end.outcome) for end in ends]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 11])
def test_a_prompt_arrives_while_it_is_computed(story: Story, chunk: int) -> None:
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    ends = []
    for computed in range(chunk, len(PROMPT) + chunk, chunk):
        assert ends == []
        p.compute("a", chunk)
        ends = d.poll()
        if computed < len(PROMPT):
            assert d.reception.num_missing("a") == len(PROMPT) - computed
    assert outcomes(ends) == [("a", DELIVERED)]
    assert ends[0].state.first_tokens == state_of("a", PROMPT).first_tokens
    assert ends[0].state.prompt_token_ids.tolist() == PROMPT
    assert d.holds("a", PROMPT)
    assert outcomes(p.outbox.poll()) == [("a", DELIVERED)]
    assert p.free_if_settled("a")
    assert d.holds("a", PROMPT)


def test_chunks_may_come_in_any_order_and_the_state_before_them(story: Story) -> None:
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    for _ in PROMPT:
        p.compute("a", 1)
    mail = story.hub.find("d0").inbox
    mail.reverse()
    late = [mail.pop() for _ in range(4)]
    assert d.poll() == []
    assert d.reception.num_missing("a") == 4
    mail.extend(late)
    assert outcomes(d.poll()) == [("a", DELIVERED)]
    assert d.holds("a", PROMPT)


def test_what_comes_twice_counts_once(story: Story) -> None:
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    p.compute("a", 6)
    mail = story.hub.find("d0").inbox
    mail.extend(list(mail))
    again = mail[0]
    assert d.poll() == []
    assert d.reception.num_missing("a") == 5
    p.compute("a", 1)
    p.outbox.poll()
    assert not p.outbox.is_settled("a")
    for pool in p.pools.groups:
        pool.storage[0] = -1  # not answered a second time, nor read
    mail.append(again)
    p.compute("a")
    assert outcomes(d.poll()) == [("a", DELIVERED)]
    assert d.holds("a", PROMPT)
    assert outcomes(p.outbox.poll()) == [("a", DELIVERED)]


def test_the_sender_keeps_its_blocks_until_every_chunk_is_answered(story: Story) -> None:
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    p.compute("a", 4)
    assert not p.outbox.is_settled("a")
    d.poll()
    assert p.outbox.poll() == []
    assert p.outbox.is_settled("a")
    assert p.outbox.is_open("a")
    p.compute("a")
    assert not p.free_if_settled("a")
    d.poll()
    assert not p.free_if_settled("a")
    p.outbox.poll()
    assert p.free_if_settled("a")
    assert not p.outbox.is_open("a")


def test_what_is_cached_already_is_neither_sent_nor_written(story: Story) -> None:
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    p.compute("a")
    d.poll()
    before = [pool.storage.clone() for pool in d.pools.groups]
    ticket = story.start("b", [*PROMPT[:8], 7], p="p1")
    assert ticket.num_cached == 8
    story.prefill["p1"].compute("b")
    (offer,) = story.hub.find("d0").inbox
    assert [(span.start, span.stop) for span in offer.source.spans] == [(8, 9), (8, 9)]
    assert outcomes(d.poll()) == [("b", DELIVERED)]
    assert d.holds("b", [*PROMPT[:8], 7])
    assert d.holds("a", PROMPT)
    for pool, old in zip(d.pools.groups, before, strict=True):
        assert int((pool.storage != old).any(dim=(1, 2, 4, 5)).sum()) == 1


def test_a_prompt_that_is_cached_as_a_whole_needs_the_state_alone(story: Story) -> None:
    story.start("a", PROMPT[:8])
    story.prefill["p0"].compute("a")
    story.decode["d0"].poll()
    ticket = story.start("b", PROMPT[:8], p="p1")
    assert ticket.num_cached == 8
    story.prefill["p1"].compute("b")
    assert story.hub.find("d0").inbox[0].source.spans == ()
    assert outcomes(story.decode["d0"].poll()) == [("b", DELIVERED)]
    assert story.decode["d0"].holds("b", PROMPT[:8])


def test_a_span_that_would_write_cached_tokens_is_refused(story: Story) -> None:
    story.start("a", PROMPT[:8])
    p, d = story.prefill["p0"], story.decode["d0"]
    p.compute("a")
    d.poll()
    ticket = story.start("b", [*PROMPT[:8], 7], p="p1")
    chunk = KVChunk((KVSpan(1, 7, 9, (0, 1)),))
    story.hub.find("p1").send(ticket, chunk)
    (end,) = d.poll()
    assert (end.request_id, end.outcome) == ("b", FAILED)
    assert "tokens [7, 9) of request 'b' were sent, [8, 9) may be" in end.error
    assert d.holds("a", PROMPT[:8])


def test_without_room_there_is_a_refusal_and_nothing_is_kept(story: Story) -> None:
    d = story.decode["d0"]
    assert d.reserve("a", "p0", PROMPT) is not None
    assert d.reserve("b", "p0", OTHER) is None
    assert "b" not in d.cache
    d.check()
    d.reception.cancel("a")
    assert d.reserve("b", "p0", OTHER) is not None


def test_what_would_never_fit_is_infeasible(story: Story) -> None:
    d = story.decode["d0"]
    assert d.reserve("a", "p0", list(range(15))) is not None
    with pytest.raises(
        InfeasibleError, match="17 tokens of prompt and output do not fit into a KV cache of 16"
    ):
        d.reserve("b", "p0", list(range(16)))


def test_late_chunks_of_a_cancelled_request_write_nothing(story: Story) -> None:
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    p.compute("a", 5)
    d.reception.cancel("a")
    story.start("b", OTHER, p="p1")
    story.prefill["p1"].compute("b")
    p.compute("a")
    assert outcomes(d.poll()) == [("b", DELIVERED)]
    assert d.holds("b", OTHER)
    assert outcomes(p.outbox.poll()) == [("a", CANCELLED)]
    assert p.free_if_settled("a")


def test_a_sender_that_gives_up_tells_why_and_frees_later(story: Story) -> None:
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    p.compute("a", 5)
    p.outbox.abort("a", "the client went away")
    assert not p.free_if_settled("a")
    (end,) = d.poll()
    assert (end.request_id, end.outcome, end.error) == ("a", FAILED, "the client went away")
    assert "a" not in d.cache
    assert p.outbox.poll() == []
    assert p.free_if_settled("a")


def test_what_a_decode_worker_had_taken_before_its_loss_is_over(story: Story) -> None:
    """Its receipts have come and were not read yet: nobody needs the prompt any more."""
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    p.compute("a")
    assert outcomes(d.poll()) == [("a", DELIVERED)]
    story.hub.disconnect("d0")
    assert p.outbox.drop_receiver("d0") == []
    assert outcomes(p.outbox.poll()) == [("a", DELIVERED)]
    assert p.free_if_settled("a")


def test_what_a_lost_decode_worker_had_taken_can_be_aborted(story: Story) -> None:
    """Nothing is offered to it any more: its answer would be awaited for ever."""
    story.start("a", PROMPT)
    p, d = story.prefill["p0"], story.decode["d0"]
    p.compute("a")
    assert outcomes(d.poll()) == [("a", DELIVERED)]
    story.hub.disconnect("d0")
    assert p.outbox.drop_receiver("d0") == []
    p.outbox.abort("a", "the request is over")
    assert p.outbox.poll() == []
    assert p.free_if_settled("a")
    p.check()


def test_after_a_decode_worker_is_lost_everything_goes_to_another(story: Story) -> None:
    story.start("a", PROMPT)
    p = story.prefill["p0"]
    p.compute("a", 3)
    story.decode["d0"].poll()
    p.compute("a", 4)
    story.hub.disconnect("d0")
    assert p.outbox.drop_receiver("d0") == ["a"]
    ticket = story.decode["d1"].reserve("a", "p0", PROMPT)
    assert ticket is not None
    p.outbox.open(ticket)
    p.compute("a")
    assert outcomes(story.decode["d1"].poll()) == [("a", DELIVERED)]
    assert story.decode["d1"].holds("a", PROMPT)
    assert outcomes(p.outbox.poll()) == [("a", DELIVERED)]
    p.check()


def test_a_decode_worker_that_is_left_for_another_still_has_to_answer(story: Story) -> None:
    story.start("a", PROMPT)
    p = story.prefill["p0"]
    p.compute("a", 3)
    p.outbox.abort("a", "another decode worker is nearer")
    p.outbox.open(story.decode["d1"].reserve("a", "p0", PROMPT))
    p.compute("a")
    story.decode["d1"].poll()
    assert outcomes(p.outbox.poll()) == [("a", DELIVERED)]
    assert not p.outbox.is_settled("a")
    assert outcomes(story.decode["d0"].poll()) == [("a", FAILED)]
    assert p.outbox.poll() == []
    assert p.outbox.is_settled("a")


def test_after_a_prefill_worker_is_lost_nothing_is_kept_of_what_it_sent(story: Story) -> None:
    story.start("a", PROMPT)
    story.start("b", OTHER[:3], p="p1")
    story.prefill["p0"].compute("a", 6)
    d = story.decode["d0"]
    d.poll()
    story.hub.disconnect("p0")
    assert d.reception.fail_sender("p0") == ["a"]
    assert "a" not in d.cache
    assert d.cache.num_cached(story.prefill["p0"].prompts["a"][1]) == 0
    story.prefill["p1"].compute("b")
    assert outcomes(d.poll()) == [("b", DELIVERED)]


def test_a_chunk_of_a_sender_that_started_again_is_not_read_from_its_new_pool(story: Story) -> None:
    story.start("a", PROMPT)
    story.prefill["p0"].compute("a", 6)
    story.connect_prefill("p0")
    (end,) = story.decode["d0"].poll()
    assert (end.request_id, end.outcome) == ("a", FAILED)
    assert "sender 'p0' is gone" in end.error


def test_a_chunk_for_a_receiver_that_started_again_does_not_fill_its_new_tickets(story: Story) -> None:
    story.start("a", PROMPT)
    d = story.connect_decode("d0")
    story.start("b", OTHER, p="p1")
    story.prefill["p0"].compute("a")
    story.prefill["p1"].compute("b", 4)
    assert d.poll() == []
    assert d.reception.num_missing("b") == len(OTHER) - 4
    assert outcomes(story.prefill["p0"].outbox.poll()) == [("a", CANCELLED)]


def test_pruned_layers_send_less_and_give_the_rest_of_their_room_back(story: Story) -> None:
    p, d = story.prefill["p0"], story.decode["d0"]
    ticket = d.reserve("a", "p0", PROMPT, is_shareable=False)
    assert p.start("a", PROMPT, is_shareable=False)
    p.compute("a", 8)
    p.cache.truncate("a", 5, layer_group=1)
    p.outbox.open(ticket)
    p.send("a")
    assert d.poll() == []
    p.compute("a")
    assert outcomes(d.poll()) == [("a", DELIVERED)]
    assert d.holds("a", PROMPT, [11, 5])
    assert torch.equal(d.read("a", 1, 8)[:, :, 5:], kv_of(PROMPT, 1)[:, :, 8:])
    assert [d.cache.num_tokens("a", group) for group in (0, 1)] == [11, 8]
    assert [len(d.cache.block_table("a", group)) for group in (0, 1)] == [6, 4]
    d.check()


def test_layers_pruned_without_notice_fail_instead_of_being_shared(story: Story) -> None:
    ticket = story.start("a", PROMPT)
    chunk = KVChunk((), state_of("a", PROMPT), (11, 5))
    story.hub.find("p0").send(ticket, chunk)
    d = story.decode["d0"]
    (end,) = d.poll()
    assert (end.outcome, end.request_id) == (FAILED, "a")
    assert "keeps (11, 5) of 11 tokens, but its blocks are shared" in end.error
    assert "a" not in d.cache


def test_pools_of_other_layouts_do_not_mix(story: Story) -> None:
    shape = pools_shape(10, 4)
    odd = replace(shape, groups=shape.groups[::-1]).build()
    p, d = PrefillWorker(odd, story.hub.connect("odd", odd)), story.decode["d0"]
    ticket = d.reserve("a", "odd", PROMPT)
    p.cache.open("a", d.reception._open["a"].identity, max_cached=0)
    story.hub.find("odd").send(ticket, KVChunk((KVSpan(0, 0, 2, (0,)),)))
    (end,) = d.poll()
    assert end.outcome is FAILED
    assert "cannot copy from pools of" in end.error


def test_a_request_has_one_hand_over_at_a_time(story: Story) -> None:
    ticket = story.start("a", PROMPT)
    with pytest.raises(ValueError, match="'a' is being handed over already; abort that first"):
        story.prefill["p0"].outbox.open(ticket)
    with pytest.raises(ValueError, match="'a' is open already"):
        story.decode["d0"].reserve("a", "p0", PROMPT[:2])


@pytest.mark.parametrize(
    ("spans", "added", "expected"),
    [
        ([], (2, 4), [(2, 4)]),
        ([(0, 2)], (2, 4), [(0, 4)]),
        ([(0, 2), (6, 8)], (3, 5), [(0, 2), (3, 5), (6, 8)]),
        ([(0, 2), (6, 8)], (1, 7), [(0, 8)]),
        ([(0, 8)], (2, 4), [(0, 8)]),
        ([(6, 8)], (0, 2), [(0, 2), (6, 8)]),
    ],
)
def test_spans_are_merged_and_gaps_remembered(
    spans: list[tuple[int, int]], added: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    assert merged(spans, *added) == expected


def test_a_recurrent_state_comes_last_and_the_blocks_before_it_are_shared() -> None:
    """No state was kept at the decode worker after the shared blocks: the prompt's own comes in any case."""
    story = Story(InProcessHub(), {}, {}, num_states=6)
    p, d = story.connect_prefill("p0"), story.connect_decode("d0")
    first, second = PROMPT[:9], [*PROMPT[:7], 50]
    assert story.start("a", first).num_cached == 0
    p.compute("a")
    assert outcomes(d.poll()) == [("a", TransferOutcome.DELIVERED)]
    assert d.holds("a", first)
    ticket = story.start("b", second)
    assert (ticket.num_cached, d.cache.current_state("b")) == (6, None)
    assert ticket.state_slot == d.cache.next_state("b")
    d.check()
    p.compute("b", 7)
    assert outcomes(d.poll()) == []
    p.compute("b")
    assert outcomes(d.poll()) == [("b", TransferOutcome.DELIVERED)]
    assert d.holds("b", second)
    assert d.holds("a", first)
    d.check()
    d.cache.free("a")
    again = story.start("c", second)
    assert again.num_cached == 6, "not all of it: a state comes with a last token"
