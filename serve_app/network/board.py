"""Keeps the list of the members: names, roles and incarnations of workers, losses, and the leading front.

    member  --follow: how it is now, which view it has seen-->   Board
            <--the next view, or nothing after a while--

One call registers, beats, acknowledges and subscribes. A member is lost when the board's link to it ends,
when it is silent for too long, or when another member accuses it; a view without it says so. A board that was
restarted knows nothing, and waits for a moment in which the members call it with what they are.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from epd.control.elasticity.assignment import roles_for_newcomer
from epd.machine import Looks, excused
from epd.serve_app.network.calls import Channel
from epd.serve_app.network.link import Link, LinkClosedError, connect
from epd.serve_app.network.members import Credentials, Hello, Member, View
from epd.serve_app.network.memory import new_fleet_id
from epd.serve_app.task_group import Tasks
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage, role_letters, topology_part

logger = logging.getLogger(__name__)

_WAIT_S = 0.5  # of a call for a newer view
_TICK_S = 0.25  # between checks for silent members
# After a restart, until views are given. Ray fails calls of an actor that it restarts only after 2 s.
_REGROUP_S = 6.0
_TELL_S = 1.0  # after that, for members to say whom they know to be lost
_MEET_S = 2.0  # for the workers to hear of a new one
_REPLACED_S = 3.0  # of silence, of a worker while another one comes
_LOADING_S = 60.0  # of silence, while a member loads its weights
_MAX_ENDED = 4096
_KEY_BYTES = 32
_VIDEO: frozenset[Stage] = frozenset({"video"})


@dataclass(slots=True)
class _Entry:
    """A member that is there.

    order: of its arrival
    heard_s: of its last call
    seen: the last view that it has seen
    traffic_seen: the last count of changed traffic that it has seen
    ready_version, ready_s: the first view in which it is ready, and when that was
    """

    member: Member
    order: int
    heard_s: float
    seen: int = -1
    traffic_seen: int = 0
    ready_version: int = -1
    ready_s: float = 0.0
    link: Link | None = None


class Board:
    """Keeps the members of one application. Used from one event loop.

    hang_s: a member that does not call for this time is lost; by default what it says of itself
    is_restarted: whether members may exist that it does not know of
    """

    def __init__(self, *, hang_s: float | None = None, is_restarted: bool = False) -> None:
        self._name, self._hang_s = secrets.token_hex(4), hang_s
        self._regrouped_s = time.monotonic()
        self._credentials: Credentials | None = None
        self._entries: dict[str, _Entry] = {}
        self._ended: deque[str] = deque(maxlen=_MAX_ENDED)
        self._departed: deque[str] = deque(maxlen=_MAX_ENDED)
        self._incarnations: dict[str, int] = {}
        self._accusations: list[tuple[str, str, str]] = []  # whom, why, and by whom
        self._vacant: dict[str, Member] = {}  # lost workers whose places nobody has, by name
        self._num_arrived = 0
        self._num_traffic = 0  # changes of any front's traffic
        # Versions of a board that was restarted follow those that members have seen.
        self._version = int(time.time() * 1000)
        self._has_former = False
        if is_restarted:
            self._follow_former()
        self._changed = asyncio.Event()
        self._tasks = Tasks()
        self._is_watching = False
        self.empty_since_s = time.monotonic()

    # Calls of members

    async def credentials(self) -> Credentials:
        """See `BoardClient`."""
        if self._credentials is None:
            await self._regroup()
        if self._credentials is None:
            self._credentials = Credentials(secrets.token_bytes(_KEY_BYTES), new_fleet_id())
        return self._credentials

    async def follow(self, member: Member, seen: int, credentials: Credentials) -> View | None:
        """See `BoardClient`."""
        self._credentials = self._credentials or credentials
        if not self._is_watching:
            self._is_watching = True
            self._tasks.spawn(self._watch_silence())
        if member.epoch in self._ended:
            return self._view()
        if self._is_of_former(member, seen):
            self._follow_former()
        self._version = max(self._version, seen)
        if member.info is None and member.kind != "front":
            await self._regroup()
        self._register(member, seen)
        await self._regroup()
        if seen >= self._version:
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    await self._changed.wait()
        if member.epoch in self._entries:
            self._entries[member.epoch].heard_s = time.monotonic()
        return self._view() if self._version > seen or self._has_traffic(member) else None

    def _has_traffic(self, member: Member) -> bool:
        """Returns whether fronts have reported traffic since this one has seen it."""
        entry = self._entries.get(member.epoch)
        if entry is None or member.kind != "front" or entry.traffic_seen == self._num_traffic:
            return False
        entry.traffic_seen = self._num_traffic
        return True

    async def leave(self, epoch: str) -> None:
        """See `BoardClient`."""
        self._departed.append(epoch)
        self._remove(epoch)

    async def accuse(self, epoch: str, reason: str, accuser: str = "") -> None:
        """See `BoardClient`."""
        self._accusations.append((epoch, reason, accuser))
        await self._regroup()
        await asyncio.sleep(max(0.0, self._told_s - time.monotonic()))
        self._judge()

    def _judge(self) -> None:
        """Declares accused members lost, those with most accusers first.

        Others end their links to a member that is lost, which looks to it as if all of them were: it accuses
        nobody. A board that was restarted knows it by its many accusers, or does not know it at all.
        """
        accusations, self._accusations = self._accusations, []
        numbers = Counter(epoch for epoch, _ in {(epoch, accuser) for epoch, _, accuser in accusations})
        for epoch, reason, accuser in sorted(accusations, key=lambda each: -numbers[each[0]]):
            if not accuser or accuser in self._entries:
                self._lose(epoch, reason)

    def _is_of_former(self, member: Member, seen: int) -> bool:
        """Returns whether a member is the first to show this board that it takes the place of another one."""
        is_known = self._has_former or member.epoch in self._entries
        return not is_known and (seen >= 0 or member.is_ready)

    def _follow_former(self) -> None:
        """Takes the place of a former board, whose members call within some seconds."""
        self._regrouped_s = time.monotonic() + _REGROUP_S
        self._has_former = True

    async def _regroup(self) -> None:
        """Waits until members that a former board knew have had time to call."""
        if (left_s := self._regrouped_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)

    @property
    def _told_s(self) -> float:
        """Returns when members have had time to say whom a former board had lost; they wait meanwhile."""
        return self._regrouped_s + (_TELL_S if self._has_former else 0.0)

    # Members

    def _register(self, member: Member, seen: int) -> None:
        entry = self._entries.get(member.epoch)
        if entry is None:
            entry = None if self._is_late(member, seen) else self._admit(member)
            if entry is None:
                self._ended.append(member.epoch)
                return
        member = replace(member, info=member.info or entry.member.info, is_known=entry.member.is_known)
        before, entry.member = entry.member, member
        if member.traffic != before.traffic:
            self._num_traffic += 1
            before = replace(before, traffic=member.traffic)
        if member != before:
            if member.is_ready and not before.is_ready:
                entry.ready_version, entry.ready_s = self._version + 1, time.monotonic()
            self._change()
        entry.heard_s = time.monotonic()
        entry.seen = max(entry.seen, seen)
        self._introduce()

    def _lose_replaced(self, newcomer: Member) -> None:
        """Declares silent workers lost when one more comes than is wanted: Serve may have found them dead.

        While a release comes up, the next one is no replacement, and a busy machine may delay calls.
        """
        if self._has_all(newcomer):
            for entry in self._workers_like(newcomer):
                silent_s = time.monotonic() - max(entry.heard_s, self._regrouped_s)
                if entry.member.is_ready and silent_s > _REPLACED_S:
                    self._lose(entry.member.epoch, "silent while another worker comes")

    def _workers_like(self, member: Member) -> list[_Entry]:
        """Returns the stage workers of a member's release."""
        return [
            entry
            for entry in self._entries.values()
            if entry.member.kind == "stage" and entry.member.release == member.release
        ]

    def _has_all(self, member: Member) -> bool:
        """Returns whether as many stage workers of a member's release are there as are wanted."""
        return len(self._workers_like(member)) >= topology_part(member.topology).num_workers

    def _forget_filled(self, member: Member) -> None:
        """Forgets the places of a release that others have under other names: they came before the loss."""
        if self._vacant and self._has_all(member):
            vacant = self._vacant.items()
            self._vacant = {name: lost for name, lost in vacant if lost.release != member.release}

    def _is_late(self, member: Member, seen: int) -> bool:
        """Returns whether a member that a former board knew calls after all others were told that it is gone.

        They have given its work to others, and refuse what names it.
        """
        return self._has_former and (seen >= 0 or member.is_ready) and time.monotonic() > self._regrouped_s

    def _admit(self, member: Member) -> _Entry | None:
        """Adds a new member. Returns None if its name is a later one's by now."""
        if member.kind == "stage" and member.info is None:
            self._lose_replaced(member)
        if member.kind != "front":
            info = member.info or self._placed(member)
            self._lose_former(info)
            if info.incarnation < self._incarnations.get(info.name, 0) or info.name in self._infos():
                return None
            self._incarnations[info.name] = info.incarnation
            self._vacant.pop(info.name, None)
            member = replace(member, info=info)
        entry = _Entry(member, self._num_arrived, time.monotonic())
        self._num_arrived += 1
        self._entries[member.epoch] = entry
        if _gets_a_place(member):
            self._forget_filled(member)
        self._change()
        self._tasks.spawn(self._watch(entry))
        return entry

    def _lose_former(self, info: WorkerInfo) -> None:
        """Declares an earlier incarnation lost: a former board had given its name to this one."""
        for entry in list(self._entries.values()):
            former = entry.member.info
            if former and former.name == info.name and former.incarnation < info.incarnation:
                self._lose(entry.member.epoch, "another worker has its place")

    def _infos(self) -> dict[str, WorkerInfo]:
        """Returns the workers by name."""
        infos = [entry.member.info for entry in self._entries.values()]
        return {info.name: info for info in infos if info is not None}

    def _placed(self, member: Member) -> WorkerInfo:
        """Returns name and roles for a new worker: of a lost one, else of what the topology lacks most."""
        taken = self._infos()
        if member.kind == "media":
            name, roles = _free_name("v", taken), _VIDEO
        else:
            name, roles = self._stage_place(member, taken)
        return WorkerInfo(name, roles, is_alive=True, incarnation=self._next_incarnation(name))

    def _next_incarnation(self, name: str) -> int:
        """Returns one that no worker of this name has had, also of those that were lost with a former board.

        Nobody reports them, but survivors know them as lost. No board has given more than its version.
        """
        following = self._incarnations.get(name, 0) + 1
        return max(following, self._version + 1) if self._has_former else following

    def _stage_place(self, member: Member, taken: Mapping[str, WorkerInfo]) -> tuple[str, frozenset[Stage]]:
        wanted = topology_part(member.topology)
        kinds = {worker.roles for worker in wanted.workers()}
        for name, lost in self._vacant.items():
            assert lost.info is not None
            is_like = lost.worker_class == member.worker_class and lost.info.own_roles in kinds
            if name not in taken and is_like:
                return name, lost.info.own_roles
        others = [
            (each.member.node_id, staying)
            for each in self._entries.values()
            if (info := each.member.info) and each.member.release == member.release and info.roles != _VIDEO
            if (staying := info.own_roles - info.leaving)
        ]
        here = [roles for node_id, roles in others if node_id == member.node_id]
        roles = roles_for_newcomer(wanted, [roles for _, roles in others], here=here)
        return _free_name(member.worker_class or role_letters(roles), taken), roles

    def _introduce(self) -> None:
        """Marks ready members as known, once the workers that were there before have seen them."""
        for entry in self._entries.values():
            if entry.member.is_ready and not entry.member.is_known and self._is_met(entry):
                entry.member = replace(entry.member, is_known=True)
                self._change()

    def _is_met(self, entry: _Entry) -> bool:
        if entry.member.kind != "stage" or time.monotonic() - entry.ready_s > _MEET_S:
            return True
        return all(
            each.seen >= entry.ready_version
            for each in self._entries.values()
            if each is not entry and each.member.kind == "stage" and each.member.is_ready
        )

    def _lose(self, epoch: str, reason: str) -> None:
        entry = self._remove(epoch)
        if entry is None:
            return
        name = entry.member.info.name if entry.member.info else epoch
        logger.warning("%s '%s' is lost: %s", entry.member.kind, name, reason)
        if _gets_a_place(entry.member):
            self._vacant[name] = entry.member
            self._forget_filled(entry.member)

    def _remove(self, epoch: str) -> _Entry | None:
        self._ended.append(epoch)
        entry = self._entries.pop(epoch, None)
        if entry is None:
            return None
        if entry.link is not None:
            entry.link.close()
        if not self._entries:
            self._vacant.clear()
            self.empty_since_s = time.monotonic()
        self._introduce()
        self._change()
        return entry

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _view(self) -> View:
        fronts = [entry for entry in self._entries.values() if entry.member.kind == "front"]
        leader = min(fronts, key=lambda entry: entry.order, default=None)
        return View(
            self._version,
            {epoch: entry.member for epoch, entry in self._entries.items()},
            leader.member.epoch if leader else "",
            frozenset(self._departed),
            self._name,
        )

    def __len__(self) -> int:
        """Returns the number of members."""
        return len(self._entries)

    # Losses

    async def _watch(self, entry: _Entry) -> None:
        """Holds a link to a member, whose end is the end of its process."""
        credentials = await self.credentials()
        try:
            link = await connect(entry.member.address, credentials.key)
        except LinkClosedError as error:
            logger.warning("%s", error)  # if it is gone, it will be silent
            return
        entry.link = link
        channel = Channel(link)
        channel.on_close = lambda reason: self._lose(entry.member.epoch, reason)
        channel.push(Hello("board"))
        if entry.member.epoch not in self._entries:
            link.close()

    async def _watch_silence(self) -> None:
        """Finds silent members. A time without a core does not count: nobody could be heard."""
        looks = Looks(_TICK_S, time.monotonic())
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            late_s = looks.late_s(now_s)
            for entry in self._entries.values():
                entry.heard_s = excused(entry.heard_s, late_s, now_s)
            for epoch, entry in list(self._entries.items()):
                hang_s = self._hang_s or entry.member.hang_s
                patience_s = hang_s if entry.member.is_ready else max(hang_s, _LOADING_S)
                # Those that called while the board regrouped still wait for its answer.
                if now_s - max(entry.heard_s, self._told_s) > patience_s:
                    self._lose(epoch, f"silent for {patience_s:g} s")
            self._introduce()

    async def close(self) -> None:
        """Ends its links."""
        self._tasks.cancel()
        await self._tasks.wait()
        for entry in self._entries.values():
            if entry.link is not None:
                entry.link.close()


def _free_name(prefix: str, taken: Mapping[str, object]) -> str:
    number = 0
    while f"{prefix}{number}" in taken:
        number += 1
    return f"{prefix}{number}"


def _gets_a_place(member: Member) -> bool:
    """Returns whether a member is one of a topology's workers, which have places there."""
    return member.kind == "stage" and bool(member.topology)
