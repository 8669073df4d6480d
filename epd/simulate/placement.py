"""Places simulated requests: asks simulated workers, in no time, as the live `PlacementPolicy` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

from epd.control.admission import AdmissionQueue
from epd.control.placement import Candidates, PlacementPolicy, Step
from epd.control.routing import Router
from epd.errors import InfeasibleError, OverloadedError
from epd.simulate.clock import EventQueue, seconds_of
from epd.simulate.deployment import Deployment
from epd.simulate.requests import RequestState
from epd.simulate.worker import SimulatedWorker

OnRequest = Callable[[RequestState], None]


class SimulatedPlacer:
    """Lets requests wait in the live queue and places them, first come, first served."""

    def __init__(
        self,
        deployment: Deployment,
        events: EventQueue,
        workers: Mapping[str, SimulatedWorker],
        router: Router,
        on_placed: OnRequest,
        on_refused: OnRequest,
    ) -> None:
        """on_placed is called for a request with workers, on_refused for one that has ended."""
        self.policy = PlacementPolicy(router, self.candidates)
        self._deployment = deployment
        self._events = events
        self._workers = workers
        self._on_placed = on_placed
        self._on_refused = on_refused
        self._queue = AdmissionQueue(deployment.max_waiting)
        self._waiting: dict[str, RequestState] = {}
        self._candidates: Candidates | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def candidates(self) -> Candidates:
        """Returns the workers that take new work; the same until `forget_roles`."""
        if self._candidates is None:
            self._candidates = Candidates(self._workers.values())
        return self._candidates

    def forget_roles(self) -> None:
        """Forgets the candidates after roles or switches of workers have changed."""
        self._candidates = None

    def enter(self, state: RequestState) -> bool:
        """Queues a request. Returns False if it is refused at once."""
        now_s = seconds_of(self._events.now)
        try:
            self._queue.enter(state.request_id, now_s, now_s + self._deployment.max_wait_s)
        except OverloadedError:
            return False
        self._waiting[state.request_id] = state
        return True

    def place_waiting(self) -> None:
        """Places requests until one finds no room."""
        while self._waiting:
            request_id = self._queue.first()[0]
            state, now_s = self._waiting[request_id], seconds_of(self._events.now)
            try:
                self._queue.check_deadline(request_id, now_s)
                if not self._is_taken(state):
                    return
            except (OverloadedError, InfeasibleError):
                self._queue.leave(request_id)
                del self._waiting[request_id]
                self._on_refused(state)
            else:
                self._queue.place(request_id, now_s)
                del self._waiting[request_id]
                state.placed = self._events.now
                self._on_placed(state)

    def first_token(self, state: RequestState) -> None:
        """Records that the prompt is computed."""
        state.placement.end_prefill()
        self._queue.record_first_token(seconds_of(self._events.now - state.placed))

    def _is_taken(self, state: RequestState) -> bool:
        """Asks workers once. Raises InfeasibleError if one could never take the request."""
        job, media = state.job, []
        if job.groups and self._deployment.enable_prefix_caching:
            media = [(str(job.media_key), job.num_visual_tokens)]
        with closing(self.policy.place(state.placement, media)) as steps:
            try:
                step = next(steps)
                while True:
                    step = steps.send(self._take_step(state, step))
            except StopIteration as end:
                return bool(end.value)

    def _take_step(self, state: RequestState, step: Step) -> bool:
        """Returns the answer of the worker: whether it has room. Prompts are always taken."""
        if step == "submit" and not state.placement.is_merged:
            return True
        prefill = self._workers[state.prefill_worker].language
        assert prefill is not None
        prefill.check_fits(state.job)
        if step == "submit" or state.job.output_tokens == 1:  # nothing to decode: no room is needed
            return True
        decoder = self._workers[state.decode_worker]
        assert decoder.language is not None
        decoder.language.check_fits(state.job)
        decoder.wake()  # blocks of the steps under way are taken before others
        return decoder.language.reserve(state)
