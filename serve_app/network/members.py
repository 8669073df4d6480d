"""Describes the members of the application - fronts, media and stage workers - and what all of them see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from epd.control.elasticity.replicas import ReplicaAdvice
from epd.control.loss_policy import LossReport
from epd.control.recent import TrafficTotals
from epd.serve_app.network.link import Address
from epd.serve_app.worker_info import WorkerInfo

Kind = Literal["front", "media", "stage"]


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the application, as it describes itself.

    epoch: unique to the process; of a front, the owner of its requests
    address: where other members reach it
    pid, start_ticks: of its process; ids alone are given to other processes again
    model: members work together only with those of the same model
    topology, release: what a stage worker is to fill, and its configuration; workers of an older release
        are leaving, or will
    worker_class: whose part of the topology a stage worker is to fill; empty for those of no class
    hang_s: after this time of silence it is lost
    info: of a worker, given by the board; None before
    is_ready: whether it can be given work
    is_known: whether the other workers know its address, so that it may be given work; set by the board
    gpus: ids of the GPUs whose memory a stage worker can open
    num_waiting: requests in a front's queue
    oldest_age_s: of the oldest of them, when it became that
    traffic: of a front; what changes in it is in the next view, but makes no new one
    bounds: the least and most replicas of a worker's deployment, if Serve scales it
    advice: by the leading front, for each deployment that Serve scales
    losses: of a front: which of its requests were at workers that were lost, with times before the report
    claims: of a front: workers that it keeps for suspects
    """

    epoch: str
    kind: Kind
    address: Address
    node_id: str
    pid: int
    start_ticks: int = 0
    model: str = ""
    topology: str = ""
    release: str = ""
    worker_class: str = ""
    hang_s: float = 10.0
    info: WorkerInfo | None = None
    is_ready: bool = False
    is_known: bool = False
    gpus: tuple[str, ...] = ()
    num_waiting: int = 0
    oldest_age_s: float | None = None
    traffic: TrafficTotals = field(default_factory=TrafficTotals)
    bounds: tuple[int, int] | None = None
    advice: Mapping[str, ReplicaAdvice] = field(default_factory=dict)
    losses: LossReport = field(default_factory=LossReport)
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message over a link. kind: of who has opened it. epoch: of a member.

    version: of a view that shows a front
    """

    kind: Literal["front", "media", "stage", "board"]
    epoch: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """Where a process runs. host: its address for other members. node_id: of its machine."""

    host: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a process is there for; see `Member`."""

    model: str = ""
    topology: str = ""
    release: str = ""
    hang_s: float = 10.0
    worker_class: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """The members at one time.

    members: by epoch
    leader: the epoch of the front that switches roles; empty without fronts
    departed: epochs of members that have completed their work and left
    board: names the board; one that takes its place has another name
    """

    version: int
    members: Mapping[str, Member]
    leader: str = ""
    departed: frozenset[str] = frozenset()
    board: str = ""

    @property
    def advice(self) -> Mapping[str, ReplicaAdvice]:
        """Returns the leading front's advice, by deployment; empty without a leader."""
        leader = self.members.get(self.leader)
        return {} if leader is None else leader.advice

    def bounds(self, kind: Kind) -> tuple[int, int] | None:
        """Returns between which numbers Serve scales workers of a kind; None if it does not."""
        return max((each.bounds for each in self.of_kind(kind) if each.bounds), default=None)

    def of_kind(self, kind: Kind) -> list[Member]:
        return [member for member in self.members.values() if member.kind == kind]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the members of one application share. key: of all links. fleet_id: see `PoolFiles`."""

    key: bytes = field(repr=False)
    fleet_id: str


class BoardClient(Protocol):
    """Calls the board, wherever it is. Every method raises UnavailableError while it is being restarted."""

    async def credentials(self) -> Credentials:
        """Returns those of the application, for a new member."""
        ...

    async def follow(self, member: Member, seen: int, credentials: Credentials) -> View | None:
        """Registers a member as it is now. Returns the next view after version `seen`; None after a while.

        A view without the member says that it has been declared lost, and must end.
        """
        ...

    async def leave(self, epoch: str) -> None:
        """Removes a member that has completed its work."""
        ...

    async def accuse(self, epoch: str, reason: str, accuser: str = "") -> None:
        """Declares a member lost that does not answer another one. accuser: the epoch of that one."""
        ...


class KnownFronts:
    """Remembers the fronts that a worker serves, to find out which of them are gone."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}  # by epoch, the version of a view that shows it

    def add(self, hello: Hello) -> None:
        """Notes a front that has opened a link."""
        self._since[hello.epoch] = hello.version

    def lost(self, view: View) -> list[str]:
        """Returns known fronts that are gone from a view, once. Those that are newer than it are not."""
        there = {member.epoch: view.version for member in view.of_kind("front")}
        newer = {epoch: since for epoch, since in self._since.items() if since > view.version}
        lost = [epoch for epoch in self._since if epoch not in newer and epoch not in there]
        self._since = newer | there
        return lost
