"""Replaces the last worker of a stage that leaves, or that nobody replaces, by one that others can spare.

Where no worker encodes for `encode_fallback_s`, one that prefills does so besides, until another one encodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from epd.control.elasticity.assignment import helper_for, replacement_for
from epd.control.elasticity.cluster import Roles, WorkerStanding
from epd.control.elasticity.controller import Switch
from epd.errors import EPDError
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.orchestration.requests import Shared
from epd.serve_app.service_status import RoleSwitch
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_PAUSE_LOOKS = 60  # after a worker could not encode besides, as where its GPU has no room
_NO_LOAD = WorkerLoad()
_VACATED = ""  # name of a worker that is lost for good
_ENCODE: frozenset[Stage] = frozenset({"encode"})
SwitchRoles = Callable[..., Awaitable[RoleSwitch]]  # of `RoleSwitcher.switch`


class Replacement:
    """Looks for a replacement every second while a worker leaves, or has left, or a place is vacant."""

    def __init__(self, shared: Shared, switch: SwitchRoles, leads: Callable[[], bool]) -> None:
        """Starts without workers that leave. leads: whether this orchestrator may switch roles now."""
        self._shared = shared
        self._switch = switch
        self._leads = leads
        self._vacated: Roles = frozenset()
        self._num_without = 0  # looks in a row that found no encoder
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
            self._num_without = 0 if self._encoders() else self._num_without + 1
            if self._leads() and not self._shared.requests.switching:
                switch = replacement_for(self._standings(), self._leaving() | {_VACATED})
                if switch is not None:
                    await self._replace(switch)
                elif self._fallback_s is not None:
                    await self._lend_or_return(self._fallback_s)

    def _is_needed(self) -> bool:
        if self._shared.config.classes:
            return False
        is_lent = self._fallback_s is not None and bool(self._helpers() or not self._encoders())
        return bool(self._vacated or self._leaving()) or is_lent

    def _leaving(self) -> set[str]:
        return {name for name, info in self._shared.fleet.workers.items() if info.is_draining}

    def _standings(self) -> list[WorkerStanding]:
        """Returns the workers as `replacement_for` sees them. One that is lost comes back, and is spared.

        Where a place is vacant, all that were to come are there.
        """
        infos, loads = self._infos(), self._shared.requests.loads
        if not self._vacated:
            return [_standing(info, loads) for info in infos]
        there = [_standing(info, loads) for info in infos if info.is_alive]
        return [*there, WorkerStanding(_VACATED, self._vacated, 0.0, {}, 0)]

    async def _replace(self, switch: Switch) -> None:
        logger.info("worker %s takes the roles of one that leaves, or is lost", switch.worker)
        await self._try(switch.worker, switch.roles)

    async def _try(self, *order: object) -> bool:
        """Switches a worker. Returns whether it has its roles. order: arguments of `RoleSwitcher.switch`"""
        try:
            await self._switch(*order)
        except EPDError as error:
            logger.warning("%s", error)
            return False
        return True

    # Encoding besides

    @property
    def _fallback_s(self) -> float | None:
        return self._shared.config.encode_fallback_s

    def _infos(self) -> list[WorkerInfo]:
        return [each for each in self._shared.fleet.workers.values() if "video" not in each.roles]

    def _encoders(self) -> list[WorkerInfo]:
        """Returns the workers that can be given groups, helpers too."""
        return [each for each in self._infos() if each.takes("encode")]

    def _helpers(self) -> list[WorkerInfo]:
        """Returns the workers that encode in place of others, and do not leave."""
        return [each for each in self._encoders() if each.lent]

    async def _lend_or_return(self, patience_s: float) -> None:
        helpers = self._helpers()
        if helpers and len(self._encoders()) > 1:
            logger.info("worker %s encodes no more: another one does", helpers[0].name)
            await self._try(helpers[0].name, helpers[0].own_roles)
        elif self._num_without * _LOOK_S >= patience_s:
            await self._lend()

    async def _lend(self) -> None:
        switch = helper_for(
            [_standing(each, self._shared.requests.loads) for each in self._infos() if each.is_alive]
        )
        if switch is None:
            return
        logger.warning("no worker encodes: %s does so besides, slower, until another one does", switch.worker)
        self._num_without = -_PAUSE_LOOKS
        if await self._try(switch.worker, switch.roles, _ENCODE):
            self._shared.requests.counters["encode_fallbacks"] += 1


def _standing(info: WorkerInfo, loads: Mapping[str, WorkerLoad]) -> WorkerStanding:
    """Returns a worker with its last report, as policies of elasticity see it."""
    load = loads.get(info.name, _NO_LOAD)
    work = {stage: float(load.num_waiting + load.num_running) for stage in info.own_roles}
    is_busy = bool(info.leaving) or not info.is_alive
    return WorkerStanding(info.name, info.own_roles, 0.0, work, load.num_running, is_switching=is_busy)
