r"""Hands the keys and values of a prompt from a prefill to a decode worker, while they are computed.

    decode worker, DecodeReception         prefill worker, KVOutbox
    reserve blocks, KVTicket        --->   open: tokens [num_cached, num_tokens) are to come
                                    <---   send: tokens computed so far     \  in chunks, each answered
                                    <---   send: the rest, HandoverState    /  by a receipt
    commit the prompt, decode

Chunks may come in any order and more than once, and the state before the last of them. The prefill worker
keeps the blocks of a request until every offer is answered. No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epd.errors import InfeasibleError, require
from epd.kv.kv_cache import KVCacheManager
from epd.kv.prefix_cache import TokenIdentity
from epd.transfer.connectors import (
    HandoverState,
    KVChunk,
    KVConnector,
    KVSpan,
    KVTicket,
    Offer,
    Receipt,
    TransferOutcome,
)
from epd.transfer.transfers import TransferIds
from epd.types import ceil_div


@dataclass(frozen=True, slots=True)
class HandoverEnd:
    """Reports the end of a hand-over to each side once.

    state: only where it was received.
    is_lost: it failed since the sender's pool is gone, see `Offer`.
    """

    request_id: str
    outcome: TransferOutcome
    state: HandoverState | None = None
    error: str = ""
    is_lost: bool = False


@dataclass(slots=True)
class _Sending:
    """Tracks a transfer.

    source: in whose blocks the tokens are, by its id in the cache
    num_sent: offered tokens of each layer group
    unanswered: offers, by number
    """

    ticket: KVTicket
    source: str
    num_sent: list[int]
    unanswered: set[int] = field(default_factory=set)
    is_last_sent: bool = False
    is_ended: bool = False


class KVOutbox:
    """Sends tokens from a prefill worker and tracks requests whose blocks it must not free yet."""

    def __init__(self, cache: KVCacheManager, connector: KVConnector) -> None:
        self._cache = cache
        self._connector = connector
        self._sending: dict[str, _Sending] = {}  # by transfer
        self._current: dict[str, str] = {}  # of a request, the transfer that has not ended
        self._receipts: list[Receipt] = []  # that have come before the next `poll`

    def open(self, ticket: KVTicket, source: str = "") -> None:
        """Starts a hand-over, from the first token that the receiver lacks.

        source: an answer that begins with these tokens, where that is not the request itself.
        Raises ValueError when the request has one that has not ended.
        """
        if ticket.request_id in self._current:
            raise ValueError(f"request '{ticket.request_id}' is being handed over already; abort that first")
        num_groups = len(ticket.block_tables)
        num_sent = [ticket.num_cached] * num_groups
        self._sending[ticket.transfer_id] = _Sending(ticket, source or ticket.request_id, num_sent)
        self._current[ticket.request_id] = ticket.transfer_id

    def is_open(self, request_id: str) -> bool:
        """Returns whether the request has a hand-over that has not ended."""
        return request_id in self._current

    def is_settled(self, request_id: str) -> bool:
        """Returns whether every offer of the request is answered: only then may its blocks be freed.

        An open hand-over may be settled: tokens committed later continue from those sent.
        """
        return not any(
            sending.unanswered
            for sending in self._sending.values()
            if sending.ticket.request_id == request_id
        )

    def send(self, request_id: str, state: HandoverState | None = None) -> None:
        """Offers the tokens committed since the last time; with the state, for the last time.

        Raises KeyError when no hand-over is open.
        """
        sending = self._sending[self._current[request_id]]
        lengths = self._lengths(sending)
        spans = self._spans(sending, lengths, is_last=state is not None)
        if state is not None:
            sending.is_last_sent = True
            slot = self._cache.current_state(sending.source)
            self._offer(sending, KVChunk(spans, state, lengths, slot))
        elif spans:
            self._offer(sending, KVChunk(spans))

    def abort(self, request_id: str, error: str) -> None:
        """Ends a hand-over early and sends the receiver the reason. Does nothing if none is open.

        A receiver that has taken all of it may be gone, and would not answer.
        """
        transfer_id = self._current.get(request_id)
        if transfer_id is not None:
            sending = self._sending[transfer_id]
            if not self._is_taken(sending):
                self._offer(sending, None, error)
            self._end(sending)

    def poll(self) -> list[HandoverEnd]:
        """Takes receipts. Returns the hand-overs that they ended, but not those aborted here."""
        ends = []
        receipts, self._receipts = [*self._receipts, *self._connector.poll()], []
        for receipt in receipts:
            sending = self._sending.get(receipt.transfer_id)
            if sending is None or receipt.number not in sending.unanswered:
                continue
            sending.unanswered.remove(receipt.number)
            is_lost = receipt.outcome is not TransferOutcome.DELIVERED
            is_complete = sending.is_last_sent and not sending.unanswered
            if not sending.is_ended and (is_lost or is_complete):
                ends.append(HandoverEnd(sending.ticket.request_id, receipt.outcome, error=receipt.error))
                self._end(sending)
            self._forget_if_settled(sending)
        return ends

    def drop_receiver(self, receiver: str) -> list[str]:
        """Forgets a receiver that is gone and will not send receipts.

        Returns the requests whose hand-over has ended by that: they can be opened with another's ticket. What
        the receiver had taken completely before its end is not among them: `poll` reports it.
        """
        self._receipts += self._connector.poll()
        self._connector.forget(receiver)
        gone = [
            sending
            for sending in self._sending.values()
            if sending.ticket.receiver == receiver and not self._is_taken(sending)
        ]
        lost = [sending.ticket.request_id for sending in gone if not sending.is_ended]
        for sending in gone:
            self._end(sending)
            sending.unanswered.clear()
            self._forget_if_settled(sending)
        return lost

    def _is_taken(self, sending: _Sending) -> bool:
        """Returns whether receipts that are not handled yet say that the receiver has all of it."""
        transfer_id = sending.ticket.transfer_id
        mine = [each for each in self._receipts if each.transfer_id == transfer_id]
        is_answered = sending.unanswered <= {each.number for each in mine}
        is_delivered = all(each.outcome is TransferOutcome.DELIVERED for each in mine)
        return sending.is_last_sent and not sending.is_ended and is_answered and is_delivered

    def _lengths(self, sending: _Sending) -> tuple[int, ...]:
        """Returns, for each layer group, how many tokens of the prompt are written."""
        groups, num_tokens = range(len(sending.num_sent)), sending.ticket.num_tokens
        return tuple(min(self._cache.num_tokens(sending.source, group), num_tokens) for group in groups)

    def _spans(self, sending: _Sending, lengths: Sequence[int], *, is_last: bool) -> tuple[KVSpan, ...]:
        """Returns the unoffered part of tokens [0, length) of each layer group, and marks it as offered.

        Windows come last: before, blocks that are offered would be freed behind them.
        """
        size, spans = self._cache.block_size, []
        for group, (start, stop) in enumerate(zip(sending.num_sent, lengths, strict=True)):
            has_window = group >= self._cache.spec.num_full
            if stop > start and (is_last or not has_window):
                table = self._cache.block_table(sending.source, group)
                start = max(start, self._cache.spec.first_attended(group, stop))
                spans.append(KVSpan(group, start, stop, tuple(table[start // size : ceil_div(stop, size)])))
                sending.num_sent[group] = stop
        return tuple(spans)

    def _offer(self, sending: _Sending, chunk: KVChunk | None, error: str = "") -> None:
        sending.unanswered.add(self._connector.send(sending.ticket, chunk, error))

    def _end(self, sending: _Sending) -> None:
        if not sending.is_ended:
            sending.is_ended = True
            del self._current[sending.ticket.request_id]

    def _forget_if_settled(self, sending: _Sending) -> None:
        if sending.is_ended and not sending.unanswered:
            del self._sending[sending.ticket.transfer_id]

    def check_integrity(self) -> None:
        """Raises AssertionError unless unanswered offers lie in blocks that are still the request's."""
        open_now = {i: s.ticket.request_id for i, s in self._sending.items() if not s.is_ended}
        require(open_now == {i: r for r, i in self._current.items()}, f"open: {open_now}, {self._current}")
        for transfer_id, sending in self._sending.items():
            require(bool(sending.unanswered) or not sending.is_ended, f"'{transfer_id}' should be forgotten")
            has_spans = any(num > sending.ticket.num_cached for num in sending.num_sent)
            is_held = not (sending.unanswered and has_spans) or sending.source in self._cache
            require(is_held, f"'{transfer_id}' is sent from blocks that were freed")


