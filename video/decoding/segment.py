"""Plans the least decoding that is still exact from packets in file order and wanted times: the GOP planner.

It sees only time stamps, so it is true for variable rates, B-frames, open GOPs, edit lists and any start:

    decode order    K0  P4  b2  b1  b3 | K8  P12 ...        K: keyframe, P and b: by presentation time
    wanted times        ^ t = 1.5            ^ t = 13
    operations      StartRun(0) Show(1) Feed K0 P4 b2 b1, Drain; StartRun(8) Show(12) Feed K8 P12, Drain

1. The frame on screen at t is the packet with the largest pts <= t. It is known as soon as one with dts > t
   is read, because no later packet can have a smaller pts.
2. A packet is fed only if something wanted follows in the same GOP: what follows the last wanted frame of a
   GOP is dropped unseen, and so is every GOP without one.
3. Packets that are not wanted themselves are fed for reference only, so that a decoder may skip them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

PacketT = TypeVar("PacketT")

# Decoding up to this many unwanted packets costs less than emptying the decoder and starting it again.
SHORT_TAIL = 2
# Forced feeding stays this far behind the newest packet: farther than any codec reorders.
REORDER_MARGIN = 64


@dataclass(frozen=True, slots=True, eq=False)
class Stamp(Generic[PacketT]):
    """One packet, times in ticks. `visible` is False where an edit list hides its frame."""

    pts: int
    dts: int | None
    is_key: bool
    size_bytes: int
    visible: bool
    packet: PacketT


@dataclass(frozen=True, slots=True)
class StartRun:
    """Reset the decoder; frames before `pts` belong to an earlier run and are to be ignored."""

    pts: int
    is_file_start: bool


@dataclass(frozen=True, slots=True)
class Show:
    """The frame of `pts`, fed after this, is on screen at `target`; None: the last frame up to it is."""

    target: int
    pts: int | None


@dataclass(frozen=True, slots=True)
class Feed(Generic[PacketT]):
    """Decode a packet: in `full` if its own frame is wanted, else only as a reference for others."""

    stamp: Stamp[PacketT]
    full: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """No more packets in this run: take out every frame the decoder still holds."""


Op = StartRun | Show | Feed[PacketT] | Drain


class Segmenter(Generic[PacketT]):
    """Turns packets into decoder operations, which it appends to `ops`.

    targets: wanted times in ticks, strictly increasing.
    fuse_packets: a run is cut at a keyframe once it holds this many packets, so that others can continue in
        parallel; None never cuts a run that decodes through.
    """

    def __init__(
        self, targets: Sequence[int], *, fuse_packets: int | None = None, max_held_bytes: int = 32 << 20
    ) -> None:
        self.ops: deque[Op[PacketT]] = deque()
        self._targets = targets
        self._next = 0
        self._start_pts: int | None = None
        self._fuse_packets = fuse_packets
        self._max_held_bytes = max_held_bytes
        self.begin(is_file_start=True)

    @property
    def next_target(self) -> int | None:
        """The first wanted time whose frame is not known yet."""
        return self._targets[self._next] if self._next < len(self._targets) else None

    @property
    def is_settled(self) -> bool:
        """Whether everything known to be wanted has been fed, so that the run may end here."""
        return self._goal_pts is None

    def begin(self, *, is_file_start: bool) -> None:
        """Expect packets from another place of the file, beginning with a keyframe."""
        self._is_file_start = is_file_start
        self._max_pts: int | None = None
        self._open(None, ())

    def push(self, stamp: Stamp[PacketT]) -> None:
        """Take the next packet in decode order."""
        if self._start_pts is None:
            if not stamp.is_key:
                return
            self._start_pts = stamp.pts
        self._hold(stamp)
        self._resolve(stamp.dts)
        if self._goal_pts is not None and stamp.dts is not None and stamp.dts > self._goal_pts:
            self._feed_wanted()
        if self._switches and self.is_settled:
            self._skip_ahead()
        if self._held_bytes > self._max_held_bytes:
            self._feed_held()

    def finish(self) -> None:
        """End the file: what was read last stays on screen for every later time."""
        while self._seen and self.next_target is not None:
            self._show(self._targets[self._next])
        self.cut()

    def cut(self) -> None:
        """End the run here; the next packet comes from elsewhere."""
        self._feed_wanted()
        self._drain()
        self.begin(is_file_start=False)

    def _open(self, start_pts: int | None, held: Sequence[Stamp[PacketT]]) -> None:
        """Begin a fresh run with the packets that were read for it already."""
        self._start_pts = start_pts
        self._num_fed = 0
        self._held: list[Stamp[PacketT]] = []
        self._held_bytes: int = 0
        self._switches: list[Stamp[PacketT]] = []  # held keyframes that a decoder can begin at
        self._seen: list[int] = []  # presentation times of this run, sorted
        self._shows: list[Show] = []  # known, and waiting to be fed
        self._wanted: set[int] = set()  # presentation times of `_shows`
        self._goal_pts: int | None = None  # the largest pts among the packets that `_shows` needs
        for stamp in held:
            self._hold(stamp)

    def _drain(self) -> None:
        if self._num_fed:
            self.ops.append(Drain())

    def _hold(self, stamp: Stamp[PacketT]) -> None:
        assert self._start_pts is not None
        is_newest = self._max_pts is None or stamp.pts > self._max_pts
        if stamp.is_key and is_newest and stamp.pts > self._start_pts:
            self._switches.append(stamp)
        if is_newest:
            self._max_pts = stamp.pts
        self._held.append(stamp)
        self._held_bytes += stamp.size_bytes
        if stamp.visible and stamp.pts >= self._start_pts:
            insort(self._seen, stamp.pts)

    def _resolve(self, dts: int | None) -> None:
        """Settle the frame of every target that no later packet can change."""
        while dts is not None and self._seen and self.next_target is not None:
            target = self._targets[self._next]
            if dts <= target or (target < self._seen[0] and dts <= self._seen[0]):
                return
            self._show(target)

    def _show(self, target: int) -> None:
        pts = self._seen[max(0, bisect_right(self._seen, target) - 1)]
        self._shows.append(Show(target, pts))
        self._wanted.add(pts)
        self._next += 1
        needed = self._held[: self._count_through({pts})]
        goal_pts = pts if self._goal_pts is None else self._goal_pts
        self._goal_pts = max(goal_pts, *(stamp.pts for stamp in needed)) if needed else goal_pts

    def _count_through(self, wanted: set[int]) -> int:
        """Returns how many held packets lead up to the last one, in decode order, whose pts is wanted."""
        for i in range(len(self._held) - 1, -1, -1):
            if self._held[i].pts in wanted:
                return i + 1
        return 0

    def _feed_wanted(self) -> None:
        fed = self._feed(self._count_through(self._wanted), self._wanted)
        if self._fuse_packets is not None and self._num_fed >= self._fuse_packets:
            self._split_after(fed)
        fed_keys = {stamp.pts for stamp in fed if stamp.is_key}
        if fed_keys:
            self._switches = [stamp for stamp in self._switches if stamp.pts not in fed_keys]

    def _feed(self, count: int, wanted: set[int]) -> list[Stamp[PacketT]]:
        if count and not self._num_fed and self._start_pts is not None:
            self.ops.append(StartRun(self._start_pts, self._is_file_start))
        fed, self._held = self._held[:count], self._held[count:]
        self.ops.extend(self._shows)
        self.ops.extend(Feed(stamp, stamp.pts in wanted) for stamp in fed)
        self._held_bytes -= sum(stamp.size_bytes for stamp in fed)
        self._num_fed += count
        self._shows, self._wanted, self._goal_pts = [], set(), None
        return fed

    def _split_after(self, fed: list[Stamp[PacketT]]) -> None:
        """Cut a long run at a keyframe that was fed for the leading pictures of an open GOP.

        The next run begins with the same keyframe, so it is decoded twice: the price of working in parallel.
        """
        switch = self._last_switch()
        if switch is not None and switch in fed:
            self._restart(fed[fed.index(switch) :] + self._held)

    def _last_switch(self) -> Stamp[PacketT] | None:
        """Returns the last keyframe read at which decoding for the next target can begin."""
        target = self.next_target
        if target is None:
            return None
        return next((stamp for stamp in reversed(self._switches) if stamp.pts <= target), None)

    def _skip_ahead(self) -> None:
        """Drop what the next target does not need, or cut a long run where there is nothing to drop."""
        switch = self._last_switch()
        if switch is None or switch not in self._held:
            return
        tail = self._held.index(switch)
        is_long = self._fuse_packets is not None and self._num_fed >= self._fuse_packets
        if not self._num_fed or tail > SHORT_TAIL or is_long:
            self._restart(self._held[tail:])

    def _restart(self, held: list[Stamp[PacketT]]) -> None:
        """End the run and open the next one at a keyframe that has been read already."""
        self._drain()
        self._is_file_start = False
        self._max_pts = None
        self._open(held[0].pts, held)

    def _feed_held(self) -> None:
        """Feed what comes before a target far ahead, in full if in doubt, because too much is held."""
        target = self.next_target
        if not self.is_settled:
            self._feed_wanted()
        elif target is not None and len(self._held) > REORDER_MARGIN:
            newest = self._seen[max(0, bisect_right(self._seen, target) - 1)] if self._seen else target
            early = self._held[:-REORDER_MARGIN]
            self._feed(len(early), {stamp.pts for stamp in early if stamp.pts >= newest})


class SequentialPlan(Generic[PacketT]):
    """Plans for files whose packet times are useless: decodes everything in order and judges by frames."""

    def __init__(self, targets: Sequence[int]) -> None:
        self.ops: deque[Op[PacketT]] = deque()
        self._targets = targets
        self._has_begun = False
        self.next_target: int | None = targets[0] if targets else None
        self.is_settled = False

    def begin(self, *, is_file_start: bool) -> None:
        """Do nothing: there is only one run."""

    def push(self, stamp: Stamp[PacketT]) -> None:
        """Feed every packet in full."""
        if not self._has_begun:
            self._has_begun = True
            self.ops.append(StartRun(stamp.pts, True))
            self.ops.extend(Show(target, None) for target in self._targets)
        self.ops.append(Feed(stamp, True))

    def finish(self) -> None:
        """End the only run with the file."""
        if self._has_begun:
            self.next_target = None
            self.ops.append(Drain())

    def cut(self) -> None:
        """End the run, as every target has its frame."""
        self.finish()
