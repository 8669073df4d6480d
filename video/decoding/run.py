"""Decodes one request: joins its reader, its decoders on the shared pool and the ring of groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epd.errors import CancelledError, CorruptMediaError, MediaLimitError
from epd.types import FrameGroup, UInt8Array
from epd.video.containers.decoder_memory import check_memory, decoder_bytes
from epd.video.containers.limits import Limits, check_size
from epd.video.containers.mp4_edits import open_as_shown
from epd.video.containers.probe import describe
from epd.video.decoding.device import VideoDevice, new_converter
from epd.video.decoding.groups import GroupRing
from epd.video.decoding.pixels import ResizeMode, Size, exact_resize
from epd.video.decoding.pool import DecodePool, StepResult
from epd.video.decoding.reader import DecodeChunk, PacketReader
from epd.video.decoding.session import DecodedFrame, DecoderSession
from epd.video.sources.source import Media, OpenVideo, open_video

# Decoded ahead of the consumer: some GOPs for every decoder, and no more memory than that.
AHEAD_BYTES = 128 << 20
MIN_GROUPS_AHEAD, MAX_GROUPS_AHEAD = 2, 64
# A step this long lets a more urgent request pass soon and keeps the cost of the queue below a percent.
STEP_S = 0.01


@dataclass(frozen=True, slots=True)
class AheadBound:
    """Bounds how far decoding may be ahead of its consumer: in groups, or by default in bytes of them."""

    num_groups: int | None = None

    def resolve(self, group_bytes: int) -> int:
        """Returns how many groups may be filled beyond those taken."""
        if self.num_groups is not None:
            return max(1, self.num_groups)
        return min(MAX_GROUPS_AHEAD, max(MIN_GROUPS_AHEAD, AHEAD_BYTES // max(1, group_bytes)))


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How one request is decoded.

    group_sizes: frames in each group.
    bound: None lets every group be in memory at once.
    first_deadline_s: when the first group is needed, on the monotonic clock.
    group_period_s: how much later each further group is needed. device: None leaves all to the CPU.
    """

    size: Size | None
    mode: ResizeMode
    workers: int
    group_sizes: tuple[int, ...]
    bound: AheadBound | None
    first_deadline_s: float
    group_period_s: float
    limits: Limits
    device: VideoDevice | None = None


