"""Runs one worker's stages behind messages, which a thread or a Ray actor merely carries.

    handle(message) -> reply     at once, nothing is computed
    step()                       every role advances by one step
    take_report()                tokens and events since the last call

Not thread-safe. Roles can change while it runs: the remaining work of a role is completed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from epd.control.elasticity.cluster import StageSample
from epd.control.routing import InFlight
from epd.machine import steady_time_s
from epd.serve_app.messages import (
    Abort,
    CancelTickets,
    DropOwner,
    EncodeGroup,
    Message,
    PeerLost,
    Prefill,
    Redirect,
    Reissue,
    Reserve,
    WorkerLoad,
    WorkerReport,
    endpoint,
)
from epd.serve_app.role_messages import (
    AskRemaining,
    Move,
    Offload,
    Onload,
    OnloadTimes,
    Pause,
    RemainingWork,
    Resume,
    SetRoles,
    StagesClosed,
)
from epd.serve_app.worker.media_feed import MediaFeeds
from epd.serve_app.worker.peer_losses import NamedPeer, PeerLosses, named_peer, refusal
from epd.serve_app.worker.prefill_role import PrefillRole
from epd.serve_app.worker.worker_roles import Clock, DecodeRole, EncodeRole, ReportBuffer, Role, lost_stage
from epd.serve_app.worker.worker_settings import Transport, WorkerSettings
from epd.serve_app.worker.worker_stages import StageBuilder
from epd.stages.encode.beside import BesideThread
from epd.topology import Stage, stages_of
from epd.transfer.connectors import KVTicket
from epd.types import UInt8Array

RoleT = TypeVar("RoleT", EncodeRole, PrefillRole, DecodeRole)


class WorkerCore:
    """Runs a worker named `name`. One engine runs both roles of a worker with prefill and decode."""

    def __init__(
        self,
        name: str,
        roles: frozenset[Stage],
        settings: WorkerSettings,
        transport: Transport,
        *,
        clock: Clock = steady_time_s,
        wake: Callable[[], None] | None = None,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Loads the weights of its roles. Raises ModelError.

        wake: called by a thread of its own once `step` has something to take; without it there is none.
        tell: called in a step with news that can be taken.
        """
        self.name = name
        self.roles: frozenset[Stage] = frozenset()
        self._builder = StageBuilder(settings, transport, roles)
        self._clock = clock
        self._reports = ReportBuffer()
        # Running roles: its own, and those being given up, until they have no work left.
        self.hosted: dict[Stage, Role] = {}
        self._peers = PeerLosses(self._drop_peer)
        self._num_switches = 0
        self._is_switching = False
        self._is_load_unreported = False
        self._has_moved = False
        self._settled_roles = roles
        self._wake = wake
        self._tell = tell
        self._beside: BesideThread[Any] | None = None
        try:
            self._set_roles(roles)
        except BaseException:
            self.close()
            raise

    def handle(self, message: Message[Any], bulk: UInt8Array | None = None) -> Any:
        """Handles a message and returns its reply. bulk: frames, uint8 [N, h, w, 3]. Raises EPDError."""
        self._is_load_unreported = True
        peer = named_peer(message)
        if peer is not None and peer.name != self.name and not self._peers.meet(peer):
            return refusal(message)
        match message:
            case EncodeGroup():
                return self._role("encode", EncodeRole).submit(message, bulk)
            case CancelTickets():
                self._cancel(message)
            case Prefill():
                return self._submit(message)
            case Redirect():
                return self._role("prefill", PrefillRole).redirect(message.request_id, message.ticket)
            case Reissue():
                self._reissue(message.transfer_ids)
            case Reserve():
                return self._reserve(message)
            case Abort():
                for role in self.hosted.values():
                    role.abort(message.request_ids, self._reports)
            case DropOwner():
                for role in self.hosted.values():
                    role.drop_owner(message.owner, self._reports)
            case PeerLost():
                return self.lose_peer(message.name, message.incarnation)
            case _:
                return self._handle_switch(message)
        return None

    def lose_peer(self, name: str, incarnation: int) -> tuple[str, ...]:
        """Handles the loss of another worker in this and earlier incarnations: see `PeerLost`.

        May be called without a message, before the worker meets the next incarnation.
        """
        return self._peers.lose(NamedPeer(name, incarnation))

    def _drop_peer(self, name: str) -> tuple[str, ...]:
        return tuple(lost for role in self.hosted.values() for lost in role.drop_peer(name))

    def _handle_switch(self, message: Message[Any]) -> Any:
        """Handles messages of a role switch."""
        match message:
            case SetRoles():
                self._switch(message.roles)
            case Offload():
                self.roles, self._is_switching = message.roles, True
            case AskRemaining():
                return self._remaining(message.stages)
            case Pause():
                return self._role("decode", DecodeRole).stage.moving.pause(message.request_id)
            case Move():
                return self._role("decode", DecodeRole).stage.moving.move(message.request_id, message.ticket)
            case Resume():
                self._role("decode", DecodeRole).stage.moving.resume(message.request_id)
            case Onload():
                return self._onload(message.roles)
            case StagesClosed():
                for role in self.hosted.values():
                    role.drop_stages(message.name, message.stages, self._reports)
            case _:
                raise TypeError(f"a worker takes no {type(message).__name__}")
        return None

    def _role(self, stage: Stage, kind: type[RoleT]) -> RoleT:
        """Returns a role that runs. Raises UnavailableError for one that the worker does not have."""
        role = self.hosted.get(stage)
        if not isinstance(role, kind):
            raise lost_stage(stage)
        return role

    def _submit(self, message: Prefill) -> bool:
        """Submits a request, unless the role is missing: only merged roles work without a decode worker."""
        is_split = message.ticket is not None or message.awaits_ticket
        has_role = "prefill" in self.roles and (is_split or "decode" in self.roles)
        return has_role and self._role("prefill", PrefillRole).submit(message)

    def _reserve(self, message: Reserve) -> KVTicket | None:
        role = self.hosted.get("decode")
        return role.reserve(message) if isinstance(role, DecodeRole) and "decode" in self.roles else None

    def _cancel(self, message: CancelTickets) -> None:
        role = self.hosted.get("encode")
        if isinstance(role, EncodeRole):
            role.cancel(message)

    def _reissue(self, transfer_ids: Sequence[str]) -> None:
        role = self.hosted.get("prefill")
        if isinstance(role, PrefillRole):
            role.feeds.reissue(transfer_ids, self._reports)

    # Roles

    def _switch(self, roles: frozenset[Stage]) -> None:
        self._builder.check_roles(stages_of(roles) - self.hosted.keys())
        self._num_switches += roles != self._settled_roles
        self._is_switching = False
        self._set_roles(roles)
        if "decode" in self.hosted:  # answers that were paused to be moved and not taken elsewhere
            self._role("decode", DecodeRole).stage.moving.resume_all()

    def _set_roles(self, roles: frozenset[Stage]) -> None:
        self._bring_up(roles)
        self.roles = self._settled_roles = roles

    def _bring_up(self, roles: frozenset[Stage]) -> None:
        missing = stages_of(roles) - self.hosted.keys()
        if not missing:
            return
        with self._builder.building():
            self._builder.size(roles, missing)
            for stage in sorted(missing):
                self.hosted[stage] = self._build(stage, roles)
                if (pace := self._builder.settings.pace) is not None:
                    pace.slow(stage, self.hosted[stage])
        self._choose_lane()

    def _choose_lane(self) -> None:
        """Encodes beside other stages, if there are any, as `WorkerSettings.encode_beside` says."""
        role, settings = self.hosted.get("encode"), self._builder.settings
        if len(self.hosted) == 1 or self._wake is None or not settings.encode_beside:
            return
        if isinstance(role, EncodeRole):
            if self._beside is None:
                device = self._builder.placement.device
                self._beside = BesideThread(f"{self.name} encode", device, self._wake, settings.num_threads)
            role.stage.lane = self._beside

    @property
    def encoding_s(self) -> float:
        """Returns the seconds that a batch has been encoded for beside the turns. Thread-safe."""
        return self._beside.busy_s if self._beside is not None else 0.0

    def _onload(self, roles: frozenset[Stage]) -> OnloadTimes:
        """Starts the stages of roles. Raises ModelError, and InfeasibleError where a GPU has no room.

        On a GPU, stages that are given up and have no work left make room first: together, the pools of
        both would not fit.
        """
        self._builder.check_roles(stages_of(roles) - self.hosted.keys())
        start_s, before_s = time.perf_counter(), self._builder.weights_s
        if self._builder.placement.is_cuda:
            self._drop_drained(roles)
        self._bring_up(roles)
        if (pace := self._builder.settings.pace) is not None:
            pace.started(start_s)
        return OnloadTimes(self._builder.weights_s - before_s, time.perf_counter() - start_s)

    def _remaining(self, stages: frozenset[Stage]) -> RemainingWork:
        left = [role.remaining() for stage, role in self.hosted.items() if stage in stages]
        return RemainingWork(
            is_over=all(each.is_over for each in left),
            waiting=tuple(name for each in left for name in each.waiting),
            arriving=tuple(name for each in left for name in each.arriving),
            running=tuple(name for each in left for name in each.running),
        )

    def _build(self, stage: Stage, roles: frozenset[Stage]) -> Role:
        name = endpoint(self.name, stage)
        if stage == "encode":
            encode = self._builder.encode(name)
            if encode.store is not None and self._wake is not None:
                encode.store.on_look = self._wake
            return EncodeRole(self.name, encode, self._clock)
        if stage == "decode":
            return DecodeRole(self._builder.decode(name), self._clock)
        prefill = self._builder.prefill(name, decodes="decode" in roles)
        if prefill.engine.store is not None and self._wake is not None:
            prefill.engine.store.on_read = self._wake
        feeds = MediaFeeds(self._builder.adapter, prefill, self._builder.receiver(name))
        return PrefillRole(self.name, prefill, feeds, self._clock, self._tell)

    def _drop_drained(self, roles: frozenset[Stage]) -> None:
        """Drops stages that these roles do not need and that have no work left."""
        wanted = stages_of(roles)
        for stage in [stage for stage in self.hosted if stage not in wanted]:
            if not self.hosted[stage].has_work():
                self.hosted.pop(stage).close()
                self._builder.close(endpoint(self.name, stage))
        self._builder.drop_models(wanted | self.hosted.keys())

    # Work

    def step(self) -> bool:
        """Advances every role by one step. Returns whether there was any progress. Raises RankLostError."""
        self._builder.check_ranks()
        has_moved = [role.step(self._reports) for role in self.hosted.values()]
        if not self._is_switching and self.hosted.keys() != stages_of(self.roles):
            self._drop_drained(self.roles)
        self._has_moved = any(has_moved)
        self._is_load_unreported |= self._has_moved
        return self._has_moved

    def close(self) -> None:
        """Ends the threads and processes that the worker has started, and what it has pinned."""
        if self._beside is not None:
            self._beside.close()
        for role in self.hosted.values():
            role.close()
        self._builder.release()

    def has_work(self) -> bool:
        """Returns whether any work is left: then messages from other workers may need a step."""
        return any(role.has_work() for role in self.hosted.values())

    def take_report(self) -> WorkerReport | None:
        """Returns a new report; None if there is none. A worker that becomes idle reports just its load."""
        reports = self._reports
        is_at_rest = self._is_load_unreported and not self._has_moved
        if not (reports.events or reports.outputs or is_at_rest):
            return None
        self._is_load_unreported = False
        return self._report()

    def take_news(self) -> WorkerReport | None:
        """Returns a report, in the middle of a step, if there is anything to tell."""
        return self._report() if self._reports.events or self._reports.outputs else None

    def _report(self) -> WorkerReport:
        return WorkerReport(self.name, *self._reports.take(), self.load())

    def load(self) -> WorkerLoad:
        """Returns the load of all roles together."""
        loads = [role.load() for role in self.hosted.values()]
        return WorkerLoad(
            num_waiting=sum(load.num_waiting for load in loads),
            num_running=sum(load.num_running for load in loads),
            kv_usage=_highest([load.kv_usage for load in loads]),
            encoder_cache_usage=_highest([load.encoder_cache_usage for load in loads]),
            num_role_switches=self._num_switches,
            seq_usage=_highest([load.seq_usage for load in loads]),
            max_num_seqs=max((load.max_num_seqs for load in loads), default=0),
            counters=_summed([load.counters for load in loads]),
            stages=self._samples(),
            transports=self._builder.transport.routes(),
            memory=self._builder.memory(),
            work=InFlight(*map(sum, zip(*(load.work or InFlight() for load in loads), strict=True))),
        )

    def _samples(self) -> dict[Stage, StageSample]:
        """Returns samples of all stages, where anybody estimates the load."""
        if not self._builder.settings.samples_load:
            return {}
        return {stage: each for role in self.hosted.values() for stage, each in role.samples().items()}

    def check_integrity(self) -> None:
        """Raises AssertionError unless the state of all roles is consistent."""
        for role in self.hosted.values():
            role.check_integrity()


def _highest(usages: Sequence[float | None]) -> float | None:
    return max((usage for usage in usages if usage is not None), default=None)


def _summed(counters: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for each in counters:
        for name, count in each.items():
            sums[name] = sums.get(name, 0) + count
    return dict(sorted(sums.items()))
