"""What a worker gets from one front is taken in order, and nothing of it holds up the rest for ever."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from epd.errors import EPDError, UnavailableError
from epd.serve_app.network.link import Address
from epd.serve_app.network.peer_links import KnownPeers
from epd.serve_app.network.wire import BulkPlace, WorkerCall
from epd.serve_app.network.worker_server import _FrontSession


@pytest.mark.parametrize(
    ("error", "told"), [(UnavailableError("lost"), "lost"), (KeyError("a bug"), "KeyError")]
)
def test_frames_that_cannot_be_fetched_hold_up_no_other_message(error: Exception, told: str) -> None:
    async def run() -> None:
        frames: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        handled: list[Any] = []

        def handle(message: Any, bulk: Any) -> asyncio.Future[Any]:
            handled.append((message, bulk))
            reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            reply.set_result(True)
            return reply

        async def fetch_bulk(_place: BulkPlace) -> Any:
            return await frames

        server: Any = SimpleNamespace(handle=handle, fetch_bulk=fetch_bulk, met=KnownPeers(1.0))
        channel: Any = SimpleNamespace()
        _FrontSession(server, channel)
        answers: list[Any] = []
        place = BulkPlace(Address("127.0.0.1", 1), 7)
        pixels = np.zeros(3, np.uint8)
        channel.on_call(WorkerCall("first", place), answers.append)  # type: ignore[arg-type]
        channel.on_call(WorkerCall("second", pixels), answers.append)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert handled == answers == []
        frames.set_exception(error)
        while len(answers) < 2:
            await asyncio.sleep(0)
        channel.on_call(WorkerCall("third", None), answers.append)  # type: ignore[arg-type]
        while len(answers) < 3:
            await asyncio.sleep(0)
        assert handled == [("second", pixels), ("third", None)]
        assert isinstance(answers[0], EPDError)
        assert told in str(answers[0])
        assert answers[1:] == [True, True]

    asyncio.run(run())
