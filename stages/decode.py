"""Implements the decode stage: prompts that others have prefilled, answered by continuous batching.

    reserve: room or a refusal | keys and values arrive chunk by chunk | complete: decodes with all the others

It has no embeddings, so a preempted request is kept in host memory, never computed again. In the middle
of its answer a request can be moved to another decode worker:

    here    pause: no more tokens | move: keys, values, tokens so far | receipt: blocks are freed
                                                                      | failed, or the other lost: continues
    there                         reserve                             | decodes from the next token
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from epd.encoders import PromptPlan
from epd.kv.prefix_cache import TokenIdentity
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, RequestFault, StepResult, logged_fault
from epd.stages.engine.sequence import TokenSequence
from epd.stages.sampling.sampler import SampledToken
from epd.transfer.connectors import FirstToken, HandoverState, KVConnector, KVTicket, TransferOutcome
from epd.transfer.handover import DecodeReception, KVOutbox
from epd.types import ceil_div


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Holds a request that has room and has not arrived.

    num_seqs: answers to it. num_dropped: tokens that do not arrive.
    """

    identity: TokenIdentity
    sender: str
    num_seqs: int
    num_dropped: int


class MovingAnswers:
    """Moves answers to other decode workers, one by one: those that are paused, and those that have left."""

    def __init__(self, engine: LanguageEngine, connector: KVConnector) -> None:
        self._engine = engine
        self._outbox = KVOutbox(engine.kv, connector)
        self._paused: dict[str, list[TokenSequence]] = {}
        self._leaving: dict[str, list[TokenSequence]] = {}  # over, but for blocks that may still be read

    def __len__(self) -> int:
        """Counts the requests that are paused, or whose blocks may still be read."""
        return len(self._paused) + len(self._leaving)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._paused or request_id in self._leaving

    @property
    def paused(self) -> Collection[str]:
        """Lists the requests that decode no more here, and nowhere else yet."""
        return self._paused.keys()

    @property
    def num_paused(self) -> int:
        """Counts the answers of paused requests, and those that have left, but for their blocks."""
        return sum(map(len, [*self._paused.values(), *self._leaving.values()]))

    def pause(self, request_id: str) -> tuple[TokenIdentity, int] | None:
        """Stops a request that decodes, so that it can be moved.

        Returns the tokens whose keys and values are sent, and for how many more it needs room. Of several
        answers the prompt is sent, which they share, and the rest computed again.
        Returns None for one that is not here or cannot be moved now: it continues.
        """
        sequences = self._engine.detach(request_id)
        if not sequences:
            return None
        self._paused[request_id] = sequences
        scheduled = sequences[0].scheduled
        if sequences[0].request.sampling.n == 1:
            return scheduled.identity.first(scheduled.num_computed), 1
        # Each begins in a block of its own: a copy of the last one of the prompt.
        size = self._engine.kv.block_size
        num_blocks = sum(1 + ceil_div(each.num_generated, size) for each in sequences)
        return scheduled.identity.first(scheduled.num_prompt_tokens), num_blocks * size

    def move(self, request_id: str, ticket: KVTicket) -> bool:
        """Sends a paused request to the worker of the ticket.

        Returns False for one that is not paused here.
        """
        sequences = self._paused.get(request_id)
        if sequences is None or self._outbox.is_open(request_id):
            return False
        kept = self._engine.scheduler.prompts.id_of(request_id)
        self._outbox.open(ticket, kept if kept in self._engine.kv else sequences[0].request_id)
        self._outbox.send(request_id, _moved_state(sequences))
        return True

    def resume(self, request_id: str) -> None:
        """Resumes a paused request that is not being moved. Unknown ids are ignored."""
        if request_id in self._paused and not self._outbox.is_open(request_id):
            self._engine.attach(self._paused.pop(request_id))

    def resume_all(self) -> None:
        """Resumes all paused requests that are not being moved."""
        for request_id in list(self._paused):
            self.resume(request_id)

    def drop_receiver(self, receiver: str) -> None:
        """Resumes what was moved to another decode worker that is gone."""
        for request_id in self._outbox.drop_receiver(receiver):
            self.resume(request_id)

    def abort(self, request_id: str) -> None:
        """Forgets a request. Others are ignored."""
        if request_id in self._paused:
            self._outbox.abort(request_id, "the request was aborted")
            self._leaving[request_id] = self._paused.pop(request_id)

    def take_receipts(self) -> None:
        """Frees the blocks of answers that are elsewhere, and resumes those that were not taken."""
        for end in self._outbox.poll():
            if end.outcome is TransferOutcome.DELIVERED:
                self._leaving[end.request_id] = self._paused.pop(end.request_id)
            else:
                self.resume(end.request_id)
        for request_id in [each for each in self._leaving if self._outbox.is_settled(each)]:
            for sequence in self._leaving.pop(request_id):
                self._engine.scheduler.release(sequence.request_id)
            self._engine.scheduler.prompts.forget(request_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless engine and outbox agree."""
        self._outbox.check_integrity()
        moved = [each for some in (self._paused, self._leaving) for own in some.values() for each in own]
        lost = [each.request_id for each in moved if not self._engine.scheduler.is_held(each.request_id)]
        if lost:
            raise AssertionError(f"{lost} are being moved without their blocks")


class DecodeStage:
    """Runs one decode worker. Not thread-safe."""

    def __init__(self, engine: LanguageEngine, connector: KVConnector) -> None:
        if engine.scheduler.config.preemption != "offload":
            raise ValueError("a decode worker cannot compute media again; set preemption to 'offload'")
        self.engine = engine
        self.reception = DecodeReception(engine.kv, connector)
        self.moving = MovingAnswers(engine, connector)
        self._arriving: dict[str, _Arriving] = {}
        self._lost: dict[str, str] = {}  # what came to an end with its sender, until `fail_sender`

    def reserve(
        self,
        request_id: str,
        sender: str,
        identity: TokenIdentity,
        sampling: SamplingParams,
        num_dropped: int = 0,
        num_output_tokens: int = 0,
    ) -> KVTicket | None:
        """Reserves room for a request that the prefill worker `sender` will send; None without room now.

        num_dropped: of its prompt, see `PromptPlan.num_dropped`.
        num_output_tokens: room for its answers, of one that is moved; 0 for the first token of each.
        Nothing is queued: a refused request is for another worker, or for later. Raises InfeasibleError when
        it could never fit, ValueError for a request that is to arrive already.

        One that decodes here may be asked for again: it was to be moved, and nobody else takes it.
        """
        is_here = request_id in self.moving or request_id in self.engine.request_ids
        is_full = self.num_seqs and self.num_seqs + sampling.n > self.engine.scheduler.config.max_num_seqs
        if is_here or is_full:  # more answers than the slots grow alone
            return None
        room = 1 + (sampling.n - 1) * self.engine.kv.block_size
        ticket = self.reception.reserve(
            request_id,
            sender,
            identity,
            num_output_tokens=num_output_tokens or room,
            num_dropped=num_dropped,
        )
        if ticket is not None:
            self._arriving[request_id] = _Arriving(identity, sender, sampling.n, num_dropped)
            if sampling.grammar:
                self.engine.grammars.start(sampling.grammar)  # built by the time that the request arrives
        return ticket

    @property
    def num_seqs(self) -> int:
        """Counts the answers that grow, wait for room to continue, are still arriving or being moved."""
        scheduler = self.engine.scheduler
        num_arriving = sum(each.num_seqs for each in self._arriving.values())
        return len(scheduler.running) + len(scheduler.waiting) + num_arriving + self.moving.num_paused

    @property
    def arriving(self) -> tuple[str, ...]:
        """Lists the requests that have room and have not arrived."""
        return tuple(self._arriving)

    @property
    def request_ids(self) -> set[str]:
        """Lists the requests that are not over: arriving, decoding, or being moved."""
        return {*self.engine.request_ids, *self._arriving, *self.moving.paused, *self._lost}

    def abort(self, request_id: str) -> None:
        """Forgets a request, arriving, decoding or being moved. Unknown ids are ignored."""
        self.reception.cancel(request_id)
        self._arriving.pop(request_id, None)
        self._lost.pop(request_id, None)
        if request_id in self.moving:
            self.moving.abort(request_id)
        else:
            self.engine.abort(request_id)

    def fail_sender(self, sender: str) -> list[str]:
        """Returns the requests of a lost prefill worker that had not arrived whole; they are forgotten.

        Includes those whose hand-over has failed before: there is no one else to report them.
        """
        lost = self.reception.fail_sender(sender)
        for request_id in lost:
            del self._arriving[request_id]
        known = [request_id for request_id, name in self._lost.items() if name == sender]
        for request_id in known:
            del self._lost[request_id]
        return [*known, *lost]

    def has_work(self) -> bool:
        """Reports whether a request decodes, is still to arrive or is not gone yet."""
        return self.engine.has_work() or len(self.reception) > 0 or len(self.moving) > 0

    def step(self) -> StepResult:
        """Takes what has arrived, releases what has left, then runs one step of the engine."""
        self.moving.take_receipts()
        ends = self.reception.poll()
        faults: list[RequestFault] = []
        for end in ends:
            arriving = self._arriving.pop(end.request_id)
            if end.is_lost:
                self._lost[end.request_id] = arriving.sender
            if end.outcome is TransferOutcome.DELIVERED and end.state is not None:
                first = [SampledToken(t.token_id, t.logprob, t.top_logprobs) for t in end.state.first_tokens]
                try:
                    self.engine.adopt(_request(end.state, arriving), first, end.state.later_token_ids)
                except Exception as error:  # noqa: BLE001 - costs its request alone
                    faults.append(logged_fault(end.request_id, error))
        result = self.engine.step()
        result.handovers += ends
        result.faults += faults
        return result

    def check_integrity(self) -> None:
        """Raises AssertionError unless engine, reception and answers that are moved agree."""
        self.engine.check_integrity()
        self.reception.check_integrity()
        self.moving.check_integrity()
        if len(self._arriving) != len(self.reception):
            raise AssertionError(f"{set(self._arriving)} are not those that arrive")


def _request(state: HandoverState, arrived: _Arriving) -> GenerateRequest:
    """Builds the request as decode sees it: media are tokens like others, with positions already known."""
    num_tokens = len(state.prompt_token_ids)
    positions = np.zeros((state.num_position_rows, num_tokens), dtype=np.int64)
    prompt = PromptPlan(state.prompt_token_ids, positions, state.next_position, ())
    identity = arrived.identity
    if len(identity) > num_tokens:  # one that was moved: its answer is appended again
        identity = identity.first(num_tokens)
    return GenerateRequest(
        state.request_id,
        prompt,
        identity,
        state.sampling,
        state.seed,
        priority=state.priority,
        num_dropped=arrived.num_dropped,
    )


def _moved_state(sequences: Sequence[TokenSequence]) -> HandoverState:
    """Collects what another decode worker needs to continue in the middle of answers that are not over."""
    request, prompt = sequences[0].request, sequences[0].request.prompt
    known = {each.index: each.known_ids[len(prompt) :].tolist() for each in sequences}
    answers = range(request.sampling.n)
    return HandoverState(
        request_id=request.request_id,
        prompt_token_ids=prompt.token_ids,
        first_tokens=tuple(FirstToken(known[index][0] if index in known else 0) for index in answers),
        next_position=prompt.next_position,
        num_position_rows=len(prompt.positions),
        sampling=request.sampling,
        seed=request.seed,
        later_token_ids=tuple(tuple(known[index][1:]) if index in known else None for index in answers),
        priority=request.priority,
    )
