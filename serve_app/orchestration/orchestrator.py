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
from dataclasses import replace
from itertools import count
from typing import Any

from epd.control.admission import AdmissionQueue, QueueSummary
from epd.control.recent import Arrivals, Recent, RequestWork
from epd.control.routing import Router
from epd.control.speeds import Speeds
from epd.encoders import MediaPlan
from epd.errors import UnavailableError
from epd.serve_app.fleet import Fleet, WorkerLostError, has_all_roles, send_surely, worker_statuses
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.media_messages import CompressVideo, NotHeldError
from epd.serve_app.messages import Abort
from epd.serve_app.orchestration.config import OrchestratorConfig
from epd.serve_app.orchestration.elastic import ElasticityLoop
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.orchestration.evacuation import Evacuations
from epd.serve_app.orchestration.event_reader import EventReader, Recovery
from epd.serve_app.orchestration.group_feed import GroupFeed
from epd.serve_app.orchestration.isolation import Isolation
from epd.serve_app.orchestration.live_answer import AnswerPlan, LiveAnswer, Reuses
from epd.serve_app.orchestration.loss_counter import LossCounter
from epd.serve_app.orchestration.placement import RequestPlacer
from epd.serve_app.orchestration.replacement import Replacement
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.orchestration.requests import Attempt, Outcome, Requests, Shared
from epd.serve_app.orchestration.retention import LoadRetention
from epd.serve_app.orchestration.role_switch import RoleSwitcher, SwitchRequest
from epd.serve_app.orchestration.substituted import SubstitutedFrames
from epd.serve_app.orchestration.watchdog import Watchdog
from epd.serve_app.service import AnswerItem, AnswerRequest, Estimate, MediaSize, MediaSource, ModelCard
from epd.serve_app.service_status import RoleSwitch, ServiceStatus
from epd.topology import Stage, topology_name

_DRAIN_POLL_S = 0.05
_MAX_COMPRESSIONS = 256  # of videos, that are known
_MAX_LOSSES = 4  # of media workers that look at a video


