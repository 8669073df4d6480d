"""The encode stage: preprocessing against Hugging Face's, balance of shards, bytes of weights by role.

    python -m benchmarks.encode.encode [--quick] [--section preprocess|balance|weights]

preprocess: ours in groups, as the pipeline does it, theirs in one call, as it is used; outputs are compared
first. Repeats are interleaved; figures are medians, ratios are medians of the ratios within a repeat.
balance: patches of the largest shard over the mean. weights: of models of published size, counted from their
shapes without memory, and read from tiny checkpoints. Results go to benchmarks/results/encode.{json,md}.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor

from benchmarks.encode.encode_models import PUBLISHED
from benchmarks.published.sharding import imbalance, plan_shards
from benchmarks.reporting import Row, Section, run_sections, setting
from epd.encoders import ADAPTERS, Adapter, MediaPlan, VideoFacts
from epd.encoders.checkpoint import Checkpoint, open_checkpoint
from epd.encoders.groups import cut
from epd.encoders.names import is_wanted
from epd.frame_sampling import FrameSampling
from epd.profiles.measuring import timed
from epd.stages.loading.weights import load_role, skeleton
from epd.stages.placement import CPU_FLOAT32
from tests.encoders.tiny_tiles import BUILDERS

GROUP_TOKENS = 256
IMAGE_SIZE = (1080, 1920)

# Real frame sizes for the tiny checkpoints: their processors are replaced by those of published models.
VISION = {
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "llava_onevision": {"image_size": 384, "patch_size": 14},
    "internvl": {"image_size": (448, 448), "patch_size": (14, 14)},
    "smolvlm": {"image_size": 384, "patch_size": 14},
}


def real_size_adapter(family: str, folder: Path) -> Adapter:
    """The family's adapter with processors of published size; there are no weights."""
    checkpoint = open_checkpoint(BUILDERS[family](folder / family))
    image, video = processors(family)
    checkpoint.processor.image_processor, checkpoint.processor.video_processor = image, video
    for name, value in VISION[family].items():
        setattr(checkpoint.config.vision_config, name, value)
    if family == "internvl":
        checkpoint.processor.image_seq_length = 256
    return ADAPTERS[family](Checkpoint(checkpoint.path, checkpoint.config, checkpoint.processor))