class DecodeRun:
    """Decodes the frames of one request, group by group; `close` stops it at any time."""

    def __init__(self, media: Media, times_s: Sequence[float], options: RunOptions, pool: DecodePool) -> None:
        self.options = options
        self._media, self._times_s, self._pool = media, times_s, pool
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._error: BaseException | None = None
        self._is_closed = False
        self._owner: DecodeTask | None = None  # who must decode the next chunk, because it continues a run
        self._parked: list[DecodeTask] = []
        self._waited_s = 0.0
        video = open_as_shown(media, options.limits.open_timeout_s)
        try:
            self._begin(video)
        except BaseException:
            video.close()
            raise

    def _begin(self, video: OpenVideo) -> None:
        self.info = describe(video)
        check_size(self._media.name, self.info, len(video.container.streams), self.options.limits)
        most = self.options.limits.max_decoder_bytes
        check_memory(self._media.name, video.stream.codec_context, most)
        self._size = self.options.size
        targets = [self.info.pts_at(time_s) for time_s in self._times_s]
        ahead = self._groups_ahead(is_in_order=targets == sorted(targets))
        self._ring = GroupRing(targets, self.options.group_sizes, ahead)
        with_room = most // max(1, decoder_bytes(video.stream.codec_context))
        device = self.options.device
        self.device = device if device is not None and device.takes(self.info) else None
        sessions = with_room if self.device is None else self.device.num_sessions
        num_workers = max(1, min(self.options.workers, self._pool.num_threads, with_room, sessions))
        self._reader = PacketReader(video, self.info, sorted(set(targets)), num_workers, self.options.limits)
        self._frame_threads = num_workers if self._reader.has_one_keyframe else 1
        self._num_sessions = 1 if self._reader.has_one_keyframe else num_workers
        self._tasks = [DecodeTask(self) for _ in range(self._num_sessions if targets else 0)]
        self._num_working = len(self._tasks)
        if not self._tasks:
            self._reader.close()
        for task in self._tasks:
            self._pool.submit(task)

    def _groups_ahead(self, *, is_in_order: bool) -> int | None:
        """Returns the resolved bound, none where an edit list goes back in the file.

        Raises MediaLimitError if too much must be in memory at once.
        """
        height, width = self.frame_size
        bound = self.options.bound if is_in_order else None
        frames = len(self._times_s) if bound is None else max(self.options.group_sizes, default=0)
        received, allowed = frames * height * width * 3, self.options.limits.max_output_bytes
        if received > allowed:
            raise MediaLimitError(
                f"{frames} frames of {height} x {width} need {received} bytes; allowed {allowed}; "
                "use stream, a smaller size or fewer times"
            )
        return None if bound is None else bound.resolve(received)

    @property
    def frame_size(self) -> Size:
        """(height, width) of the result."""
        return self._size or (self.info.height, self.info.width)

    def next_group(self) -> FrameGroup | None:
        """Returns the next group in order, waiting for it; None after the last. Raises what went wrong."""
        with self._changed:
            if self._ring.num_taken >= len(self.options.group_sizes):
                return None
            self._wait_until_fillable()
            group = self._ring.take(self._times_s, self.frame_size)
            self._wake_parked()
            return group

    def _wait_until_fillable(self) -> None:
        """Wait, holding the lock, until the next group can be taken; max_file_s bounds the wait."""
        while not self._raise_or_ready():
            left_s = self.options.limits.max_file_s - self._waited_s
            if left_s <= 0:
                self._fail(
                    MediaLimitError(
                        f"{self._media.name} took more than {self.options.limits.max_file_s:g} s to decode; "
                        "allowed: up to that; sample fewer times or raise max_file_s"
                    )
                )
            began = time.monotonic()
            self._changed.wait(timeout=max(0.0, left_s))
            self._waited_s += time.monotonic() - began

    def _raise_or_ready(self) -> bool:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise CancelledError("the stream was closed during a read; open another one")
        group = self._ring.groups[self._ring.num_taken]
        assert group is not None
        return group.is_complete and (self._ring.can_fill(group) or self._is_stuck)

    @property
    def _is_stuck(self) -> bool:
        """Whether no task can continue by itself: all have ended, or wait for the consumer."""
        return len(self._parked) == self._num_working

    def close(self) -> None:
        """Stop every task of this request and free what it holds; calling it again does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._wake_parked()

    # What tasks call.

    def new_session(self) -> DecoderSession:
        """Returns a decoder for one task. A lone task uses the reader's, so the file is opened once."""
        if self.device is not None:
            return self.device.new_session(self._media, self.info, self.options.limits.open_timeout_s)
        if self._num_sessions == 1 and self._frame_threads == 1:
            return DecoderSession(self._reader.own_context(), self.info)
        with open_video(self._media, open_timeout_s=self.options.limits.open_timeout_s) as video:
            context = video.stream.codec_context
            if self._frame_threads > 1:
                context.thread_type, context.thread_count = "FRAME", self._frame_threads
            return DecoderSession(context, self.info)

    def take_chunk(self, task: DecodeTask, is_session_idle: bool) -> DecodeChunk | None:
        """Returns the next work for a task; None if it must wait or is done."""
        with self._reading:
            with self._changed:
                if self._is_closed or not self._may_read(task, is_session_idle):
                    return None
            chunk = self._reader.next_chunk()
            with self._changed:
                self._owner = task if chunk is not None and not chunk.ends_run else None
                if self._owner is None:
                    self._wake_parked()
            return chunk

    def _may_read(self, task: DecodeTask, is_session_idle: bool) -> bool:
        """Returns whether it is this task's turn and the ring has room; frames waited for come first."""
        if self._owner not in (None, task):
            return False
        target = self._reader.next_target
        return target is None or not is_session_idle or self._ring.has_room(target)

    def has_room(self, target: int) -> bool:
        """Returns whether the frame of a target may be put into the ring already."""
        with self._changed:
            return self._is_closed or self._ring.has_room(target)

    def park_for_room(self, task: DecodeTask, target: int) -> bool:
        """Put a task aside until the consumer has moved on; False if it may continue at once."""
        with self._changed:
            if self._is_closed or self._ring.has_room(target):
                return False
            self._park(task)
            return True

    def park_for_work(self, task: DecodeTask, is_session_idle: bool) -> bool:
        """Put a task aside until there may be a chunk for it; False if it should look again."""
        with self._changed:
            if self._is_closed or self._may_read(task, is_session_idle):
                return False
            self._park(task)
            return True

    def _park(self, task: DecodeTask) -> None:
        """Wake the consumer if no task can continue: otherwise it could wait for ever."""
        self._parked.append(task)
        if self._is_stuck:
            self._changed.notify_all()

    def is_finished(self) -> bool:
        """Returns whether no work is left: all frames are decoded, or nobody wants them."""
        return self._is_closed or self._ring.is_complete

    def deadline_s(self, target: int | None) -> float:
        """Returns when the group of a target is needed, on the monotonic clock."""
        group = 0 if target is None else self._ring.group_of(target)
        return self.options.first_deadline_s + group * self.options.group_period_s

    @property
    def next_target(self) -> int | None:
        """The first target that no chunk holds yet."""
        return self._reader.next_target

    def deliver(self, decoded: DecodedFrame, pixels: UInt8Array | None) -> None:
        """Write a frame into the ring; `pixels` is uint8 [H, W, 3], or None for a frame that is missing."""
        with self._changed:
            if self._is_closed:
                return
            if pixels is not None and self._size is None:
                self._size = (pixels.shape[0], pixels.shape[1])
            rows = (
                [(group.rows(self.frame_size), row) for group, row in self._ring.slots(decoded.target)]
                if pixels is not None
                else []
            )
        for data, row in rows:
            assert pixels is not None
            data[row] = exact_resize(pixels, self.frame_size)
        self._settle(decoded, pixels is None)

    def restart_sequentially(self) -> None:
        """Decode what is left from the start of the file; the first free task begins."""
        with self._reading, self._changed:
            if not self._reader.is_sequential:
                self._reader.restart_sequentially(self._ring.open_targets)
                self._owner = None
                self._wake_parked()

    def _settle(self, decoded: DecodedFrame, is_missing: bool) -> None:
        with self._changed:
            is_substitute = decoded.is_substitute or decoded.target in self._reader.cut_short
            pts_s = None if is_missing else self.info.seconds(decoded.pts)
            if self._ring.settle(decoded.target, pts_s, is_substitute):
                self._changed.notify_all()
            self._check_budget()

    def _check_budget(self) -> None:
        allowed = max(1, int(self.options.limits.max_substituted_fraction * self._ring.num_frames))
        if self._ring.num_substituted > allowed:
            self._fail(
                CorruptMediaError(
                    f"{self._media.name}: {self._ring.num_substituted} of {self._ring.num_frames} frames "
                    f"cannot be decoded; allowed {allowed}; copy or encode the file again"
                )
            )

    def fail(self, error: BaseException) -> None:
        """End the request with an error, which is raised to the consumer."""
        with self._changed:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._is_closed = True
        self._changed.notify_all()
        self._wake_parked()

    def _wake_parked(self) -> None:
        parked, self._parked = self._parked, []
        for task in parked:
            self._pool.submit(task)

    def leave(self, task: DecodeTask) -> None:
        """Note that a task has ended; the last one settles what could not be decoded."""
        with self._changed:
            if self._owner is task:
                self._owner = None
            self._num_working -= 1
            self._wake_parked()
            if self._num_working:
                return
            self._reader.close()
            is_stopped = self._is_closed
            leftover = [] if is_stopped else self._ring.open_targets
        for target in leftover:
            self._settle(DecodedFrame(target, None, target, True), True)
        with self._changed:
            self._changed.notify_all()


class DecodeTask:
    """Takes chunks of its run, decodes them, converts and delivers the frames."""

    def __init__(self, run: DecodeRun) -> None:
        self._run = run
        self._session: DecoderSession | None = None
        self._converter = new_converter(run.device, run.options.size, run.options.mode)
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
