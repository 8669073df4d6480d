"""Serves until SIGINT or SIGTERM, which end it cleanly at any moment of its start as well.

main thread     signals alone, so that none comes in the middle of a call of Ray's
other thread    the server: starts, serves until it is to stop, and ends
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Literal, Self

from epd.errors import CancelledError
from epd.serve_app.observability.logs import operation

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = 130
# What a start in a cluster of others has to take back what it had begun.
_TAKE_BACK_S = 90.0
# The longest that a signal is noticed late.
_TURN_S = 0.2
_Event = Literal["signal", "ready", "ended"]


class Signals:
    """Notes SIGINT and SIGTERM while it is open."""

    def __init__(self) -> None:
        self.events: SimpleQueue[_Event] = SimpleQueue()  # its `put` may interrupt its `get`

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.events.put("signal")

    def next(self, within_s: float = math.inf) -> _Event:
        """Returns what happens next; `ended` if nothing does in time.

        A wait without an end can miss a signal that comes just before it: the interpreter runs handlers only
        between its own steps. So it waits in short turns.
        """
        end_s = time.monotonic() + within_s
        while (left_s := end_s - time.monotonic()) > 0:
            with suppress(Empty):
                return self.events.get(timeout=min(left_s, _TURN_S))
        return "ended"


def serve_until_signal(
    served: Callable[[threading.Event], AbstractContextManager[None]],
    signals: Signals,
    on_ready: Callable[[], None],
    end_process: Callable[[int], None],
    *,
    is_alone: bool,
) -> None:
    """Serves in another thread, and returns when that has ended; raises its error.

    served: given what is set when the server is to stop, even before it is ready
    end_process: ends this process with a code, and all below it
    is_alone: whether nothing but these processes is to be cleaned up, so that a start can be cut off
    """
    server = _Server(served, signals)
    server.start()
    event = signals.next()
    if event == "ready":
        on_ready()
        if signals.next() == "signal":
            operation.info("draining; press Ctrl-C again to stop immediately")
            server.stopping.set()
            if signals.next() == "signal":
                end_process(_INTERRUPTED)
            operation.info("drained and stopped")
    elif event == "signal":
        operation.info("stopped before it was ready")
        if is_alone:
            end_process(0)
        server.stopping.set()
        while signals.next(_TAKE_BACK_S) != "ended":
            continue
    server.join(_TAKE_BACK_S if event == "signal" else None)
    if server.is_alive():
        end_process(0)
    if server.error is not None and not (event == "signal" and isinstance(server.error, CancelledError)):
        raise server.error


class _Server(threading.Thread):
    """error: with which it ended."""

    def __init__(
        self, served: Callable[[threading.Event], AbstractContextManager[None]], signals: Signals
    ) -> None:
        super().__init__(name="server", daemon=True)
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._served = served
        self._signals = signals

    def run(self) -> None:
        try:
            with self._served(self.stopping):
                self._signals.events.put("ready")
                self.stopping.wait()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            self.error = error
        finally:
            self._signals.events.put("ended")
