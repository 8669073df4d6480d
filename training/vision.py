"""First step: teaches the vision tower to name what each visual token shows.

    python -m training.vision --clips runs/clips --out runs/vision_state.pt --final runs/vision.pt

Learning to see through answers alone is slow. Here every visual token has separate targets - which shapes and
which colours reach into its cell - read by one linear layer that is thrown away afterwards. The tower sees
pairs of neighbouring frames, as in a video, and single frames twice, as in an image. Resumes from --out when
it exists.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from epd.encoders.patches import PatchSpec, patchify_plain
from epd.shapes import COLOURS, SHAPES, Scene, SceneObject
from epd.shapes.world import NUM_LANES
from epd.types import UInt8Array
from training.checkpoint import build_config, build_tokenizer
from training.clips import MODEL_HEIGHT, MODEL_WIDTH, SOURCE_HEIGHT, SOURCE_WIDTH, Clip, read_shard
from training.loop import Training, base_parser, learning_rate

PATCH, MERGE = 14, 2
GRID_H, GRID_W = MODEL_HEIGHT // PATCH, MODEL_WIDTH // PATCH
ROWS, COLUMNS = GRID_H // MERGE, GRID_W // MERGE
TOKENS = ROWS * COLUMNS
_NAMES = (*SHAPES, *COLOURS)
_PATCHES = PatchSpec(
    PATCH,
    MERGE,
    frames_per_unit=2,
    mean=tuple(255 * each for each in OPENAI_CLIP_MEAN),
    std=tuple(255 * each for each in OPENAI_CLIP_STD),
    resample=3,
)
# Most tokens show no more than background, and most pairs of frames that show nothing are drawn again.
_POSITIVE_WEIGHT = torch.tensor(3.0)
_REDRAWN = 0.8
# Pairs of frames whose embeddings are looked at, to whiten them.
_WHITENING_PAIRS = 1024
# Directions that vary less than this carry no name and are not blown up.
_WHITENING_FLOOR = 1.5
# Length of the embedding of a token that shows something; text embeddings start at 0.3.
_SHOWN_NORM = 1.5


def patchify(pairs: Tensor) -> Tensor:
    """Returns the processor's patches: uint8 [B, 2, 84, 140, 3] -> normalised float32 [B, 60, 1176]."""
    return patches_of(pairs, _PATCHES)


def patches_of(pairs: Tensor, spec: PatchSpec) -> Tensor:
    """Returns patches of pairs of frames: uint8 [B, 2, H, W, 3] -> float32 [B, N, 6 * side**2]."""
    return patchify_plain(pairs.flatten(0, 1), spec).view(len(pairs), -1, 6 * spec.side**2)


def encode(visual: nn.Module, patches: Tensor) -> Tensor:
    """Returns the vision tower over a batch of frame pairs at once: [B, 60, 1176] -> [B, 15, hidden].

    The same arithmetic as the module's own forward (every block attends within one frame pair), batched
    instead of one pair after another.
    """
    batch, count, _ = patches.shape
    hidden = visual.patch_embed(patches.reshape(batch * count, -1)).view(batch, count, -1)
    cos, sin = visual.rotary_pos_emb(hidden, _patch_positions())
    return run_blocks(visual, hidden, cos, sin)


