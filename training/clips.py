"""Draws training clips, encodes them as H.264, decodes them and keeps the frames at model size in shards.

    python -m training.clips --out runs/clips --shards 200 --first-shard 0

    python -m training.clips --out runs/filmed --footage handheld=0.2 --footage wild=0.4 --background clips
    python -m training.clips --out runs/lanes --size 32x96 --shards 60

A shard is `NNNN.npy`, uint8 [clips, frames, height, width, 3], and `NNNN.json`, the scenes' seeds, durations,
numbers of objects and footage, if not still: a scene follows from them. Seeds from HELD_OUT_SEED on belong to
evaluation and are never drawn here.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from epd.errors import RequestError
from epd.shapes import Scene, SceneObject, make_scene
from epd.shapes.world import max_objects
from epd.types import UInt8Array
from epd.video.demo_video import encode_h264
from tests.video.plain_decoder import reference_decode
from training.footage import PLAIN, BackgroundClips, Filming, footage_level, resized

HELD_OUT_SEED = 2_000_000_000
MODEL_HEIGHT, MODEL_WIDTH = 84, 140
MODEL_SIZE = MODEL_HEIGHT, MODEL_WIDTH
SOURCE_HEIGHT, SOURCE_WIDTH = 360, 640
_FRAMES_PER_SHARD = 1536
_LENGTHS = (4, 8, 16, 16, 32, 32, 32, 64)
_LONGEST_S = 1024.0


Size = tuple[int, int]  # height, width


@dataclass(frozen=True, slots=True)
class Clip:
    """One video as the model sees it, sampled every `gap_s` seconds: uint8 [N, height, width, 3]."""

    scene: Scene
    frames: UInt8Array

    @property
    def gap_s(self) -> float:
        return self.scene.duration_s / len(self.frames)

    @property
    def times_s(self) -> list[float]:
        return [index * self.gap_s for index in range(len(self.frames))]


def is_resolved(scene: Scene, num_frames: int) -> bool:
    """Returns True if the frames show every object, each first in a later frame pair than the one before."""
    gap_s = scene.duration_s / num_frames
    first_pairs = []
    for item in scene.objects:
        first_frame = math.ceil(item.start_s / gap_s)
        if first_frame >= num_frames or not item.is_visible(first_frame * gap_s):
            return False
        first_pairs.append(first_frame // 2)
    return all(earlier < later for earlier, later in itertools.pairwise(first_pairs))


def draw_scene(rng: random.Random, num_frames: int) -> Scene:
    """Returns a scene of 4 to 1024 seconds for `num_frames` frames; object counts are spread evenly."""
    for _ in range(1000):
        shortest_s = max(4.0, num_frames / 2)
        duration_s = math.exp(rng.uniform(math.log(shortest_s), math.log(_LONGEST_S)))
        wanted = rng.randint(1, min(max_objects(duration_s), max(1, num_frames // 2)))
        scene = make_scene(rng.randrange(HELD_OUT_SEED), duration_s, wanted)
        if is_resolved(scene, num_frames):
            return scene
    raise RuntimeError(f"no scene fits {num_frames} frames")


@dataclass(frozen=True, slots=True)
class FootageMix:
    """Draws how clips are filmed. shares: of the clips, by level of footage; the rest is still.

    backgrounds: behind the objects of clips that are not still; None draws them.
    """

    shares: Mapping[str, float]
    backgrounds: BackgroundClips | None = None

    @classmethod
    def parse(cls, texts: Sequence[str], folder: Path | None) -> FootageMix:
        """Reads LEVEL=SHARE. Raises RequestError for unknown levels, and shares that are none."""
        shares: dict[str, float] = {}
        for text in texts:
            level, _, share = text.partition("=")
            footage_level(level)
            shares[level] = float(share) if re.fullmatch(r"[01]?\.?\d+", share) else math.nan
        if not sum(shares.values()) <= 1 or (folder is not None and not shares):
            raise RequestError(
                f"received the footage {' '.join(texts) or 'none'!r}; allowed: LEVEL=SHARE, at most 1 "
                "in all, and at least one with a background; try --footage wild=0.5"
            )
        return cls(shares, None if folder is None else BackgroundClips(folder))

    def draw(self, rng: random.Random) -> str:
        """Returns the level of the next clip."""
        place = rng.random()
        for level, share in self.shares.items():
            if (place := place - share) < 0:
                return level
        return "still"

    def filming(self, level: str) -> Filming:
        return PLAIN if level == "still" else Filming(footage_level(level), self.backgrounds)


ALL_STILL = FootageMix({})


def cropped(item: SceneObject, start_s: float, end_s: float) -> SceneObject:
    """Returns the object as it is seen in [start_s, end_s), in the time of the part."""
    first_s, last_s = max(item.start_s, start_s), min(item.end_s, end_s)
    return dataclasses.replace(
        item,
        start_s=first_s - start_s,
        end_s=last_s - start_s,
        start_xy=item.position(first_s),
        end_xy=item.position(last_s),
    )


def film(
    scene: Scene, num_frames: int, rng: random.Random, filming: Filming = PLAIN, size: Size = MODEL_SIZE
) -> UInt8Array:
    """Draws the sampled frames, takes them through H.264, and resizes: uint8 [N, height, width, 3]."""
    gap_s = scene.duration_s / num_frames
    file = io.BytesIO()
    encode_h264(
        file,
        filming.frames(scene, (index * gap_s for index in range(num_frames)), SOURCE_HEIGHT, SOURCE_WIDTH),
        fps=Fraction(2),
        height=SOURCE_HEIGHT,
        width=SOURCE_WIDTH,
        crf=rng.randint(18, 30),
        preset="ultrafast",
    )
    times_s = [(index + 0.5) / 2 for index in range(num_frames)]
    return reference_decode(file.getvalue(), times_s, size).data


def write_shard(
    folder: Path,
    number: int,
    num_frames: int,
    shard_frames: int,
    mix: FootageMix = ALL_STILL,
    size: Size = MODEL_SIZE,
) -> None:
    """Writes about `shard_frames` frames as clips of `num_frames`; the JSON file appears last and whole."""
    rng, footage_rng = random.Random(number), random.Random(f"footage {number}")
    scenes = [draw_scene(rng, num_frames) for _ in range(shard_frames // max(num_frames, 8))]
    levels = [mix.draw(footage_rng) for _ in scenes]
    filmed = list(zip(scenes, levels, strict=True))
    frames = np.stack([film(scene, num_frames, rng, mix.filming(level), size) for scene, level in filmed])
    np.save(folder / f"{number:04d}.npy", frames)
    specs = [
        [scene.seed, scene.duration_s, len(scene.objects), *([] if level == "still" else [level])]
        for scene, level in filmed
    ]
    temporary = folder / f"{number:04d}.json.part"
    temporary.write_text(json.dumps(specs))
    temporary.rename(folder / f"{number:04d}.json")


def read_shard(spec: Path) -> Iterator[Clip]:
    """Yields the clips of one shard, frames memory-mapped."""
    frames = np.load(spec.with_suffix(".npy"), mmap_mode="r")
    for (seed, duration_s, count, *level), clip in zip(json.loads(spec.read_text()), frames, strict=True):
        footage = footage_level(level[0] if level else "still")
        yield Clip(resized(make_scene(seed, duration_s, count), footage), clip)


def _size(text: str) -> Size:
    height, width = map(int, text.split("x"))
    return height, width


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--first-shard", type=int, default=0)
    parser.add_argument("--frames", type=int, help="frames per clip; by default 4 to 64, a length per shard")
    parser.add_argument("--shard-frames", type=int, default=_FRAMES_PER_SHARD, help="frames per shard")
    parser.add_argument(
        "--footage", action="append", default=[], metavar="LEVEL=SHARE", help="share of clips filmed so"
    )
    parser.add_argument(
        "--size", type=_size, default=MODEL_SIZE, metavar="HxW", help="of a frame as the model sees it"
    )
    parser.add_argument("--background", type=Path, metavar="DIR", help="videos behind these clips' objects")
    options = parser.parse_args()
    mix = FootageMix.parse(options.footage, options.background)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for number in range(options.first_shard, options.first_shard + options.shards):
        if not (options.out / f"{number:04d}.json").exists():
            num_frames = options.frames or _LENGTHS[number % len(_LENGTHS)]
            write_shard(options.out, number, num_frames, options.shard_frames, mix, options.size)
            print(f"shard {number} written", flush=True)


if __name__ == "__main__":
    main()
