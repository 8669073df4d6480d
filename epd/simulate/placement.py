"""Places requests and switches roles as the live policies say of simulated workers.

A switch follows the paper (EPD, section 3.4): offload, the worker gets nothing new and completes its work;
migrate and onload, `switch_s`; then it takes its new roles. No drain waits, since siblings get its work:

    prompts that are not computed     to another prefill worker, from their beginning
    room reserved for answers         to another decode worker
    answers under way                 with their keys and values, to another decode worker

A prompt's embeddings move along at no cost. Work without room at any sibling is completed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from epd.control.admission import AdmissionQueue
from epd.control.elasticity.cluster import StageSample, WorkerSample
from epd.control.elasticity.controller import ControllerConfig, RoleController, Switch
from epd.control.elasticity.estimator import TrafficEstimator
from epd.control.placement import Candidates, PlacementPolicy, Step
from epd.control.recent import RequestWork
from epd.control.routing import Router
from epd.errors import InfeasibleError, OverloadedError
from epd.profiles.cost import StageCost
from epd.profiles.profile import Profile
from epd.simulate.clock import EventQueue, seconds_of
from epd.simulate.deployment import Deployment
from epd.simulate.requests import Job, RequestState
from epd.simulate.worker import SimulatedWorker
from epd.topology import Stage

_MEAN_CONTEXT = 1024  # tokens that a decode step is assumed to read of each sequence, before any was measured
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
        job, is_merged = state.job, state.placement.is_merged
        if step == "submit" and not is_merged:
            return True
        prefill = self._workers[state.prefill_worker].language_side
        prefill.check_fits(job, job.output_tokens if is_merged else 1)
        if step == "submit" or job.output_tokens == 1:  # nothing to decode: no room is needed
            return True
        decoder = self._workers[state.decode_worker]
        decoder.language_side.check_fits(job, job.output_tokens)
        decoder.wake()  # blocks of the steps under way are taken before others
        return decoder.language_side.reserve(state)


@dataclass(frozen=True, slots=True)
class Elasticity:
    """Configures switches. max_tokens: that requests allow for answers; None: as many as they get.

    is_failing: whether a switch, drained and about to load, is to fail; its worker keeps its old roles.
    """

    controller: ControllerConfig = field(default_factory=ControllerConfig)
    max_tokens: int | None = None
    is_failing: Callable[[Switch], bool] = lambda _: False


class RoleSwitching:
    """Decides switches by the load of a simulated fleet. Times in seconds."""

    def __init__(self, profile: Profile, elasticity: Elasticity) -> None:
        self.elasticity = elasticity
        config = replace(elasticity.controller, load_s=profile.switch_s)
        self.controller = RoleController(config)
        self.estimator = TrafficEstimator(known_costs(profile))

    @property
    def interval_s(self) -> float:
        return self.controller.config.interval_s

    def arrived(self, now_s: float, job: Job) -> None:
        max_tokens = self.elasticity.max_tokens or job.output_tokens
        self.estimator.arrived(now_s, RequestWork(job.num_patches, job.num_prompt_tokens, max_tokens))

    def look(self, now_s: float, workers: Sequence[WorkerSample], num_waiting: int) -> Switch | None:
        return self.controller.decide(now_s, self.estimator.observe(now_s, workers, num_waiting=num_waiting))


def known_costs(profile: Profile) -> dict[Stage, StageCost]:
    """Returns the prior costs of the estimator."""
    decode = profile.decode.cost
    per_sequence_s = decode.added_s + decode.per_item_s * _MEAN_CONTEXT
    decode = replace(decode, per_unit_s=per_sequence_s, per_item_s=0.0, read_s=0.0)
    return {"encode": profile.encode.cost, "prefill": profile.prefill.cost, "decode": decode}


def sample_of(worker: SimulatedWorker, since_s: float) -> WorkerSample:
    """Returns a simulated worker's metrics, for each stage that it has a side for."""
    stages: dict[Stage, StageSample] = {}
    kv_usage = None
    if worker.encoder is not None:
        stages["encode"] = worker.encoder.sample()
    if worker.language is not None:
        kv_usage = worker.language.kv.usage
        sides = worker.language.samples()
        stages |= {stage: sides[stage] for stage in sides.keys() & worker.roles}
    return WorkerSample(worker.name, worker.roles, since_s, stages, kv_usage, worker.is_switching)


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
        self._memory = profile.memory
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
        worker.language_side.withdraw(state.request_id)
        other.language_side.add(state)
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
            self._after_transfer(self._memory.sequence_bytes(num_sent), lambda: self._arrive(state))
        elif state.job.output_tokens > 1:
            side.cancel(state)

    def _has_room(self, name: str, state: RequestState) -> bool:
        if state.job.output_tokens == 1:  # nothing to decode: it is there in name only
            return True
        worker = self._workers[name]
        worker.wake()
        return worker.language_side.reserve(state)

    def _arrive(self, state: RequestState) -> None:
        worker = self._workers[state.decode_worker]
        worker.wake()
        worker.language_side.adopt(state)
