"""Embeddings on disk: another life of an encoder encodes only units whose pixels no earlier one had.

Modules: `epd/store/write_behind.py`, `stages/kept_files.py`.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread

import pytest

from epd.encoders.groups import MediaGroup, plan_groups, salted
from epd.store.file_format import Place, place
from epd.store.piece_files import PieceFiles, stored
from epd.store.write_behind import read_paces
from epd.types import Reuse, Tier
from tests.encoders.families import Clip, Family, Picture
from tests.encoders.tolerances import assert_same_but_for_batching
from tests.stages.encode.workers import SAMPLING, Workers, clip_of, merged, noise

SOON_S = 60.0


def life(family: Family, folder: Path, skip_static: float | None = None) -> Workers:
    """An encoder with nothing in memory, over a folder."""
    workers = Workers(family, 1, skip_static=skip_static)
    workers.encoders[0].keep_in(PieceFiles(folder, "tests", 1 << 30, {}))
    return workers


def groups_of(
    family: Family, media: Sequence[Picture | Clip], name: str = "item", salt: str = "", units: int = 2
) -> list[MediaGroup]:
    plans = [family.plan(item, SAMPLING) for item in media]
    hashes = [salted(f"{name} {index}", salt) for index in range(len(media))]
    tokens = units * plans[0].tokens_per_unit
    return plan_groups(plans, hashes, model="tiny", group_tokens=tokens, cache_salt=salt)


def run(workers: Workers, media: Sequence[Picture | Clip], groups: Sequence[MediaGroup]) -> int:
    """Encodes as an encoder that keeps nothing does. Returns the patches that it took."""
    family, (encoder,) = workers.family, workers.encoders
    plans = [family.plan(item, SAMPLING) for item in media]
    before = encoder.counts.num_patches
    results = workers.encode(media, groups)
    plain = Workers(family, 1)
    expected = merged(family.adapter, plans, plain.encode(media, groups))
    for ours, theirs in zip(merged(family.adapter, plans, results), expected, strict=True):
        assert_same_but_for_batching(ours, theirs)
    encoder.close()
    workers.check()
    return encoder.counts.num_patches - before


def patches(groups: Sequence[MediaGroup]) -> int:
    return sum(group.plan.grid.num_patches for group in groups)


@pytest.fixture
def clip(family: Family) -> Clip:
    return clip_of(family)


def test_a_second_life_encodes_and_reads_no_frame(family: Family, clip: Clip, tmp_path: Path) -> None:
    media = [clip, Picture(noise(56, 56, 3, seed=2))]
    groups = groups_of(family, media)
    assert run(life(family, tmp_path), media, groups) == patches(groups)
    again = life(family, tmp_path)
    assert all(again.encoders[0].has(group.spec.key, group.plan) for group in groups)
    assert run(again, media, groups) == 0
    assert again.frames_asked == []
    assert again.encoders[0].store is not None
    counts = again.encoders[0].store.units.counts
    assert counts.read_tokens == sum(group.spec.num_embeddings for group in groups)
    assert counts.num_failed == 0


def test_equal_pixels_are_encoded_once_whatever_file_they_came_in(
    family: Family, clip: Clip, tmp_path: Path
) -> None:
    """Under another name, in other groups, within one group, and in one batch."""
    groups = groups_of(family, [clip], "first")
    run(life(family, tmp_path), [clip], groups)
    copy = groups_of(family, [clip], "remuxed", units=3)
    again = life(family, tmp_path)
    assert not any(again.encoders[0].has(group.spec.key, group.plan) for group in copy)
    assert run(again, [clip], copy) == 0
    assert len(again.frames_asked) == len(copy)
    still = Clip(255 - clip.frames[:1].expand_as(clip.frames), clip.fps)
    stills = groups_of(family, [still], "still")
    assert run(life(family, tmp_path), [still], stills) == stills[0].plan.part(0, 1).grid.num_patches


def test_drawn_ranges_encode_only_units_that_no_earlier_request_had(
    family: Family, clip: Clip, tmp_path: Path
) -> None:
    """200 of them in all families, of which many begin at an odd frame, or end within a unit."""
    draw, seen = random.Random(47), set[bytes]()
    for number in range(34):
        start = draw.randrange(len(clip.frames) - 1)
        part = Clip(clip.frames[start : draw.randrange(start + 1, len(clip.frames)) + 1], clip.fps)
        groups, needed = groups_of(family, [part], f"range {number}"), 0
        workers = life(family, tmp_path)
        for group in groups:
            frames = workers.frames([part], group)
            for unit in range(group.plan.num_units):
                pixels = frames[slice_of(group, unit)].numpy().tobytes()
                if pixels not in seen:
                    seen.add(pixels)
                    needed += group.plan.part(unit, unit + 1).grid.num_patches
        before = workers.encoders[0].counts.num_patches
        workers.encode([part], groups)
        workers.encoders[0].close()
        assert workers.encoders[0].counts.num_patches - before == needed


def slice_of(group: MediaGroup, unit: int) -> slice:
    frames = group.plan.frame_range(unit, unit + 1)
    return slice(frames.start, frames.stop)


def test_a_salt_shares_with_its_own_alone(family: Family, clip: Clip, tmp_path: Path) -> None:
    plain, mine = groups_of(family, [clip]), groups_of(family, [clip], salt="mine")
    run(life(family, tmp_path), [clip], plain)
    assert run(life(family, tmp_path), [clip], mine) == patches(mine)
    assert run(life(family, tmp_path), [clip], groups_of(family, [clip], "copy", "mine")) == 0
    assert run(life(family, tmp_path), [clip], groups_of(family, [clip], "copy", "other")) == patches(plain)


def test_units_that_depend_on_others_are_kept_by_group(family: Family, clip: Clip, tmp_path: Path) -> None:
    """Where a unit is compared with the one before it, within a tolerance."""
    groups = groups_of(family, [clip])
    for name, units, expected in (("first", 2, patches(groups)), ("copy", 2, 0), ("cut", 5, patches(groups))):
        workers = life(family, tmp_path, skip_static=1e-6)
        assert run(workers, [clip], groups_of(family, [clip], name, units=units)) == expected


def place_of(path: Path) -> Place:
    with path.open("rb") as file:
        return place(file, path.name)


@pytest.mark.parametrize("damage", ["cut off", "missing", "one bit"])
def test_what_is_damaged_is_encoded_again(family: Family, clip: Clip, tmp_path: Path, damage: str) -> None:
    groups = groups_of(family, [clip])
    run(life(family, tmp_path), [clip], groups)
    lost = groups[0].plan.part(0, 1).grid.num_patches
    sizes = {each: place_of(each.path).num_bytes for each in stored(tmp_path)}
    unit = max(sizes, key=lambda each: sizes[each])
    if damage == "missing":
        unit.path.unlink()
    elif damage == "cut off":
        os.truncate(unit.path, 100)
        lost *= sum(each.file == unit.file and size == sizes[unit] for each, size in sizes.items())
    else:
        data = bytearray(unit.path.read_bytes())
        data[place_of(unit.path).start] ^= 1
        unit.path.write_bytes(data)
    assert run(life(family, tmp_path), [clip], groups) == lost
    assert run(life(family, tmp_path), [clip], groups) == 0


def test_a_disk_that_is_full_ends_writing_alone(
    family: Family,
    clip: Clip,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PieceFiles, "write", full)
    groups = groups_of(family, [clip])
    assert run(life(family, tmp_path), [clip], groups) == patches(groups)
    assert not list(stored(tmp_path))
    assert [each.message for each in caplog.records if "no longer" in each.message] == [
        f"embeddings are kept in {tmp_path} no longer: No space left on device"
    ]


class Silent(PieceFiles):
    """Files that are there, and do not answer before they are told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "tests", 1 << 30, {})
        self.may_answer = Event()

    def read(self, key: str, index: int, payload: memoryview) -> Tier | None:
        self.may_answer.wait(SOON_S)
        return super().read(key, index, payload)


