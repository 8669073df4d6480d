"""Where a request goes: who waits, who is refused, which workers get it.

See `serve_app/orchestration/placement.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from epd.control.admission import AdmissionQueue
from epd.control.routing import Router
from epd.errors import InfeasibleError, OverloadedError
from epd.simulate.choosing import Chooser
from epd.simulate.clock import EventQueue, seconds_of
from epd.simulate.deployment import Deployment
from epd.simulate.requests import RequestState
from epd.simulate.worker import Worker
from epd.topology import Stage

OnRequest = Callable[[RequestState], None]


class Placement:
    """switching: names of workers that take nothing new.

    on_placed: a request has its workers. on_refused: it has ended.
    """

    def __init__(
        self,
        deployment: Deployment,
        events: EventQueue,
        workers: Mapping[str, Worker],
        on_placed: OnRequest,
        on_refused: OnRequest,
    ) -> None:
        self.chooser = Chooser(Router(), is_plain=deployment.is_stepwise)
        self.switching: set[str] = set()
        self._deployment = deployment
        self._events = events
        self._workers = workers
        self._on_placed = on_placed
        self._on_refused = on_refused
        self._admission = AdmissionQueue(deployment.max_waiting)
        self._waiting: deque[RequestState] = deque()
        self._candidates: dict[str, list[str]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # Candidates

    def with_role(self, stage: Stage) -> list[str]:
        """Names of the workers that take new work of a stage; the same list until roles change."""
        if stage not in self._candidates:
            self._candidates[stage] = [
                worker.name
                for worker in self._workers.values()
                if stage in worker.roles and worker.name not in self.switching
            ]
        return self._candidates[stage]

    def decoders(self) -> list[str]:
        """Those that go on with prompts of others: workers that prefill too decode their own."""
        if "others" not in self._candidates:
            self._candidates["others"] = [
                name for name in self.with_role("decode") if "prefill" not in self._workers[name].roles
            ]
        return self._candidates["others"]

    def forget_roles(self) -> None:
        """Roles have changed, or what is in `switching`."""
        self._candidates = {}

    # Requests

    def enter(self, state: RequestState) -> bool:
        """Queues a request; False if it is refused at once."""
        now_s = seconds_of(self._events.now)
        try:
            self._admission.enter(state.request_id, now_s, now_s + self._deployment.max_wait_s)
        except OverloadedError:
            return False
        self._waiting.append(state)
        return True

    def place_waiting(self) -> None:
        """Places requests, first come, first served, until one finds no room."""
        while self._waiting:
            state = self._waiting[0]
            now_s = seconds_of(self._events.now)
            try:
                self._admission.check_deadline(state.request_id, now_s)
                if not self._place(state):
                    return
                self._admission.place(state.request_id, now_s)
                self._waiting.popleft()
                self._on_placed(state)
            except (OverloadedError, InfeasibleError):
                self._admission.leave(state.request_id)
                self._waiting.popleft()
                self._on_refused(state)

    def first_token(self, worker: str, state: RequestState) -> None:
        """The prompt is computed."""
        self.chooser.book(worker, prefill_tokens=-state.job.num_prompt_tokens, num_prefills=-1)
        self._admission.record_first_token(seconds_of(self._events.now - state.placed))

    def _place(self, state: RequestState) -> bool:
        """Chooses a prefill worker and, unless that decodes too, reserves room at a decode worker."""
        job, chooser = state.job, self.chooser
        prefillers = self.with_role("prefill")
        if not prefillers:
            return False
        media = [(str(job.media_key), job.num_visual_tokens)] if job.groups else []
        prefill = chooser.prefill(prefillers, media, job.num_prompt_tokens)
        language = self._workers[prefill].language
        assert language is not None
        language.check_fits(job)
        decode = prefill if "decode" in self._workers[prefill].roles else self._reserve(state)
        if decode is None:
            return False
        state.prefill_worker, state.decode_worker, state.placed = prefill, decode, self._events.now
        chooser.book(prefill, prefill_tokens=job.num_prompt_tokens, num_prefills=1)
        chooser.book(decode, num_decodes=1)
        if self._deployment.enable_prefix_caching:
            chooser.router.remember_prefix(prefill, media)
        return True

    def _reserve(self, state: RequestState) -> str | None:
        if state.job.output_tokens == 1:  # nothing to decode: any of them in name only
            return self.decoders()[0] if self.decoders() else None
        for name in self.chooser.decode_order(self.decoders()):
            worker = self._workers[name]
            assert worker.language is not None
            worker.language.check_fits(state.job)
            worker.wake()  # blocks of the steps under way are booked before others are
            if worker.language.reserve(state):
                return name
        return None
