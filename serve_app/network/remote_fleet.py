"""Implements a front's fleet: workers of other processes, which belong to no front, over links.

board    --views: who is there-->         RemoteFleet   links to each worker that is known to the others
workers  --reports of own requests-->                   a worker whose link ends is lost, for all fronts
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from epd.errors import EPDError, InternalError, UnavailableError
from epd.serve_app.fleet import (
    Bulk,
    FleetBroken,
    FleetEvent,
    WorkerBack,
    WorkerChanged,
    WorkerLost,
    WorkerLostError,
    state_after,
)
from epd.serve_app.messages import Message, ReplyT, WorkerReport
from epd.serve_app.network.calls import Answer, Channel, Channels
from epd.serve_app.network.link import Link, LinkClosedError, LinkTimeoutError, connect
from epd.serve_app.network.members import BoardClient, Hello, Member, ProcessAddress, Purpose, View
from epd.serve_app.network.membership import Membership
from epd.serve_app.network.wire import BulkPlace, FetchCall, Fetched, FrontLost, ReleaseBulk, WorkerCall
from epd.serve_app.task_group import Loops, Tasks
from epd.serve_app.worker_info import EVERY_STAGE, WorkerInfo
from epd.topology import Stage

logger = logging.getLogger(__name__)

_ASK_S = 2.0  # for the answers of other fronts


class RemoteBulk:
    """Refers to frames at a media worker, which are released when nobody refers to them any more."""

    def __init__(self, place: BulkPlace, release: Callable[[], None]) -> None:
        self.place = place
        weakref.finalize(self, release)


@dataclass(slots=True)
class _Worker:
    """A worker that this front knows. channel: None until connected, and after the loss."""

    member: Member
    channel: Channel | None = None


class OtherFronts:
    """Asks the other fronts over the same workers, and answers them. Used from one event loop.

    answers: how this front answers what another one asks, by the type of what is asked
    is_closed: whether the fleet is: then nothing more is told
    """

    def __init__(self, membership: Membership) -> None:
        self.answers: dict[type, Callable[[Any], Awaitable[Any]]] = {}
        self._membership = membership
        self._channels: Channels | None = None
        self._tasks = Tasks()
        self.is_closed = False

    def open(self) -> None:
        """Lets others be asked, once this front is a member."""
        hello = Hello("front", self._membership.epoch)
        self._channels = Channels(self._membership.credentials.key, hello)

    async def close(self) -> None:
        """Ends what is asked and answered."""
        self._tasks.cancel()
        await self._tasks.wait()
        if self._channels is not None:
            self._channels.close()

    def accept(self, link: Link) -> None:
        """Takes a link: of the board, which watches this process, or of another front."""
        Channel(link).on_call = self._take_ask

    def _take_ask(self, value: Any, answer: Answer) -> None:
        self._tasks.spawn(self._answer(value, answer))

    async def _answer(self, value: Any, answer: Answer) -> None:
        try:
            answer(await self.answers.get(type(value), _refuse)(value))
        except EPDError as error:
            answer(error)
        except Exception as error:
            logger.exception("what another front asked was not answered")
            answer(InternalError.of(error))

    async def ask_leader(self, value: Any) -> Any:
        """Asks the leading front. Raises UnavailableError without one, and what it answers with."""
        view = self._membership.view
        leader = view.members.get(view.leader)
        if leader is None or self._channels is None:
            raise UnavailableError("no replica of the server leads at the moment; send the request again")
        return await self._channels.call(leader.address, value)

    def among(self, view: View) -> list[Member]:
        """Returns the other fronts over the same workers."""
        own, model = self._membership.epoch, self._membership.purpose.model
        return [each for each in view.of_kind("front") if each.epoch != own and each.model == model]

    async def ask(self, value: Any) -> list[Any]:
        """Asks all of them. Returns the answers of those that give one within `_ASK_S`."""
        others, channels = self.among(self._membership.view), self._channels
        if not others or channels is None:
            return []
        asked = [self._tasks.spawn(_answer_of(channels, each, value)) for each in others]
        answered, late = await asyncio.wait(asked, timeout=_ASK_S)
        for each in late:
            each.cancel()
        results = [each.result() for each in asked if each in answered]
        return [result for result in results if result is not None]

    def tell(self, value: Any) -> None:
        """Tells all of them, and waits for no answer."""
        if not self.is_closed:
            self._tasks.spawn(self.ask(value))

    def publish(self, **changes: Any) -> None:
        """Changes what other members see of this front, at once."""
        self._membership.set(**changes)
        self._tasks.spawn(self._membership.update())


class _WorkerLinks:
    """Follows the workers of the views, with a link to each.

    infos: of all workers that were linked, by name
    is_closed: whether the fleet is, or is lost: then no end of a link is a loss
    """

    def __init__(self, membership: Membership, tell: Callable[[FleetEvent], None]) -> None:
        """Starts without workers. tell: gets what happens to them."""
        self.infos: dict[str, WorkerInfo] = {}
        self._workers: dict[str, _Worker] = {}
        self._membership = membership
        self._tell = tell
        self._tasks = Tasks()
        self.is_closed = False

    async def close(self) -> None:
        """Ends the links."""
        self._tasks.cancel()
        await self._tasks.wait()
        for worker in self._workers.values():
            if worker.channel is not None:
                worker.channel.close()

    def member(self, name: str) -> Member:
        """Returns where a worker that is there runs. Raises KeyError for others."""
        return self._workers[name].member

    def channel_to(self, target: str) -> Channel:
        """Returns the channel to a worker. Raises WorkerLostError."""
        worker = self._workers.get(target)
        if worker is None or worker.channel is None:
            raise WorkerLostError(f"worker '{target}' is gone; another one takes its place")
        return worker.channel

    def take_view(self, view: View) -> None:
        """Ends the links to workers that are gone, and begins those to new ones."""
        model = self._membership.purpose.model
        there = {
            _info(member).name: member
            for member in view.members.values()
            if member.kind != "front" and member.is_ready and member.is_known and member.model == model
        }
        for name, worker in list(self._workers.items()):
            if name not in there or there[name].epoch != worker.member.epoch:
                is_planned = worker.member.epoch in view.departed
                self._lose(
                    name, "it has left" if is_planned else "its process has ended", is_planned=is_planned
                )
        for name, member in there.items():
            if name not in self._workers:
                self._workers[name] = _Worker(member)
                self._tasks.spawn(self._connect(name, member))

    async def _connect(self, name: str, member: Member) -> None:
        try:
            link = await self._linked(name, member)
        except LinkClosedError as error:
            if self._is_current(name, member) and not self.is_closed:
                del self._workers[name]
                await self._membership.accuse(member.epoch, str(error))
            return
        channel = Channel(link)
        if self.is_closed or not self._is_current(name, member):
            channel.close()
            return
        channel.on_push = self._take_push
        channel.on_close = lambda reason: self._end(name, member, reason)
        channel.push(Hello("front", self._membership.epoch, self._membership.view.version))
        self._workers[name].channel = channel
        self.infos[name] = replace(_info(member), is_alive=True)
        self._tell(WorkerBack(name))

    async def _linked(self, name: str, member: Member) -> Link:
        """Connects to a worker, again if it takes long: it may be this process that is slow.

        Raises LinkClosedError if its process has ended, or it is not among the members any more.
        """
        while True:
            try:
                return await connect(member.address, self._membership.credentials.key)
            except LinkTimeoutError as error:
                if self.is_closed or not self._is_current(name, member):
                    raise
                logger.warning("worker %s: %s; trying again", name, error)

    def _is_current(self, name: str, member: Member) -> bool:
        return name in self._workers and self._workers[name].member.epoch == member.epoch

    def _end(self, name: str, member: Member, reason: str) -> None:
        """Handles the end of a link: the worker is lost, and lost for all, unless the board has said so."""
        if self.is_closed or not self._is_current(name, member):
            return
        info = self.infos[name]
        self._lose(name, reason, is_planned=info.is_draining)
        self._tasks.spawn(self._membership.accuse(member.epoch, f"its link to a front has ended: {reason}"))

    def _lose(self, name: str, reason: str, *, is_planned: bool = False) -> None:
        worker = self._workers.pop(name)
        if worker.channel is None:
            return
        worker.channel.close()
        logger.log(logging.INFO if is_planned else logging.WARNING, "worker %s is lost: %s", name, reason)
        info = self.infos[name]
        leaving = EVERY_STAGE if is_planned else frozenset[Stage]()
        self.infos[name] = replace(info, is_alive=False, closed=frozenset(), leaving=leaving)
        self._tell(WorkerLost(name, reason, info.incarnation, is_planned))

    def _take_push(self, value: WorkerReport | WorkerInfo | FrontLost) -> None:
        if isinstance(value, FrontLost):
            self.is_closed = True
            self._membership.on_ended("it was declared lost")
        elif isinstance(value, WorkerReport):
            self._tell(value)
        elif value.name in self.infos:
            self.infos[value.name] = value
            self._tell(WorkerChanged(value.name))


class RemoteFleet:
    """Reaches the workers of the application. Used from one event loop.

    owner: the name under which workers know this front's requests
    on_view: gets each view of the members
    fronts: the others over the same workers
    """

    def __init__(self, board: BoardClient, place: ProcessAddress, purpose: Purpose | None = None) -> None:
        self.membership = Membership(board, "front", place, purpose)
        self.on_view: Callable[[View], None] = lambda _view: None
        self.fronts = OtherFronts(self.membership)
        self._events: asyncio.Queue[FleetEvent | None] = asyncio.Queue()
        self._loops = Loops(Counter(), lambda loop: self._events.put_nowait(FleetBroken(loop)))
        self._links = _WorkerLinks(self.membership, self._events.put_nowait)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    @property
    def owner(self) -> str:
        return self.membership.epoch

    def member(self, name: str) -> Member:
        """Returns where a worker that is there runs. Raises KeyError for others."""
        return self._links.member(name)

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        return self._links.infos

    async def start(self) -> None:
        """Joins the members. Workers are found as they come."""
        self._loop = asyncio.get_running_loop()
        await self.membership.join(self.fronts.accept)
        self.fronts.open()
        self.membership.on_view = self._take_view
        self._take_view(self.membership.view)
        self._loops.start("board", self.membership.run)
        await self.membership.update(is_ready=True)

    async def close(self) -> None:
        """Leaves; the workers drop what belongs to this front, and go on."""
        if self._is_closed:
            return
        self._is_closed = self._links.is_closed = self.fronts.is_closed = True
        await self.membership.leave()
        await self._loops.close()
        await self._links.close()
        await self.fronts.close()
        self._events.put_nowait(None)

    def _take_view(self, view: View) -> None:
        self._links.take_view(view)
        self.on_view(view)

    # Messages

    async def send(
        self,
        stage: Stage,  # noqa: ARG002 - a worker takes messages for all of its roles in one place
        target: str,
        message: Message[ReplyT],
        bulk: Bulk | None = None,
    ) -> ReplyT:
        channel = self._links.channel_to(target)
        frames = bulk.place if isinstance(bulk, RemoteBulk) else bulk
        reply = _reply(target, channel.call(WorkerCall(message, cast(Any, frames))))
        self._links.infos[target] = state_after(self._links.infos[target], message)
        return cast(ReplyT, await reply)

    async def fetch(
        self,
        stage: Stage,  # noqa: ARG002 - as above
        target: str,
        message: Message[ReplyT],
    ) -> tuple[ReplyT, Bulk]:
        channel = self._links.channel_to(target)
        address = self._links.member(target).address  # the worker may be lost by the time of its reply
        reply = channel.call(FetchCall(message))
        try:
            fetched: Fetched = await _reply(target, asyncio.shield(reply))
        except asyncio.CancelledError:
            reply.add_done_callback(partial(_release_unread, channel))
            raise
        finally:
            del reply  # see `_reply`
        if fetched.number is None:
            return fetched.value, None
        place = BulkPlace(address, fetched.number)
        return fetched.value, RemoteBulk(place, partial(self._release, channel, fetched.number))

    def _release(self, channel: Channel, number: int) -> None:
        """Releases frames; called from wherever the last reference is dropped."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(channel.push, ReleaseBulk(number))

    async def events(self) -> AsyncIterator[FleetEvent]:
        while True:
            event = await self._events.get()
            if event is None:
                return
            yield event


async def _reply(target: str, reply: asyncio.Future[Any]) -> Any:
    """Waits for a reply. Raises WorkerLostError, and what the worker answers with.

    A future has its error, and that by its traceback the frames of all callers with what these have:
    frames at media workers would be kept until the collector finds the circle.
    """
    try:
        return await reply
    except LinkClosedError as error:
        raise WorkerLostError(f"worker '{target}' is gone: {error}; send to another worker") from error
    finally:
        del reply


async def _answer_of(channels: Channels, front: Member, value: Any) -> Any:
    """Returns what a front answers, None if it does not."""
    with suppress(EPDError):
        return await channels.call(front.address, value)


async def _refuse(value: Any) -> Any:
    raise UnavailableError(f"this replica answers no {type(value).__name__}")


def _release_unread(channel: Channel, reply: asyncio.Future[Fetched]) -> None:
    """Releases frames that came after the fetch was cancelled."""
    if reply.cancelled() or reply.exception() is not None:
        return
    number = reply.result().number
    if number is not None:
        channel.push(ReleaseBulk(number))


def _info(member: Member) -> WorkerInfo:
    assert member.info is not None
    return member.info
