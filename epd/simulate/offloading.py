"""Hands the work of a worker that changes its roles to its siblings, so that no drain waits for others.

    prompts that are not computed     to another prefill worker, from their beginning
    room reserved for answers         to another decode worker
    answers under way                 with their keys and values, to another decode worker

A prompt's embeddings move along at no cost. Work without room at any sibling is completed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from epd.control.routing import Router
from epd.profiles.profile import Profile
from epd.simulate.requests import RequestState
from epd.simulate.worker import SimulatedWorker

AfterTransfer = Callable[[int, Callable[[], None]], None]


class Offloading:
    """Moves requests between workers; only while the one that is left is between two passes."""

    def __init__(
        self,
        profile: Profile,
        workers: Mapping[str, SimulatedWorker],
        router: Router,
        after_transfer: AfterTransfer,
    ) -> None:
        """after_transfer calls a function when that number of bytes has been sent."""
        self._kv_bytes = profile.memory.kv_bytes_per_token
        self._workers = workers
        self._router = router
        self._after_transfer = after_transfer

    def move_prompts(
        self, worker: SimulatedWorker, states: Iterable[RequestState], others: Sequence[str]
    ) -> None:
        """Moves prompts to the prefill workers `others`; a merged one keeps its own."""
        for state in states:
            is_merged = state.placement.is_merged
            if state.prefill_worker != worker.name or state.first_token >= 0 or is_merged or not others:
                continue
            state.placement.move_prefill(next(self._router.prefill_order(others)))
            if state.is_added:
                self._to_prefill(worker, self._workers[state.prefill_worker], state)

    @staticmethod
    def _to_prefill(worker: SimulatedWorker, other: SimulatedWorker, state: RequestState) -> None:
        assert worker.language is not None
        assert other.language is not None
        worker.language.withdraw(state.request_id)
        other.language.add(state)
        other.wake()

    def move_answers(
        self, worker: SimulatedWorker, states: Iterable[RequestState], others: Sequence[str]
    ) -> None:
        """Moves answers to the decode workers `others`, as far as they have room."""
        for state in states:
            if state.decode_worker == worker.name != state.prefill_worker or state.adopted >= 0:
                self._move_answer(worker, state, others)

    def _move_answer(self, worker: SimulatedWorker, state: RequestState, others: Sequence[str]) -> None:
        side, is_moving = worker.language, state.adopted >= 0
        if state.decode_worker != worker.name or side is None:
            return
        num_sent = side.tokens_of(state.request_id) if is_moving else state.num_sent
        if num_sent is None:
            return
        before, state.num_sent = state.num_sent, num_sent
        order = self._router.decode_order(others)
        name = next((each for each in order if self._has_room(each, state)), None)
        if name is None:
            state.num_sent = before
            return
        state.placement.move_decode(name)
        if is_moving:
            side.withdraw(state.request_id)
            self._after_transfer(num_sent * self._kv_bytes, lambda: self._arrive(state))
        elif state.job.output_tokens > 1:
            side.cancel(state)

    def _has_room(self, name: str, state: RequestState) -> bool:
        if state.job.output_tokens == 1:  # nothing to decode: it is there in name only
            return True
        worker = self._workers[name]
        assert worker.language is not None
        worker.wake()
        return worker.language.reserve(state)

    def _arrive(self, state: RequestState) -> None:
        worker = self._workers[state.decode_worker]
        assert worker.language is not None
        worker.wake()
        worker.language.adopt(state)
