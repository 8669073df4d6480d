"""Gives a worker other roles while it runs; if anything goes wrong, it gets its former roles back.

offload    the worker gets no new work for the roles it gives up; work it has not begun goes to others
migrate    answers move to other decode workers with their keys and values, the rest is completed, or after
           `drain_s` retried elsewhere: see `evacuation`, by which other orchestrators take away theirs
onload     the stages of the new roles are started alongside the old ones
announce   the worker takes work of its new roles and closes the old stages
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from epd.errors import EPDError, InfeasibleError, InternalError, RequestError, UnavailableError
from epd.serve_app.fleet import Fleet, WorkerLostError, send_surely
from epd.serve_app.messages import Message, ReplyT
from epd.serve_app.orchestration.config import SwitchLimits
from epd.serve_app.orchestration.evacuation import Evacuation
from epd.serve_app.orchestration.requests import Shared
from epd.serve_app.orchestration.worker_calls import DecodeMoves
from epd.serve_app.role_messages import (
    AskRemaining,
    Offload,
    Onload,
    OnloadTimes,
    SetRoles,
    StagesClosed,
)
from epd.serve_app.service_status import RoleSwitch, SwitchTotals
from epd.serve_app.task_group import Tasks
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage, closed_roles, role_letters, stages_of

logger = logging.getLogger(__name__)

Phase = Literal["offload", "migrate", "onload", "announce"]
_POLL_S = 0.005  # between checks of what a worker still has
_ROLL_BACK_S = 0.25  # until another attempt to give a worker its former roles
_MAX_KEPT = 64
_NUM_ROLL_BACKS = 3
_SWITCHABLE: frozenset[Stage] = frozenset({"encode", "prefill", "decode"})


@dataclass(frozen=True, slots=True)
class SwitchRequest:
    """A role switch that another orchestrator asks the leading one for."""

    worker: str
    roles: frozenset[Stage]


class RoleSwitcher:
    """Switches workers and records the results. last: the latest switches, oldest first."""

    def __init__(self, shared: Shared, moves: DecodeMoves) -> None:
        """Starts without switches. moves: changes the decode workers of attempts."""
        self.last: deque[RoleSwitch] = deque(maxlen=_MAX_KEPT)
        self.in_flight = shared.requests.switching
        self._totals: dict[str, SwitchTotals] = {}
        self._leads = True
        self._shared = shared
        self._moves = moves
        self._tasks = Tasks()

    @property
    def totals(self) -> tuple[SwitchTotals, ...]:
        """Returns the totals of each kind of switch."""
        return tuple(self._totals[kind] for kind in sorted(self._totals))

    async def switch(
        self, worker: str, roles: frozenset[Stage], lent: frozenset[Stage] = frozenset()
    ) -> RoleSwitch:
        """Switches a worker, and returns when it has these roles. lent: see `WorkerInfo`.

        Raises RequestError for an invalid worker or roles, InfeasibleError if too few other workers would
        be left, UnavailableError if the switch failed: the worker is then unchanged, or restarted.
        """
        info = self._checked(worker, roles)
        self.in_flight.add(worker)
        # The caller may be cancelled: the switch is completed anyway.
        record = await asyncio.shield(self._tasks.spawn(self._carry_out(info, roles, lent)))
        if record.error:
            raise UnavailableError(f"worker '{worker}' did not take its roles: {record.error}")
        return record

    async def _carry_out(
        self, info: WorkerInfo, roles: frozenset[Stage], lent: frozenset[Stage]
    ) -> RoleSwitch:
        try:
            record = await _SwitchRun(self._shared, self._moves, info, SetRoles(roles, lent)).carry_out()
        finally:
            self.in_flight.discard(info.name)
        self.last.append(record)
        total = self._totals.get(record.kind, SwitchTotals(record.kind))
        self._totals[record.kind] = total.plus(record)
        logger.info("%s", record.line())
        return record

    @property
    def leads(self) -> bool:
        """Returns whether this orchestrator switches roles: of those that share the workers, one does."""
        return self._leads

    @leads.setter
    def leads(self, leads: bool) -> None:
        begins, self._leads = leads and not self._leads, leads
        if begins:
            self.roll_back_if_leading()

    def roll_back_if_leading(self) -> None:
        """Ends switches of a front that is gone. A worker may say that it leaves after another one leads."""
        if self._leads:
            self._shared.requests.tasks.spawn(self.roll_back_abandoned())

    async def roll_back_abandoned(self) -> None:
        """Gives workers their roles back that nobody switches any more: who did is gone."""
        for info in list(self._shared.fleet.workers.values()):
            is_abandoned = info.leaving and not info.is_draining and info.name not in self.in_flight
            if info.is_alive and is_abandoned:
                await send_surely(self._shared.fleet, min(info.roles), info.name, _former(info))

    async def close(self) -> None:
        """Cancels the switches in flight."""
        self._tasks.cancel()
        await self._tasks.wait()

    def _checked(self, worker: str, roles: frozenset[Stage]) -> WorkerInfo:
        workers = self._shared.fleet.workers
        names = sorted(
            name for name, info in workers.items() if "video" not in info.roles and not info.is_gone
        )
        if worker not in names:
            raise RequestError(f"received the worker {worker[:100]!r}; allowed: {', '.join(names)}; name one")
        if not roles or not roles <= _SWITCHABLE:
            allowed = ", ".join(sorted(_SWITCHABLE))
            raise RequestError(
                f"received the roles {sorted(roles)}; allowed: some of {allowed}; name at least one"
            )
        info = workers[worker]
        if info.roles == roles:
            raise RequestError(f"worker '{worker}' has the roles {sorted(roles)} already; name others")
        if info.leaving and worker not in self.in_flight:
            raise UnavailableError(f"worker '{worker}' gives up work already; try again later")
        if not info.is_alive:
            raise UnavailableError(f"worker '{worker}' is being started again; try again when it is back")
        if self._shared.config.keeps_roles(worker):
            raise RequestError(
                f"received roles for the worker '{worker}' of a class; allowed: for workers of none, since "
                "those of a class keep their roles; name another worker"
            )
        if self.in_flight:
            raise UnavailableError(
                f"{sorted(self.in_flight)} are being switched; allowed at once: 1; try again later"
            )
        check_others(self._shared.fleet, info, roles)
        return info


def _former(info: WorkerInfo) -> SetRoles:
    """Returns the message that gives a worker back what it had."""
    return SetRoles(info.roles, info.lent)


def check_others(fleet: Fleet, info: WorkerInfo, roles: frozenset[Stage]) -> None:
    """Raises InfeasibleError unless other workers have the roles that this one gives up."""
    for stage in sorted(closed_roles(info.roles, roles)):
        if not any(each.name != info.name and each.takes(stage) for each in fleet.workers.values()):
            raise InfeasibleError(
                f"without '{info.name}' there are 0 workers for {stage}; at least 1 must be left; give the "
                "role to another worker first"
            )


@dataclass(slots=True)
class _SwitchRun:
    """Runs one switch. seconds: of each phase so far. stage: the stage that messages to it are sent to."""

    shared: Shared
    moves: DecodeMoves
    info: WorkerInfo
    target: SetRoles
    seconds: dict[Phase, float] = field(default_factory=dict, init=False)
    phase: Phase = field(default="offload", init=False)
    weights_s: float = field(default=0.0, init=False)
    start_s: float = field(default=0.0, init=False)
    evacuation: Evacuation = field(init=False)

    def __post_init__(self) -> None:
        self.evacuation = Evacuation(self.shared, self.moves, self.name, self.leaving)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def roles(self) -> frozenset[Stage]:
        return self.target.roles

    @property
    def limits(self) -> SwitchLimits:
        return self.shared.config.switching

    @property
    def leaving(self) -> frozenset[Stage]:
        """Returns the stages that it gives up."""
        return stages_of(self.info.roles) - stages_of(self.roles)

    async def carry_out(self) -> RoleSwitch:
        at_s, error = self.shared.requests.clock(), ""
        self.start_s = time.monotonic()
        try:
            with self._timed("offload"):
                await self._offload()
            with self._timed("migrate"):
                await self._migrate()
            with self._timed("onload"):
                await self._onload()
            with self._timed("announce"):
                await self._announce()
        except EPDError as reason:
            error = f"{self.phase}: {reason}"
            await self._roll_back()
        except Exception as bug:  # any error: the worker must not stay closed
            logger.exception("the switch of worker %s failed", self.name)
            error = f"{self.phase}: {InternalError.of(bug)}"
            await self._roll_back()
        finally:
            self.shared.wake()
            self.shared.dispatcher.encoders.wake()
        return self._record(at_s, error)

    def _record(self, at_s: float, error: str) -> RoleSwitch:
        return RoleSwitch(
            worker=self.name,
            before=role_letters(self.info.roles),
            after=role_letters(self.roles),
            at_s=at_s,
            offload_s=self.seconds.get("offload", 0.0),
            migrate_s=self.seconds.get("migrate", 0.0),
            onload_s=self.seconds.get("onload", 0.0),
            announce_s=self.seconds.get("announce", 0.0),
            weights_s=self.weights_s,
            num_handed_on=self.evacuation.num_handed_on,
            num_moved=self.evacuation.num_moved,
            num_redone=self.evacuation.num_redone,
            error=error,
        )

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        self.phase, start_s = phase, time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = time.monotonic() - start_s

    # Phases

    async def _offload(self) -> None:
        await self._send(Offload(self.info.roles - closed_roles(self.info.roles, self.roles), self.leaving))
        await self.evacuation.hand_on(await self._send(AskRemaining(self.leaving)))

    async def _migrate(self) -> None:
        redo_s = time.monotonic() + self.limits.drain_s
        while not (left := await self._send(AskRemaining(self.leaving))).is_over:
            check_others(self.shared.fleet, self.info, self.roles)
            await self.evacuation.step(left, is_late=time.monotonic() >= redo_s)
            await asyncio.sleep(_POLL_S)

    async def _onload(self) -> None:
        times: OnloadTimes = await self._send(Onload(self.roles))
        self.weights_s = times.weights_s

    async def _announce(self) -> None:
        check_others(self.shared.fleet, self.info, self.roles)
        await self._send(self.target)
        self.shared.router.forget(self.name)
        await self._report_closed()

    async def _report_closed(self) -> None:
        """Notifies the other workers of the closed stages; they would keep data sent there forever."""
        send, message = self.shared.fleet.send, StagesClosed(self.name, self.leaving, self.info.incarnation)
        others = [
            info
            for info in self.shared.fleet.workers.values()
            if info.is_alive and info.name != self.name and "video" not in info.roles
        ]
        await asyncio.gather(
            *(send(min(info.roles), info.name, message) for info in others), return_exceptions=True
        )

    async def _roll_back(self) -> None:
        """Gives the worker its former roles; a lost worker is restarted with them."""
        for _ in range(_NUM_ROLL_BACKS):
            try:
                await self.shared.fleet.send(min(self.info.roles), self.name, _former(self.info))
            except WorkerLostError:
                return
            except Exception:
                logger.exception("worker %s does not go back to its roles", self.name)
                await asyncio.sleep(_ROLL_BACK_S)
            else:
                return

    # Messages

    async def _send(self, message: Message[ReplyT]) -> ReplyT:
        """Sends a message. Raises UnavailableError at the time limit, or if the worker was restarted."""
        now = self.shared.fleet.workers.get(self.name)
        if now is None or not now.is_alive or now.incarnation != self.info.incarnation:
            raise WorkerLostError(f"worker '{self.name}' was lost; it is started with its former roles")
        left_s = self.start_s + self.limits.limit_s - time.monotonic()
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                return await self.shared.fleet.send(min(self.info.roles), self.name, message)
        except TimeoutError:
            raise UnavailableError(f"it took more than {self.limits.limit_s:g} s") from None