def processors(family: str) -> tuple[Any, Any]:
    """Image and video processor at the sizes of published checkpoints."""
    t = transformers
    square = {"height": 384, "width": 384}
    if family == "qwen2_5_vl":
        size = {"shortest_edge": 56 * 56, "longest_edge": 448 * 448}
        return t.Qwen2VLImageProcessor(), t.Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False)
    if family == "qwen3_vl":
        image = t.Qwen2VLImageProcessor(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
        size = {"shortest_edge": 64 * 64, "longest_edge": 64 * 448 * 448}
        return image, t.Qwen3VLVideoProcessor(size=size, cap_pixels_per_frame=False)
    if family == "llava_onevision":
        return t.LlavaOnevisionImageProcessor(size=square), t.LlavaOnevisionVideoProcessor(size=square)
    if family == "internvl":
        square = {"height": 448, "width": 448}
        image = t.GotOcr2ImageProcessor(size=square, crop_to_patches=True)
        return image, t.InternVLVideoProcessor(size=square)
    tile, whole = {"longest_edge": 384}, {"longest_edge": 4 * 384}
    image = t.SmolVLMImageProcessor(size=whole, max_image_size=tile)
    return image, t.SmolVLMVideoProcessor(size=tile, max_image_size=tile, fps=1, num_frames=64)


def preprocess_rows(num_frames: int, repeats: int) -> list[Row]:
    """Seconds of one core per item."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in BUILDERS:
            adapter = real_size_adapter(family, Path(folder))
            for case in (video_case, image_case):
                rows.append(preprocess_row(family, *case(adapter, num_frames), repeats))
                print(rows[-1], file=sys.stderr)
    return rows


Case = tuple[str, Callable[[], list[Tensor] | None], Callable[[], Tensor], Callable[[], list[Tensor]]]


def video_case(adapter: Adapter, num_frames: int) -> Case:
    """Frames that the decoder has brought to the planned size already, for both."""
    facts = VideoFacts(num_frames * 24, 24.0, 448, 448)
    plan = adapter.plan_video(facts, FrameSampling(num_frames=num_frames))
    frames = noise(plan.num_frames, *plan.size, 3)
    channels_first = frames.permute(0, 3, 1, 2)  # the same bytes, as decoders give them
    processor = video_processor_of(adapter)

    def ours(keep: bool = False) -> list[Tensor] | None:
        return in_groups(adapter, plan, frames, keep)

    def theirs() -> Tensor:
        output = processor(videos=[channels_first], do_sample_frames=False, return_tensors="pt")
        return pixels_of(output)

    name = f"video, {plan.num_frames} frames of {plan.size[1]}x{plan.size[0]}"
    return name, ours, theirs, lambda: ours(keep=True) or []


def image_case(adapter: Adapter, num_frames: int) -> Case:  # noqa: ARG001 # cases are called alike
    """A decoded image, resized by both."""
    image = noise(*IMAGE_SIZE, 3)
    channels_first = image.permute(2, 0, 1)
    processor = adapter.checkpoint.processor.image_processor  # type: ignore[attr-defined]

    def ours(keep: bool = False) -> list[Tensor] | None:
        plan = adapter.plan_image(*IMAGE_SIZE)
        return in_groups(adapter, plan, adapter.resize(image, plan), keep)

    def theirs() -> Tensor:
        return pixels_of(processor(images=[channels_first], return_tensors="pt"))

    return f"image, {IMAGE_SIZE[1]}x{IMAGE_SIZE[0]}", ours, theirs, lambda: ours(keep=True) or []


def video_processor_of(adapter: Adapter) -> Any:
    return adapter.checkpoint.processor.video_processor  # type: ignore[attr-defined]


def in_groups(adapter: Adapter, plan: MediaPlan, frames: Tensor, keep: bool) -> list[Tensor] | None:
    """Preprocesses group by group; what is not kept is dropped before the next, as after encoding."""
    kept = [] if keep else None
    for start, stop in cut(plan, max(1, GROUP_TOKENS // plan.tokens_per_unit)):
        shown = plan.frame_range(start, stop)
        patches = adapter.preprocess(frames[shown.start : shown.stop], plan)
        if kept is not None:
            kept.append(patches)
    return kept


def pixels_of(output: Any) -> Tensor:
    pixels: Tensor = output["pixel_values" if "pixel_values" in output else "pixel_values_videos"]
    return pixels


def preprocess_row(
    family: str,
    name: str,
    ours: Callable[[], list[Tensor] | None],
    theirs: Callable[[], Tensor],
    kept: Callable[[], list[Tensor]],
    repeats: int,
) -> Row:
    is_equal = torch.equal(torch.cat(kept()).flatten(), theirs().flatten())
    seconds = [(timed(ours), timed(theirs)) for _ in range(repeats)]
    return {
        "family": family,
        "case": name,
        "ours_ms": round(1e3 * statistics.median(a for a, _ in seconds), 1),
        "processor_ms": round(1e3 * statistics.median(b for _, b in seconds), 1),
        "ratio": round(statistics.median(a / b for a, b in seconds), 3),
        "bit_equal": is_equal,
        "repeats": repeats,
    }


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def balance_rows() -> list[Row]:
    """Groups of equal and of drawn sizes over the encoders of an EPD deployment."""
    rng = random.Random(0)
    loads = {
        "one video, 64 groups of 1024 patches": [1024] * 64,
        "one video, 450 groups of 1024 patches, the last of 256": [1024] * 449 + [256],
        "100 images of 256 to 2048 patches": [rng.randrange(256, 2048) for _ in range(100)],
        "one 4K image, 13 tiles of 1024 patches": [1024] * 13,
        "one video, 8 groups of 1024 patches (few)": [1024] * 8,
    }
    return [
        {
            "load": name,
            "encoders": encoders,
            "one_run_each": round(imbalance(plan_shards(patches, [0] * encoders), encoders), 3),
            "dealt": round(
                imbalance(plan_shards(patches, [0] * encoders, max_run_patches=1024), encoders), 3
            ),
        }
        for name, patches in loads.items()
        for encoders in (2, 3, 5, 8)
    ]


def weight_rows() -> list[Row]:
    """Bytes that each role loads: in bfloat16 for published sizes, as stored for tiny checkpoints."""
    rows = [published_row(name, config()) for name, config in PUBLISHED.items()]
    with tempfile.TemporaryDirectory() as folder:
        return rows + [tiny_row(family, Path(folder)) for family in BUILDERS]


def published_row(name: str, config: Any) -> Row:
    model = skeleton(config, torch.bfloat16)
    parameters = dict(model.named_parameters())  # a tied one is counted once
    roles = {
        role: sum(p.numel() * 2 for key, p in parameters.items() if is_wanted(key, role))
        for role in ("encode", "language")
    }
    return _weights(name, "counted from shapes", roles["encode"], roles["language"])


def tiny_row(family: str, folder: Path) -> Row:
    path = BUILDERS[family](folder / family)
    loaded = [load_role(path, role, CPU_FLOAT32).num_bytes for role in ("encode", "language")]
    return _weights(f"tiny {family}", "read from the files", *loaded)


def _weights(name: str, how: str, encode: int, language: int) -> Row:
    whole = encode + language
    return {
        "model": name,
        "how": how,
        "whole_bytes": whole,
        "encode_bytes": encode,
        "prefill_bytes": language,
        "decode_bytes": language,
        "encode_saves": round(1 - encode / whole, 4),
        "prefill_saves": round(1 - language / whole, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few frames and repeats; writes nothing")
    parser.add_argument("--section", action="append", help="preprocess, balance or weights; may be repeated")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    frames, repeats = (8, 3) if options.quick else (64, 15)
    sections = {
        "preprocess": Section(
            "Preprocessing, one core: ours over Hugging Face's processor (aim: 0.25)",
            lambda: preprocess_rows(frames, repeats),
        ),
        "balance": Section(
            "Patches of the largest shard over the mean (aim: 1.1 when groups are many)", balance_rows
        ),
        "weights": Section("Bytes of weights by role", weight_rows),
    }
    run_sections(
        "encode",
        "The encode stage",
        sections,
        options.section or list(sections),
        lambda: setting(("torch", "torchvision", "transformers", "numpy"), group_tokens=GROUP_TOKENS),
        save=not options.quick,
    )


if __name__ == "__main__":
    main()
