"""Defines how one worker's embeddings, keys and values get into blocks that another has reserved.

    receiver                      sender
    reserve blocks, ticket  --->  make it, hold it
                            <---  Offer: where it is
    copy into the blocks
                            --->  Receipt: release it

The embeddings of a group are one offer; keys and values of a prompt are many, made while it is computed. The
receiver copies, and only for tickets that are open: a late offer can never write into blocks that have since
been given to another. Every offer is answered by exactly one receipt; the sender keeps the offered data until
then, regardless of the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from epd.encode.encoder_cache import CachedGroup, GroupKey
from epd.sampling_params import SamplingParams
from epd.types import Int64Array


class TransferOutcome(StrEnum):
    """Describes how a transfer ended, as both sides learn."""

    DELIVERED = "delivered"
    CANCELLED = "cancelled"  # the receiver did not want it any more
    FAILED = "failed"  # the sender could not produce it


class AnyTicket(Protocol):
    """Names a transfer and its room at a receiver; no two ever have the same name."""

    @property
    def transfer_id(self) -> str: ...

    @property
    def receiver(self) -> str: ...


TicketT = TypeVar("TicketT", bound=AnyTicket)
SourceT = TypeVar("SourceT")
_TicketT = TypeVar("_TicketT", bound=AnyTicket, contravariant=True)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Reserves room for the embeddings of one group."""

    transfer_id: str
    receiver: str
    key: GroupKey
    target: CachedGroup


@dataclass(frozen=True, slots=True)
class KVTicket:
    """Reserves room for the prompt of one request.

    sender: the worker that is to fill it.
    block_tables: of each layer group, the blocks of tokens [0, num_tokens).
    num_cached: leading tokens that are there already and must not be written, as others may be reading them.
    state_slot: where their recurrent state goes; None for a model without any.
    """

    transfer_id: str
    receiver: str
    sender: str
    request_id: str
    num_cached: int
    num_tokens: int
    block_tables: tuple[tuple[int, ...], ...]
    state_slot: int | None = None


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Covers tokens [start, stop) of one layer group. blocks: exactly those of the sender that hold them."""

    layer_group: int
    start: int
    stop: int
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a span needs 0 <= start < stop, got [{self.start}, {self.stop})")


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Holds prefill's sample for one answer. top_logprobs: (token id, logprob), the most likely first."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class HandoverState:
    """Holds the data that decode needs besides keys and values.

    prompt_token_ids: int64 [T].
    first_tokens: of each of the request's answers.
    next_position: of the first token of the answer, in every row of positions.
    num_position_rows: 3 for a model with multimodal positions, otherwise 1.
    seed: of the draws, chosen by now if the params leave it open.
    later_token_ids: where it is moved in the middle, what followed the first token of each answer; None for
        an answer that is over. Of several answers, these are computed again.
    priority: the lower, the sooner.
    """

    request_id: str
    prompt_token_ids: Int64Array
    first_tokens: tuple[FirstToken, ...]
    next_position: int
    num_position_rows: int
    sampling: SamplingParams
    seed: int
    later_token_ids: tuple[tuple[int, ...] | None, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class KVChunk:
    """Describes one offer of keys and values.

    state: in the last chunk alone, which may be without spans.
    num_kv_tokens: with the state, the tokens each layer group keeps of the prompt: all unless it was pruned.
    state_slot: with the state, where the sender has the recurrent state of all tokens, if the model has one.
    """

    spans: tuple[KVSpan, ...]
    state: HandoverState | None = None
    num_kv_tokens: tuple[int, ...] = ()
    state_slot: int | None = None


@dataclass(frozen=True, slots=True)
class Offer(Generic[SourceT]):
    """Offers data for a ticket: at `source` in a pool of the sender's, or None when it could not be made.

    number: differs among the sender's offers.
    pool_id: differs among pools of senders that have or had the same name.
    is_lost: the source is gone with its pool, as the receiver found; the sender did not say so.
    """

    transfer_id: str
    number: int
    sender: str
    pool_id: str
    source: SourceT | None
    error: str = ""
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Receipt:
    """Reports the end of an offer."""

    transfer_id: str
    number: int
    outcome: TransferOutcome
    error: str = ""


class Connector(Protocol[_TicketT, SourceT]):
    """Connects one worker. Nothing blocks: `send` returns at once, the receiver's `recv` copies."""

    name: str

    def send(self, ticket: _TicketT, source: SourceT | None, error: str = "") -> int:
        """Offers the data at `source` in this worker's pool, which must stay until the receipt.

        None instead of a source says that there will be nothing, and `error` why. Returns the offer's number.
        """
        ...

    def forget(self, receiver: str) -> None:
        """Forgets what was offered to an end that is gone and will not send receipts."""
        ...

    def poll(self) -> Sequence[Receipt]:
        """Returns receipts for this end's offers, new since the last call."""
        ...

    def expect(self, ticket: _TicketT) -> None:
        """Opens a ticket: from now on an offer for it is copied into its blocks."""
        ...

    def cancel(self, transfer_id: str) -> None:
        """Closes a ticket: its blocks are not written any more. Unknown ids are ignored."""
        ...

    def recv(self) -> Sequence[Offer[SourceT]]:
        """Copies all offers for open tickets, and answers them and the rest.

        Returns the offers for open tickets: those copied, and those that failed, without a source. Repeated
        ones are ignored.
        """
        ...


AnySource = CachedGroup | KVChunk
EncoderConnector = Connector[Ticket, CachedGroup]
KVConnector = Connector[KVTicket, KVChunk]
