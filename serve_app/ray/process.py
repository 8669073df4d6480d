"""Watches processes of this machine that are not our children: reports their end at once, and kills them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable


class WatchedProcess:
    """Watches a process of this machine, by its id. Raises ProcessLookupError if it no longer exists.

    on_end: called once, in the event loop that is currently running
    """

    def __init__(self, pid: int, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._ended)

    def kill(self) -> None:
        """Ends it with SIGKILL, which works even on a stopped process, and stops watching it."""
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        self.forget()

    def forget(self) -> None:
        """Stops watching it. May be called again."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _ended(self) -> None:
        self.forget()
        self._on_end("its process ended")
