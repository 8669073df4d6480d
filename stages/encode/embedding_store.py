"""Keeps embeddings on disk: encodes only units that are not there.

    group      source, range, size  ->  names of its units        found without a frame
    unit       its decoded pixels   ->  its embeddings            found in any file, at any time

A tower attends within a unit of a video only, so equal pixels have equal embeddings. A group of an image, of
sound, or where units are compared or merged, is one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from epd.encode.encoder_cache import GroupKey
from epd.encoders.adapter import Embeddings, MediaPlan, PatchRun
from epd.encoders.batch import FrameEncoder
from epd.encoders.device import to_host
from epd.stages.encode.encoder_pool import EmbeddingLayout, joined
from epd.stages.kept_files import EMBEDDINGS_KIND
from epd.store.piece_files import PieceFiles
from epd.store.write_behind import WriteBehind
from epd.types import Reuse, totals

_NAME_BYTES = 16


class Wanted(Protocol):
    """Describes a group: see `EncodeJob`."""

    @property
    def key(self) -> GroupKey: ...
    @property
    def plan(self) -> MediaPlan: ...
    @property
    def num_embeddings(self) -> int: ...
    @property
    def frames(self) -> Callable[[], Tensor]: ...
    @property
    def on_reuse(self) -> Callable[[Reuse], None]: ...


class EmbeddingStore:
    """Keeps what one encoder encodes. Another thread may ask what is kept."""

    def __init__(self, files: PieceFiles, layout: EmbeddingLayout, encoder: FrameEncoder) -> None:
        self._files = WriteBehind(files, EMBEDDINGS_KIND)
        self.counts = self._files.counts
        self._layout = layout
        self._encoder = encoder

    def has(self, key: GroupKey, plan: MediaPlan) -> bool:
        """Returns whether all of a group is kept, so that its frames need not be read."""
        names = self._units_of(key, plan)
        return bool(names) and all(name in self._files for name in names)

    def encode(self, groups: Sequence[Wanted]) -> tuple[list[Embeddings], int]:
        """Returns the embeddings of groups, and how many patches were encoded for them."""
        found: dict[str, Tensor] = {}  # rows [V, width] of units, on the host
        runs: list[tuple[list[str], PatchRun]] = []  # to encode, with the names of their units
        names = [self._find(group, found, runs) for group in groups]
        encoded = self._encoder.encode([run for _, run in runs]) if runs else []
        for (new, _), embeddings in zip(runs, encoded, strict=True):
            rows = to_host(joined(embeddings)).to(self._layout.dtype)
            found |= zip(new, rows.chunk(len(new)), strict=True)
            for index, name in enumerate(new):
                self._files.add(name, index, found[name].flatten().view(torch.uint8).numpy().data)
        for group, each in zip(groups, names, strict=True):
            self._keep_names(group, each)
        whole = [self._layout.split(torch.cat([found[name] for name in each])) for each in names]
        return whole, sum(run.grid.num_patches for _, run in runs)

    def _find(
        self, group: Wanted, found: dict[str, Tensor], runs: list[tuple[list[str], PatchRun]]
    ) -> list[str]:
        """Returns the names of a group's units, of which each is found then, or in a run."""
        num_rows = group.num_embeddings // self._num_units(group.plan)
        names = self._units_of(group.key, group.plan)
        reused: list[Reuse] = []
        if names and all(self._read(name, num_rows, found, reused) for name in names):
            _tell(group, reused)
            return names
        frames = group.frames()
        names, plan = self._names(frames, group), group.plan
        wanted = {name for new, _ in runs for name in new}
        new: dict[str, int] = {}
        for index, name in enumerate(names):
            if name not in wanted and name not in new and not self._read(name, num_rows, found, reused):
                new[name] = index
        if len(new) == len(names):
            runs.append((names, self._encoder.patches(frames, plan)))
        elif new:
            runs.append((list(new), self._encoder.patches(*_of_units(frames, plan, list(new.values())))))
        _tell(group, reused)
        return names

    def _num_units(self, plan: MediaPlan) -> int:
        """Counts the units of a group that are known one by one."""
        return plan.num_units if plan.kind == "video" and self._encoder.is_by_unit else 1

    # Names

    def _names(self, frames: Tensor, group: Wanted) -> list[str]:
        """Names a group's units by their pixels, uint8 [N, h, w, 3]."""
        plan, num_units = group.plan, self._num_units(group.plan)
        if num_units == 1:
            return [unit_name(group.key, plan, frames)]
        ranges = [plan.frame_range(unit, unit + 1) for unit in range(num_units)]
        return [
            unit_name(group.key, plan.part(unit, unit + 1), frames[each.start : each.stop])
            for unit, each in enumerate(ranges)
        ]

    def _units_of(self, key: GroupKey, plan: MediaPlan) -> list[str]:
        """Returns the names of a group's units; none if they are not kept."""
        kept = bytearray(self._num_units(plan) * _NAME_BYTES)
        if not self._files.read(group_name(key, plan), 0, memoryview(kept)):
            return []
        return [kept[start : start + _NAME_BYTES].hex() for start in range(0, len(kept), _NAME_BYTES)]

    def _keep_names(self, group: Wanted, names: Sequence[str]) -> None:
        if all(name in self._files for name in names):
            payload = memoryview(bytes.fromhex("".join(names)))
            self._files.add(group_name(group.key, group.plan), 0, payload)

    # Rows

    def _read(self, name: str, num_rows: int, found: dict[str, Tensor], reused: list[Reuse]) -> bool:
        """Reads the rows of a unit. Returns whether they are found."""
        if name not in found and name in self._files:
            rows = torch.empty(num_rows, self._layout.width, dtype=self._layout.dtype)
            if tier := self._files.read(name, 0, rows.flatten().view(torch.uint8).numpy().data):
                found[name] = rows
                reused.append(self.counts.found(Reuse("embeddings", tier, num_rows, rows.nbytes)))
            else:
                self.counts.num_failed += 1
        return name in found

    def close(self) -> None:
        """Ends the thread, once what waits is written."""
        self._files.close()


def _tell(group: Wanted, reused: Sequence[Reuse]) -> None:
    for each in totals(reused):
        group.on_reuse(each)


def group_name(key: GroupKey, plan: MediaPlan) -> str:
    """Names a group by its source. The model is another namespace."""
    return _name((key.mm_hash, key.times_s, key.units, key.size, key.reduction, plan.kind, plan.grid))


def unit_name(key: GroupKey, plan: MediaPlan, frames: Tensor) -> str:
    """Names a unit by its pixels, uint8 [N, h, w, 3]. key: of its group. plan: of the unit alone."""
    facts = key.salt, key.reduction, plan.kind, plan.grid, plan.resized, tuple(frames.shape)
    return _name(facts, frames.contiguous().numpy().data)


def _name(facts: tuple[object, ...], content: bytes | memoryview = b"") -> str:
    digest = blake2b(repr(facts).encode(), digest_size=_NAME_BYTES)
    digest.update(content)
    return digest.hexdigest()


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
