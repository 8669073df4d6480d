"""Counts what is taken of a video with the processor files that checkpoints publish.

    python -m benchmarks.encode.published_processors   # writes benchmarks/results/published_processors.md

Two plans of each: as the model's authors have it, which is the default here, and as transformers' processor
does, with --bare-processor. Nothing is decoded, and no weights are needed; the same on every machine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.reporting import RESULTS, table
from epd.encoders import FrameSampling, MediaPlan, VideoFacts, load_adapter
from epd.pixel_settings import AUTHORS, AUTHORS_LIMITS, BARE_PROCESSOR, PixelSettings
from tests.models.processors import qwen_bytes, write_processor
from tests.models.published import PUBLISHED
from tests.models.real_tokenizer import qwen_words
from tests.models.shrunk import special_ids

PAGE = RESULTS / "published_processors.md"
FPS = 30.0
LENGTHS_S: Mapping[str, int] = {"10 s": 10, "1 min": 60, "10 min": 600, "60 min": 3600}
# (height, width)
SIZES: Mapping[str, tuple[int, int]] = {"360p": (360, 640), "1080p": (1080, 1920), "4K": (2160, 3840)}
_HEAD = """\
# Published processors

Frames, size and visual tokens of one video of 30 frames a second, with the processor files that checkpoints
publish (`tests/models/processors.py`). `python -m benchmarks.encode.published_processors` counts; nothing is
measured, so that the figures are the same everywhere.

- **Default**: held to the limits of the model's authors, whose sources each section names.
- **transformers**: as its own processor does, `--bare-processor`; 2 frames a second where files name no rate.
- **over**: more tokens than the context has; then fewer frames are taken, or fewer tokens of each are kept.
- SmolVLM2's frames are read in their own size; the model gets each as one square.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Checkpoints of one processor and one context. name: of the first."""

    name: str
    members: tuple[str, ...]

    @property
    def context_tokens(self) -> int:
        return PUBLISHED[self.name].context_tokens


def groups() -> list[Group]:
    found: dict[tuple[str, int], list[str]] = {}
    for name, published in PUBLISHED.items():
        family = published.config["model_type"].removesuffix("_moe")
        side = published.config["vision_config"].get("image_size", 0)
        found.setdefault((f"{family} {side}", published.context_tokens), []).append(name)
    return [Group(members[0], tuple(members)) for members in found.values()]


def opened(
    name: str, folder: Path, pixels: PixelSettings = AUTHORS_LIMITS, *, has_words: bool = False
) -> Any:
    """The adapter of a checkpoint, whose published files are written to a folder.

    has_words: with words of the real tokenizer, for who counts tokens of a text
    """
    write_processor(name, folder, qwen_words if has_words else qwen_bytes)
    config = PUBLISHED[name].config
    config = config | special_ids(config, AutoTokenizer.from_pretrained(folder, local_files_only=True))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_adapter(folder, pixels=pixels)


def plans(adapter: Any, pixels: PixelSettings) -> dict[tuple[str, str], MediaPlan]:
    """The plans of a checkpoint by length and size."""
    adapter.checkpoint = replace(adapter.checkpoint, pixels=pixels)
    return {
        (length, size): adapter.plan_video(facts(length, size), FrameSampling())
        for length in LENGTHS_S
        for size in SIZES
    }


def facts(length: str, size: str) -> VideoFacts:
    return VideoFacts(int(LENGTHS_S[length] * FPS), FPS, *SIZES[size])


def section(group: Group, adapter: Any) -> str:
    default, bare = plans(adapter, AUTHORS_LIMITS), plans(adapter, BARE_PROCESSOR)
    rows = [
        {
            "length": length,
            "video": size,
            "default: frames x size": _shown(default[length, size]),
            "tokens": f"{default[length, size].num_tokens:,}{_over(default[length, size], group)}",
            "transformers: frames x size": _shown(bare[length, size]),
            "tokens ": f"{bare[length, size].num_tokens:,}{_over(bare[length, size], group)}",
        }
        for length, size in default
    ]
    authors = AUTHORS[PUBLISHED[group.name].config["model_type"]]
    names = ", ".join(group.members)
    limits = f"Limits: {authors.source}. Context: {group.context_tokens:,} tokens."
    return f"## {names}\n\n{limits}\n\n{table(rows)}\n"


def _shown(plan: MediaPlan) -> str:
    height, width = plan.size
    return f"{plan.num_frames} x {width}x{height}"


def _over(plan: MediaPlan, group: Group) -> str:
    return " over" if plan.num_tokens >= group.context_tokens else ""


def page() -> str:
    return "\n".join(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    for group in groups():
        with tempfile.TemporaryDirectory() as folder:
            yield section(group, opened(group.name, Path(folder)))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
