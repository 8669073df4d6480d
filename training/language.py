"""Second step: teaches the language model to answer from what the (now frozen) vision tower sees.

    python -m training.language --clips runs/clips --vision runs/vision.pt --out runs/language.pt

A video's embeddings never change once the tower is frozen, so each clip is encoded once and kept
(`training/encoded.py`); a sequence holds one video and a dozen questions (`training/batches.py`). Videos grow
longer during training. Resumes from --out when it exists.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from training.batches import USUAL_GAP_S, Batch, Prompts, ask, draw_batch, make_batch
from training.checkpoint import build_config, build_tokenizer, save_checkpoint
from training.encoded import EncodedPool, retime
from training.loop import Training, base_parser, learning_rate
from training.rows import NO_TARGET, Tally, answers_loss
from training.vision import TOKENS, load_vision

# (until this share of the training, at most this number of frame pairs)
_CURRICULUM = ((0.2, 8), (0.6, 32), (0.75, 64), (2.0, 256))


def answer_logits(model: Qwen2_5_VLForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits [T, V], targets [T] and weights [T] where an answer token is predicted, row by row."""
    with torch.autocast("cpu", torch.bfloat16):
        embedded = model.get_input_embeddings()(batch.ids)
        inputs = embedded.index_copy(1, batch.visual, batch.embeddings.to(embedded.dtype))
        hidden = model.model.language_model(
            inputs_embeds=inputs, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
        wanted = batch.targets != NO_TARGET
        return model.lm_head(hidden[wanted]).float(), batch.targets[wanted], batch.weights[wanted]


@torch.inference_mode()
def validate(model: nn.Module, pool: EncodedPool, prompts: Prompts, budget: int) -> dict[str, float]:
    """Returns accuracy by length and by kind on clips never trained on."""
    tally, rng = Tally(), random.Random(1)
    for length, clips in sorted(pool.validation.items()):
        size = max(1, budget // (length * TOKENS + 280))
        for first in range(0, min(len(clips), 48), size):
            part = [
                clip if clip.is_image else retime(clip, USUAL_GAP_S) for clip in clips[first : first + size]
            ]
            batch = make_batch(prompts, part, [ask(clip, rng, 1) for clip in part], rng, 0.0)
            logits, targets, _ = answer_logits(model, batch)
            tally.add(batch, logits.argmax(-1) == targets, f"{2 * length}f" if length else "image")
    return tally.shares()


def make_optimizers(model: Qwen2_5_VLForConditionalGeneration) -> list[torch.optim.Optimizer]:
    """Returns Muon for the layers' matrices, AdamW for embeddings, biases and norms; rates of one scale."""
    language = model.model.language_model
    matrices = [parameter for parameter in language.layers.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in language.parameters() if parameter.ndim == 1]
    return [
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([language.embed_tokens.weight, *rest], weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def longest_pairs(share: float) -> int:
    """Returns the longest video trained on, in frame pairs, when `share` of the training is over."""
    return next(longest for until, longest in _CURRICULUM if share < until)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    prompts = Prompts(tokenizer)
    model = Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))
    load_vision(model, options.vision)
    pool = EncodedPool(options.clips, model.model.visual, options.cache)
    training = Training({"model": model}, make_optimizers(model), options.out)
    rng = random.Random(options.seed + training.step)
    while training.step < options.steps:
        share = training.step / options.steps
        batch = draw_batch(pool.training, prompts, rng, options.budget, longest_pairs(share))
        logits, targets, weights = answer_logits(model, batch)
        loss = answers_loss(logits, targets, weights)
        training.update(loss, learning_rate(training.step, options.steps, options.lr))
        if training.step % 250 == 0 or training.step == options.steps:
            accuracy = validate(model, pool, prompts, options.budget)
            print(json.dumps({name: round(value, 3) for name, value in accuracy.items()}), flush=True)
            training.save()
            if options.checkpoint:
                save_checkpoint(model, options.checkpoint)


def main() -> None:
    parser = base_parser(__doc__, steps=2000, lr=2e-3)
    parser.add_argument("--vision", type=Path, required=True, help="tower that `training.vision` made")
    parser.add_argument("--cache", type=Path, default=Path("runs/encoded"), help="folder for encoded clips")
    parser.add_argument("--checkpoint", type=Path, help="folder for a loadable checkpoint")
    parser.add_argument("--budget", type=int, default=9000, help="tokens per step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options)


if __name__ == "__main__":
    main()
