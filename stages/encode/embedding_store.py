"""Keeps embeddings on disk: encodes only units that are not there.

    group      source, range, size  ->  names of its units        found without a frame
    unit       its decoded pixels   ->  its embeddings            found in any file, at any time

    a group is looked for in a thread, and its pixels are hashed there  ->  the tower encodes what is missing

A tower attends within a unit of a video only, so equal pixels have equal embeddings. A group of an image, of
sound, or where units are compared or merged, is one unit. What is quicker to encode than to read is encoded.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from threading import Lock
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from epd.control.recent import Pace, Recent
from epd.control.way_back import PartCosts
from epd.encode.encoder_cache import GroupKey
from epd.encoders.adapter import Embeddings, PatchRun
from epd.encoders.device import to_host
from epd.encoders.groups import FrameEncoder
from epd.encoders.plans import MediaPlan
from epd.stages.encode.encoder_pool import EmbeddingLayout, joined
from epd.stages.kept_files import EMBEDDINGS_KIND
from epd.store.piece_files import PieceFiles
from epd.store.write_behind import ReadPaces, WriteBehind
from epd.types import Reuse, totals

_NAME_BYTES = 16
# Groups that are hashed, and that are read, at once.
_NUM_HASHERS, _NUM_READERS = 2, 4
# Names of units that were encoded last: more than are encoded while one group waits for the tower.
_NUM_ENCODED = 1 << 16
# Seconds that an idle tower waits at least for a group that is looked for.
_PATIENCE_S = 0.25


@dataclass(slots=True)
class Found:
    """Says what is kept of a group.

    names: of its units, in order.
    rows: those that were read, [V, width] of each unit, by name.
    left: names of units that are kept, and are quicker to encode.
    frames: uint8 [N, h, w, 3], if any of it has to be encoded.
    """

    names: list[str]
    rows: dict[str, Tensor] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    frames: Tensor | None = None


class Wanted(Protocol):
    """Describes a group: see `EncodeJob`."""

    @property
    def key(self) -> GroupKey: ...
    @property
    def plan(self) -> MediaPlan: ...
    @property
    def num_embeddings(self) -> int: ...
    @property
    def num_patches(self) -> int: ...
    @property
    def frames(self) -> Callable[[], Tensor]: ...
    @property
    def has_frames(self) -> bool: ...
    @property
    def found(self) -> Found | None: ...
    @property
    def on_reuse(self) -> Callable[[Reuse], None]: ...


class KeptUnits:
    """Finds and reads the units of groups that are kept, and says whether encoding them is quicker."""

    def __init__(
        self, files: PieceFiles, layout: EmbeddingLayout, encoder: FrameEncoder, paces: ReadPaces | None
    ) -> None:
        """paces: see `WriteBehind`."""
        self.files = WriteBehind(files, EMBEDDINGS_KIND, paces)
        self.counts = self.files.counts
        self._layout = layout
        self._encoder = encoder
        self._encoding = Pace()  # of patches
        self._counting = Lock()

    def has(self, key: GroupKey, plan: MediaPlan, frames_s: float | None = None) -> bool:
        """Returns whether all of a group is kept and to be read, so that its frames need not come.

        frames_s: in which they would come; None if that is not known.
        """
        tier, num_units = self.files.tier_of(group_name(key, plan)), self.num_units(key, plan)
        media_s = self.encode_s(plan.grid.num_patches, math.inf if frames_s is None else frames_s)
        if not self._is_read(self.files.seconds(tier, num_units * _NAME_BYTES), media_s):
            return False
        bytes_per_unit = plan.num_tokens * self._layout.bytes_per_embedding / num_units
        tiers = Counter(self.files.tier_of(unit) for unit in set(self.units_of(key, plan)))
        read_s = sum(self.files.seconds(tier, num * bytes_per_unit, num) for tier, num in tiers.items())
        return bool(tiers) and self._is_read(read_s, media_s)

    def encode_s(self, num_patches: int, frames_s: float = 0.0) -> float:
        """Returns the seconds until patches are encoded, infinite if that is not known."""
        seconds = self._encoding.seconds(num_patches, time.monotonic())
        return math.inf if seconds is None else max(seconds, frames_s)

    @staticmethod
    def _is_read(read_s: float, media_s: float) -> bool:
        return math.isfinite(read_s) and PartCosts(embeddings_s=read_s, encode_s=media_s).reads_embeddings

    def note_encoded(self, num_patches: int, seconds: float) -> None:
        """Notes how long the tower took for patches, until now."""
        now_s = time.monotonic()
        self._encoding.add(num_patches, now_s - seconds, now_s)

    def pays(self, name: str, group: Wanted) -> bool:
        """Returns whether a unit is read sooner than encoded, as far as that is known."""
        num_bytes = self.num_rows(group) * self._layout.bytes_per_embedding
        encode_s = self.encode_s(group.num_patches // self.num_units(group.key, group.plan))
        return self._is_read(self.files.seconds(self.files.tier_of(name), num_bytes), encode_s)

    def num_rows(self, group: Wanted) -> int:
        return group.num_embeddings // self.num_units(group.key, group.plan)

    def num_units(self, key: GroupKey, plan: MediaPlan) -> int:
        """Counts the units of a group that are known one by one."""
        is_by_unit = self._encoder.is_by_unit and key.tower_share is None
        return plan.num_units if plan.kind == "video" and is_by_unit else 1

    def names(self, frames: Tensor, group: Wanted) -> list[str]:
        """Names a group's units by their pixels, uint8 [N, h, w, 3]."""
        plan, num_units = group.plan, self.num_units(group.key, group.plan)
        if num_units == 1:
            return [unit_name(group.key, plan, frames)]
        one = plan.part(0, 1)  # as all others, but for its times
        ranges = [plan.frame_range(unit, unit + 1) for unit in range(num_units)]
        return [unit_name(group.key, one, frames[each.start : each.stop]) for each in ranges]

    def units_of(self, key: GroupKey, plan: MediaPlan) -> list[str]:
        """Returns the names of a group's units; none if they are not kept."""
        kept = bytearray(self.num_units(key, plan) * _NAME_BYTES)
        if not self.files.read(group_name(key, plan), 0, memoryview(kept)):
            return []
        return [kept[start : start + _NAME_BYTES].hex() for start in range(0, len(kept), _NAME_BYTES)]

    def read(self, name: str, num_rows: int, rows: dict[str, Tensor], reused: list[Reuse]) -> bool:
        """Reads the rows of a unit. Returns whether they are there."""
        if name not in self.files:
            return False
        found = torch.empty(num_rows, self._layout.width, dtype=self._layout.dtype)
        tier = self.files.read(name, 0, found.flatten().view(torch.uint8).numpy().data)
        if tier is None:
            with self._counting:
                self.counts.num_failed += 1
            return False
        rows[name] = found
        reused.append(self.counted(Reuse("embeddings", tier, num_rows, found.nbytes)))
        return True

    def counted(self, reuse: Reuse) -> Reuse:
        with self._counting:
            return self.counts.found(reuse)