class Asked:
    """An encoder over a silent disk that has been asked for groups. told: what was found of them."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.workers, self.files = Workers(family, 1), Silent(folder)
        (self.stage,) = self.workers.encoders
        self.stage.keep_in(self.files)
        self.told: list[Reuse] = []

    def submit(self, clip: Clip, groups: Sequence[MediaGroup], *, has_frames: bool) -> None:
        request_id = groups[0].spec.key.mm_hash
        self.workers.receiver.open(request_id, [group.spec for group in groups])
        for grant in self.workers.receiver.grant():
            job = self.workers.job([clip], groups[grant.group], grant.ticket)
            self.stage.submit(replace(job, has_frames=has_frames, on_reuse=self.told.append))

    def until_ready(self, groups: Sequence[MediaGroup]) -> None:
        while not all(self.stage.cache.is_ready(group.spec.key) for group in groups):
            self.stage.step()

    def close(self) -> None:
        self.files.may_answer.set()
        self.stage.close()


@pytest.fixture
def asked(family: Family, clip: Clip, tmp_path: Path) -> Iterator[Asked]:
    run(life(family, tmp_path), [clip], groups_of(family, [clip]))
    asked = Asked(family, tmp_path)
    yield asked
    asked.close()


def test_a_silent_disk_delays_no_other_group(family: Family, clip: Clip, asked: Asked) -> None:
    kept, new = groups_of(family, [clip]), groups_of(family, [negative(clip)], "new")
    asked.submit(clip, kept, has_frames=False)
    asked.submit(negative(clip), new, has_frames=True)
    asked.until_ready(new)
    assert not any(asked.stage.cache.is_ready(group.spec.key) for group in kept)
    assert not asked.stage.can_step
    assert asked.stage.has_work()
    asked.files.may_answer.set()
    asked.until_ready(kept)
    assert asked.stage.counts.num_patches == patches(new)


def negative(clip: Clip) -> Clip:
    return Clip(255 - clip.frames, clip.fps)


def test_an_idle_tower_waits_for_a_silent_disk_no_longer_than_it_encodes(
    family: Family, clip: Clip, asked: Asked
) -> None:
    kept = groups_of(family, [clip])
    assert asked.stage.store is not None
    asked.stage.store.units.note_encoded(1000, 0.1)
    asked.submit(clip, kept, has_frames=True)
    asked.until_ready(kept)
    assert not asked.files.may_answer.is_set()
    assert asked.stage.counts.num_patches == patches(kept)


def test_what_is_slow_to_read_is_encoded_and_told(family: Family, clip: Clip, asked: Asked) -> None:
    """If its frames come soon enough."""
    kept, store = groups_of(family, [clip]), asked.stage.store
    assert store is not None
    asked.files.may_answer.set()
    store.units.files.note_read("disk", 1, time.monotonic() - 1000.0)
    assert all(store.units.has(group.spec.key, group.plan) for group in kept), "nothing else is known"
    store.units.note_encoded(1000, 0.1)
    assert not any(store.units.has(group.spec.key, group.plan, 1.0) for group in kept)
    assert all(store.units.has(group.spec.key, group.plan, 1e9) for group in kept)
    assert all(store.units.has(group.spec.key, group.plan) for group in kept), "no frames came yet"
    asked.submit(clip, kept, has_frames=True)
    asked.until_ready(kept)
    assert asked.stage.counts.num_patches == patches(kept)
    assert {(each.kind, each.tier, each.num_bytes) for each in asked.told} == {("embeddings", "left", 0)}
    assert sum(each.num for each in asked.told) == sum(group.spec.num_embeddings for group in kept)
    assert store.units.counts.left_tokens == sum(group.spec.num_embeddings for group in kept)
    assert store.units.counts.read_tokens == 0


@pytest.mark.parametrize(("latency_s", "is_read"), [(0.0, True), (0.1, False)])
def test_small_units_of_a_slow_disk_are_read_unless_each_read_takes_long(
    family: Family, clip: Clip, tmp_path: Path, latency_s: float, is_read: bool
) -> None:
    """Large pieces were read from it, by whoever keeps keys and values: they tell what a small one takes."""
    groups, paces, now_s = groups_of(family, [clip]), read_paces(), time.monotonic()
    run(life(family, tmp_path), [clip], groups)
    for size in (1_570_000, 172_000):
        taken_s = latency_s + size / 2e6
        paces["disk"].add(size, now_s, now_s + taken_s)
        now_s += taken_s
    workers = Workers(family, 1)
    (stage,) = workers.encoders
    stage.keep_in(PieceFiles(tmp_path, "tests", 1 << 30, {}), paces)
    assert stage.store is not None
    num_bytes = sum(group.spec.num_embeddings for group in groups) * workers.layout.bytes_per_embedding
    stage.store.units.note_encoded(patches(groups), 10 * num_bytes / 2e6)  # and 64 KiB take 60 times as long
    assert {stage.has(group.spec.key, group.plan, 0.0) for group in groups} == {is_read}
    stage.close()


def test_a_new_unit_is_looked_for_once(
    family: Family, clip: Clip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tower asks no disk for what a thread did not find. Writes wait until all is encoded."""
    asked, is_over, tier_of, write = Counter[str](), Event(), PieceFiles.tier_of, PieceFiles.write

    def counted(files: PieceFiles, key: str) -> Tier | None:
        if current_thread().name.startswith("hash-frames"):
            units.add(key)
        asked[key] += 1
        return tier_of(files, key)

    def late(files: PieceFiles, pieces: Mapping[str, memoryview], index: int = 0) -> int:
        assert is_over.wait(SOON_S)
        return write(files, pieces, index)

    units = set[str]()
    monkeypatch.setattr(PieceFiles, "tier_of", counted)
    monkeypatch.setattr(PieceFiles, "write", late)
    workers, groups = life(family, tmp_path), groups_of(family, [clip])
    workers.encode([clip], groups)
    assert units
    assert {asked[key] for key in units} == {1}
    is_over.set()
    workers.encoders[0].close()
