"""Answers requests with a fleet of workers: plans, places, follows, and retries what was lost.

    answer():  plan (in a thread) -> attempt: place, feed groups, receive tokens -> complete
                                       ^ lost with a worker: at most `max_attempts` times
    events:    reports of workers -> the attempts concerned;  a lost worker -> recovery of what it had

These are recomputed after a loss: of an encoder, its groups in transit; of a prefill worker, the prompts it
had not handed over, with embeddings from the encoders' caches; of a decode worker, the prompts that have left
their prefill worker. Tokens that were already passed on are dropped by their index when they come again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from epd.control.admission import AdmissionQueue, Others
from epd.control.elasticity import RequestWork
from epd.control.loss_policy import LossLedger
from epd.control.routing import Router
from epd.encode.substituted_frames import SubstitutedFrames
from epd.errors import UnavailableError
from epd.serve_app.fleet import Fleet, send_surely
from epd.serve_app.fleet_status import has_all_roles, worker_statuses
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.messages import (
    Abort,
    WorkerLoad,
)
from epd.serve_app.orchestration.attempt import Attempt, Ending
from epd.serve_app.orchestration.config import OrchestratorConfig
from epd.serve_app.orchestration.elastic import Elastic
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.orchestration.evacuation import EvacuationParts, Evacuations
from epd.serve_app.orchestration.event_reader import EventReader
from epd.serve_app.orchestration.group_feed import GroupFeed
from epd.serve_app.orchestration.live_answer import LiveAnswer
from epd.serve_app.orchestration.losses.isolation import Isolation
from epd.serve_app.orchestration.losses.loss_counter import LossCounter
from epd.serve_app.orchestration.losses.recovery import Recovery
from epd.serve_app.orchestration.losses.watchdog import Watchdog
from epd.serve_app.orchestration.placement import PlacementLimits, RequestPlacer
from epd.serve_app.orchestration.prompts import Prompts
from epd.serve_app.orchestration.request_planner import AnswerPlan, RequestPlanner
from epd.serve_app.orchestration.retention import LoadRetention
from epd.serve_app.orchestration.role_switch import RoleSwitcher, SwitchRequest
from epd.serve_app.orchestration.shared_load import SharedLoad
from epd.serve_app.service import (
    AnswerItem,
    AnswerRequest,
    ModelCard,
    RoleSwitch,
    ServiceStatus,
)
from epd.serve_app.task_group import Loops, Tasks
from epd.serve_app.worker.peer_losses import NamedPeer
from epd.topology import Stage, topology_name

_MAX_GROUP_FAILURES = 3
_DRAIN_POLL_S = 0.05


class Orchestrator:
    """Implements AnswerService. Used from one event loop, which it never blocks."""

    def __init__(
        self,
        fleet: Fleet,
        planner: RequestPlanner,
        config: OrchestratorConfig | None = None,
        owner: str = "",
    ) -> None:
        """Starts without requests. owner: unique among those that share the workers, without "/"."""
        assert "/" not in owner
        self.owner = owner
        self.config = config or OrchestratorConfig()
        self.router = Router()
        self.queue = AdmissionQueue(self.config.max_waiting)
        self._fleet = fleet
        self._planner = planner
        limits = PlacementLimits(self.config.max_prefills, self.config.unavailable_s)
        self._dispatcher = EncodeDispatcher(
            fleet,
            self.router,
            max_backlog_patches=self.config.max_backlog_patches,
            unavailable_s=self.config.unavailable_s,
            stall_s=self.config.stall_timeout_s,
        )
        self._attempts: dict[str, Attempt] = {}
        self._loads: dict[str, WorkerLoad] = {}
        self.losses = LossCounter(
            LossLedger(self.config.losses),
            fleet,
            self._dispatcher,
            self._attempts,
            time.time,
            max_losses=self.config.max_attempts,
        )
        self.isolation = Isolation(self._dispatcher, self.router, self._attempts, time.time)
        self._placement = RequestPlacer(
            fleet,
            self.router,
            self.queue,
            limits,
            self.losses,
            self.isolation,
            time.time,
            self._sole_encoder,
            self._loads,
        )
        self._shared = SharedLoad(self.router, self._dispatcher, self._placement)
        self._feeds: dict[str, GroupFeed] = {}
        self._recovery = Recovery(fleet, self.router, self._dispatcher, self._placement, self._attempts)
        parts = EvacuationParts(fleet, self.router, self._dispatcher, self._placement, self._attempts)
        self.switcher = RoleSwitcher(parts, self.config.switching)
        switching = self.config.switching
        self._evacuations = Evacuations(
            parts, self.switcher.in_flight, switch_s=switching.drain_s, drain_s=switching.leave_s
        )
        self._leads = True
        self.ask_leader: Callable[[SwitchRequest], Awaitable[Any]] | None = None
        self.media = FleetMedia(
            fleet, self.router, self._loads, owner=owner, patience_s=self.config.unavailable_s
        )
        self.elastic = Elastic(
            fleet, self.queue, self.switcher, self._loads, self.config.elastic, time.time, lambda: self._leads
        )
        self.retention = LoadRetention(
            self.config.retention,
            fleet,
            self.queue,
            self._attempts,
            self._loads,
            lambda: self._num_planning,
            time.time,
        )
        self._substituted = SubstitutedFrames()
        self._counters: Counter[str] = Counter()
        self._watchdog = Watchdog(
            self._attempts, self._dispatcher, self._counters, time.time, timeout_s=self.config.stall_timeout_s
        )
        self._numbers = count(1)
        self._num_planning = 0
        self._is_draining = False
        self._tasks = Tasks()
        self._loops = Loops(self._counters)
        self._threads = ThreadPoolExecutor(self.config.num_planning_threads, thread_name_prefix="planning")
        self.prompts = Prompts(planner, self.retention, self._plan, self._threads)

    @property
    def models(self) -> Sequence[ModelCard]:
        return (self._planner.card,)

    async def start(self) -> None:
        """Starts the fleet. Raises EPDError when a worker cannot start."""
        await self._fleet.start()
        self._loops.start("events", self._reader().follow)
        self._loops.start("watchdog", self._watchdog.run)
        self.elastic.start(self._loops)
        self.retention.start(self._loops)

    def _reader(self) -> EventReader:
        return EventReader(
            self._fleet,
            self._dispatcher,
            self._placement,
            self._recovery,
            self._evacuations,
            self.losses,
            self._watchdog,
            self._shared,
            self.queue,
            self.retention,
            self._attempts,
            self._feeds,
            self._loads,
            self._counters,
            self._loops,
            self._tasks,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those in flight. Returns whether all of them ended in time."""
        self._is_draining = True
        end_s = time.monotonic() + timeout_s
        while self.num_attempts and time.monotonic() < end_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.num_attempts == 0

    async def close(self) -> None:
        """Ends the fleet and all requests: answers in flight raise UnavailableError."""
        self._tasks.cancel()
        await self._tasks.wait()
        await self._loops.close()
        await self.elastic.close()
        await self.switcher.close()
        await self._evacuations.close()
        await self.media.close()
        await self._fleet.close()
        self._threads.shutdown(cancel_futures=True)

    # Answers

    async def answer(self, request: AnswerRequest) -> AsyncGenerator[Sequence[AnswerItem], None]:
        """See `AnswerService`."""
        now_s = time.time()
        deadline_s = request.deadline_s or now_s + self.config.max_wait_s
        if self._is_draining:
            raise UnavailableError("the server is shutting down; retry later or use another replica")
        self.queue.check(now_s, deadline_s, num_coming=self._num_planning, priority=request.priority)
        await self.losses.check(request)
        request = self.retention.reduced(request)
        plan = await self._plan(request)
        answer = LiveAnswer(request, plan, self._planner.texts, time.time, self._substituted)
        self.elastic.arrived(plan)
        self.retention.arrived(plan)
        running = self._tasks.spawn(self._run(answer, deadline_s))
        try:
            async for items in answer.items():
                yield items
        finally:
            self.elastic.finished()
            running.cancel()

    async def _plan(self, request: AnswerRequest) -> AnswerPlan:
        """Plans a request; its images stay at their media workers."""
        self._num_planning += 1
        try:
            loop = asyncio.get_running_loop()
            self._planner.check_images(request)
            images = await self.media.plan_images(request.media)
            plan = self._planner.plan_at_once(request, images)
            if plan is not None:
                return plan
            return await loop.run_in_executor(self._threads, self._planner.plan, request, images)
        finally:
            self._num_planning -= 1

    async def _run(self, answer: LiveAnswer, deadline_s: float) -> None:
        """Runs all attempts at a request. The error that ends it reaches the consumer through the answer."""
        try:
            is_new = True
            while answer.num_losses < self.config.max_attempts:
                attempt = Attempt(next(self._numbers), answer, self.router, self.owner)
                self.losses.begin(attempt)
                num_losses = answer.num_losses
                ending = await self._try(attempt, deadline_s, is_new=is_new)
                if ending is Ending.COMPLETE:
                    self.losses.answered(attempt)
                    answer.finish(attempt.decode_worker)
                    return
                is_new = False
                if ending is Ending.LOST:
                    answer.num_losses = max(answer.num_losses, num_losses + 1)
                    self._counters["retries"] += 1
                answer.num_retries += 1
                answer.forget_early()
                await self.losses.check(answer.request)
            raise UnavailableError(
                f"the request was lost with {self.config.max_attempts} workers in turn; retry"
            )
        except asyncio.CancelledError:
            answer.fail(UnavailableError("the server was shut down; retry when it is back"))
            raise
        except Exception as error:  # noqa: BLE001 - the consumer waits for it
            answer.fail(error)

    def _sole_encoder(self, attempt: Attempt) -> NamedPeer | None:
        """Returns the encoder for all groups of a new request that drops tokens; retries send all tokens."""
        answer = attempt.answer
        if answer.num_retries or answer.plan.prompt.reduction is None:
            return None
        return self._dispatcher.sole_encoder(self.config.sharding, attempt.prefill_worker)

    async def _try(self, attempt: Attempt, deadline_s: float, *, is_new: bool) -> Ending:
        feed = GroupFeed(
            self._fleet,
            self.media,
            self._dispatcher,
            self.losses,
            self.isolation,
            attempt,
            time.time,
            patience_s=self.config.unavailable_s,
            sharding=self.config.sharding,
        )
        self._attempts[attempt.id], self._feeds[attempt.id] = attempt, feed
        attempt.event_s = time.time()
        ending = None
        try:
            await self._placement.place(attempt, deadline_s, is_new=is_new)
            ending = await attempt.wait()
            return ending
        finally:
            del self._attempts[attempt.id], self._feeds[attempt.id]
            feed.stop()  # before anything is freed, so that nothing is sent afterwards
            attempt.placement.release()
            self._tasks.spawn(self._free(attempt, feed, is_complete=ending is Ending.COMPLETE))

    async def _free(self, attempt: Attempt, feed: GroupFeed, *, is_complete: bool) -> None:
        """Frees everything that an attempt holds anywhere."""
        if not is_complete:
            await asyncio.gather(
                *(self._abort(attempt, worker) for worker in sorted(attempt.placement.touched))
            )
            await self._dispatcher.drop_request(attempt.id, attempt.sole_encoder)
        await feed.close()
        self._placement.wake()

    async def _abort(self, attempt: Attempt, worker: str) -> None:
        stage: Stage = "prefill" if worker == attempt.prefill_worker else "decode"
        await send_surely(self._fleet, stage, worker, Abort((attempt.id,)))

    @property
    def attempts(self) -> Mapping[str, Attempt]:
        """Returns a view of the attempts that have not ended, by id."""
        return self._attempts

    @property
    def _is_open(self) -> bool:
        """Returns whether requests are accepted and the loops that they need are running."""
        return not self._is_draining and not self._loops.gone

    @property
    def num_attempts(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self._attempts) + self._num_planning

    @property
    def num_tickets(self) -> int:
        """Returns the number of groups that encoders have."""
        return len(self._dispatcher)

    # Roles

    async def switch_roles(self, worker: str, roles: frozenset[Stage]) -> RoleSwitch:
        """See `AnswerService`. Asks the orchestrator that leads, if that is another one."""
        if self._leads:
            return await self.switcher.switch(worker, roles)
        if self.ask_leader is None:
            raise UnavailableError("another replica of the server switches roles; send the request again")
        switch: RoleSwitch = await self.ask_leader(SwitchRequest(worker, roles))
        return switch

    @property
    def leads(self) -> bool:
        """Returns whether this orchestrator switches roles: of those that share the workers, one does."""
        return self._leads

    @leads.setter
    def leads(self, leads: bool) -> None:
        if leads and not self._leads:
            self._tasks.spawn(self.switcher.roll_back_abandoned())
        self._leads = leads

    def share(self, others: Others | None) -> None:
        """Sets what is known of other orchestrators over the same workers. None: there are none."""
        self.queue.others = others
        self._shared.share(is_shared=others is not None)

    def recent_load(self) -> Sequence[tuple[float, RequestWork]]:
        """See `AnswerService`."""
        return self.elastic.estimator.recent(time.time())

    # Status

    async def status(self) -> ServiceStatus:
        """See `AnswerService`."""
        infos = [info for info in self._fleet.workers.values() if not info.is_gone]
        counters = Counter(self._counters)
        for load in self._loads.values():
            counters.update(load.counters)
        counters["refused"] = self.queue.num_refused
        return ServiceStatus(
            is_ready=has_all_roles(infos) and self._is_open,
            topology=topology_name([info.roles for info in infos]),
            workers=worker_statuses(infos, self._loads, self.switcher.in_flight),
            counters=dict(counters),
            num_waiting=len(self.queue),
            decisions=tuple(self.elastic.decisions),
            advice=self.elastic.advisor.advice,
            switches=tuple(self.switcher.last),
            switch_totals=self.switcher.totals,
            retention=self.retention.status,
        )