@dataclass(slots=True)
class _IncomingHandover:
    """Tracks arrivals. arrived: ordered token spans of each layer group. num_kv_tokens: final numbers."""

    ticket: KVTicket
    identity: TokenIdentity
    arrived: list[list[tuple[int, int]]]
    num_kv_tokens: tuple[int, ...]
    is_shareable: bool
    state: HandoverState | None = None

    def check(self, num_kv_tokens: Sequence[int]) -> None:
        """Raises ValueError for lengths that the reservation does not allow."""
        whole = self.ticket.num_tokens
        if any(num > whole or (num < whole and self.is_shareable) for num in num_kv_tokens):
            raise ValueError(
                f"request '{self.ticket.request_id}' keeps {tuple(num_kv_tokens)} of {whole} tokens, but its "
                f"blocks are shared; reserve with is_shareable=False what may be pruned"
            )


class DecodeReception:
    """Receives prompts for a decode worker. When one is complete its block table goes to the decode loop."""

    def __init__(self, cache: KVCacheManager, connector: KVConnector) -> None:
        self._cache = cache
        self._connector = connector
        self._ids = TransferIds(connector.name)
        self._open: dict[str, _IncomingHandover] = {}

    def __len__(self) -> int:
        return len(self._open)

    def reserve(
        self,
        request_id: str,
        sender: str,
        identity: TokenIdentity,
        *,
        num_output_tokens: int = 1,
        num_dropped: int = 0,
        is_shareable: bool = True,
    ) -> KVTicket | None:
        """Reserves room for a prompt that `sender` computes and for its first output; None: no room now.

        num_output_tokens: at least 1, of all answers together.
        num_dropped: tokens of the prompt that the sender's cache has dropped; then nothing is shared.
        is_shareable: False if layers may be pruned.
        Raises InfeasibleError if it could never fit, ValueError for a request that is here already.
        """
        num_tokens = len(identity) - num_dropped
        is_shareable &= not num_dropped
        self._check_fits(num_tokens + num_output_tokens)
        # Whole blocks alone: part of one would have to be copied before anything arrives. A recurrent state
        # comes with the last token, so that one is never cached.
        most = len(identity) - (self._cache.spec.num_states > 0)
        whole = self._cache.num_cached(identity, most, awaits_state=True)
        whole = whole // self._cache.block_size * self._cache.block_size
        self._cache.open(
            request_id,
            identity,
            max_cached=whole,
            is_shareable=is_shareable,
            awaits_state=True,
            num_ahead=num_output_tokens,
        )
        needed = num_tokens + num_output_tokens
        if not self._cache.can_allocate(request_id, needed, arriving=num_tokens):
            self._cache.free(request_id)
            return None
        self._cache.allocate(request_id, needed, arriving=num_tokens)
        ticket = self._issue(request_id, sender, num_tokens)
        groups = range(len(ticket.block_tables))
        lengths = tuple(num_tokens for _ in groups)
        self._open[request_id] = _IncomingHandover(
            ticket, identity, [self._here(ticket, group) for group in groups], lengths, is_shareable
        )
        self._connector.expect(ticket)
        return ticket

    def _here(self, ticket: KVTicket, group: int) -> list[tuple[int, int]]:
        """Returns the tokens that need not be sent: cached ones, and those behind a window."""
        num_tokens = max(ticket.num_cached, self._cache.spec.first_attended(group, ticket.num_tokens))
        return [(0, num_tokens)] if num_tokens else []

    def poll(self) -> list[HandoverEnd]:
        """Takes arrived offers. Returns the requests that are complete, and those that never will be.

        The blocks of a failed request are freed; those of a complete one are for the caller to free.
        """
        ends = []
        for offer in self._connector.recv():
            arriving = self._find(offer.transfer_id)
            end = None if arriving is None else self._record(arriving, offer)
            if end is not None:
                ends.append(end)
        return ends

    def cancel(self, request_id: str) -> None:
        """Forgets a request that has not arrived, with its blocks. Unknown requests are ignored."""
        arriving = self._open.pop(request_id, None)
        if arriving is not None:
            self._connector.cancel(arriving.ticket.transfer_id)
            self._cache.free(request_id)

    def fail_sender(self, sender: str) -> list[str]:
        """Cancels the unfinished requests of a sender that is gone. Returns the requests."""
        lost = [i for i, arriving in self._open.items() if arriving.ticket.sender == sender]
        for request_id in lost:
            self.cancel(request_id)
        return lost

    def num_missing(self, request_id: str) -> int:
        """Returns how many tokens the least complete layer group lacks. Raises KeyError for unknown ids."""
        arriving = self._open[request_id]
        return max(
            length - sum(stop - start for start, stop in arrived)
            for length, arrived in zip(arriving.num_kv_tokens, arriving.arrived, strict=True)
        )

    def _check_fits(self, num_tokens: int) -> None:
        spec = self._cache.spec
        capacity = min(spec.num_blocks[: spec.num_full]) * spec.block_size
        if any(spec.most_blocks(group, num_tokens) > each for group, each in enumerate(spec.num_blocks)):
            raise InfeasibleError(
                f"{num_tokens} tokens of prompt and output do not fit into a KV cache of {capacity}; "
                f"shorten the prompt or give the decode worker more blocks"
            )

    def _issue(self, request_id: str, sender: str, num_tokens: int) -> KVTicket:
        num_blocks = ceil_div(num_tokens, self._cache.block_size)
        tables = tuple(
            tuple(self._cache.block_table(request_id, group)[:num_blocks])
            for group in range(len(self._cache.spec.num_blocks))
        )
        return KVTicket(
            self._ids.next(), self._connector.name, sender, request_id,
            self._cache.num_tokens(request_id), num_tokens, tables, self._cache.next_state(request_id),
        )  # fmt: skip

    def _find(self, transfer_id: str) -> _IncomingHandover | None:
        return next((a for a in self._open.values() if a.ticket.transfer_id == transfer_id), None)

    def _record(self, arriving: _IncomingHandover, offer: Offer[KVChunk]) -> HandoverEnd | None:
        """Records an offer that was copied; returns the request's end if it is complete or failed."""
        if offer.source is None:
            return self._fail(arriving, offer.error, is_lost=offer.is_lost)
        for span in offer.source.spans:
            arrived = arriving.arrived[span.layer_group]
            arriving.arrived[span.layer_group] = merged(arrived, span.start, span.stop)
        if offer.source.state is not None:
            try:
                arriving.check(offer.source.num_kv_tokens)
            except ValueError as error:
                return self._fail(arriving, str(error))
            arriving.state, arriving.num_kv_tokens = offer.source.state, offer.source.num_kv_tokens
        if arriving.state is None or self.num_missing(arriving.ticket.request_id) > 0:
            return None
        self._complete(arriving)
        return HandoverEnd(arriving.ticket.request_id, TransferOutcome.DELIVERED, arriving.state)

    def _fail(self, arriving: _IncomingHandover, error: str, *, is_lost: bool = False) -> HandoverEnd:
        self.cancel(arriving.ticket.request_id)
        return HandoverEnd(arriving.ticket.request_id, TransferOutcome.FAILED, error=error, is_lost=is_lost)

    def _complete(self, arriving: _IncomingHandover) -> None:
        """Commits the prompt; layer groups that keep less of it return the blocks they do not need."""
        ticket = arriving.ticket
        del self._open[ticket.request_id]
        self._connector.cancel(ticket.transfer_id)
        self._cache.commit(ticket.request_id, arriving.identity, ticket.num_tokens)
        for group, length in enumerate(arriving.num_kv_tokens):
            if length < ticket.num_tokens:
                self._cache.truncate(ticket.request_id, length, group)

    def check_integrity(self) -> None:
        """Raises AssertionError unless open tickets name blocks of their request, and counts agree."""
        self._cache.check_integrity()
        for request_id, arriving in self._open.items():
            for group, blocks in enumerate(arriving.ticket.block_tables):
                table = tuple(self._cache.block_table(request_id, group))[: len(blocks)]
                require(table == blocks, f"the ticket of '{request_id}' names blocks of another")
            for arrived in arriving.arrived:
                ends = [end for span in arrived for end in span]
                require(ends == sorted(set(ends)), f"spans of '{request_id}' out of order: {arrived}")


def merged(spans: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Returns half-open spans in order, without overlap or touch, after adding [start, stop)."""
    apart = [span for span in spans if span[1] < start or span[0] > stop]
    joined = [span for span in spans if span[1] >= start and span[0] <= stop]
    whole = (min([start, *(a for a, _ in joined)]), max([stop, *(b for _, b in joined)]))
    return sorted([*apart, whole])
