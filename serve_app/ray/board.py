"""Runs the board as a named Ray actor: restarted when it is lost, and gone some time after its members."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.exceptions import RayError

from epd.errors import UnavailableError
from epd.serve_app.network.board import Board
from epd.serve_app.network.members import Credentials, Member, View

_NAMESPACE = "epd"
_MAX_CALLS = 10_000  # each member has one waiting
_END_S = 30.0  # without members


class BoardActor:
    """Carries calls to the `Board`."""

    def __init__(self) -> None:
        is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._board = Board(is_restarted=is_restarted)
        # Who has made it may be killed before its first call.
        self._ending = asyncio.get_running_loop().create_task(self._end_when_empty())

    async def credentials(self) -> Credentials:
        return await self._board.credentials()

    async def follow(self, member: Member, seen: int, credentials: Credentials) -> View | None:
        return await self._board.follow(member, seen, credentials)

    async def leave(self, epoch: str) -> None:
        await self._board.leave(epoch)

    async def accuse(self, epoch: str, reason: str, accuser: str = "") -> None:
        await self._board.accuse(epoch, reason, accuser)

    async def _end_when_empty(self) -> None:
        while len(self._board) or time.monotonic() - self._board.empty_since_s < _END_S:
            await asyncio.sleep(1.0)
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class RayBoard:
    """Implements `BoardClient` over the actor of one application, which the first member starts."""

    def __init__(self, application: str) -> None:
        self._name = f"epd-board-{application}"
        self._actor: Any = None

    async def credentials(self) -> Credentials:
        credentials: Credentials = await self._call("credentials")
        return credentials

    async def follow(self, member: Member, seen: int, credentials: Credentials) -> View | None:
        view: View | None = await self._call("follow", member, seen, credentials)
        return view

    async def leave(self, epoch: str) -> None:
        await self._call("leave", epoch)

    async def accuse(self, epoch: str, reason: str, accuser: str = "") -> None:
        await self._call("accuse", epoch, reason, accuser)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._actor is None:
                self._actor = _board_actor(self._name)
            return await getattr(self._actor, method).remote(*arguments)
        except (RayError, ValueError) as error:
            self._actor = None
            raise UnavailableError(f"the board does not answer: {type(error).__name__}") from error


def _board_actor(name: str) -> Any:
    return (
        ray.remote(BoardActor)
        .options(
            name=name,
            namespace=_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=_MAX_CALLS,
            num_cpus=0,
        )
        .remote()
    )
