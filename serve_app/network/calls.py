"""Calls over links: a request is answered by a value or by an error that is raised at the caller.

caller  --(call, number, value)-->   server      either end may call, and push what needs no answer
        <--(value | error, number, value)--
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

from epd.errors import EPDError, InternalError
from epd.serve_app.network.link import Address, Link, LinkClosedError, connect

logger = logging.getLogger(__name__)

_CALL, _VALUE, _ERROR, _PUSH = range(4)
# Gets what another process asks, and a function to be called once with the answer: a value or an EPDError.
Answer = Callable[[Any], None]
OnCall = Callable[[Any, Answer], None]


class Channel:
    """Calls and answers over one link. Used from one event loop.

    on_call: gets each call of the other end; on_push: gets what it pushes; on_close: the reason of the end
    """

    def __init__(self, link: Link) -> None:
        self.on_call: OnCall = _refuse
        self.on_push: Callable[[Any], None] = lambda _value: None
        self.on_close: Callable[[str], None] = lambda _reason: None
        self._link = link
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        link.on_message = self._take
        link.on_close = self._end

    @property
    def is_open(self) -> bool:
        return self._link.is_open

    def call(self, value: Any) -> asyncio.Future[Any]:
        """Sends a call at once. Returns the future of its answer: LinkClosedError if the link ends first."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._link.is_open:
            answer.set_exception(LinkClosedError("the link has ended"))
            return answer
        number = next(self._numbers)
        self._calls[number] = answer
        self._link.send((_CALL, number, value))
        return answer

    def push(self, value: Any) -> None:
        """Sends what needs no answer. Does nothing once the link has ended."""
        self._link.send((_PUSH, 0, value))

    def close(self, reason: str = "closed here") -> None:
        self._link.close(reason)

    def _take(self, message: tuple[int, int, Any]) -> None:
        kind, number, value = message
        if kind == _CALL:
            self._answer(number, value)
        elif kind == _PUSH:
            self.on_push(value)
        else:
            answer = self._calls.pop(number, None)
            if answer is None or answer.done():
                return
            if kind == _VALUE:
                answer.set_result(value)
            else:
                answer.set_exception(value)

    def _answer(self, number: int, value: Any) -> None:
        def answer(result: Any) -> None:
            kind = _ERROR if isinstance(result, EPDError) else _VALUE
            self._link.send((kind, number, result))

        try:
            self.on_call(value, answer)
        except EPDError as error:
            answer(error)
        except Exception as error:
            logger.exception("a call was not handled: %s", type(value).__name__)
            answer(InternalError.of(error))

    def _end(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(LinkClosedError(f"the link has ended: {reason}"))
                answer.exception()  # its caller may have gone
        self.on_close(reason)


def _refuse(value: Any, answer: Answer) -> None:
    answer(LinkClosedError(f"no {type(value).__name__} is handled here"))


class Channels:
    """Keeps one channel to each address, and opens it when it is first needed.

    hello: what this process says of itself, pushed first on each channel
    """

    def __init__(self, key: bytes, hello: Any) -> None:
        self._key = key
        self._hello = hello
        self._open: dict[Address, Channel] = {}
        self._opening: dict[Address, asyncio.Task[Channel]] = {}
        self._is_closed = False

    async def get(self, address: Address) -> Channel:
        """Returns an open channel. Raises LinkClosedError if none answers there."""
        channel = self._open.get(address)
        if channel is not None and channel.is_open:
            return channel
        if address not in self._opening:
            task = asyncio.create_task(self._connect(address))
            self._opening[address] = task
            task.add_done_callback(lambda _task: self._opening.pop(address, None))
        return await asyncio.shield(self._opening[address])

    async def call(self, address: Address, value: Any) -> Any:
        """Calls a process by its address. Raises LinkClosedError, and what it answers with."""
        return await (await self.get(address)).call(value)

    def push(self, address: Address, value: Any) -> None:
        """Pushes over an open channel; does nothing if there is none."""
        channel = self._open.get(address)
        if channel is not None:
            channel.push(value)

    async def _connect(self, address: Address) -> Channel:
        channel = Channel(await connect(address, self._key))
        if self._is_closed:
            channel.close()
            raise LinkClosedError("this process ends")
        channel.push(self._hello)
        self._open[address] = channel
        return channel

    def forget(self, address: Address) -> None:
        """Ends the channel to a process that is gone."""
        channel = self._open.pop(address, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Ends all channels; none is opened afterwards."""
        self._is_closed = True
        for address in list(self._open):
            self.forget(address)
        for task in list(self._opening.values()):
            task.cancel()
