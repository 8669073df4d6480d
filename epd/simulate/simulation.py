"""Simulates a whole fleet: requests from arrival to their last token, on the live system's own policies.

    arrive | admission: a prefill worker, room at a decode worker | media read | groups sent to encoders
           | embeddings move | prefill, the live scheduler | keys and values move | decode | done

Live code: AdmissionQueue, PlacementPolicy, Router, wanted_encoder, pick_batch, Scheduler, KVCacheManager, and
where they are simulated the estimator and controller of roles.
In place of devices: costs of a Profile, and events in whole picoseconds.
In place of the network: workers that answer in no time, so that requests are placed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from epd.control.elasticity.controller import Switch
from epd.control.placement import Candidates, Placement
from epd.control.routing import Router
from epd.profiles.profile import Profile
from epd.simulate.clock import EventPriority, EventQueue, Machine, seconds_of, ticks_of
from epd.simulate.deployment import Deployment
from epd.simulate.encoding import EncodeTask
from epd.simulate.language import PassResult
from epd.simulate.media_flow import MediaFlow
from epd.simulate.placement import Elasticity, Offloading, RoleSwitching, SimulatedPlacer, sample_of
from epd.simulate.records import RecordTable, SimulationResult, WorkSpan
from epd.simulate.requests import Job, RequestState, identity_of
from epd.simulate.worker import SimulatedWorker
from epd.topology import STAGES, Stage, closed_roles, role_letters, stages_of

OnProgress = Callable[[int], None]
_PROGRESS_EVERY = 256


class Simulation:
    """Runs once. The same jobs and deployment give the same result, to the last tick."""

    def __init__(
        self,
        profile: Profile,
        deployment: Deployment,
        *,
        elasticity: Elasticity | None = None,
        has_spans: bool = False,
        machine: Callable[[EventQueue], Machine] = Machine,
    ) -> None:
        """has_spans keeps the actions of every worker. machine: that runs them.

        Raises InfeasibleError if one does not fit.
        """
        self.events = EventQueue()
        self._machine = machine(self.events)
        self.profile = profile
        self.deployment = deployment
        self.records = RecordTable()
        self._spans: list[WorkSpan] | None = [] if has_spans else None
        self._workers = {
            spec.name: self._worker(spec.name, spec.roles) for spec in deployment.topology.workers()
        }
        self.router = Router()
        self._placer = SimulatedPlacer(
            deployment, self.events, self._workers, self.router, self._begin, self._refused
        )
        self._switcher = None if elasticity is None else RoleSwitching(profile, elasticity)
        self._media = MediaFlow(
            self.profile, deployment, self.events, self._machine, self._workers, self.router,
            self._placer.candidates,
        )  # fmt: skip
        self._offloading = Offloading(profile, self._workers, self.router, self._media.after_transfer)
        self._placed: dict[str, RequestState] = {}  # requests that have workers and have not ended
        self._since_s = dict.fromkeys(self._workers, 0.0)
        self._switches: list[tuple[float, str, str]] = []
        self._num_open = 0

    @property
    def work_s(self) -> float:
        """Returns seconds of all tasks of workers and readers, and of what else the machine counts."""
        return seconds_of(self._machine.work_ticks)

    @property
    def _candidates(self) -> Candidates:
        return self._placer.candidates()

    # Set-up

    def _worker(self, name: str, roles: frozenset[Stage]) -> SimulatedWorker:
        on_span = None if self._spans is None else self._spans.append
        worker = SimulatedWorker(
            name, roles, self.events, self._machine, self._encoded, self._passed, on_span
        )
        worker.host(roles, self.deployment, self.profile)
        return worker

    # The run

    def run(self, jobs: Iterable[Job], on_progress: OnProgress | None = None) -> SimulationResult:
        """Runs until every request has ended. jobs: in order of arrival; taken one at a time."""
        source = iter(jobs)
        self._plan_arrival(source)
        self._plan_look()
        while self.events.step():
            if on_progress is not None and self.events.num_happened % _PROGRESS_EVERY == 0:
                on_progress(len(self.records))
        if self._num_open:
            raise AssertionError(f"{self._num_open} requests never ended")
        sides = [worker.language for worker in self._workers.values() if worker.language is not None]
        return SimulationResult(
            self.records.rows(),
            self.events.num_happened,
            sum(side.scheduler.num_preempted for side in sides),
            tuple(self._switches),
            tuple(self._spans or ()),
            self._media.num_groups,
            self._media.num_encoded,
            sum(side.num_drafts_held for side in sides),
        )

    def _plan_arrival(self, source: Iterator[Job]) -> None:
        job = next(source, None)
        if job is None:
            return
        self._num_open += 1
        self.events.push(job.due, EventPriority.ARRIVAL, partial(self._arrive, job, source))

    def _arrive(self, job: Job, source: Iterator[Job]) -> None:
        self._plan_arrival(source)
        state = RequestState(job, Placement(self.router, job.num_prompt_tokens))
        if self.deployment.enable_prefix_caching:
            state.identity = identity_of(job)
        self._machine.spend(
            ("request", "split") if self._candidates.decoders() else ("request",), partial(self._enter, state)
        )

    def _enter(self, state: RequestState) -> None:
        if not self._placer.enter(state):
            self._refused(state)
            return
        if self._switcher is not None:
            self._switcher.arrived(seconds_of(self.events.now), state.job)
        self._placer.place_waiting()

    def _refused(self, state: RequestState) -> None:
        self._record(state, is_refused=True)

    def _record(self, state: RequestState, *, is_refused: bool = False) -> None:
        state.end = self.events.now
        self._num_open -= 1
        state.placement.release()
        self._placed.pop(state.request_id, None)
        self.records.add(state, state.end, is_refused=is_refused)
        if self._switcher is not None and not is_refused:
            self._switcher.estimator.finished(seconds_of(state.end))

    def _begin(self, state: RequestState) -> None:
        self._placed[state.request_id] = state
        self._media.begin(state)

    def _encoded(self, worker: SimulatedWorker, tasks: list[EncodeTask]) -> None:
        self._media.encoded(worker, tasks)

    # Tokens

    def _passed(self, worker: SimulatedWorker, result: PassResult) -> None:
        for state in result.prefilled:
            state.prefill_ticks += worker.last_ticks
        self._media.prefilled(result.prefilled)
        self._machine.send_tokens(len(result.sampled))
        for state in result.first_tokens:
            self._first_token(worker, state)
        for state in result.finished:
            self._end(state)
        if worker.is_switching:
            self._offload(worker)
        if result.finished or result.first_tokens:
            self._placer.place_waiting()

    def _end(self, state: RequestState) -> None:
        self._machine.spend(("end",), partial(self._record, state))

    def _first_token(self, worker: SimulatedWorker, state: RequestState) -> None:
        state.first_token = self.events.now
        self._placer.first_token(state)
        self._media.note_computed(state)
        if state.decode_worker == worker.name:
            return
        if state.job.output_tokens == 1:
            self._workers[worker.name].language_side.release(state.request_id)
            self._end(state)
            return
        tokens = state.job.num_prompt_tokens
        if self.deployment.is_overlapped:  # all but the last chunk have gone while it was computed
            tokens = min(tokens, self.deployment.language.max_chunk_tokens)
        num_bytes = self.profile.memory.sequence_bytes(tokens)
        arrived = partial(self._handed_over, worker, state)
        self._media.after_transfer(num_bytes, partial(self._machine.spend, ("second",), arrived))

    def _handed_over(self, prefill: SimulatedWorker, state: RequestState) -> None:
        state.adopted = self.events.now
        self._workers[prefill.name].language_side.release(state.request_id)
        prefill.wake()
        decode = self._workers[state.decode_worker]
        decode.wake()
        self._workers[decode.name].language_side.adopt(state)

    # Roles

    def _plan_look(self) -> None:
        if self._switcher is not None:
            at = self.events.now + ticks_of(self._switcher.interval_s)
            self.events.push(at, EventPriority.POLICY, self._look)

    def _look(self) -> None:
        """Lets the controller see all workers; it looks again while there is anything to see."""
        assert self._switcher is not None
        for worker in self._workers.values():
            worker.wake()  # steps under way count as single ones would have
        samples = [sample_of(each, self._since_s[each.name]) for each in self._workers.values()]
        switch = self._switcher.look(seconds_of(self.events.now), samples, self._placer.num_waiting)
        if switch is not None:
            self._begin_switch(switch)
        if self._num_open:
            self._plan_look()

    def _begin_switch(self, switch: Switch) -> None:
        """Starts a switch: what the worker gives up gets nothing new, and its waiting groups go to others."""
        worker = self._workers[switch.worker]
        worker.is_switching, worker.closed = True, closed_roles(worker.roles, switch.roles)
        leaving = stages_of(worker.roles) - stages_of(switch.roles)
        self._placer.forget_roles()
        if worker.encoder is not None and "encode" in leaving and self._candidates.taking("encode"):
            tasks = worker.encoder.take_back()
            for task in tasks:
                self.router.add(worker.name, encode_patches=-task.num_patches)
                self._media.deal(task.state, [task.group])
        self._await_drained(worker, switch, leaving)

    def _offload(self, worker: SimulatedWorker) -> None:
        """Hands its work to siblings. Between two passes."""
        states, candidates = list(self._placed.values()), self._candidates
        if "prefill" in worker.closed:
            self._offloading.move_prompts(worker, states, candidates.taking("prefill"))
        if "decode" in worker.closed:
            self._offloading.move_answers(worker, states, candidates.decoders())

    def _await_drained(self, worker: SimulatedWorker, switch: Switch, leaving: frozenset[Stage]) -> None:
        if not worker.is_busy:
            self._offload(worker)
        if worker.has_work(leaving) or self._is_expected(worker.name, leaving):
            at = self.events.now + ticks_of(0.01)
            self.events.push(at, EventPriority.POLICY, partial(self._await_drained, worker, switch, leaving))
            return
        is_starting = stages_of(switch.roles) - stages_of(worker.roles)
        at = self.events.now + ticks_of(self.profile.switch_s if is_starting else 0.0)
        self.events.push(at, EventPriority.POLICY, partial(self._end_switch, worker, switch))

    def _is_expected(self, name: str, stages: Collection[Stage] = STAGES) -> bool:
        in_flight = self.router.in_flight(name)
        counts: dict[Stage, float] = {
            "encode": in_flight.encode_patches,
            "prefill": in_flight.num_prefills + in_flight.num_decodes,
            "decode": in_flight.num_decodes,
        }
        return any(counts[stage] for stage in stages)

    def _end_switch(self, worker: SimulatedWorker, switch: Switch) -> None:
        """Ends a switch: it has its new roles, or its old ones again if the switch fails."""
        assert self._switcher is not None
        now_s = seconds_of(self.events.now)
        worker.is_switching, worker.closed = False, frozenset()
        self._placer.forget_roles()
        if self._switcher.elasticity.is_failing(switch):
            self._switcher.controller.failed(now_s, worker.name)
        else:
            worker.host(switch.roles, self.deployment, self.profile)
            self.router.forget(worker.name)
            self._since_s[worker.name] = now_s
            self._switches.append((now_s, worker.name, role_letters(switch.roles)))
            self._switcher.controller.succeeded(now_s, worker.name)
            worker.wake()
        self._placer.place_waiting()