class EmbeddingStore:
    """Keeps what one encoder encodes. Threads of its own look what is kept.

    on_look: called by another thread, once a step has something to take.
    """

    def __init__(
        self,
        files: PieceFiles,
        layout: EmbeddingLayout,
        encoder: FrameEncoder,
        paces: ReadPaces | None = None,
    ) -> None:
        """paces: see `WriteBehind`."""
        self.units = KeptUnits(files, layout, encoder, paces)
        self.on_look: Callable[[], None] = lambda: None
        self._layout = layout
        self._encoder = encoder
        self._encoded: Recent[str, bool] = Recent(_NUM_ENCODED)
        self._hashers = ThreadPoolExecutor(_NUM_HASHERS, "hash-frames")
        self._readers = ThreadPoolExecutor(_NUM_READERS, "read-embeddings")

    # Looking for groups, in threads

    def look(self, group: Wanted) -> Future[Found]:
        """Looks for a group. The future raises what `frames` does.

        One whose frames are there is known by its pixels, and waits for no other group's reads.
        """
        looked: Future[Found] = Future()
        looked.add_done_callback(lambda _: self.on_look())
        if group.has_frames:
            self._hashers.submit(self._settle, looked, self._look_by_pixels, group, looked)
        else:
            self._readers.submit(self._settle, looked, self._look_by_source, group)
        return looked

    @staticmethod
    def _settle(looked: Future[Found], work: Callable[..., Found | None], *arguments: object) -> None:
        """Does work that gives a future its result, or hands it on."""
        try:
            found = work(*arguments)
        except BaseException as error:  # noqa: BLE001 - the future raises it
            looked.set_exception(error)
            return
        if found is not None:
            looked.set_result(found)

    def is_late(self, group: Wanted, since_s: float) -> bool:
        """Returns whether a group that is looked for would have been encoded by now."""
        waited_s = time.monotonic() - since_s
        return group.has_frames and waited_s > max(_PATIENCE_S, self.units.encode_s(group.num_patches))

    def _look_by_pixels(self, group: Wanted, looked: Future[Found]) -> Found | None:
        """Returns what is found at once; None if something is to be read first."""
        frames = group.frames()
        found = Found(self.units.names(frames, group), frames=frames)
        kept = [name for name in dict.fromkeys(found.names) if name in self.units.files]
        found.left.update(name for name in kept if not self.units.pays(name, group))
        num_left = len(found.left) * self.units.num_rows(group)
        if num_left:
            group.on_reuse(self.units.counted(Reuse("embeddings", "left", num_left)))
        if len(kept) == len(found.left):
            return found
        self._readers.submit(self._settle, looked, self._read_units, group, found)
        return None

    def _look_by_source(self, group: Wanted) -> Found:
        """Reads a group without frames, as was found out before; asks for them if it is there no more."""
        found = self._read_units(group, Found(self.units.units_of(group.key, group.plan)))
        if not found.names or any(name not in found.rows for name in found.names):
            found.frames = group.frames()
        return found

    def _read_units(self, group: Wanted, found: Found) -> Found:
        """Reads those units of a group that are kept, and are not left."""
        reused: list[Reuse] = []
        for name in dict.fromkeys(found.names):
            if name not in found.left:
                self.units.read(name, self.units.num_rows(group), found.rows, reused)
        _tell(group, reused)
        return found

    # In the tower's thread

    def encode(self, groups: Sequence[Wanted]) -> tuple[list[Embeddings], int]:
        """Returns the embeddings of groups, and how many patches were encoded for them."""
        rows: dict[str, Tensor] = {}  # [V, width] of units, on the host
        runs: list[tuple[list[str], PatchRun]] = []  # to encode, with the names of their units
        names = [self._add_run(group, group.found or self._hashed(group), rows, runs) for group in groups]
        share = groups[0].key.tower_share
        encoded = self._encoder.encode([run for _, run in runs], share) if runs else []
        for (new, _), embeddings in zip(runs, encoded, strict=True):
            whole = to_host(joined(embeddings)).to(self._layout.dtype)
            rows |= zip(new, whole.chunk(len(new)), strict=True)
        self._keep([name for new, _ in runs for name in new], rows, groups, names)
        results = [self._layout.split(torch.cat([rows[name] for name in each])) for each in names]
        return results, sum(run.grid.num_patches for _, run in runs)

    def _keep(
        self,
        new: Sequence[str],
        rows: Mapping[str, Tensor],
        groups: Sequence[Wanted],
        names: Sequence[Sequence[str]],
    ) -> None:
        """Keeps the rows of new units and, once they wait to be written, the names of groups, all at once."""
        pieces = {name: rows[name].flatten().view(torch.uint8).numpy().data for name in new}
        for name in new:
            self._encoded.set(name, True)
        for group, each in zip(groups, names, strict=True):
            pieces[group_name(group.key, group.plan)] = memoryview(bytes.fromhex("".join(each)))
        self.units.files.add(pieces)

    def _hashed(self, group: Wanted) -> Found:
        """Returns a group for which the disk did not answer, to be encoded whole."""
        frames = group.frames()
        names = self.units.names(frames, group)
        return Found(names, left=set(names), frames=frames)

    def _add_run(
        self, group: Wanted, found: Found, rows: dict[str, Tensor], runs: list[tuple[list[str], PatchRun]]
    ) -> list[str]:
        """Adds the run of a group's units that are in none yet. Returns the names of all its units.

        Those that other groups had encoded since it was looked for are read. No other is looked for again.
        """
        rows |= found.rows
        known = {name for new, _ in runs for name in new}
        new: dict[str, int] = {}
        reused: list[Reuse] = []
        for index, name in enumerate(found.names):
            if name in known or name in new or name in rows:
                continue
            is_kept = name not in found.left and self._encoded.get(name) and self.units.pays(name, group)
            if not is_kept or not self.units.read(name, self.units.num_rows(group), rows, reused):
                new[name] = index
        if new:
            frames = group.frames() if found.frames is None else found.frames
            plan = group.plan
            if len(new) < len(found.names):
                frames, plan = _of_units(frames, plan, list(new.values()))
            runs.append((list(new), self._encoder.patches(frames, plan)))
        _tell(group, reused)
        return found.names

    def close(self) -> None:
        """Ends the threads, once what waits is written."""
        for threads in (self._hashers, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)
        self.units.files.close()


