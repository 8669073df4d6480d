"""Takes what the pipeline hands to the vision tower: the frames of a clip, and when they are on screen.

look -> plan -> decode by groups -> patches     as `ask` does, in this process
                                                or as a server does: in media children, cut into runs
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.witness.timecode import HEIGHT, WIDTH
from epd.encoders import FrameSampling, MediaPlan, PixelLimits
from epd.encoders.adapter import Adapter, Embeddings, PatchRun
from epd.encoders.device import CPU
from epd.encoders.groups import FrameEncoder, MediaGroup, plan_groups
from epd.encoders.registry import load_adapter
from epd.serve_app.orchestration.group_feed import plan_runs
from epd.stages.media import plan_video
from epd.types import StageTimings, UInt8Array
from epd.video import ChildStream, MediaChildren, open_file
from tests.colocated import decode_groups, encode_group, plan_media
from tests.encoders.tiny_tiles import BUILDERS

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl", "smolvlm")
_GROUP_TOKENS = 96
_READERS = 2
_TILE_SIDE = 384  # pixels; the tiny checkpoints of the tests have squares too small to read


@dataclass(frozen=True, slots=True)
class Handed:
    """Holds what a model gets of a clip.

    plan: with the times at which frames are taken from the video.
    frames: as they go into the vision tower, grey, uint8 [h, w] each.
    stamps_s: in the text of the prompt, before each unit; empty for families that write none.
    num_substituted: frames that show a neighbour.
    """

    plan: MediaPlan
    frames: tuple[UInt8Array, ...]
    stamps_s: tuple[float, ...]
    num_substituted: int = 0


class _Recorder:
    """Stands where a family's tower is called, and keeps what it is called with."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.runs: list[PatchRun] = []

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        return self._adapter.preprocess(frames, plan, device)

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:  # noqa: ARG002
        self.runs += runs
        return [Embeddings(torch.zeros(1, 1)) for _ in runs]

    def tower_merger(self, *_: Any) -> Any:
        raise NotImplementedError

    def join(self, embeddings: Embeddings, *_: Any) -> Embeddings:
        return embeddings


class Model:
    """Plans and preprocesses videos for one family, at a size at which digits can be read."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.adapter: Any = load_adapter(BUILDERS[family](folder))
        self._is_tiled = not family.startswith("qwen")
        if self._is_tiled:
            self._enlarge_tiles()

    def _enlarge_tiles(self) -> None:
        adapter = self.adapter
        adapter.video_spec = replace(adapter.video_spec, side=_TILE_SIDE)
        if self.family == "smolvlm":
            adapter.checkpoint.processor.video_processor.size = {"longest_edge": _TILE_SIDE}

    def pixels(self, num_frames: int) -> PixelLimits:
        """Returns limits that keep frames at their size or above. num_frames: at most, of a video."""
        if self._is_tiled:
            return PixelLimits()
        each = HEIGHT * WIDTH
        return PixelLimits(size=(each, 4 * each * (num_frames if self.family == "qwen3_vl" else 1)))

    def frames_of(self, runs: Sequence[PatchRun], num_frames: int) -> tuple[UInt8Array, ...]:
        """Returns what was made patches of, grey, uint8 [h, w] each."""
        frames = torch.cat([self._pixels_of(run) for run in runs])[:num_frames]
        return tuple(frames.numpy())

    def _pixels_of(self, run: PatchRun) -> Tensor:
        spec = self.adapter.video_spec
        if self._is_tiled:
            red = run.values[:, 0]
        else:
            grid, merge, side, unit = run.grid, spec.merge, spec.side, spec.frames_per_unit
            rows, columns = grid.h // merge, grid.w // merge
            patches = run.values.reshape(grid.t, rows, columns, merge, merge, 3, unit, side, side)
            red = patches[:, :, :, :, :, 0].permute(0, 5, 1, 3, 6, 2, 4, 7)
            red = red.reshape(grid.t * unit, grid.h * side, grid.w * side)
        return (red * spec.std[0] + spec.mean[0]).round().clamp(0, 255).to(torch.uint8)

    def stamps_of(self, plan: MediaPlan) -> tuple[float, ...]:
        """Returns the times that the prompt says, seconds; of whole seconds their middle."""
        text = self.adapter.tokenizer.decode(self.adapter.plan_prompt([plan], "?").token_ids)
        if self.family == "qwen3_vl":
            return tuple(float(stamp) for stamp in re.findall(r"<([\d.]+) seconds>", text))
        clock = re.findall(r"(\d\d+):(\d\d):", text) if self.family == "smolvlm" else ()
        return tuple(60.0 * int(minutes) + int(seconds) + 0.5 for minutes, seconds in clock)


def handed_by_ask(model: Model, path: Path, sampling: FrameSampling, pixels: PixelLimits) -> Handed:
    """Runs the stages before the language model in this process. Raises what they have failed with."""
    recorder = _Recorder(model.adapter)
    encoder = FrameEncoder(recorder, nn.Linear(1, 1))
    planned = plan_media(model.adapter, path, sampling, pixels)
    num_substituted, timings = 0, StageTimings()
    with closing(decode_groups([planned], _GROUP_TOKENS, timings)) as groups:
        for group in groups:
            num_substituted += group.num_substituted
            encode_group(encoder, group, timings)
    frames = model.frames_of(recorder.runs, planned.plan.num_frames)
    return Handed(planned.plan, frames, model.stamps_of(planned.plan), num_substituted)


def handed_by_children(
    model: Model, path: Path, sampling: FrameSampling, pixels: PixelLimits, children: MediaChildren
) -> Handed:
    """Looks and decodes in media children, in runs for two readers. Raises MediaError, RequestError."""
    with open_file(path, path.name) as file:
        facts = children.look(file, path.name)
    plan = plan_video(model.adapter, facts, sampling, pixels)
    groups = plan_groups([plan], [""], model="", group_tokens=_GROUP_TOKENS)
    made: list[PatchRun] = []
    num_substituted = 0
    for run in plan_runs(len(groups), _READERS):
        for group, frames in _streamed(path, groups[run.start : run.stop], children):
            num_substituted += frames.num_substituted
            values = model.adapter.preprocess(torch.from_numpy(frames.data), group.plan)
            made.append(PatchRun("video", values, group.plan.grid))
    return Handed(plan, model.frames_of(made, plan.num_frames), model.stamps_of(plan), num_substituted)


def _streamed(
    path: Path, groups: Sequence[MediaGroup], children: MediaChildren
) -> Iterator[tuple[MediaGroup, Any]]:
    times = [time_s for group in groups for time_s in group.plan.times_s]
    sizes = [group.num_frames for group in groups]
    stream = ChildStream(children, open_file(path, path.name), path.name, times, groups[0].plan.size, sizes)
    with closing(stream):
        for group in groups:
            yield group, stream.read()
