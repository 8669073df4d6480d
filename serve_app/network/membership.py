"""Keeps one process a member: registers it with the board, beats, and passes on each view."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from epd.control.recent import Recent
from epd.errors import UnavailableError
from epd.serve_app.network.link import Link, Listener, listen
from epd.serve_app.network.members import (
    BoardClient,
    Credentials,
    Kind,
    Member,
    ProcessAddress,
    Purpose,
    View,
)
from epd.serve_app.worker_info import WorkerInfo

logger = logging.getLogger(__name__)

_RETRY_S = 0.1  # between calls of a board that is being restarted
_MAX_LOST = 4096


class Membership:
    """Makes this process a member, at an address that it listens at. Used from one event loop.

    on_view: gets each new view
    on_ended: called with the reason once the process has been declared lost: it must end
    describe: returns the fields of this member that change all the time
    """

    def __init__(
        self, board: BoardClient, kind: Kind, place: ProcessAddress, purpose: Purpose | None = None
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self.on_view: Callable[[View], None] = lambda _view: None
        self.on_ended: Callable[[str], None] = lambda _reason: None
        self.describe: Callable[[], Mapping[str, Any]] = dict
        self.view = View(-1, {})
        self._board = board
        self._kind: Kind = kind
        self._place = place
        self.purpose = purpose or Purpose()
        self._listener: Listener | None = None
        self._credentials: Credentials | None = None
        self._member: Member | None = None
        self._lost: Recent[str, bool] = Recent(_MAX_LOST)  # epochs of others that are gone
        self._has_left = False

    @property
    def credentials(self) -> Credentials:
        assert self._credentials is not None
        return self._credentials

    @property
    def member(self) -> Member:
        assert self._member is not None
        return self._member

    @property
    def info(self) -> WorkerInfo:
        """Returns name and state of a worker, after it has joined."""
        assert self.member.info is not None
        return self.member.info

    async def join(self, on_link: Callable[[Link], None]) -> None:
        """Listens, registers, and returns once the board has answered. on_link: gets links of others."""
        self._credentials = await self._surely(lambda: self._board.credentials())
        self._listener = await listen(self._place.host, self._credentials.key, on_link)
        self._member = Member(
            epoch=self.epoch,
            kind=self._kind,
            address=self._listener.address,
            node_id=self._place.node_id,
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()),
            model=self.purpose.model,
            topology=self.purpose.topology,
            release=self.purpose.release,
            hang_s=self.purpose.hang_s,
            worker_class=self.purpose.worker_class,
        )
        while self.epoch not in self.view.members:
            await self._follow_once()

    async def update(self, **changes: Any) -> None:
        """Changes fields of this member, and registers them at once."""
        self._member = replace(self.member, **changes)
        with suppress(UnavailableError):  # it has left, and the board is being restarted
            await self._surely(lambda: self._board.follow(self.member, -1, self.credentials))

    def set(self, **changes: Any) -> None:
        """Changes fields of this member, of which the next call informs the board."""
        if changes:
            self._member = replace(self.member, **changes)

    async def run(self) -> None:
        """Follows the board until this process has left, or must end."""
        while not self._has_left:
            try:
                await self._follow_once()
            except UnavailableError:  # it has left, and the board is being restarted
                return
            if self.epoch not in self.view.members and not self._has_left:
                self.on_ended("it was declared lost")
                return

    async def leave(self) -> None:
        """Ends the membership of a process that has completed its work."""
        if self._has_left:
            return
        self._has_left = True
        if self._member is not None:
            try:
                async with asyncio.timeout(2.0):
                    await self._board.leave(self.epoch)
            except (UnavailableError, TimeoutError):
                logger.warning("the board was not informed that this process ends")
        if self._listener is not None:
            await self._listener.close()

    async def accuse(self, epoch: str, reason: str) -> None:
        """Declares another member lost.

        A board that takes the place of one that ended meanwhile hears of it once it shows that member: first
        it must hear of this one, as it does not while this one waits for it.
        """
        self._lost.set(epoch, True)
        try:
            await self._board.accuse(epoch, reason, self.epoch)
        except UnavailableError as error:
            logger.info("the board has not heard of a loss: %s", error)

    async def _follow_once(self) -> None:
        self.set(**self.describe())
        view = await self._surely(
            lambda: self._board.follow(self.member, self.view.version, self.credentials)
        )
        if view is None or self._has_left:
            return
        mine = view.members.get(self.epoch)
        if mine is not None and self.member.info is None and mine.info is not None:
            self._member = replace(self.member, info=mine.info)
        before, self.view = self.view, self._without_lost(view)
        if mine is not None:
            self._end_lost(before)
            self.on_view(self.view)
        # All at once: the board judges when the first of them has waited.
        reason = "its loss was handled before the board was restarted"
        again = [epoch for epoch in view.members if epoch not in self.view.members]
        await asyncio.gather(*(self.accuse(epoch, reason) for epoch in again))

    def _without_lost(self, view: View) -> View:
        """Leaves out members whose loss is handled here: a board that was restarted may take them back.

        Nobody has worked with one that was not ready. It may have joined just before the former board ended.
        """
        for epoch in self.view.members.keys() - view.members.keys():
            self._lost.set(epoch, self.view.members[epoch].is_ready)
        there = {epoch: member for epoch, member in view.members.items() if not self._lost.get(epoch)}
        return view if len(there) == len(view.members) else replace(view, members=there)

    def _end_lost(self, before: View) -> None:
        """Ends processes of this machine that are lost but may hang: nobody waits for them any more.

        A board that was restarted may not have heard yet of those that are joining.
        """
        is_same = self.view.board == before.board
        for member in before.members.values():
            is_gone = member.epoch not in self.view.members and member.epoch not in self.view.departed
            is_lost = is_gone and (member.is_ready or is_same)
            if is_lost and member.node_id == self._place.node_id and member.pid != os.getpid():
                end_process(member.pid, member.start_ticks)

    async def _surely(self, call: Callable[[], Any]) -> Any:
        """Calls the board, as often as needed while it is being restarted."""
        while True:
            try:
                return await call()
            except UnavailableError as error:
                logger.info("the board does not answer: %s", error)
                if self._has_left:
                    raise
                await asyncio.sleep(_RETRY_S)


def start_ticks(pid: int) -> int:
    """Returns when a process of this machine was started, in clock ticks; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def end_process(pid: int, ticks: int) -> None:
    """Ends a process, even a stopped one, unless its id is another one's by now."""
    if ticks and start_ticks(pid) == ticks:
        logger.warning("process %d is lost and is ended", pid)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