class Orchestrator:
    """Implements AnswerService. Used from one event loop, which it never blocks.

    ask_leader: has the orchestrator that leads switch roles, if that is another one
    """

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
        self.config = config = config or OrchestratorConfig()
        self.arrivals = Arrivals()
        self.ask_leader: Callable[[SwitchRequest], Awaitable[Any]] | None = None
        self._planner = planner
        self._shared = shared = _shared(fleet, config)
        self.router, self.queue, self.requests = shared.router, shared.queue, shared.requests
        self.losses = LossCounter(shared)
        self.isolation = Isolation(shared, owner)
        self._placement = RequestPlacer(shared, self.isolation)
        self.switcher = RoleSwitcher(shared, self._placement.moves)
        self.media = FleetMedia(
            fleet, shared.router, shared.requests.loads, owner=owner, patience_s=config.unavailable_s
        )
        self._evacuations = Evacuations(shared, self._placement.moves, self.switcher.roll_back_if_leading)
        self.replacement = Replacement(shared, self.switcher.switch, lambda: self.switcher.leads)
        self.elastic = ElasticityLoop(
            shared, self.arrivals, config.elastic, self.switcher.switch, lambda: self.switcher.leads
        )
        self.retention = None if config.retention is None else LoadRetention(config.retention, shared)
        self._substituted = SubstitutedFrames(folder=config.cache_dir)
        self._runner = AttemptRunner(shared, self.media, self.losses, self.isolation, self._placement, owner)
        self._is_draining = False
        self.prompts = Prompts(shared, planner, self.media, self.retention)

    @property
    def models(self) -> Sequence[ModelCard]:
        return self._planner.cards

    async def start(self) -> None:
        """Starts the fleet, and ends it where a worker cannot start. Raises EPDError then."""
        try:
            await self._shared.fleet.start()
        except BaseException:
            await self.close()
            raise
        watchdog, recovery = Watchdog(self._shared), Recovery(self._shared, self._placement.moves, self.owner)
        reader = EventReader(
            self._shared,
            self.losses,
            watchdog,
            recovery,
            self._evacuations,
            self.replacement,
            self.retention,
        )
        self.requests.loops.start("events", reader.follow)
        self.requests.loops.start("watchdog", watchdog.run)
        if self.config.elastic is not None:
            self.elastic.start()
        if self.retention is not None:
            self.requests.loops.start("retention", self.retention.run, is_vital=False)

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those in flight. Returns whether all of them ended in time."""
        self._is_draining = True
        end_s = time.monotonic() + timeout_s
        while self.num_attempts and time.monotonic() < end_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.num_attempts == 0

    async def close(self) -> None:
        """Ends the fleet and all requests: answers in flight raise UnavailableError."""
        self.requests.tasks.cancel()
        await self.requests.tasks.wait()
        await self.requests.loops.close()
        await self.switcher.close()
        await self._evacuations.close()
        await self.media.close()
        await self._shared.fleet.close()
        self.prompts.close()

    # Answers

    async def answer(self, request: AnswerRequest) -> AsyncGenerator[Sequence[AnswerItem], None]:
        """See `AnswerService`."""
        now_s = self.requests.clock()
        deadline_s = request.deadline_s or now_s + self.config.max_wait_s
        if self._is_draining:
            raise UnavailableError("the server is shutting down; retry later or use another replica")
        self.queue.check(
            now_s,
            deadline_s,
            num_coming=self.requests.num_planning,
            priority=request.priority,
            client=request.client,
            weight=request.weight,
        )
        await self.losses.check(request)
        plan = await self.prompts.plan(request)
        answer = LiveAnswer(request, plan, self._planner.texts, self.requests.clock, self._substituted)
        answer.reuses = Reuses(plan) if self.config.cache_dir is not None else None
        self.arrivals.arrived(self.requests.clock(), plan.work)
        if self.retention is not None:
            self.retention.arrived(plan)
        running = self.requests.tasks.spawn(self._runner.run(answer, deadline_s))
        try:
            async for items in answer.items.all():
                yield items
        finally:
            self.arrivals.finished()
            running.cancel()

    @property
    def attempts(self) -> Mapping[str, Attempt]:
        """Returns a view of the attempts that have not ended, by id."""
        return self.requests.attempts

    @property
    def num_attempts(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self.requests)

    @property
    def num_tickets(self) -> int:
        """Returns the number of groups that encoders have."""
        return len(self._shared.dispatcher)

    # Roles

    async def switch_roles(self, worker: str, roles: frozenset[Stage]) -> RoleSwitch:
        """See `AnswerService`. Asks the orchestrator that leads, if that is another one."""
        if self.switcher.leads:
            return await self.switcher.switch(worker, roles)
        if self.ask_leader is None:
            raise UnavailableError("another replica of the server switches roles; send the request again")
        switch: RoleSwitch = await self.ask_leader(SwitchRequest(worker, roles))
        return switch

    def share(self, others: QueueSummary | None) -> None:
        """Sets what waits at other orchestrators over the same workers. None: there are none."""
        if self.queue.others is not None and others is None:
            self.router.clear_reported()
        self.queue.others = others

    def recent_load(self) -> Sequence[tuple[float, RequestWork]]:
        """See `AnswerService`."""
        return self.arrivals.recent(self.requests.clock())

    # Status

    async def status(self) -> ServiceStatus:
        """See `AnswerService`."""
        infos = [info for info in self._shared.fleet.workers.values() if not info.is_gone]
        loads, controller = self.requests.loads, self.elastic.controller
        counters = Counter(self.requests.counters)
        for load in loads.values():
            counters.update(load.counters)
        counters["refused"] = self.queue.num_refused
        return ServiceStatus(
            is_ready=has_all_roles(infos) and not self._is_draining and not self.requests.loops.gone,
            topology=topology_name([info.roles for info in infos]),
            workers=worker_statuses(infos, loads, self.requests.switching),
            counters=dict(counters),
            num_waiting=len(self.queue),
            decisions=() if controller is None else tuple(controller.decisions),
            advice=self.elastic.advisor.advice,
            switches=tuple(self.switcher.last),
            switch_totals=self.switcher.totals,
            retention=None if self.retention is None else self.retention.status,
        )


def _shared(fleet: Fleet, config: OrchestratorConfig) -> Shared:
    router = Router(speeds=Speeds() if config.classes else None)
    dispatcher = EncodeDispatcher(
        fleet,
        router,
        max_backlog_patches=config.max_backlog_patches,
        unavailable_s=config.unavailable_s,
        stall_s=config.stall_timeout_s,
    )
    return Shared(fleet, router, AdmissionQueue(config.max_waiting), dispatcher, Requests(), config)


class AttemptRunner:
    """Runs attempts at an answer, one after another, until one of them has completed it."""

    def __init__(
        self,
        shared: Shared,
        media: FleetMedia,
        losses: LossCounter,
        isolation: Isolation,
        placement: RequestPlacer,
        owner: str,
    ) -> None:
        """Stands on an orchestrator's parts. owner: its id, in those of attempts."""
        self._shared = shared
        self._requests = shared.requests
        self._max_attempts = shared.config.max_attempts
        self._media = media
        self._losses = losses
        self._isolation = isolation
        self._placement = placement
        self._owner = owner
        self._numbers = count(1)

    async def run(self, answer: LiveAnswer, deadline_s: float) -> None:
        """Runs all attempts at a request. The error that ends it reaches the consumer through the answer."""
        try:
            is_new = True
            while answer.num_losses < self._max_attempts:
                attempt = Attempt(next(self._numbers), answer, self._shared.router, self._owner)
                self._losses.begin(attempt)
                num_losses = answer.num_losses
                outcome = await self._try(attempt, deadline_s, is_new=is_new)
                if outcome is Outcome.COMPLETE:
                    self._losses.answered(attempt)
                    answer.finish(attempt.decode_worker)
                    return
                is_new = False
                if outcome is Outcome.LOST:
                    answer.num_losses = max(answer.num_losses, num_losses + 1)
                    self._requests.counters["retries"] += 1
                answer.num_retries += 1
                answer.forget_early()
                await self._losses.check(answer.request)
            raise UnavailableError(f"the request was lost with {self._max_attempts} workers in turn; retry")
        except asyncio.CancelledError:
            answer.items.fail(UnavailableError("the server was shut down; retry when it is back"))
            raise
        except Exception as error:  # noqa: BLE001 - the consumer waits for it
            answer.items.fail(error)

    async def _try(self, attempt: Attempt, deadline_s: float, *, is_new: bool) -> Outcome:
        feed = GroupFeed(self._shared, self._media, self._losses, self._isolation, attempt)
        attempt.on_grant = feed.grant
        self._requests.begin(attempt)
        outcome = None
        try:
            await self._placement.place(attempt, deadline_s, is_new=is_new)
            outcome = await attempt.wait()
            return outcome
        finally:
            feed.stop()  # before anything is freed, so that nothing is sent afterwards
            self._requests.leave(attempt)
            is_complete = outcome is Outcome.COMPLETE
            self._requests.tasks.spawn(self._free(attempt, feed, is_complete=is_complete))

    async def _free(self, attempt: Attempt, feed: GroupFeed, *, is_complete: bool) -> None:
        """Frees everything that an attempt holds anywhere."""
        if not is_complete:
            await asyncio.gather(
                *(self._abort(attempt, worker) for worker in sorted(attempt.placement.touched))
            )
            await self._shared.dispatcher.drop_request(attempt.id, attempt.readers.values())
        await feed.close()
        self._shared.wake()

    async def _abort(self, attempt: Attempt, worker: str) -> None:
        stage: Stage = "prefill" if worker == attempt.prefill_worker else "decode"
        await send_surely(self._shared.fleet, stage, worker, Abort((attempt.id,)))


