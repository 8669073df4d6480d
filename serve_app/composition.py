"""Builds the application with its HTTP API from its arguments and a fleet, both on Ray and in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from epd.control.admission import QueueSummary
from epd.control.elasticity.assignment import roles_for_newcomer
from epd.control.elasticity.cluster import Roles
from epd.errors import UnavailableError
from epd.machine import steady_time_s
from epd.serve_app.app_args import AppArgs
from epd.serve_app.fleet import Fleet
from epd.serve_app.http.api import create_api
from epd.serve_app.http.guard.keyed_clients import Spent
from epd.serve_app.http.requests.named_media import NameAsked
from epd.serve_app.http.server_state import ServerState
from epd.serve_app.network.members import Kind, Member, View
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.role_switch import SwitchRequest
from epd.serve_app.service_composition import create_service, media_settings, worker_settings
from epd.serve_app.service_status import RoleSwitch
from epd.serve_app.worker_info import EVERY_STAGE
from epd.topology import Stage, topology_part

__all__ = ["create_app", "media_settings", "share_clients", "share_lead", "worker_settings"]

# Deployments whose replicas are workers, by the kind of member.
_SCALED: Mapping[Kind, str] = {"stage": "Stage", "media": "Media"}


async def create_app(args: AppArgs, fleet: Fleet, owner: str = "") -> FastAPI:
    """Starts the fleet and returns the HTTP app over it. The app's lifespan closes both. Raises EPDError.

    owner: by which the fleet's workers know the requests of this app
    """
    service, settings = create_service(args, fleet, owner)
    app = create_api(service, service.media, settings)
    api_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with api_lifespan(app):
                yield
        finally:
            await service.close()

    app.router.lifespan_context = lifespan
    await service.start()
    return app


def share_lead(service: Orchestrator, fleet: RemoteFleet) -> None:
    """Lets one front at a time switch roles, whom the others ask to, and has all of them queue as one."""

    ages = _Ages()

    def follow(view: View) -> None:
        fronts = fleet.fronts.among(view)
        service.switcher.leads = view.leader == fleet.owner
        service.share(_waiting_at(fronts, ages))
        service.losses.follow({each.epoch: each.losses for each in fronts} or None)
        service.isolation.share({each.epoch: each.claims for each in fronts} or None)
        service.arrivals.follow(steady_time_s(), {each.epoch: each.traffic for each in fronts})
        service.replacement.fill(vacated(view, fleet.membership.purpose.model))
        _follow_advice(service, view, fleet)

    def describe() -> Mapping[str, Any]:
        queue = service.queue.summary()
        return {
            "num_waiting": queue.num_waiting,
            "oldest_age_s": ages.given(queue.oldest_s),
            "claims": service.isolation.claims,
            "traffic": service.arrivals.published(steady_time_s(), len(service.queue)),
            "advice": service.elastic.advisor.advice if service.switcher.leads else {},
        }

    async def answer(asked: SwitchRequest) -> RoleSwitch:
        if not service.switcher.leads:
            raise UnavailableError("another replica of the server switches roles by now; send it again")
        return await service.switch_roles(asked.worker, asked.roles)

    service.ask_leader, fleet.fronts.answers[SwitchRequest] = fleet.fronts.ask_leader, answer
    service.losses.on_recorded = lambda: fleet.fronts.publish(losses=service.losses.report())
    service.isolation.on_claimed = lambda: fleet.fronts.publish(claims=service.isolation.claims)
    fleet.on_view, fleet.membership.describe = follow, describe
    follow(fleet.membership.view)


def share_clients(server: ServerState, fleet: RemoteFleet) -> None:
    """Lets each client have one minute's amount, and name its media, at all fronts together."""
    named, clients = server.named_media, server.clients
    named.ask_others, named.tell_others = fleet.fronts.ask, fleet.fronts.tell
    fleet.fronts.answers[NameAsked] = named.answer
    if clients is not None:
        clients.tell_others, fleet.fronts.answers[Spent] = fleet.fronts.tell, clients.spent_elsewhere


def vacated(view: View, model: str) -> Roles:
    """Returns the roles of a place that nobody will take; none if there is no such place.

    A worker may come before the board knows whom it replaces, and get another place. Then a stage has nobody
    although as many workers as wanted are there, and no other one comes.
    """
    stages = [each for each in view.of_kind("stage") if each.model == model]
    infos = [each.info for each in stages if each.info is not None and not each.info.is_draining]
    if not infos or not all(each.is_known for each in stages):
        return frozenset()
    if _has_classes(view):
        return frozenset()
    present, wanted = [info.own_roles - info.leaving for info in infos], topology_part(stages[-1].topology)
    is_served = frozenset[Stage]().union(*present) >= EVERY_STAGE
    if is_served or len(present) < wanted.num_workers:
        return frozenset()
    return roles_for_newcomer(wanted, present)


def _has_classes(view: View) -> bool:
    """Returns whether stage workers are of classes: each keeps its roles, in a deployment of its own."""
    return any(each.worker_class for each in view.of_kind("stage"))


class _Ages:
    """Exchanges times between fronts, whose clocks differ: an age is of when it is first given, or heard."""

    def __init__(self) -> None:
        self._given: tuple[float | None, float | None] = None, None  # the time, and its age
        self._heard: dict[str, tuple[float, float]] = {}  # by front, the age and the time

    def given(self, at_s: float | None) -> float | None:
        """Returns the age of a time; the same one for the same time, so that it makes no new view."""
        if at_s != self._given[0]:
            self._given = at_s, None if at_s is None else steady_time_s() - at_s
        return self._given[1]

    def heard(self, front: str, age_s: float) -> float:
        """Returns the time here of an age that another front has given."""
        if front not in self._heard or self._heard[front][0] != age_s:
            self._heard[front] = age_s, steady_time_s() - age_s
        return self._heard[front][1]


def _waiting_at(fronts: Sequence[Member], ages: _Ages) -> QueueSummary | None:
    """Returns what waits at fronts; None without any."""
    if not fronts:
        return None
    arrivals = [ages.heard(each.epoch, each.oldest_age_s) for each in fronts if each.oldest_age_s is not None]
    return QueueSummary(sum(each.num_waiting for each in fronts), min(arrivals, default=None))


def _follow_advice(service: Orchestrator, view: View, fleet: RemoteFleet) -> None:
    """Takes the bounds within which Serve scales, if it scales any deployment, and the leader's advice."""
    scaled = {kind: name for kind, name in _SCALED.items() if kind != "stage" or not _has_classes(view)}
    bounds = {name: found for kind, name in scaled.items() if (found := view.bounds(kind))}
    advisor = service.elastic.advisor
    if not bounds and not service.elastic.is_running:
        return
    service.elastic.start()
    advisor.follow(bounds, fleet.membership.purpose.topology)
    if not service.switcher.leads:
        advisor.stop(view.advice)
