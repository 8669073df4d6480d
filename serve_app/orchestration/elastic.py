"""Switches roles as traffic changes: looks at the workers every interval, and switches one when that pays.

    requests, reports of workers -> TrafficEstimator -ClusterTraffic-> RoleController -Switch-> RoleSwitcher

The estimate is always kept, for the status; roles are switched only with a controller. Of several
fronts each publishes its own traffic and counts that of the others; one leads, switches and advises.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from epd.control.admission import AdmissionQueue
from epd.control.elasticity import (
    ControllerConfig,
    Decision,
    MediaSample,
    OtherFronts,
    RequestWork,
    RoleController,
    Switch,
    TrafficEstimator,
    TrafficTotals,
    WorkerSample,
    WorkerStanding,
    replacement_for,
)
from epd.errors import EPDError
from epd.serve_app.fleet import Fleet
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.orchestration.replica_advisor import ReplicaAdvisor
from epd.serve_app.orchestration.request_planner import AnswerPlan
from epd.serve_app.orchestration.role_switch import RoleSwitcher
from epd.serve_app.task_group import Loops, Tasks
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage

logger = logging.getLogger(__name__)

_NO_LOAD = WorkerLoad()
_INTERVAL_S = 1.0  # between looks without a controller


class Elastic:
    """Drives `TrafficEstimator` and `RoleController` with what the server knows.

    loads: the last report of each worker, by name
    on_look: called every interval
    """

    def __init__(
        self,
        fleet: Fleet,
        queue: AdmissionQueue,
        switcher: RoleSwitcher,
        loads: Mapping[str, WorkerLoad],
        config: ControllerConfig | None,
        clock: Callable[[], float],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Starts without an estimate.

        config: None for no switches. clock: Unix time, seconds. leads: whether it may switch roles now
        """
        self.estimator = TrafficEstimator()
        self.controller = None if config is None else RoleController(config)
        self.advisor = ReplicaAdvisor()
        self.others = OtherFronts(self.estimator)
        self.on_look: Callable[[], None] = lambda: None
        self._totals = TrafficTotals()
        self._fleet = fleet
        self._queue = queue
        self._switcher = switcher
        self.loads = loads
        self._clock = clock
        self._leads = leads
        self._since: dict[str, tuple[frozenset[Stage], float]] = {}
        self._tasks = Tasks()

    @property
    def decisions(self) -> Sequence[Decision]:
        """Returns the last decisions, oldest first."""
        return () if self.controller is None else self.controller.decisions

    def start(self, loops: Loops) -> None:
        loops.start("elastic", self._run, is_vital=False)

    async def close(self) -> None:
        self._tasks.cancel()
        await self._tasks.wait()

    def arrived(self, plan: AnswerPlan) -> None:
        """Counts a request that was planned and not refused."""
        num_patches = sum(group.spec.num_patches for group in plan.groups)
        max_tokens = plan.sampling.n * (plan.sampling.max_tokens or 1)
        work = RequestWork(num_patches, len(plan.prompt), max_tokens, plan.expected_tokens)
        self.estimator.arrived(self._clock(), work)
        self._totals = self._totals.plus(work)

    def finished(self) -> None:
        """Counts an answer that has ended, completely or not."""
        self.estimator.finished(self._clock())
        self._totals = replace(self._totals, num_finished=self._totals.num_finished + 1)

    @property
    def traffic(self) -> TrafficTotals:
        """Returns what has come to this front."""
        return replace(self._totals, num_waiting=len(self._queue))

    def follow_others(self, fronts: Mapping[str, TrafficTotals]) -> None:
        """Counts the traffic of the other fronts that are there, by id."""
        self.others.follow(self._clock(), fronts)

    def samples(self) -> list[WorkerSample]:
        """Returns the live workers in the estimator's form."""
        infos = self._fleet.workers.values()
        return [self._sample(info) for info in infos if info.is_alive and "video" not in info.roles]

    def _sample(self, info: WorkerInfo) -> WorkerSample:
        load = self.loads.get(info.name, _NO_LOAD)
        roles, since_s = self._since.get(info.name, (frozenset(), 0.0))
        if roles != info.roles:
            since_s = self._clock()
            self._since[info.name] = info.roles, since_s
        is_switching = info.name in self._switcher.in_flight or bool(info.leaving)
        # The resource that runs out first limits how many answers a worker can generate at once.
        usages = [usage for usage in (load.kv_usage, load.seq_usage) if usage is not None]
        usage = max(usages, default=None)
        return WorkerSample(info.name, info.roles, since_s, load.stages, usage, is_switching)

    def _media(self) -> list[MediaSample]:
        """Returns the live media workers that have reported."""
        infos = [info for info in self._fleet.workers.values() if info.is_alive and "video" in info.roles]
        samples = [(info.name, self.loads.get(info.name, _NO_LOAD).media) for info in infos]
        return [replace(sample, name=name) for name, sample in samples if sample is not None]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S if self.controller is None else self.controller.config.interval_s)
            if self.controller is not None or self.advisor.is_wanted:
                self._look(self._clock())
            if self._leads() and not self._switcher.in_flight:
                self._replace_leavers()
            self.on_look()

    def _look(self, now_s: float) -> None:
        num_waiting = len(self._queue) + self.others.num_waiting
        traffic = self.estimator.observe(now_s, self.samples(), num_waiting=num_waiting)
        if not self._leads():
            return
        self.advisor.look(traffic, self._media())
        switch = None if self.controller is None else self.controller.decide(now_s, traffic)
        if self.controller is not None and switch is not None:
            logger.info("decision: %s", self.controller.decisions[-1].reason)
            self._tasks.spawn(self._switch(self.controller, switch))

    def _replace_leavers(self) -> None:
        """Switches a worker that others can spare if the last one of a stage leaves for good, or has left."""
        infos = [info for info in self._fleet.workers.values() if "video" not in info.roles]
        leaving = {info.name for info in infos if info.is_draining}
        switch = replacement_for([self._standing(info) for info in infos], leaving) if leaving else None
        if switch is not None:
            logger.info("worker %s takes the roles of one that leaves", switch.worker)
            self._tasks.spawn(self._replace(switch))

    def _standing(self, info: WorkerInfo) -> WorkerStanding:
        """Returns a worker as `replacement_for` sees it. One that is lost comes back, and is spared."""
        load = self.loads.get(info.name, _NO_LOAD)
        work = {stage: float(load.num_waiting + load.num_running) for stage in info.roles}
        is_busy = bool(info.leaving) or not info.is_alive
        return WorkerStanding(info.name, info.roles, 0.0, work, load.num_running, is_switching=is_busy)

    async def _replace(self, switch: Switch) -> None:
        try:
            await self._switcher.switch(switch.worker, switch.roles)
        except EPDError as error:
            logger.warning("%s", error)

    async def _switch(self, controller: RoleController, switch: Switch) -> None:
        try:
            await self._switcher.switch(switch.worker, switch.roles)
        except EPDError as error:
            logger.warning("%s", error)
            controller.failed(self._clock(), switch.worker)
        else:
            controller.succeeded(self._clock(), switch.worker)
