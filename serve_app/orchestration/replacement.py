"""Replaces the last worker of a stage that leaves, or that nobody replaces, by one that others can spare."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from epd.control.elasticity.assignment import replacement_for
from epd.control.elasticity.cluster import Roles, WorkerStanding
from epd.control.elasticity.controller import Switch
from epd.errors import EPDError
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.orchestration.requests import Shared
from epd.serve_app.service import RoleSwitch
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_NO_LOAD = WorkerLoad()
_VACATED = ""  # name of a worker that is lost for good
SwitchRoles = Callable[[str, frozenset[Stage]], Awaitable[RoleSwitch]]


class Replacement:
    """Looks for a replacement every second while a worker leaves, or has left, or a place is vacant."""

    def __init__(self, shared: Shared, switch: SwitchRoles, leads: Callable[[], bool]) -> None:
        """Starts without workers that leave. leads: whether this orchestrator may switch roles now."""
        self._shared = shared
        self._switch = switch
        self._leads = leads
        self._vacated: Roles = frozenset()
        self._looking: asyncio.Task[None] | None = None

    def fill(self, vacated: Roles) -> None:
        """Notes the roles of a place that no worker will take unless one is switched; none: no such place."""
        self._vacated = vacated
        if vacated:
            self.look()

    def look(self) -> None:
        """Begins to look if any worker leaves. To be called after each change of a worker."""
        if self._is_needed() and (self._looking is None or self._looking.done()):
            self._looking = self._shared.requests.tasks.spawn(self._run())

    async def _run(self) -> None:
        while self._is_needed():
            await asyncio.sleep(_LOOK_S)
            switch = None
            if self._leads() and not self._shared.requests.switching:
                switch = replacement_for(self._standings(), self._leaving() | {_VACATED})
            if switch is not None:
                await self._replace(switch)

    def _is_needed(self) -> bool:
        return not self._shared.config.has_classes and bool(self._vacated or self._leaving())

    def _leaving(self) -> set[str]:
        return {name for name, info in self._shared.fleet.workers.items() if info.is_draining}

    def _standings(self) -> list[WorkerStanding]:
        """Returns the workers as `replacement_for` sees them. One that is lost comes back, and is spared.

        Where a place is vacant, all that were to come are there.
        """
        infos = [each for each in self._shared.fleet.workers.values() if "video" not in each.roles]
        if not self._vacated:
            return [self._standing(info) for info in infos]
        there = [self._standing(info) for info in infos if info.is_alive]
        return [*there, WorkerStanding(_VACATED, self._vacated, 0.0, {}, 0)]

    def _standing(self, info: WorkerInfo) -> WorkerStanding:
        load = self._shared.requests.loads.get(info.name, _NO_LOAD)
        work = {stage: float(load.num_waiting + load.num_running) for stage in info.roles}
        is_busy = bool(info.leaving) or not info.is_alive
        return WorkerStanding(info.name, info.roles, 0.0, work, load.num_running, is_switching=is_busy)

    async def _replace(self, switch: Switch) -> None:
        logger.info("worker %s takes the roles of one that leaves, or is lost", switch.worker)
        try:
            await self._switch(switch.worker, switch.roles)
        except EPDError as error:
            logger.warning("%s", error)
