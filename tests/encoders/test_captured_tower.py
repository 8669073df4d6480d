"""A captured tower gives what the tower does: for media of any sizes, and for those that it does not replay.

A CPU has no graphs: what is captured is run again, over the same memory, whose other rows are no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from epd.encoders import FrameSampling
from epd.encoders.adapter import Embeddings, PatchRun
from epd.encoders.families import captured_tower
from epd.encoders.families.captured_tower import CapturedTower, captured
from epd.encoders.groups import FrameEncoder
from epd.reduction import TowerMerge
from tests.encoders.families import Clip, Family, Picture
from tests.encoders.tolerances import assert_same_but_for_batching
from tests.fake_cuda import FakeCuda, fake_cuda, model_like
from tests.stages.encode.workers import noise

SIZES = (64, 128, 256)
NAMES = ("qwen2_5_vl", "qwen3_vl")
SAMPLING = FrameSampling(num_frames=6)


class Repeats:
    """Stands in for CUDA graphs: a replay is a run of what was captured. num_replays: so far."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames and windows of these checkpoints have few patches."""
    monkeypatch.setattr(captured_tower, "SIZES", SIZES)
    monkeypatch.setattr(captured_tower, "_LEAST_PATCHES", {"cu_seqlens": 8, "cu_window_seqlens": 4})


def made(family: Family, graphs: Repeats, most: int = SIZES[-1]) -> CapturedTower:
    found = captured(family.adapter, family.tower, graphs.capture, most)
    assert found is not None
    return found


def batches(family: Family) -> Iterator[list[PatchRun]]:
    """A video, two images of one size, and one of another; and the video again."""
    encoder = FrameEncoder(family.adapter, family.tower)
    clip = Clip(noise(6, 56, 84, 3), 2.0)
    media = [[clip], [Picture(noise(84, 56, 3)), Picture(noise(84, 56, 3))], [Picture(noise(112, 140, 3))]]
    for items in [*media, [clip]]:
        plans = [family.plan(item, SAMPLING) for item in items]
        frames = [noise(len(plan.frame_indices) or 1, *plan.size, 3) for plan in plans]
        yield [encoder.patches(each, plan) for each, plan in zip(frames, plans, strict=True)]


def poison(tower: CapturedTower) -> None:
    """Leaves nothing of a call before in what captured calls read and write."""
    for call in tower._calls:
        for memory in (call._patches, *call._outputs):
            memory.fill_(torch.nan)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_embeddings_are_those_of_the_tower(name: str, families: dict[str, Family]) -> None:
    family, graphs = families[name], Repeats()
    tower = made(family, graphs)
    plain, ours = (FrameEncoder(family.adapter, family.tower, captured=each) for each in (None, tower))
    kept: list[tuple[list[Embeddings], list[Embeddings]]] = []
    for number, runs in enumerate(batches(family)):
        poison(tower)
        kept.append((ours.encode(runs), plain.encode(runs)))
        assert graphs.num_replays == number + 1
    poison(tower)
    for found, expected in kept:
        for mine, theirs in zip(found, expected, strict=True):
            assert_same_but_for_batching(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_calls_that_were_not_captured_are_the_towers(
    name: str, families: dict[str, Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with too many patches, or frames; and where tokens are merged."""
    family, graphs = families[name], Repeats()
    (runs, *_), plain = list(batches(family)), FrameEncoder(family.adapter, family.tower)
    tower = made(family, graphs, SIZES[0])
    assert sum(run.grid.num_patches for run in runs) > SIZES[0]
    ours = FrameEncoder(family.adapter, family.tower, captured=tower)
    assert_same_but_for_batching(ours.encode(runs)[0], plain.encode(runs)[0])
    tower = made(family, graphs)
    ours = FrameEncoder(family.adapter, family.tower, captured=tower)
    few, merged = (FrameEncoder(family.adapter, family.tower, merge=TowerMerge(0.5), captured=each)
                   for each in (None, tower))  # fmt: skip
    assert_same_but_for_batching(merged.encode(runs)[0], few.encode(runs)[0])
    monkeypatch.setattr(captured_tower, "_LEAST_PATCHES", {"cu_seqlens": 1000, "cu_window_seqlens": 4})
    assert_same_but_for_batching(ours.encode(runs)[0], plain.encode(runs)[0])
    assert graphs.num_replays == 0


def test_other_towers_are_not_captured(families: dict[str, Family]) -> None:
    for name in ("glm4v", "qwen2_vl", "internvl"):
        family = families[name]
        assert captured(family.adapter, family.tower, Repeats().capture, 256) is None


def test_a_device_that_captures_nothing_launches_the_tower(
    families: dict[str, Family], caplog: pytest.LogCaptureFixture
) -> None:
    def capture(_run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    family = families["qwen3_vl"]
    assert captured(family.adapter, family.tower, capture, 256) is None
    assert "not permitted when stream is capturing" in caplog.text


class Replays:
    """The same on a device that computes nothing: one launch."""

    def __init__(self, mode: FakeCuda) -> None:
        self._mode = mode

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: self._mode.launches.append("replay")


# Three copies of patches, the replay, and a copy of each tensor of embeddings.
@pytest.mark.parametrize(("name", "most"), [("qwen2_5_vl", 5), ("qwen3_vl", 7)])
@torch.inference_mode()
def test_a_group_is_a_replay_and_a_few_copies_and_waits_for_nothing(
    name: str, most: int, families: dict[str, Family]
) -> None:
    """Of new grids what a tower takes of them is moved and copied once more."""
    family = families[name]
    with fake_cuda() as cuda:
        with cuda.unchecked():
            tower = family.adapter.vision_tower(model_like(family.model.config)).bfloat16()
        found = captured(family.adapter, tower, Replays(cuda).capture, SIZES[-1])
        plan = family.plan(Clip(noise(6, 56, 84, 3), 2.0), SAMPLING)
        launches: list[list[str]] = []
        for each in (None, found, found):
            encoder = FrameEncoder(family.adapter, tower, captured=each)
            runs = [encoder.patches(noise(6, *plan.size, 3), plan)]
            cuda.launches.clear()
            (embeddings,) = encoder.encode(runs)
            assert len(embeddings.rows) == plan.grid.num_patches // 4
            launches.append(list(cuda.launches))
        assert [each.count("replay") for each in launches] == [0, 1, 1]
        assert len(launches[0]) > 50
        assert len(launches[1]) <= most + 8
        assert len(launches[2]) == most
        assert not cuda.waits


def test_runs_at_the_end_may_be_empty() -> None:
    """By hand: three runs, of which the last has nothing, give what each gives alone."""
    query, key, value = (torch.randn(10, 2, 8) for _ in range(3))
    from epd.encoders.families.qwen_tower import StaticRuns

    found = StaticRuns(torch.tensor([0, 4, 10, 10], dtype=torch.int32), 6).attend(query, key, value, 0.5)
    parts: list[Tensor] = []
    for rows in (slice(0, 4), slice(4, 10)):
        weights = torch.einsum("qhd,khd->hqk", query[rows], key[rows]) * 0.5
        parts.append(torch.einsum("hqk,khd->qhd", weights.softmax(-1), value[rows]))
    torch.testing.assert_close(found, torch.cat(parts))
