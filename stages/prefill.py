"""Implements the prefill stage: prompts in by chunks as media arrive, keys and values on to a decode worker.

    submit(request, ticket)   prefill chunk | chunk | last chunk, first token
    to the decode worker      [ tokens      )[      )[           ) + what decode needs to continue

Without a ticket the roles are merged: the same engine decodes the request to its end, and its decodes ride
along with the prefill chunks of others. Blocks of a request are kept until the decode worker has all of them,
so a decode worker that is lost costs no prefill: see `redirect`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import Extent, GenerateRequest, StepResult, TokenOutput
from epd.transfer.connectors import FirstToken, HandoverState, KVConnector, KVTicket, TransferOutcome
from epd.transfer.handover import KVOutbox


@dataclass(slots=True)
class _Handover:
    """Holds a request for another worker to continue.

    state: what that needs to know, once it is prefilled.
    """

    request: GenerateRequest
    state: HandoverState | None = None


class PrefillStage:
    """Runs one prefill worker, or one with merged roles. Not thread-safe."""

    def __init__(self, engine: LanguageEngine, connector: KVConnector | None = None) -> None:
        """Creates a stage. connector: to decode workers; without one, only merged roles are possible."""
        self.engine = engine
        self.outbox = KVOutbox(engine.kv, connector) if connector is not None else None
        if self.outbox is not None:
            engine.scheduler.may_preempt = self.outbox.is_settled
        self._handovers: dict[str, _Handover] = {}
        self._leaving: set[str] = set()  # over, but for blocks that may still be read

    def submit(
        self, request: GenerateRequest, ticket: KVTicket | None = None, *, awaits_ticket: bool = False
    ) -> None:
        """Queues a request. ticket: room at the decode worker that is to continue it.

        awaits_ticket: it will come by `redirect`; what is computed before waits for it.
        Raises InfeasibleError when it can never fit, RequestError for an id in use, ValueError for a ticket
        of another length.
        """
        if ticket is None and not awaits_ticket:
            self.engine.add(request)
            return
        if ticket is not None:
            _check_length(request, ticket)
        self.engine.add(replace(request, extent=Extent.FIRST_TOKEN))
        self._handovers[request.request_id] = _Handover(request)
        if ticket is not None:
            self._outbox.open(ticket)

    def redirect(self, request_id: str, ticket: KVTicket) -> None:
        """Hands a request over to a decode worker, from its first token; a former one gets no more.

        Raises KeyError for a request that is not here any more: prefill it again.
        """
        handover = self._handovers[request_id]
        self._outbox.abort(request_id, "it goes to another worker")
        self._outbox.open(ticket)
        if handover.state is not None:
            self._outbox.send(request_id, handover.state)

    def drop_receiver(self, receiver: str) -> list[str]:
        """Returns the requests on their way to a lost decode worker: redirect or abort them."""
        return self._outbox.drop_receiver(receiver)

    def abort(self, request_id: str) -> None:
        """Forgets a request; its blocks stay until they are no longer read. Unknown ids are ignored."""
        if request_id in self._handovers:
            self._outbox.abort(request_id, "the request was aborted")
            self.engine.abort(request_id, hold=True)
            self._leave(request_id)
        elif request_id not in self._leaving:
            self.engine.abort(request_id)

    @property
    def request_ids(self) -> set[str]:
        """Lists the requests that are not over, including those that are being handed over."""
        return {*self.engine.request_ids, *self._handovers}

    @property
    def num_merged(self) -> int:
        """Counts the requests that are not over and have no other worker to decode them."""
        return len(set(self.engine.request_ids) - self._handovers.keys())

    def has_work(self) -> bool:
        """Reports whether a request is not over, or its blocks may still be read."""
        return self.engine.has_work() or bool(self._handovers) or bool(self._leaving)

    def step(self) -> StepResult:
        """Runs one step of the engine, and of the hand-overs that depend on it."""
        result = self.engine.step()
        for fault in result.faults:
            self.abort(fault.request_id)
        if self.outbox is not None:
            self._send(result)
            self._take_receipts(result)
        return result

    @property
    def _outbox(self) -> KVOutbox:
        if self.outbox is None:
            raise ValueError("this worker was made without a connector; it cannot hand requests over")
        return self.outbox

    def _send(self, result: StepResult) -> None:
        """Sends what was computed in this step, and for complete prompts what decode needs to continue.

        Of a prompt that drops tokens nothing is sent before its question has chosen them.
        """
        for request_id in result.computed:
            is_early = request_id not in result.prefilled and self._outbox.is_open(request_id)
            if is_early and not self._handovers[request_id].request.prompt.num_dropped:
                self._outbox.send(request_id)
        for request_id in result.prefilled:
            if request_id in self._handovers:
                self._finish(request_id, [out for out in result.outputs if out.request_id == request_id])

    def _finish(self, request_id: str, first: list[TokenOutput]) -> None:
        """Finishes a computed prompt. Answers of one token need no decode worker."""
        if all(output.finish_reason for output in first):
            self._outbox.abort(request_id, "the request ended with its first token")
            self._leave(request_id)
            return
        handover = self._handovers[request_id]
        handover.state = _state(handover.request, first)
        if self._outbox.is_open(request_id):
            self._outbox.send(request_id, handover.state)

    def _take_receipts(self, result: StepResult) -> None:
        for end in self._outbox.poll():
            result.handovers.append(end)
            if end.outcome is TransferOutcome.DELIVERED and end.request_id in self._handovers:
                self._leave(end.request_id)
        for request_id in [each for each in self._leaving if self._outbox.is_settled(each)]:
            self._leaving.remove(request_id)
            if self.engine.scheduler.is_held(request_id):
                self.engine.scheduler.release(request_id)

    def _leave(self, request_id: str) -> None:
        del self._handovers[request_id]
        self._leaving.add(request_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless engine and hand-overs agree."""
        self.engine.check_integrity()
        if self.outbox is not None:
            self.outbox.check_integrity()


def _check_length(request: GenerateRequest, ticket: KVTicket) -> None:
    held = request.num_prompt_tokens - request.prompt.num_dropped
    if ticket.num_tokens != held:
        raise ValueError(
            f"request '{request.request_id}' will hold {held} tokens of its prompt, its ticket has room for "
            f"{ticket.num_tokens}; reserve with the prompt's num_dropped"
        )


def _state(request: GenerateRequest, first: list[TokenOutput]) -> HandoverState:
    tokens = [output.token for output in sorted(first, key=lambda each: each.choice)]
    return HandoverState(
        request_id=request.request_id,
        prompt_token_ids=request.prompt.token_ids,
        first_tokens=tuple(FirstToken(*token) for token in tokens),
        next_position=request.prompt.next_position,
        num_position_rows=len(request.prompt.positions),
        sampling=request.sampling,
        seed=request.seed,
        priority=request.priority,
    )
