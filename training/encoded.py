"""Keeps clips as the language model sees them: the frozen tower's embeddings, made once, in files."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from epd.shapes import Scene
from training.clips import Clip, cropped, read_shard
from training.vision import encode, patchify

# One shard of every length, see `training.clips`.
_VALIDATION_SHARDS = {*range(32, 40), 1000, 2000, 2001}


@dataclass(frozen=True, slots=True)
class EncodedClip:
    """A clip as the language model sees it: embeddings bfloat16 [P, 15, hidden] of frame pairs."""

    scene: Scene
    gap_s: float
    embeddings: Tensor
    is_image: bool = False

    def __len__(self) -> int:
        return len(self.embeddings)


def crop(clip: EncodedClip, first: int, stop: int) -> EncodedClip | None:
    """Returns the clip of frame pairs [first, stop) as a video; None where it would show nothing."""
    start_s, end_s = first * 2 * clip.gap_s, stop * 2 * clip.gap_s
    frame_times = start_s + clip.gap_s * np.arange(2 * (stop - first))
    objects = tuple(
        cropped(item, start_s, end_s)
        for item in clip.scene.objects
        if ((frame_times >= item.start_s) & (frame_times < item.end_s)).any()
    )
    scene = Scene(clip.scene.seed, end_s - start_s, objects)
    return EncodedClip(scene, clip.gap_s, clip.embeddings[first:stop]) if objects else None


def retime(clip: EncodedClip, gap_s: float) -> EncodedClip:
    """Returns the same frames as a video in which they lie `gap_s` apart: embeddings do not know of time."""
    scale = gap_s / clip.gap_s
    objects = tuple(
        dataclasses.replace(item, start_s=item.start_s * scale, end_s=item.end_s * scale)
        for item in clip.scene.objects
    )
    scene = Scene(clip.scene.seed, clip.scene.duration_s * scale, objects)
    return dataclasses.replace(clip, scene=scene, gap_s=gap_s)


@torch.inference_mode()
def encode_shard(visual: nn.Module, clips: list[Clip], rng: random.Random) -> list[EncodedClip]:
    """Returns every clip, and one of its frames as an image."""
    encoded = []
    for clip in clips:
        frames = torch.from_numpy(np.array(clip.frames))
        still = rng.randrange(len(frames))
        pairs = torch.cat([frames.view(-1, 2, *frames.shape[1:]), frames[None, [still, still]]])
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = torch.cat([encode(visual, patchify(part)) for part in pairs.split(64)]).bfloat16()
        encoded.append(EncodedClip(clip.scene, clip.gap_s, embeddings[:-1].clone()))
        shown = tuple(clip.scene.visible(clip.times_s[still]))
        if shown:
            image = Scene(clip.scene.seed, clip.scene.duration_s, shown)
            encoded.append(EncodedClip(image, clip.gap_s, embeddings[-1:].clone(), is_image=True))
    return encoded


class EncodedPool:
    """Encoded clips by number of frame pairs, a few shards of them for validation; kept in files."""

    def __init__(self, folder: Path, visual: nn.Module, cache: Path) -> None:
        self._visual, self._cache = visual, cache
        self.training: dict[int, list[EncodedClip]] = defaultdict(list)
        self.validation: dict[int, list[EncodedClip]] = defaultdict(list)
        cache.mkdir(parents=True, exist_ok=True)
        for spec in sorted(folder.glob("*.json")):
            target = self.validation if int(spec.stem) in _VALIDATION_SHARDS else self.training
            for clip in self._load(spec):
                target[0 if clip.is_image else len(clip)].append(clip)

    def _load(self, spec: Path) -> list[EncodedClip]:
        file = self._cache / f"{spec.stem}.pt"
        if not file.exists():
            clips = encode_shard(self._visual, list(read_shard(spec)), random.Random(int(spec.stem)))
            stored = [clip.embeddings for clip in clips]
            torch.save((stored, [(clip.scene, clip.gap_s, clip.is_image) for clip in clips]), file)
        embeddings, rest = torch.load(file, weights_only=False)
        return [
            EncodedClip(scene, gap_s, embedding, is_image)
            for embedding, (scene, gap_s, is_image) in zip(embeddings, rest, strict=True)
        ]
