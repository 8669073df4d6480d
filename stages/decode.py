"""The decode stage: prompts that others have prefilled, answered by continuous batching.

    reserve: room or a refusal | keys and values arrive chunk by chunk | complete: decodes with all the others

It has no embeddings, so a request that gives way is kept in host memory, never computed again.
"""

from __future__ import annotations

import numpy as np

from encoders import PromptPlan
from epd.connectors import HandoverState, KVConnector, KVTicket, TransferOutcome
from epd.handover import DecodeReception
from epd.kv_identity import TokenIdentity
from epd.sampling_params import SamplingParams
from stages.engine import LanguageEngine
from stages.generation import GenerateRequest, StepResult
from stages.sampler import SampledToken


class DecodeStage:
    """One decode worker. Not for several threads at once."""

    def __init__(self, engine: LanguageEngine, connector: KVConnector) -> None:
        if engine.scheduler.config.preemption != "offload":
            raise ValueError("a decode worker cannot compute media again; set preemption to 'offload'")
        self.engine = engine
        self.reception = DecodeReception(engine.kv, connector)
        self._identities: dict[str, TokenIdentity] = {}

    def reserve(
        self, request_id: str, sender: str, identity: TokenIdentity, sampling: SamplingParams
    ) -> KVTicket | None:
        """Room for a request that the prefill worker `sender` will send; None when there is none now.

        Nothing is queued: a refused request is for another worker, or for later. Raises InfeasibleError when
        it could never fit, ValueError for a request that is here already.
        """
        if self.num_requests >= self.engine.scheduler.config.max_num_seqs:
            return None
        room = 1 + (sampling.n - 1) * self.engine.kv.block_size
        ticket = self.reception.reserve(request_id, sender, identity, num_output_tokens=room)
        if ticket is not None:
            self._identities[request_id] = identity
        return ticket

    @property
    def num_requests(self) -> int:
        """Requests that decode, wait for room to go on, or are still arriving."""
        scheduler = self.engine.scheduler
        return len(scheduler.running) + len(scheduler.waiting) + len(self.reception)

    def abort(self, request_id: str) -> None:
        """Forgets a request, arriving or decoding. Unknown ids are ignored."""
        self.reception.cancel(request_id)
        self._identities.pop(request_id, None)
        self.engine.abort(request_id)

    def fail_sender(self, sender: str) -> list[str]:
        """A prefill worker is gone. Returns the requests that had not arrived whole; they are forgotten."""
        lost = self.reception.fail_sender(sender)
        for request_id in lost:
            del self._identities[request_id]
        return lost

    def has_work(self) -> bool:
        """Whether a request decodes or is still to arrive."""
        return self.engine.has_work() or len(self.reception) > 0

    def step(self) -> StepResult:
        """Takes what has arrived, then one step of the engine."""
        ends = self.reception.poll()
        for end in ends:
            identity = self._identities.pop(end.request_id)
            if end.outcome is TransferOutcome.DELIVERED and end.state is not None:
                first = [SampledToken(t.token_id, t.logprob, t.top_logprobs) for t in end.state.first_tokens]
                self.engine.adopt(_request(end.state, identity), first)
        result = self.engine.step()
        result.handovers += ends
        return result

    def check_integrity(self) -> None:
        """Raises AssertionError unless engine and reception agree."""
        self.engine.check_integrity()
        self.reception.check_integrity()
        if len(self._identities) != len(self.reception):
            raise AssertionError(f"identities of {set(self._identities)} are not those that arrive")


def _request(state: HandoverState, identity: TokenIdentity) -> GenerateRequest:
    """The request as decode sees it: media are tokens like others, their positions are behind it."""
    num_tokens = len(state.prompt_token_ids)
    positions = np.zeros((state.num_position_rows, num_tokens), dtype=np.int64)
    prompt = PromptPlan(state.prompt_token_ids, positions, state.next_position, ())
    return GenerateRequest(state.request_id, prompt, identity, state.params, state.seed)