def run_blocks(visual: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns embeddings of patches that are rotated by cos and sin: [B, N, width] -> [B, N / 4, hidden]."""
    batch, count, _ = hidden.shape
    for block in visual.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(hidden)).view(batch, count, 3, attention.num_heads, -1)
        query, key, value = qkv.unbind(2)
        query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        )
        hidden = hidden + attention.proj(mixed.transpose(1, 2).reshape(batch, count, -1))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return visual.merger(hidden.reshape(batch * count, -1)).view(batch, count // MERGE**2, -1)


def _patch_positions() -> Tensor:
    """Returns row and column of every patch in merge order: int64 [60, 2] as the rotary module takes it."""
    rows, columns = torch.meshgrid(torch.arange(GRID_H), torch.arange(GRID_W), indexing="ij")
    ordered = [
        axis.view(ROWS, MERGE, COLUMNS, MERGE).permute(0, 2, 1, 3).reshape(-1) for axis in (rows, columns)
    ]
    return torch.stack(ordered, dim=-1)


def token_targets(scene: Scene, times_s: list[float]) -> Tensor:
    """Returns which names each token of one frame pair shows: float32 [15, 14].

    1 where the object's square covers at least a quarter of the token's cell, or is mostly in it, in either
    frame.
    """
    target = torch.zeros(TOKENS, len(_NAMES))
    for time_s in times_s:
        for item in scene.visible(time_s):
            covered = reached(item, time_s)
            target[covered, _NAMES.index(item.shape)] = 1
            target[covered, _NAMES.index(item.colour)] = 1
    return target


def reached(item: SceneObject, time_s: float) -> Tensor:
    """Returns which tokens an object reaches into: bool [15]."""
    x, y = item.position(time_s)
    radius = item.radius * min(SOURCE_WIDTH / NUM_LANES, SOURCE_HEIGHT)
    rows = _overlap(y, 0.85 * radius / SOURCE_HEIGHT, ROWS)
    columns = _overlap(x, 0.85 * radius / SOURCE_WIDTH, COLUMNS)
    return (torch.outer(rows, columns) >= 0.25).flatten()


def _overlap(centre: float, half: float, cells: int) -> Tensor:
    """Returns the share of each of `cells` cells of [0, 1) covered by [centre - half, centre + half)."""
    edges = torch.arange(cells + 1) / cells
    covered = torch.minimum(edges[1:], torch.tensor(centre + half)) - torch.maximum(
        edges[:-1], torch.tensor(centre - half)
    )
    return covered.clamp(min=0) * cells


def draw_batch(clips: list[Clip], rng: random.Random, size: int) -> tuple[Tensor, Tensor]:
    """Draws frame pairs and single frames: uint8 [B, 2, 84, 140, 3] and targets float32 [B, 15, 14]."""
    pairs, targets = [], []
    for pair, scene, times_s in draw_pairs(clips, rng, size, _REDRAWN):
        pairs.append(pair)
        targets.append(token_targets(scene, times_s))
    return torch.from_numpy(np.stack(pairs)), torch.stack(targets)


def draw_pairs(
    clips: list[Clip], rng: random.Random, size: int, redrawn: float
) -> Iterator[tuple[UInt8Array, Scene, list[float]]]:
    """Yields pairs of neighbouring frames, or of one frame twice, [2, H, W, 3], with scene and instants.

    redrawn: share of those that show nothing in whose place others are drawn
    """
    num_drawn = 0
    while num_drawn < size:
        clip = rng.choice(clips)
        first = rng.randrange(len(clip.frames) // 2) * 2
        second = first if rng.random() < 0.15 else first + 1
        times_s = [clip.times_s[first], clip.times_s[second]]
        if not any(clip.scene.visible(time_s) for time_s in times_s) and rng.random() < redrawn:
            continue
        num_drawn += 1
        yield np.stack([clip.frames[first], clip.frames[second]]), clip.scene, times_s


def exact_share(logits: Tensor, targets: Tensor) -> float:
    """Returns the share of tokens showing something whose every name is right."""
    right = ((logits > 0) == (targets > 0.5)).all(-1)
    return right[targets.any(-1)].float().mean().item()


@torch.inference_mode()
def whitening(visual: nn.Module, clips: list[Clip], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Returns a matrix [C, C] and an offset [C] that bring embeddings near the size of text ones.

    Names become equally strong. A tower trained through a linear layer alone gives embeddings 60 long where
    text is 0.3, most of it a common offset, and the residual stream of the language model would drown in it.
    Some offset must stay: the model's norms would otherwise blow the noise of an empty background up to the
    size of an object.
    """
    pairs, targets = draw_batch(clips, rng, _WHITENING_PAIRS)
    embeddings = torch.cat([encode(visual, patchify(part)) for part in pairs.split(64)]).flatten(0, 1)
    centred = embeddings - embeddings.mean(0)
    variances, axes = torch.linalg.eigh(centred.T @ centred / len(centred))
    shrink = axes @ torch.diag((variances + _WHITENING_FLOOR**2).rsqrt()) @ axes.T
    shown = (centred @ shrink)[targets.flatten(0, 1).any(-1)]
    matrix = shrink * (_SHOWN_NORM / shown.norm(dim=-1).median())
    return matrix, _SHOWN_NORM * axes[:, 0] - matrix @ embeddings.mean(0)


@torch.inference_mode()
def fold_into_projector(visual: nn.Module, matrix: Tensor, offset: Tensor) -> None:
    """Makes the tower give `matrix @ x + offset` where it gave x."""
    last = visual.merger.mlp[2]
    last.weight.copy_(matrix @ last.weight)
    last.bias.copy_(matrix @ last.bias + offset)


def load_vision(model: Any, path: Path) -> None:
    """Gives a model the tower that a step of training has made, to be learned no more."""
    model.model.visual.load_state_dict(torch.load(path)["visual"])
    model.model.visual.requires_grad_(False)


def read_clips(folder: Path) -> list[Clip]:
    return [clip for spec in sorted(folder.glob("*.json")) for clip in read_shard(spec)]


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    model = Qwen2_5_VLForConditionalGeneration(build_config(build_tokenizer()))
    visual = model.model.visual
    head = nn.Linear(visual.config.out_hidden_size, len(_NAMES))
    optimizer = torch.optim.AdamW([*visual.parameters(), *head.parameters()], weight_decay=0.02)
    training = Training({"visual": visual, "head": head}, [optimizer], options.out)
    rng = random.Random(options.seed + training.step)
    clips = read_clips(options.clips)
    while training.step < options.steps:
        pairs, targets = draw_batch(clips, rng, options.batch)
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(encode(visual, patchify(pairs))).float()
        loss = functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=_POSITIVE_WEIGHT)
        training.update(loss, learning_rate(training.step, options.steps, options.lr))
        if training.step % 200 == 0 or training.step == options.steps:
            print(f"tokens whose every name is right: {exact_share(logits, targets):.3f}", flush=True)
            training.save()
    fold_into_projector(visual, *whitening(visual, clips, rng))
    torch.save({"visual": visual.state_dict()}, options.final)


def main() -> None:
    parser = base_parser(__doc__, steps=1260, lr=1.5e-3)
    parser.add_argument("--final", type=Path, required=True, help="file for the tower `language` starts from")
    parser.add_argument("--batch", type=int, default=192, help="frame pairs per step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options)


if __name__ == "__main__":
    main()
