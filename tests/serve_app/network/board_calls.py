"""What members ask of a board that may be gone: the same, whatever calls it."""

from __future__ import annotations

import asyncio
from typing import Any

from epd.errors import UnavailableError
from epd.serve_app.network.members import Credentials, Member, View


class BoardCalls:
    """Passes on what members ask. Who derives from it says how a method of the board is called."""

    async def _call(self, method: str, *arguments: Any) -> Any:
        raise NotImplementedError

    async def _answer(self, call: asyncio.Future[Any]) -> Any:
        """Waits for a call. One that ends with the board fails, as an actor's does."""
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():
                raise UnavailableError("the board is gone") from None
            raise

    async def credentials(self) -> Credentials:
        return await self._call("credentials")  # type: ignore[no-any-return]

    async def follow(self, member: Member, seen: int, credentials: Credentials) -> View | None:
        return await self._call("follow", member, seen, credentials)  # type: ignore[no-any-return]

    async def leave(self, epoch: str) -> None:
        await self._call("leave", epoch)

    async def accuse(self, epoch: str, reason: str, accuser: str = "") -> None:
        await self._call("accuse", epoch, reason, accuser)
