"""Does one decoder's part of a request as a pool task: takes chunks, decodes them and delivers the frames."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from epd.types import UInt8Array
from epd.video.decoding.pixels import FrameConverter
from epd.video.decoding.pool import StepResult
from epd.video.decoding.session import DecodedFrame, DecoderSession

if TYPE_CHECKING:
    from epd.video.decoding.run import DecodeRun

# A step this long lets a more urgent request pass soon and keeps the cost of the queue below a percent.
STEP_S = 0.01


class DecodeTask:
    """Takes chunks of its run, decodes them, converts and delivers the frames."""

    def __init__(self, run: DecodeRun) -> None:
        self._run = run
        self._session: DecoderSession | None = None
        self._converter = FrameConverter(run.options.size, run.options.mode)
        self._work: Iterator[DecodedFrame | None] = iter(())
        self._decoded: DecodedFrame | None = None  # decoded, and waiting for room in the ring
        self._last: tuple[int, UInt8Array] | None = None
        self._busy_s = 0.0
        self._has_left = False

    @property
    def deadline_s(self) -> float:
        """When the frame it works on is needed."""
        return self._run.deadline_s(
            self._decoded.target if self._decoded is not None else self._run.next_target
        )

    def step(self) -> StepResult:
        """Work until the slice of time is used up, the ring is full or no work is left."""
        began = time.monotonic()
        try:
            result = self._work_until(began + STEP_S)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the consumer must learn of every failure
            self._run.fail(error)
            result = "done"
        self._busy_s += time.monotonic() - began
        if result == "done":
            self._leave()
        return result

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._session, self._work, self._last = None, iter(()), None
            self._run.leave(self)

    def _work_until(self, end_s: float) -> StepResult:
        while True:
            if self._run.is_finished():
                return "done"
            if self._decoded is not None:
                if not self._run.has_room(self._decoded.target):
                    if self._run.park_for_room(self, self._decoded.target):
                        return "parked"
                    continue
                self._deliver(self._decoded)
                self._decoded = None
            result = self._advance()
            if result != "again":
                return result
            if time.monotonic() > end_s:
                return "again"

    def _advance(self) -> StepResult:
        """Get the next frame of the chunk, or the next chunk."""
        if self._session is None:
            self._session = self._run.new_session()
        try:
            self._decoded = next(self._work)
        except StopIteration:
            return self._take_chunk(self._session)
        if self._busy_s > self._run.options.limits.max_gop_s:
            self._busy_s = 0.0
            self._work = self._session.abandon()
        return "again"

    def _take_chunk(self, session: DecoderSession) -> StepResult:
        self._busy_s = 0.0
        chunk = self._run.take_chunk(self, session.is_idle)
        if chunk is not None:
            self._work = session.run(chunk)
            return "again"
        return (
            "parked"
            if self._run.park_for_work(self, session.is_idle)
            else "done"
            if self._run.next_target is None
            else "again"
        )

    def _deliver(self, decoded: DecodedFrame) -> None:
        if decoded.is_unexplained:
            return self._run.restart_sequentially()
        if decoded.frame is None:
            return self._run.deliver(decoded, None)
        if self._last is None or self._last[0] != decoded.pts:
            self._last = decoded.pts, self._converter.convert(decoded.frame)
        return self._run.deliver(decoded, self._last[1])
