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


class _Run(Generic[PacketT]):
    """Holds the packets that are read between two resets of the decoder, and appends operations to `ops`.

    start_pts: of its first keyframe, None until that is read
    held: packets that are not fed, in decode order
    seen: presentation times of its packets, sorted
    shows: known, and waiting to be fed. wanted: their presentation times
    goal_pts: the largest pts among the packets that `shows` needs
    """

    def __init__(self, ops: deque[Op[PacketT]], start_pts: int | None, *, is_file_start: bool) -> None:
        self.start_pts = start_pts
        self.num_fed = self.held_bytes = 0
        self.held: list[Stamp[PacketT]] = []
        self.seen: list[int] = []
        self.shows: list[Show] = []
        self.wanted: set[int] = set()
        self.goal_pts: int | None = None
        self._ops = ops
        self._is_file_start = is_file_start

    def hold(self, stamp: Stamp[PacketT]) -> None:
        """Add a packet that is not fed yet."""
        assert self.start_pts is not None
        self.held.append(stamp)
        self.held_bytes += stamp.size_bytes
        if stamp.visible and stamp.pts >= self.start_pts:
            insort(self.seen, stamp.pts)

    def on_screen(self, target: int) -> int:
        """Returns the presentation time of the frame that is on screen, of those seen."""
        return self.seen[max(0, bisect_right(self.seen, target) - 1)]

    def show(self, target: int) -> None:
        """Note that the frame on screen at a target is known."""
        pts = self.on_screen(target)
        self.shows.append(Show(target, pts))
        self.wanted.add(pts)
        needed = self.held[: self.count_through({pts})]
        goal_pts = pts if self.goal_pts is None else self.goal_pts
        self.goal_pts = max(goal_pts, *(stamp.pts for stamp in needed)) if needed else goal_pts

    def count_through(self, wanted: set[int]) -> int:
        """Returns how many held packets lead up to the last one, in decode order, whose pts is wanted."""
        for i in range(len(self.held) - 1, -1, -1):
            if self.held[i].pts in wanted:
                return i + 1
        return 0

    def feed(self, count: int, wanted: set[int]) -> list[Stamp[PacketT]]:
        """Feed the first held packets, those in full that are wanted, and all that is to be shown."""
        if count and not self.num_fed and self.start_pts is not None:
            self._ops.append(StartRun(self.start_pts, self._is_file_start))
        fed, self.held = self.held[:count], self.held[count:]
        self._ops.extend(self.shows)
        self._ops.extend(Feed(stamp, stamp.pts in wanted) for stamp in fed)
        self.held_bytes -= sum(stamp.size_bytes for stamp in fed)
        self.num_fed += count
        self.shows, self.wanted, self.goal_pts = [], set(), None
        return fed

    def has_fed(self, num_packets: int | None) -> bool:
        """Returns whether so many packets were fed; None is never reached."""
        return num_packets is not None and self.num_fed >= num_packets

    def drain(self) -> None:
        """End it: no more packets of it come."""
        if self.num_fed:
            self._ops.append(Drain())


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
        return self._run.goal_pts is None

    def begin(self, *, is_file_start: bool) -> None:
        """Expect packets from another place of the file, beginning with a keyframe."""
        self._open(_Run(self.ops, None, is_file_start=is_file_start))

    def _open(self, run: _Run[PacketT], held: Sequence[Stamp[PacketT]] = ()) -> None:
        """Begin a run with the packets that were read for it already."""
        self._run = run
        self._max_pts: int | None = None
        self._switches: list[Stamp[PacketT]] = []  # held keyframes that a decoder can begin at
        for stamp in held:
            self._hold(stamp)

    def push(self, stamp: Stamp[PacketT]) -> None:
        """Take the next packet in decode order."""
        if self._run.start_pts is None:
            if not stamp.is_key:
                return
            self._run.start_pts = stamp.pts
        self._hold(stamp)
        self._resolve(stamp.dts)
        goal_pts = self._run.goal_pts
        if goal_pts is not None and stamp.dts is not None and stamp.dts > goal_pts:
            self._feed_wanted()
        if self._switches and self.is_settled:
            self._skip_ahead()
        if self._run.held_bytes > self._max_held_bytes:
            self._feed_held()

    def finish(self) -> None:
        """End the file: what was read last stays on screen for every later time."""
        while self._run.seen and self.next_target is not None:
            self._run.show(self._targets[self._next])
            self._next += 1
        self.cut()

    def cut(self) -> None:
        """End the run here; the next packet comes from elsewhere."""
        self._feed_wanted()
        self._run.drain()
        self.begin(is_file_start=False)

    def _hold(self, stamp: Stamp[PacketT]) -> None:
        start_pts = self._run.start_pts
        assert start_pts is not None
        is_newest = self._max_pts is None or stamp.pts > self._max_pts
        if stamp.is_key and is_newest and stamp.pts > start_pts:
            self._switches.append(stamp)
        if is_newest:
            self._max_pts = stamp.pts
        self._run.hold(stamp)

    def _resolve(self, dts: int | None) -> None:
        """Settle the frame of every target that no later packet can change."""
        seen = self._run.seen
        while dts is not None and seen and self.next_target is not None:
            target = self._targets[self._next]
            if dts <= target or (target < seen[0] and dts <= seen[0]):
                return
            self._run.show(target)
            self._next += 1

    def _feed_wanted(self) -> None:
        """Feed up to the last frame that is wanted.

        A long run is cut at a keyframe that was fed for the leading pictures of an open GOP. The next run
        begins with the same keyframe, so it is decoded twice: the price of working in parallel.
        """
        fed = self._run.feed(self._run.count_through(self._run.wanted), self._run.wanted)
        switch = self._last_switch() if self._run.has_fed(self._fuse_packets) else None
        if switch is not None and switch in fed:
            self._restart(fed[fed.index(switch) :] + self._run.held)
        fed_keys = {stamp.pts for stamp in fed if stamp.is_key}
        if fed_keys:
            self._switches = [stamp for stamp in self._switches if stamp.pts not in fed_keys]

    def _last_switch(self) -> Stamp[PacketT] | None:
        """Returns the last keyframe read at which decoding for the next target can begin."""
        target = self.next_target
        if target is None:
            return None
        return next((stamp for stamp in reversed(self._switches) if stamp.pts <= target), None)

    def _skip_ahead(self) -> None:
        """Drop what the next target does not need, or cut a long run where there is nothing to drop."""
        switch = self._last_switch()
        if switch is None or switch not in self._run.held:
            return
        tail = self._run.held.index(switch)
        if not self._run.num_fed or tail > SHORT_TAIL or self._run.has_fed(self._fuse_packets):
            self._restart(self._run.held[tail:])

    def _restart(self, held: list[Stamp[PacketT]]) -> None:
        """End the run and open the next one at a keyframe that has been read already."""
        self._run.drain()
        self._open(_Run(self.ops, held[0].pts, is_file_start=False), held)

    def _feed_held(self) -> None:
        """Feed what comes before a target far ahead, in full if in doubt, because too much is held."""
        run, target = self._run, self.next_target
        if not self.is_settled:
            self._feed_wanted()
        elif target is not None and len(run.held) > REORDER_MARGIN:
            newest = run.on_screen(target) if run.seen else target
            early = run.held[:-REORDER_MARGIN]
            run.feed(len(early), {stamp.pts for stamp in early if stamp.pts >= newest})


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
