"""Switches roles as traffic changes: looks at the workers every interval, and switches one when that pays.

    requests, reports of workers -> TrafficEstimator -ClusterTraffic-> RoleController -Switch-> RoleSwitcher

Roles are switched only with a controller, and replicas advised only where Serve scales. Of several fronts
each publishes its own traffic and counts that of the others; one leads, switches and advises.

load, media workers --> StageReplicas, MediaReplicas --> advice --> board --> replicas --> Serve's policies
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from epd.control.elasticity.cluster import ClusterTraffic, MediaSample, WorkerSample
from epd.control.elasticity.controller import ControllerConfig, RoleController, Switch
from epd.control.elasticity.estimator import TrafficEstimator
from epd.control.elasticity.replicas import MediaReplicas, ReplicaAdvice, ReplicaConfig, StageReplicas
from epd.control.recent import Arrivals
from epd.errors import EPDError
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.orchestration.replacement import SwitchRoles
from epd.serve_app.orchestration.requests import Shared
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage, parse_topology

# A reason that says the same of other figures is given out again only this often.
_REFRESH_S = 5.0
# Workers that are there already need this time to be seen by a front that has just begun to lead.
_SETTLE_S = 10.0
Bounds = tuple[int, int]
logger = logging.getLogger(__name__)

_NO_LOAD = WorkerLoad()
_INTERVAL_S = 1.0  # between looks without a controller


class ReplicaAdvisor:
    """Advises numbers for deployments that Serve scales.

    is_wanted: whether Serve scales any deployment
    config: delays; the bounds are Serve's
    settle_s: from the first look of a leader to its first advice
    """

    def __init__(self, config: ReplicaConfig | None = None, settle_s: float = _SETTLE_S) -> None:
        self.config = config or ReplicaConfig()
        self.is_wanted = False
        self.advice: Mapping[str, ReplicaAdvice] = {}
        self._settle_s = settle_s
        self._stage: StageReplicas | None = None
        self._media: MediaReplicas | None = None
        self._since_s: float | None = None

    def follow(self, bounds: Mapping[str, Bounds], topology: str) -> None:
        """Takes Serve's bounds, of deployments that it scales. topology: for its sets of roles."""
        stage, media = self._bounded(bounds.get("Stage")), self._bounded(bounds.get("Media"))
        if stage != (self._stage and self._stage.config):
            self._stage = None if stage is None else StageReplicas(stage, parse_topology(topology))
        if media != (self._media and self._media.config):
            self._media = None if media is None else MediaReplicas(media)
        self.is_wanted = self._stage is not None or self._media is not None

    def _bounded(self, bounds: Bounds | None) -> ReplicaConfig | None:
        """Returns None without bounds. Serve may scale to none; an answer needs a worker."""
        if bounds is None:
            return None
        least = max(1, bounds[0])
        return replace(self.config, min_replicas=least, max_replicas=max(least, bounds[1]))

    def look(self, traffic: ClusterTraffic, media: Sequence[MediaSample]) -> None:
        """Advises on a load. media: all media workers that are alive."""
        if self._since_s is None:
            self._since_s = traffic.now_s
        if traffic.now_s - self._since_s < self._settle_s:
            return
        if self._stage is not None and traffic.is_known:
            self._note("Stage", self._stage.advise, traffic)
        if self._media is not None and media:
            self._note("Media", self._media.advise, traffic.now_s, media)

    def _note(self, deployment: str, advise: Callable[..., ReplicaAdvice], *seen: object) -> None:
        advice, before = advise(*seen), self.advice.get(deployment)
        if advice.verdict == "unknown load":
            return
        is_same = before is not None and (before.verdict, before.num_replicas) == (
            advice.verdict,
            advice.num_replicas,
        )
        if before is None or not is_same or advice.at_s - before.at_s >= _REFRESH_S:
            self.advice = {**self.advice, deployment: advice}

    def stop(self, given: Mapping[str, ReplicaAdvice]) -> None:
        """Shows the advice that another front gives, which leads."""
        self.advice = given
        self._since_s = None


class ElasticityLoop:
    """Drives `TrafficEstimator`, `RoleController` and `ReplicaAdvisor` with what the server knows.

    Nothing runs before `start`.
    """

    def __init__(
        self,
        shared: Shared,
        arrivals: Arrivals,
        config: ControllerConfig | None,
        switch: SwitchRoles,
        leads: Callable[[], bool],
    ) -> None:
        """Starts without an estimate.

        config: None for no switches. leads: whether this orchestrator may switch roles and advise now
        """
        self.estimator = TrafficEstimator()
        self.controller = None if config is None else RoleController(config, shared.config.keeps_roles)
        self.advisor = ReplicaAdvisor()
        self._shared = shared
        self._arrivals = arrivals
        self._switch_roles = switch
        self._leads = leads
        self.is_running = False
        self._since: dict[str, tuple[frozenset[Stage], float]] = {}

    def start(self) -> None:
        """Begins to look, unless it has begun."""
        if not self.is_running:
            self.is_running = True
            self._shared.requests.loops.start("elastic", self._run, is_vital=False)

    def samples(self) -> list[WorkerSample]:
        """Returns the live workers in the estimator's form."""
        infos = self._shared.fleet.workers.values()
        return [self._sample(info) for info in infos if info.is_alive and "video" not in info.roles]

    def _sample(self, info: WorkerInfo) -> WorkerSample:
        load = self._shared.requests.loads.get(info.name, _NO_LOAD)
        roles, since_s = self._since.get(info.name, (frozenset(), 0.0))
        if roles != info.roles:
            since_s = self._shared.requests.clock()
            self._since[info.name] = info.roles, since_s
        is_switching = info.name in self._shared.requests.switching or bool(info.leaving)
        # The resource that runs out first limits how many answers a worker can generate at once.
        usages = [usage for usage in (load.kv_usage, load.seq_usage) if usage is not None]
        usage = max(usages, default=None)
        return WorkerSample(info.name, info.roles, since_s, load.stages, usage, is_switching)

    def _media(self) -> list[MediaSample]:
        """Returns the live media workers that have reported."""
        infos, loads = self._shared.fleet.workers.values(), self._shared.requests.loads
        alive = [info for info in infos if info.is_alive and "video" in info.roles]
        samples = [(info.name, loads.get(info.name, _NO_LOAD).media) for info in alive]
        return [replace(sample, name=name) for name, sample in samples if sample is not None]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S if self.controller is None else self.controller.config.interval_s)
            if self.controller is not None or self.advisor.is_wanted:
                self._look(self._shared.requests.clock())

    def _look(self, now_s: float) -> None:
        num_waiting = len(self._shared.queue) + self._arrivals.num_waiting_elsewhere
        self.estimator.follow(now_s, self._arrivals)
        traffic = self.estimator.observe(now_s, self.samples(), num_waiting=num_waiting)
        if not self._leads():
            return
        if self.advisor.is_wanted:
            self.advisor.look(traffic, self._media())
        switch = None if self.controller is None else self.controller.decide(now_s, traffic)
        if self.controller is not None and switch is not None:
            logger.info("decision: %s", self.controller.decisions[-1].reason)
            self._shared.requests.tasks.spawn(self._switch(self.controller, switch))

    async def _switch(self, controller: RoleController, switch: Switch) -> None:
        try:
            record = await self._switch_roles(switch.worker, switch.roles)
        except EPDError as error:
            logger.warning("%s", error)
            controller.failed(self._shared.requests.clock(), switch.worker)
        else:
            load_s = record.onload_s + record.announce_s
            controller.succeeded(self._shared.requests.clock(), switch.worker, load_s)