class Prompts:
    """Plans requests, and implements PromptService. Nothing is encoded; no worker of a stage hears of it."""

    def __init__(
        self, shared: Shared, planner: RequestPlanner, media: FleetMedia, retention: LoadRetention | None
    ) -> None:
        """Stands on an orchestrator's parts. retention: that follows the load, if it does."""
        self._shared = shared
        self._planner = planner
        self._media = media
        self._retention = retention
        self._compressions: Recent[tuple[str, MediaPlan], MediaPlan] = Recent(_MAX_COMPRESSIONS)
        self._threads = ThreadPoolExecutor(shared.config.num_planning_threads, thread_name_prefix="planning")

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(cancel_futures=True)

    async def plan(self, request: AnswerRequest) -> AnswerPlan:
        """Plans a request with the share of visual tokens kept now; images stay at their workers."""
        if self._retention is not None:
            request = self._retention.reduced(request)
        else:
            request = replace(request, reduction=request.reduction.clamped(1.0, request.retention_min or 0.0))
        with self._shared.requests.planning():
            loop = asyncio.get_running_loop()
            self._planner.check_images(request)
            images = await self._media.plan_images(request.media) if request.media else {}
            plan = self._planner.plan_at_once(request, images)
            if plan is None:
                plan = await loop.run_in_executor(self._threads, self._planner.plan, request, images)
            if not self._planner.adapter.compresses or plan.prompt.reduction is not None:
                return plan
            images |= await self._compressed(request.media, plan.media)
            compressed = await loop.run_in_executor(self._threads, self._planner.plan, request, images)
            return replace(compressed, choice=plan.choice)

    async def _compressed(
        self, sources: Sequence[MediaSource], plans: Sequence[MediaPlan]
    ) -> dict[int, MediaPlan]:
        """Returns the videos of a request, by place, with the tokens that their pixels leave."""
        pairs = enumerate(zip(sources, plans, strict=True))
        videos = {place: pair for place, pair in pairs if pair[0].kind == "video"}
        found = await asyncio.gather(*(self._compressed_one(*pair) for pair in videos.values()))
        return dict(zip(videos, found, strict=True))

    async def _compressed_one(self, source: MediaSource, plan: MediaPlan) -> MediaPlan:
        """Looks at a video once; then it is known. Raises MediaError, UnavailableError."""
        key, fleet = (source.mm_hash, plan), self._shared.fleet
        for _ in range(_MAX_LOSSES):
            known = self._compressions.get(key)
            if known is not None:
                return known
            worker, held = await self._media.place(source)
            try:
                found = await fleet.send("video", worker, CompressVideo(held, plan))
            except (WorkerLostError, NotHeldError):
                self._media.leave(source, worker)
                continue
            self._compressions.set(key, found)
            return found
        raise UnavailableError(f"{source.label}: {_MAX_LOSSES} media workers were lost with it; retry later")

    async def estimate(self, request: AnswerRequest) -> Estimate:
        """See `PromptService`."""
        plan = await self.plan(request)
        return Estimate(
            plan.usage(0),
            plan.retention,
            plan.sampling.max_tokens or 0,
            tuple(plan.prompt.token_ids.tolist()),
            tuple(
                MediaSize(each.kind, each.num_frames, *each.resized, each.num_tokens) for each in plan.media
            ),
        )

    async def tokens(self, text: str, *, with_special: bool) -> tuple[int, ...]:
        """See `PromptService`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._planner.tokens_of, text, with_special)

    async def text(self, token_ids: Sequence[int]) -> str:
        """See `PromptService`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._planner.text_of, token_ids)

    async def names(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """See `PromptService`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._planner.names_of, token_ids)
