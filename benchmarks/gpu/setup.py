"""What all sections share: the device, how large everything is, and the checkpoint that is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from epd.encoders import Adapter, load_adapter
from epd.encoders.names import WeightSet
from epd.kv.pass_limits import SchedulerConfig
from epd.stages.loading.weights import load_role
from epd.stages.placement import Placement


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is.

    checked: published checkpoints that are shrunk and answer in every type.
    checked_families: tiny checkpoints of families with layers of several kinds, which answer in float32.
    num_tokens: of each answer that is compared.
    measured: the published checkpoint that is measured, at full size if is_full.
    decode_batches, decode_contexts: requests at once, and tokens before each next one.
    step_context: of requests that are prefilled before the engine's steps are timed.
    prefill_tokens: of one pass. mixed_tokens: of one with a chunk beside decodes, launched and replayed.
    pass_tokens: most of a pass in engines whose passes are captured.
    encode_units: temporal patches of `frame_size` in one call of the tower.
    transfer_tokens: moved at once.
    num_frames: of the video until whose first token is timed.
    repeats: of what is timed; the median is told.
    num_questions: about drawn videos, with each way of reduction. num_servers: that are asked about one.
    mixtures: of experts: a model, experts, channels, channels within an expert, and experts of a row.
    checked_expert_rows, expert_rows: of one call of experts that is checked, and of one that is timed.
    mixture_batches: requests at once whose decodes by experts are timed.
    served_topologies, served_videos: of servers that get a file: its minutes, and their options.
    served_loads: what is sent, requests under way and in all, options of `epd bench`.
    """

    checked: tuple[str, ...]
    checked_families: tuple[str, ...]
    num_tokens: int
    measured: str
    is_full: bool
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    step_context: int
    prefill_tokens: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    pass_tokens: int
    encode_units: tuple[int, ...]
    frame_size: tuple[int, int]
    transfer_tokens: tuple[int, ...]
    num_frames: int
    repeats: int
    num_questions: int
    num_servers: int
    mixtures: tuple[tuple[str, int, int, int, int], ...]
    checked_expert_rows: tuple[int, ...]
    expert_rows: tuple[int, ...]
    mixture_batches: tuple[int, ...]
    served_topologies: tuple[str, ...]
    served_videos: tuple[tuple[int, tuple[str, ...]], ...]
    served_loads: tuple[tuple[str, int, int, tuple[str, ...]], ...]


_IMAGES = ("--workload", "images", "--image-size", "1024x1024", "--text-tokens", "32", "--max-tokens", "128")
_VIDEOS = ("--workload", "video", "--video-seconds", "600", "--video-fps", "2", "--video-size", "1920x1080")

FULL = Sizes(
    checked=(
        "Qwen2.5-VL-7B",
        "Qwen3-VL-8B",
        "Qwen3-VL-30B-A3B",
        "InternVL3.5-8B",
        "LLaVA-OneVision-7B",
        "SmolVLM2-2.2B",
    ),
    checked_families=("qwen3_5_moe", "gemma4", "glm4v_moe"),
    num_tokens=16,
    measured="Qwen2.5-VL-7B",
    is_full=True,
    decode_batches=(1, 8, 32, 64, 128, 256),
    decode_contexts=(2048, 32_768),
    step_context=2048,
    prefill_tokens=(256, 1024, 2048, 4096, 8192),
    mixed_tokens=(64, 256, 500),
    pass_tokens=SchedulerConfig().max_num_batched_tokens,
    encode_units=(1, 7, 32, 64),
    frame_size=(252, 448),
    transfer_tokens=(256, 2048, 32_768),
    num_frames=600,
    repeats=10,
    num_questions=24,
    num_servers=6,
    mixtures=(("Qwen3.6-35B-A3B", 256, 2048, 512, 8), ("Qwen3-VL-30B-A3B", 128, 2048, 768, 8)),
    checked_expert_rows=(1, 32, 700),  # more than 16 for each expert have other tiles
    expert_rows=(1, 32, 8192),
    mixture_batches=(1, 32),
    served_topologies=("1epd", "1e1p1d"),
    served_videos=(
        (10, ()),
        (10, ("--video-max-tokens", "43000")),
        (10, ("--video-max-tokens", "115000")),
        (60, ("--video-max-tokens", "115000", "--retention", "0.25", "--reduction", "balanced")),
    ),
    served_loads=(
        ("an image of 1024x1024", 64, 512, _IMAGES),
        ("ten minutes of video", 32, 64, (*_VIDEOS, "--max-tokens", "64")),
    ),
)
TINY = Sizes(
    checked=("Qwen2.5-VL-7B", "Qwen3-VL-30B-A3B"),
    checked_families=("qwen3_5_moe",),
    num_tokens=4,
    measured="Qwen2.5-VL-7B",
    is_full=False,
    decode_batches=(1, 2),
    decode_contexts=(48, 96),
    step_context=48,
    prefill_tokens=(16, 64),
    mixed_tokens=(20,),
    pass_tokens=128,  # two sizes are captured; a CPU takes seconds for all six
    encode_units=(1, 2),
    frame_size=(84, 56),
    transfer_tokens=(64,),
    num_frames=12,
    repeats=2,
    num_questions=6,
    num_servers=1,
    mixtures=(("a tiny model", 8, 32, 24, 2),),
    checked_expert_rows=(1, 70),
    expert_rows=(1, 64),
    mixture_batches=(1, 2),
    served_topologies=("1e1p1d",),
    served_videos=((1, ()),),
    served_loads=(
        ("a small image", 2, 4, ("--workload", "images", "--image-size", "56x56", "--max-tokens", "4")),
    ),
)


@dataclass(slots=True)
class Setup:
    """Where and how large.

    folder: for checkpoints, removed at the end.
    checkpoint: the measured one, once it is written.
    """

    placement: Placement
    sizes: Sizes
    folder: Path
    checkpoint: Path | None = None
    _adapter: Adapter | None = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """The measured checkpoint. Raises RuntimeError before section `load` has written it."""
        if self.checkpoint is None:
            raise RuntimeError("no checkpoint was written; run the section 'load' first")
        return self.checkpoint

    @property
    def adapter(self) -> Adapter:
        self._adapter = self._adapter or load_adapter(self.path)
        return self._adapter

    def load(self, role: WeightSet) -> Any:
        """The part of the measured checkpoint for a role, on the device."""
        return load_role(self.path, role, self.placement).model

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.placement.is_cuda:
            torch.cuda.synchronize(self.placement.device)

    def seconds(self, work: Callable[[], object], *, warm_up: int = 1, on_host: bool = False) -> float:
        """The median time of `work`, until the device has done it; on the host, until it returns."""
        for _ in range(warm_up):
            work()
        times = []
        for _ in range(self.sizes.repeats):
            self.wait()
            start_s = time.perf_counter()
            work()
            if not on_host:
                self.wait()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)


def room_bytes(placement: Placement) -> int:
    """Bytes of the device that are free, less what one pass may need; of a CPU as many as a test may take."""
    if not placement.is_cuda:
        return 2**30
    free, _total = torch.cuda.mem_get_info(placement.device)
    return max(0, free - 3 * 2**30)
