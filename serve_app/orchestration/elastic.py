"""Switches roles as traffic changes: looks at the workers every interval, and switches one when that pays.

    requests, reports of workers --> LoadEstimator --ClusterLoad--> RoleController --Switch--> RoleSwitcher

The estimate is always kept, for the status; roles are switched only with a controller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from epd.control.admission import AdmissionQueue
from epd.control.elasticity import (
    ControllerConfig,
    Decision,
    LoadEstimator,
    RequestWork,
    RoleController,
    Switch,
    WorkerSample,
)
from epd.errors import EPDError
from epd.topology import Stage
from serve_app.fleet import Fleet
from serve_app.messages import WorkerLoad
from serve_app.orchestration.request_planner import AnswerPlan
from serve_app.orchestration.role_switch import RoleSwitcher
from serve_app.task_group import Loops, Tasks
from serve_app.worker_info import WorkerInfo

logger = logging.getLogger(__name__)

_NO_LOAD = WorkerLoad()


class Elastic:
    """Drives `LoadEstimator` and `RoleController` with what the server knows.

    loads: the last report of each worker, by name
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
        self.estimator = LoadEstimator()
        self.controller = None if config is None else RoleController(config)
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
        if self.controller is not None:
            loops.start("elastic", partial(self._run, self.controller), is_vital=False)

    async def close(self) -> None:
        self._tasks.cancel()
        await self._tasks.wait()

    def arrived(self, plan: AnswerPlan) -> None:
        """Counts a request that was planned and not refused."""
        num_patches = sum(group.spec.num_patches for group in plan.groups)
        max_tokens = plan.sampling.n * (plan.sampling.max_tokens or 1)
        work = RequestWork(num_patches, len(plan.prompt), max_tokens, plan.expected_tokens)
        self.estimator.arrived(self._clock(), work)

    def finished(self) -> None:
        """Counts an answer that has ended, completely or not."""
        self.estimator.finished(self._clock())

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
        usages = [usage for usage in (load.kv_usage, load.seat_usage) if usage is not None]
        usage = max(usages, default=None)
        return WorkerSample(info.name, info.roles, since_s, load.stages, usage, is_switching)

    async def _run(self, controller: RoleController) -> None:
        while True:
            await asyncio.sleep(controller.config.interval_s)
            now_s = self._clock()
            load = self.estimator.observe(now_s, self.samples(), num_waiting=len(self._queue))
            switch = controller.decide(now_s, load) if self._leads() else None
            if switch is not None:
                logger.info("decision: %s", controller.decisions[-1].reason)
                self._tasks.spawn(self._switch(controller, switch))

    async def _switch(self, controller: RoleController, switch: Switch) -> None:
        try:
            await self._switcher.switch(switch.worker, switch.roles)
        except EPDError as error:
            logger.warning("%s", error)
            controller.failed(self._clock(), switch.worker)
        else:
            controller.succeeded(self._clock(), switch.worker)
