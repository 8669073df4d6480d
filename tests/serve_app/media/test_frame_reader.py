"""Reading frames when a decoder is stuck: it is seen, closing does not wait for it, others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from epd.errors import CancelledError
from epd.serve_app.media.frame_reader import FrameReader, FrameStream, stream_here
from epd.serve_app.media_messages import CloseStream, DecodeOrder, ReadFrames
from epd.serve_app.service import HeldItem
from epd.types import Frames
from epd.video import open_file
from tests.serve_app.server import wait_until

TIMES_S = (0.1, 0.4, 0.7, 1.0)


def order_of(path: Path) -> DecodeOrder:
    """Two groups of two frames."""
    return DecodeOrder(HeldItem(str(path), 0), TIMES_S, (2, 2), (32, 32))


def read(stream_id: str, path: Path = Path("x"), index: int = 0) -> ReadFrames:
    return ReadFrames(stream_id, index, order_of(path))


class Stuck:
    """A stream that gives nothing until it is closed, or not even then: may_end, its reads may return."""

    def __init__(self) -> None:
        self.begun, self.closed, self.may_end = (threading.Event() for _ in range(3))
        self.may_end.set()

    def read(self) -> Frames:
        self.begun.set()
        self.closed.wait(60)
        self.may_end.wait(60)
        raise CancelledError("closed")

    def close(self) -> None:
        self.closed.set()


def test_closing_a_stuck_stream_does_not_wait_and_ends_its_read() -> None:
    stream = Stuck()
    reader = FrameReader(lambda _: stream)
    stream.may_end.clear()
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(reader.handle, read("a"))
        wait_until(lambda: stream.begun.is_set() and reader.busy_s > 0.05)
        try:
            threads.submit(reader.handle, CloseStream("a")).result(timeout=50)
            assert stream.closed.is_set()
            assert not waiting.done()
        finally:
            stream.may_end.set()
        assert isinstance(waiting.exception(timeout=50), CancelledError)
    assert (len(reader), reader.busy_s) == (0, 0.0)


def test_a_stream_that_cannot_be_opened_holds_up_no_other() -> None:
    """The opening of one never ends until the other has been read, and it was closed meanwhile."""
    other_is_read, closed = threading.Event(), Stuck()

    class Ready(Stuck):
        def read(self) -> Frames:
            return Frames(np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2))

    def opener(order: DecodeOrder) -> FrameStream:
        if order.source.hold == "stuck":
            assert other_is_read.wait(60)
            return closed
        return Ready()

    reader = FrameReader(opener)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(reader.handle, read("stuck", Path("stuck")))
        wait_until(lambda: reader.busy_s > 0)
        assert threads.submit(reader.handle, read("other")).result(timeout=50)[1] is not None
        reader.handle(CloseStream("stuck"))
        other_is_read.set()
        assert isinstance(waiting.exception(timeout=50), CancelledError)
    assert closed.closed.is_set()


def test_groups_in_order_and_again(media: dict[str, Path]) -> None:
    reader = FrameReader(lambda order: stream_here(open_file(Path(order.source.hold), "it"), "it", order))
    whole: Callable[[int], np.ndarray] = lambda index: reader.handle(read("a", media["video"], index))[1]  # type: ignore[assignment,return-value]  # noqa: E731
    first, second, again = whole(0), whole(1), whole(0)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)
    reader.close()
    assert len(reader) == 0
