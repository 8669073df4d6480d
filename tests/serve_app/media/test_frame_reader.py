"""Reading frames when a decoder is stuck: it is seen, closing does not wait for it, others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from epd.errors import CancelledError, MediaNotFoundError
from epd.types import Frames
from serve_app.media.frame_reader import FrameReader, FrameStream
from serve_app.messages import CloseStream, DecodeOrder, ReadFrames
from tests.serve_app.server import wait_until
from video import open_file

TIMES_S = (0.1, 0.4, 0.7, 1.0)


def order_of(path: Path) -> DecodeOrder:
    """Two groups of two frames."""
    return DecodeOrder(path, TIMES_S, (2, 2), (32, 32))


def read(stream_id: str, path: Path = Path("x"), index: int = 0) -> ReadFrames:
    return ReadFrames(stream_id, index, order_of(path))


class Stuck:
    """A stream that gives nothing until it is closed, or not even then."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def read(self) -> Frames:
        self.closed.wait(10)
        raise CancelledError("closed")

    def close(self) -> None:
        self.closed.set()


def test_closing_a_stuck_stream_does_not_wait_and_ends_its_read() -> None:
    stream = Stuck()
    reader = FrameReader(lambda _: stream)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(reader.handle, read("a"))
        wait_until(lambda: reader.busy_s > 0.05)
        began = time.monotonic()
        reader.handle(CloseStream("a"))
        assert time.monotonic() - began < 0.5
        assert isinstance(waiting.exception(timeout=5), CancelledError)
    assert (len(reader), reader.busy_s) == (0, 0.0)


def test_a_stream_that_cannot_be_opened_holds_up_no_other() -> None:
    """The opening of one never ends until the other has been read, and it was closed meanwhile."""
    other_is_read, closed = threading.Event(), Stuck()

    class Ready(Stuck):
        def read(self) -> Frames:
            return Frames(np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2))

    def opener(order: DecodeOrder) -> FrameStream:
        if order.source == Path("stuck"):
            assert other_is_read.wait(10)
            return closed
        return Ready()

    reader = FrameReader(opener)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(reader.handle, read("stuck", Path("stuck")))
        wait_until(lambda: reader.busy_s > 0)
        assert threads.submit(reader.handle, read("other")).result(timeout=5)[1] is not None
        reader.handle(CloseStream("stuck"))
        other_is_read.set()
        assert isinstance(waiting.exception(timeout=5), CancelledError)
    assert closed.closed.is_set()


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path, media: dict[str, Path]) -> None:
    path = tmp_path / "video.mp4"
    path.write_bytes(media["video"].read_bytes())
    with open_file(path, "it") as file:
        identity = file.identity
    message = ReadFrames("a", 0, replace(order_of(path), name="the clip", identity=identity))
    assert FrameReader().handle(message)[1] is not None
    other = tmp_path / "other"
    other.write_bytes(media["video"].read_bytes())
    other.rename(path)
    with pytest.raises(MediaNotFoundError, match="the clip was changed"):
        FrameReader().handle(message)
    path.unlink()
    path.symlink_to(media["video"])
    with pytest.raises(MediaNotFoundError, match="cannot read the clip"):
        FrameReader().handle(message)


def test_groups_in_order_and_again(media: dict[str, Path]) -> None:
    reader = FrameReader()
    whole: Callable[[int], np.ndarray] = lambda index: reader.handle(read("a", media["video"], index))[1]  # type: ignore[assignment,return-value]  # noqa: E731
    first, second, again = whole(0), whole(1), whole(0)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)
    reader.close()
    assert len(reader) == 0