WantedT = TypeVar("WantedT", bound=Wanted)


class Looks(Generic[WantedT]):
    """Holds the groups that are being looked for, in order. Used by one thread."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._looks: list[tuple[WantedT, Future[Found], float]] = []

    @property
    def groups(self) -> list[WantedT]:
        return [group for group, _, _ in self._looks]

    def add(self, group: WantedT) -> None:
        """Begins to look for a group."""
        self._looks.append((group, self._store.look(group), time.monotonic()))

    def forget(self, is_over: Callable[[WantedT], bool]) -> None:
        """Forgets groups."""
        self._looks = [each for each in self._looks if not is_over(each[0])]

    def take(self, *, is_idle: bool) -> list[tuple[WantedT, Future[Found] | None]]:
        """Returns the groups that are found or not, and for an idle tower those for which it waits too long.

        None comes with these.
        """
        taken: list[tuple[WantedT, Future[Found] | None]] = []
        left = []
        for group, looked, since_s in self._looks:
            if looked.done():
                taken.append((group, looked))
            elif is_idle and self._store.is_late(group, since_s):
                taken.append((group, None))
            else:
                left.append((group, looked, since_s))
        self._looks = left
        return taken


def _tell(group: Wanted, reused: Sequence[Reuse]) -> None:
    for each in totals(reused):
        group.on_reuse(each)


def group_name(key: GroupKey, plan: MediaPlan) -> str:
    """Names a group by its source. The model is another namespace."""
    return _name((key.mm_hash, key.times_s, key.units, key.size, key.tower_share, plan.kind, plan.grid))


def unit_name(key: GroupKey, plan: MediaPlan, frames: Tensor) -> str:
    """Names a unit by its pixels, uint8 [N, h, w, 3]. key: of its group. plan: of the unit alone."""
    shown = plan.resized, plan.drawn_times_s, tuple(frames.shape)
    facts = key.salt, key.tower_share, plan.kind, plan.grid, *shown
    return _name(facts, frames.contiguous().numpy().data)


def _name(facts: tuple[object, ...], content: bytes | memoryview = b"") -> str:
    digest = sha256(repr(facts).encode())
    digest.update(content)
    return digest.digest()[:_NAME_BYTES].hex()


def _of_units(frames: Tensor, plan: MediaPlan, units: Sequence[int]) -> tuple[Tensor, MediaPlan]:
    """Returns the frames and the plan of some units alone, in order."""
    numbers = [number for unit in units for number in plan.frame_range(unit, unit + 1)]
    part = replace(
        plan,
        grid=plan.grid.cut(len(units)),
        times_s=tuple(plan.times_s[number] for number in numbers),
        frame_indices=tuple(plan.frame_indices[number] for number in numbers),
    )
    return frames[numbers], part
