"""Several orchestrators over the threads of one LocalFleet, each with its own view of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from epd.serve_app.fleet import Bulk, FleetEvent, WorkerChanged, WorkerLostError
from epd.serve_app.messages import DropOwner, Message, ReplyT, WorkerReport, by_owner
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.role_messages import Offload, SetRoles
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage
from tests.serve_app.deployments import Deployment, patient


class SharedFleet:
    """A fleet with a view for each owner. views: of those that are there."""

    def __init__(self, deployment: Deployment) -> None:
        self.local, self.held = deployment.fleet, deployment.held
        self.views: dict[str, FleetView] = {}
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._pump is None:
            self._pump = asyncio.create_task(self._follow())
            await self.local.start()

    async def close(self) -> None:
        await self.local.close()
        if self._pump is not None:
            await self._pump

    async def _follow(self) -> None:
        async for event in self.local.events():
            self.publish(event)

    def publish(self, event: FleetEvent, but: str | None = None) -> None:
        """Gives an event to all views but one."""
        parts = by_owner(event, self.views) if isinstance(event, WorkerReport) else {}
        for owner, view in self.views.items():
            if owner != but:
                view.queue.put_nowait(parts.get(owner, event))

    async def drop(self, owner: str) -> None:
        """All workers drop what an owner has that is gone."""
        for worker in self.local.media.values():
            worker.drop_owner(owner)
        for info in self.local.workers.values():
            if info.is_alive and "video" not in info.roles:
                await self.local.send(min(info.roles), info.name, DropOwner(owner))


class FleetView:
    """Implements `Fleet` for one owner. is_closed: it can send nothing more, and hears nothing."""

    def __init__(self, shared: SharedFleet, owner: str) -> None:
        self.shared = shared
        self.owner = owner
        self.is_closed = False
        self.queue: asyncio.Queue[FleetEvent | None] = asyncio.Queue()
        shared.views[owner] = self

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        return self.shared.local.workers

    async def start(self) -> None:
        await self.shared.start()

    async def close(self) -> None:
        self.is_closed = True
        self.shared.views.pop(self.owner, None)
        self.queue.put_nowait(None)

    async def send(
        self, stage: Stage, target: str, message: Message[ReplyT], bulk: Bulk | None = None
    ) -> ReplyT:
        if self.is_closed:
            raise WorkerLostError("this orchestrator is gone")
        try:
            return await self.shared.local.send(stage, target, message, bulk)
        finally:
            if isinstance(message, Offload | SetRoles):
                self.shared.publish(WorkerChanged(target), but=self.owner)

    async def fetch(self, stage: Stage, target: str, message: Message[ReplyT]) -> tuple[ReplyT, Bulk]:
        if self.is_closed:
            raise WorkerLostError("this orchestrator is gone")
        return await self.shared.local.fetch(stage, target, message)

    async def events(self) -> AsyncIterator[FleetEvent]:
        while (event := await self.queue.get()) is not None:
            yield event


class Front(Deployment):
    """One of several orchestrators over the same workers; the first leads."""

    def __init__(self, path: Path, shared: SharedFleet, owner: str, options: dict[str, Any]) -> None:
        self.fleet, self.held = shared.local, shared.held
        self.shared = shared
        planner = RequestPlanner(path, "tiny", group_tokens=16)
        self.view = FleetView(shared, owner)
        self.service = Orchestrator(self.view, planner, patient(options), owner)
        self.service.switcher.leads = len(shared.views) == 1

    async def crash(self) -> None:
        """Ends without a message to any worker; then the workers are told to drop what it has."""
        await self.view.close()
        await self.shared.drop(self.service.owner)


@asynccontextmanager
async def fronts_over(
    path: Path, topology: str, owners: str = "ab", *, fleet: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[list[Front]]:
    """Fronts named by single letters over one fleet. fleet, options: as in `deployed`."""
    settings = options.pop("settings", {})
    shared = SharedFleet(Deployment(path, topology, fleet or {}, settings=settings))
    fronts = [Front(path, shared, owner, options) for owner in owners]
    try:
        for front in fronts:
            await front.service.start()
        yield fronts
    finally:
        for front in fronts:
            await front.service.close()
        await shared.close()
