"""Dispatches groups to encoders: tracks which encoder has which ticket, and chooses the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from epd.control.routing import Router
from epd.encode.sharding import Sharding, sends_groups
from epd.encoders.groups import MediaGroup
from epd.errors import UnavailableError
from epd.serve_app.fleet import Bulk, Fleet, FramesLostError, WorkerLostError, send_surely
from epd.serve_app.messages import CancelTickets, EncodeGroup, Reissue
from epd.serve_app.worker.peer_losses import NamedPeer
from epd.transfer.transfers import Grant

_POLL_S = 0.5  # between checks of the time
Allowed = Callable[[list[str]], list[str]]


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """A group that an encoder has. receiver: the prefill worker that granted it."""

    worker: str
    receiver: str
    grant: Grant
    group: MediaGroup


class Encoders:
    """Chooses the encoder of the next group, and waits for room at one."""

    def __init__(
        self, fleet: Fleet, router: Router, max_backlog_patches: int, unavailable_s: float, stall_s: float
    ) -> None:
        """Arguments as of `EncodeDispatcher`."""
        self._fleet = fleet
        self._router = router
        self._max_backlog = max_backlog_patches
        self._has_room = asyncio.Event()
        self._unavailable_s = unavailable_s
        self._stall_s = stall_s
        self._freed_s = float("-inf")  # when an encoder last completed a group, in the event loop's time

    def wake(self) -> None:
        """Rechecks the encoders, which may have been added or changed."""
        self._has_room.set()

    def freed(self) -> None:
        """Notes that an encoder has completed a group, or has it no longer."""
        self._freed_s = asyncio.get_running_loop().time()
        self._has_room.set()

    async def next(
        self,
        wanted: str | None = None,
        allowed: Allowed = list,
        needs_room: Callable[[], bool] = lambda: True,
        num_patches: int = 1,
    ) -> str:
        """Returns the encoder that takes the next group; waits until one has room.

        wanted: the encoder that should take it, while it is alive. allowed: filters encoders that may.
        needs_room: whether the group can wait for others to be encoded. num_patches: of the group.
        Raises UnavailableError if no encoder is alive, or completes anything, for too long.
        """
        clock = asyncio.get_running_loop().time
        start_s = alive_s = clock()
        while True:
            alive = self._alive()
            among = [wanted] if wanted is not None and wanted in alive else alive
            is_any = not needs_room()
            backlog, most = self._router.encode_backlog, self._max_backlog
            names = allowed([name for name in among if is_any or backlog(name) < most])
            if names:
                return self._router.encoder(names, num_patches=num_patches)
            alive_s = clock() if alive else alive_s
            self._check_wait(clock() - alive_s, clock() - max(start_s, self._freed_s))
            self._has_room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):  # wait_for may swallow a cancellation
                    await self._has_room.wait()

    def _check_wait(self, without_s: float, full_s: float) -> None:
        """Checks waiting times. without_s: since an encoder existed. full_s: since one completed a group."""
        if without_s > self._unavailable_s:
            raise UnavailableError(f"no worker for encode since {without_s:.0f} s; see /health and retry")
        if full_s > self._stall_s:
            raise UnavailableError(f"no encoder finished a group for {full_s:.0f} s; retry later")

    def preferred(self, wanted: str | None, num_patches: int) -> str | None:
        """Returns the encoder that the next group should wait for; None if none is alive.

        wanted: as in `next`. num_patches: of the group.
        """
        alive = self._alive()
        return self._router.encoder(alive, wanted, num_patches) if alive else None

    def with_group(self, group: MediaGroup) -> str | None:
        """Returns the encoder that may have the group in its cache."""
        return self._router.contents.encoder(self._alive(), group.spec.key)

    def sends_groups(self, sharding: Sharding, prefill_worker: str) -> bool:
        """Returns whether groups of a request go from encoders to another worker."""
        return sends_groups(sharding, self._alive(), prefill_worker)

    def _alive(self) -> list[str]:
        return [info.name for info in self._fleet.workers.values() if info.takes("encode")]


class EncodeDispatcher:
    """Dispatches the groups of all requests of one orchestrator. encoders: chooses who gets the next one."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        *,
        max_backlog_patches: int,
        unavailable_s: float = 60.0,
        stall_s: float = 180.0,
    ) -> None:
        """Starts without groups in flight.

        max_backlog_patches: an encoder with more outstanding patches gets no more groups
        unavailable_s: how long to wait while no encoder is alive
        stall_s: how long to wait while no encoder completes a group
        """
        self.encoders = Encoders(fleet, router, max_backlog_patches, unavailable_s, stall_s)
        self._fleet = fleet
        self._router = router
        self._dispatched: dict[str, _Dispatched] = {}

    def __len__(self) -> int:
        """Returns the number of tickets that encoders have."""
        return len(self._dispatched)

    def groups_at(self, worker: str) -> list[tuple[str, int]]:
        """Returns the groups that an encoder has: request and number of the group."""
        mine = [each.grant for each in self._dispatched.values() if each.worker == worker]
        return [(grant.request_id, grant.group) for grant in mine]

    def encoders_of(self, request_id: str) -> frozenset[str]:
        """Returns the encoders that have groups of a request."""
        return frozenset(
            each.worker for each in self._dispatched.values() if each.grant.request_id == request_id
        )

    def record(self, worker: str, receiver: str, granted: Grant, group: MediaGroup) -> None:
        """Reserves this encoder for the group; `give` follows."""
        self._dispatched[granted.ticket.transfer_id] = _Dispatched(worker, receiver, granted, group)
        self._router.add(worker, encode_patches=group.spec.num_patches)

    async def give(self, worker: str, message: EncodeGroup, frames: Bulk | None) -> bool:
        """Sends a reserved group. Returns False if the encoder lacks the role, or both group and frames.

        A worker that is lost meanwhile counts as having taken it: its tickets are reissued, as is the ticket
        of a group whose frames are lost.
        """
        transfer_id = message.ticket.transfer_id
        dispatched = self._dispatched.get(transfer_id)
        receiver = None if dispatched is None else self._fleet.workers.get(dispatched.receiver)
        if receiver is None or not receiver.is_alive:
            return True  # after `PeerLost` the encoder would keep what is never fetched
        message = replace(message, incarnation=receiver.incarnation)
        try:
            is_taken = await self._fleet.send("encode", worker, message, frames)
        except WorkerLostError:
            return True
        except FramesLostError:
            await self.reissue(receiver.name, [transfer_id])
            return True
        except UnavailableError:
            is_taken = False
        except BaseException:
            self._forget(transfer_id)
            raise
        if not is_taken:
            self._forget(transfer_id)
        return is_taken

    def arrived(self, transfer_ids: Iterable[str]) -> None:
        """Notes that the groups are at their receivers."""
        for transfer_id in transfer_ids:
            dispatched = self._forget(transfer_id)
            if dispatched is not None:
                self._router.contents.remember_group(dispatched.worker, dispatched.group.spec.key)

    async def drop_request(self, request_id: str, readers: Iterable[NamedPeer] = ()) -> None:
        """Drops the groups of an ended request, notifies encoders, and regrants groups others still want.

        readers: encoders that may not have ended their readings
        """
        by_worker: dict[str, list[str]] = {reader.name: [] for reader in readers}
        for transfer_id, dispatched in list(self._dispatched.items()):
            if dispatched.grant.request_id == request_id:
                self._forget(transfer_id)
                by_worker.setdefault(dispatched.worker, []).append(transfer_id)
        for worker, ids in by_worker.items():
            await send_surely(self._fleet, "encode", worker, CancelTickets(tuple(ids), request_id))

    async def reissue(self, receiver: str, ticket_ids: Iterable[str]) -> None:
        """Asks receivers to grant the groups of these tickets again."""
        ids = tuple(ticket_ids)
        for transfer_id in ids:
            self._forget(transfer_id)
        await send_surely(self._fleet, "prefill", receiver, Reissue(ids))

    async def take_back(self, worker: str, transfer_ids: Collection[str] | None = None) -> int:
        """Regrants an encoder's groups, by default all, to other encoders. Returns their number."""
        ids = [
            transfer_id
            for transfer_id, dispatched in self._dispatched.items()
            if dispatched.worker == worker and (transfer_ids is None or transfer_id in transfer_ids)
        ]
        if ids:
            await send_surely(self._fleet, "encode", worker, CancelTickets(tuple(ids)))
            await self._reissue_all(ids)
        return len(ids)

    async def _reissue_all(self, transfer_ids: Collection[str]) -> None:
        by_receiver: dict[str, list[str]] = {}
        for transfer_id in transfer_ids:
            if transfer_id in self._dispatched:
                by_receiver.setdefault(self._dispatched[transfer_id].receiver, []).append(transfer_id)
        for receiver, ids in by_receiver.items():
            await self.reissue(receiver, ids)

    async def lost(self, worker: str) -> None:
        """Handles a lost worker: groups it should encode are regranted, groups bound for it are dropped."""
        for transfer_id in [i for i, dispatched in self._dispatched.items() if dispatched.receiver == worker]:
            self._forget(transfer_id)
        await self._reissue_all(
            [i for i, dispatched in self._dispatched.items() if dispatched.worker == worker]
        )
        self.encoders.wake()

    def _forget(self, transfer_id: str) -> _Dispatched | None:
        dispatched = self._dispatched.pop(transfer_id, None)
        if dispatched is not None:
            self._router.add(dispatched.worker, encode_patches=-dispatched.group.spec.num_patches)
            self.encoders.freed()
        return dispatched
