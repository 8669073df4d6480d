"""Groups on their way to encoders: who has which ticket, and who takes the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from encoders.groups import MediaGroup
from epd.control.routing import Router
from epd.errors import UnavailableError
from epd.transfer.reception import Grant
from serve_app.fleet import Bulk, Fleet, WorkerLostError, send_surely
from serve_app.messages import CancelTickets, EncodeGroup, Reissue

_POLL_S = 0.5  # between looks at the clock
Allowed = Callable[[list[str]], list[str]]


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """A group that an encoder has. receiver: the prefill worker that granted it."""

    worker: str
    receiver: str
    grant: Grant
    group: MediaGroup


class EncodeDispatcher:
    """Shared by all requests of one orchestrator."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        *,
        max_backlog_patches: int,
        unavailable_s: float = 60.0,
        stall_s: float = 180.0,
    ) -> None:
        """max_backlog_patches: an encoder with more than that outstanding is given nothing more.

        unavailable_s, stall_s: to wait where there is no encoder, and where all of them do nothing.
        """
        self._fleet = fleet
        self._router = router
        self._max_backlog = max_backlog_patches
        self._dispatched: dict[str, _Dispatched] = {}
        self._has_room = asyncio.Event()
        self._unavailable_s = unavailable_s
        self._stall_s = stall_s
        self._freed_s = float("-inf")  # when an encoder was done with a group, in the event loop's time

    def __len__(self) -> int:
        """Tickets that encoders have."""
        return len(self._dispatched)

    def groups_at(self, worker: str) -> list[tuple[str, int]]:
        """The groups that an encoder has: request and number of the group."""
        mine = [each.grant for each in self._dispatched.values() if each.worker == worker]
        return [(grant.request_id, grant.group) for grant in mine]

    def encoders_of(self, request_id: str) -> frozenset[str]:
        """The encoders that have groups of a request."""
        return frozenset(
            each.worker for each in self._dispatched.values() if each.grant.request_id == request_id
        )

    def wake(self) -> None:
        """Encoders may have come or changed."""
        self._has_room.set()

    async def encoder(self, wanted: str | None = None, allowed: Allowed = list) -> str:
        """The encoder that takes the next group; waits until there is one with room.

        wanted: the one that should take it, as long as it is there. allowed: those of some encoders that may.
        Raises UnavailableError when there is no encoder for too long, or none gets done with anything.
        """
        clock = asyncio.get_running_loop().time
        start_s = alive_s = clock()
        while True:
            alive = self._alive()
            among = [wanted] if wanted is not None and wanted in alive else alive
            names = [
                name for name in among if self._router.in_flight(name).encode_patches < self._max_backlog
            ]
            names = allowed(names)
            if names:
                return self._router.encoder(names)
            alive_s = clock() if alive else alive_s
            self._check_wait(clock() - alive_s, clock() - max(start_s, self._freed_s))
            self._has_room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):  # wait_for may swallow a cancellation
                    await self._has_room.wait()

    def _check_wait(self, without_s: float, full_s: float) -> None:
        """without_s: since there was an encoder. full_s: since one was done with a group."""
        if without_s > self._unavailable_s:
            raise UnavailableError(f"no worker for encode since {without_s:.0f} s; see /health and retry")
        if full_s > self._stall_s:
            raise UnavailableError(f"no encoder finished a group for {full_s:.0f} s; retry later")

    def encoder_with(self, group: MediaGroup) -> str | None:
        """The encoder that may have the group in its cache."""
        return self._router.encoder_with(self._alive(), group.spec.key)

    def _alive(self) -> list[str]:
        return [info.name for info in self._fleet.workers.values() if info.takes("encode")]

    def book(self, worker: str, receiver: str, granted: Grant, group: MediaGroup) -> None:
        """The group is for this encoder; `give` follows."""
        self._dispatched[granted.ticket.transfer_id] = _Dispatched(worker, receiver, granted, group)
        self._router.add(worker, encode_patches=group.spec.num_patches)

    async def give(self, worker: str, message: EncodeGroup, frames: Bulk | None) -> bool:
        """Hands a booked group over. False if the encoder has no such role, or lacks it and has no frames.

        A worker that is lost meanwhile is as good as one that took it: its tickets are issued anew.
        """
        transfer_id = message.ticket.transfer_id
        dispatched = self._dispatched.get(transfer_id)
        if dispatched is None or not self._fleet.workers[dispatched.receiver].is_alive:
            return True  # after `PeerLost` the encoder would keep what nobody takes
        try:
            is_taken = await self._fleet.send("encode", worker, message, frames)
        except WorkerLostError:
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
        """The groups are where they are wanted."""
        for transfer_id in transfer_ids:
            dispatched = self._forget(transfer_id)
            if dispatched is not None:
                self._router.remember_group(dispatched.worker, dispatched.group.spec.key)

    async def drop_request(self, request_id: str) -> None:
        """Groups of a request that is over: who still wants one is granted it anew. Encoders are told."""
        by_worker: dict[str, list[str]] = {}
        for transfer_id, dispatched in list(self._dispatched.items()):
            if dispatched.grant.request_id == request_id:
                self._forget(transfer_id)
                by_worker.setdefault(dispatched.worker, []).append(transfer_id)
        for worker, ids in by_worker.items():
            await send_surely(self._fleet, "encode", worker, CancelTickets(tuple(ids)))

    async def reissue(self, receiver: str, ticket_ids: Iterable[str]) -> None:
        """Asks for the groups of these tickets to be granted anew."""
        ids = tuple(ticket_ids)
        for transfer_id in ids:
            self._forget(transfer_id)
        await send_surely(self._fleet, "prefill", receiver, Reissue(ids))

    async def take_back(self, worker: str, transfer_ids: Collection[str] | None = None) -> int:
        """Has groups that an encoder has, by default all, granted anew, for others. Returns how many."""
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
        """A worker is gone: what it should encode is granted anew, what should come to it is forgotten."""
        for transfer_id in [i for i, dispatched in self._dispatched.items() if dispatched.receiver == worker]:
            self._forget(transfer_id)
        await self._reissue_all(
            [i for i, dispatched in self._dispatched.items() if dispatched.worker == worker]
        )
        self.wake()

    def _forget(self, transfer_id: str) -> _Dispatched | None:
        dispatched = self._dispatched.pop(transfer_id, None)
        if dispatched is not None:
            self._router.add(dispatched.worker, encode_patches=-dispatched.group.spec.num_patches)
            self._freed_s = asyncio.get_running_loop().time()
            self.wake()
        return dispatched
