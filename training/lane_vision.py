"""Teaches the tower of a Qwen3-VL-shaped model to give the embedding of what each lane shows.

    python -m training.lane_vision --clips runs/clips --out runs/vision_state.pt --final runs/vision.pt
    torchrun --nproc-per-node 2 -m training.lane_vision ...      two processes, one core each

Clips are those of `training.clips --size 32x96`. The tower sees pairs of neighbouring frames, as in a video,
and single frames twice, as in an image. Resumes from --out when it exists.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from epd.encoders.patches import PatchSpec
from training.clips import Clip
from training.lane_scenes import TowerErrors
from training.lanes import (
    EMPTY,
    HEIGHT,
    MERGE,
    MODEL_HEIGHT,
    MODEL_WIDTH,
    PATCH,
    SCALE,
    TOKENS,
    codes,
    directions,
    embeddings,
)
from training.loop import Training, base_parser, joined_processes, learning_rate, rank
from training.qwen3_checkpoint import build_model, build_tokenizer, load_model
from training.vision import draw_pairs, patches_of, read_clips, run_blocks

GRID_H, GRID_W = MODEL_HEIGHT // PATCH, MODEL_WIDTH // PATCH
_HALF = (127.5,) * 3
_PATCHES = PatchSpec(PATCH, MERGE, frames_per_unit=2, mean=_HALF, std=_HALF, resample=3)
_GRID = torch.tensor([[1, GRID_H, GRID_W]])
_REDRAWN = 0.7  # of pairs that show nothing
# Clips that are not learned from, and pairs of their frames that are looked at.
_HELD_OUT, _NUM_JUDGED = 200, 2048


def patchify(pairs: Tensor) -> Tensor:
    """Returns the processor's patches: uint8 [B, 2, 32, 96, 3] -> normalised float32 [B, 12, 1536]."""
    return patches_of(pairs, _PATCHES)


def encode(visual: nn.Module, patches: Tensor) -> Tensor:
    """Returns the vision tower over a batch of frame pairs at once: [B, 12, 1536] -> [B, 3, C].

    The same arithmetic as the module's own forward, batched instead of one pair after another.
    """
    hidden = functional.linear(
        patches, visual.patch_embed.proj.weight.flatten(1), visual.patch_embed.proj.bias
    )
    indices, weights = get_vision_interpolation_indices_and_weights(
        _GRID,
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=MERGE,
        kwargs={},
    )
    hidden = hidden + (visual.pos_embed(indices) * weights[:, :, None]).sum(1)
    cos, sin = visual.rotary_pos_emb(hidden, get_vision_position_ids(_GRID, MERGE, kwargs={}))
    return run_blocks(visual, hidden, cos, sin)


def draw_batch(clips: list[Clip], rng: random.Random, size: int) -> tuple[Tensor, Tensor]:
    """Draws frame pairs and single frames, uint8 [B, 2, 32, 96, 3], and their codes [B, 3, CODE_SIZE]."""
    pairs, targets = [], []
    for pair, scene, times_s in draw_pairs(clips, rng, size, _REDRAWN):
        pairs.append(pair)
        targets.append(codes(scene, times_s)[0])
    return torch.from_numpy(np.stack(pairs)), torch.stack(targets)


def read_codes(seen: Tensor) -> Tensor:
    """Returns the codes that embeddings are nearest to: [..., C] -> [..., CODE_SIZE]."""
    table = directions()
    return seen @ table.T / table.square().sum(1)


def accuracy(seen: Tensor, targets: Tensor) -> tuple[float, float]:
    """Returns the share of tokens whose every name is right, and how far heights are off."""
    read = read_codes(seen)
    right = ((read > 0.5) == (targets > 0.5))[..., :HEIGHT].all(-1)
    one = targets[..., : HEIGHT - TOKENS].sum(-1) == 2
    return right.float().mean().item(), (read - targets)[..., HEIGHT][one].abs().mean().item()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    model = load_model(options.model) if options.model else build_model(build_tokenizer())
    visual = model.model.visual
    optimizer = torch.optim.AdamW(visual.parameters(), weight_decay=0.02)
    training = Training({"visual": visual}, [optimizer], options.out)
    rng = random.Random(options.seed + training.step + 10**6 * rank())
    clips = read_clips(options.clips)
    held_out, clips = clips[:_HELD_OUT], clips[_HELD_OUT:]
    while training.step < options.steps:
        pairs, targets = draw_batch(clips, rng, options.batch)
        with torch.autocast("cpu", torch.bfloat16):
            seen = encode(visual, patchify(pairs)).float()
        loss = ((seen - embeddings(targets)) / SCALE).square().sum(-1).mean()
        training.update(loss, learning_rate(training.step, options.steps, options.lr))
        if rank() == 0 and (training.step % 200 == 0 or training.step == options.steps):
            report(visual, held_out)
        training.save_now_and_then(is_over=training.step == options.steps)
    if rank() == 0:
        torch.save({"visual": visual.state_dict()}, options.final)


@torch.inference_mode()
def report(visual: nn.Module, clips: list[Clip]) -> None:
    pairs, targets = draw_batch(clips, random.Random(0), _NUM_JUDGED)
    names, heights = accuracy(encode(visual, patchify(pairs)), targets)
    print(f"tokens whose every name is right: {names:.4f}; heights off by {heights:.3f}", flush=True)


@torch.inference_mode()
def errors_of(visual: nn.Module, clips: list[Clip]) -> TowerErrors:
    """Returns what the tower is off by, for tokens of clips that it did not learn from."""
    pairs, targets = draw_batch(clips[:_HELD_OUT], random.Random(1), _NUM_JUDGED)
    seen = torch.cat([encode(visual, patchify(some)) for some in pairs.split(256)])
    errors, is_empty = seen - embeddings(targets), targets[..., EMPTY] > 0
    return TowerErrors(errors[is_empty], errors[~is_empty])


def main() -> None:
    parser = base_parser(__doc__, steps=1500, lr=1.5e-3)
    parser.add_argument("--final", type=Path, required=True, help="file for the tower")
    parser.add_argument("--batch", type=int, default=192, help="frame pairs per step")
    parser.add_argument("--model", help="checkpoint whose tower to teach further: a name or a folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with joined_processes():
        train(options)


if __name__ == "__main__":
    main()
