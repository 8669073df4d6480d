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
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from epd.shapes import SHAPES
from training.batches import USUAL_GAP_S, Batch, Prompts, ask_all, draw_batch, make_batch
from training.checkpoint import build_config, build_tokenizer, save_checkpoint
from training.encoded import EncodedPool, retime
from training.loop import Training, base_parser, learning_rate
from training.rows import NO_TARGET, Tally, answers_loss
from training.vision import TOKENS, load_vision

# After so many layers, visual tokens are to know what `Probes` reads.
_PROBED_LAYERS = (3, 4, 5)
_PROBES_WEIGHT = 0.2
# Few tokens are the first to show something, or not to.
_EVENT_WEIGHT = torch.tensor(10.0)
_EVENTS_SHARE = 5.0
_FAR = 0.2  # of the frame's height: a move that counts as 1
# (until this share of the training, at most this number of frame pairs)
_CURRICULUM = ((0.2, 8), (0.6, 32), (0.75, 64), (2.0, 256))


class Probes(nn.Module):
    """Reads from three layers what visual tokens are to know by then; thrown away after training.

    The first gives on the second that a token shows; the second, which shapes it is the first to show, and,
    of the last token of a pair of frames, which the pair is the first not to show any more, so that an answer
    finds their times in one look; the third, how far the object that it shows has fallen.
    """

    def __init__(self, layers: Sequence[nn.Module], hidden_size: int) -> None:
        super().__init__()
        self.clock = nn.Linear(hidden_size, 3 * 10)
        self.appears, self.leaves = nn.Linear(hidden_size, len(SHAPES)), nn.Linear(hidden_size, len(SHAPES))
        self.fallen = nn.Linear(hidden_size, 1)
        self.hidden: list[Tensor] = []
        for layer in layers:
            layer.register_forward_hook(self._keep)

    def _keep(self, _layer: nn.Module, _inputs: object, hidden: Tensor) -> None:
        self.hidden = [*self.hidden[-2:], hidden]

    def loss(self, batch: Batch) -> Tensor:
        """Returns how far off they are, after a batch has passed through the three layers."""
        timed, told, moved = (hidden[:, batch.visual].float() for hidden in self.hidden)
        seen = batch.sightings
        fallen = self.fallen(moved[seen.is_one])[:, 0] - seen.fallen[seen.is_one] / _FAR
        return (
            _digits_loss(self.clock(timed), batch.instants)
            + _EVENTS_SHARE * _events_loss(self.appears(told), seen.appears)
            + _EVENTS_SHARE * _events_loss(self.leaves(told[:, TOKENS - 1 :: TOKENS]), seen.leaves)
            + fallen.square().sum() / max(1, len(fallen))
        )


def _events_loss(logits: Tensor, happened: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, happened, pos_weight=_EVENT_WEIGHT)


def _digits_loss(logits: Tensor, seconds: Tensor) -> Tensor:
    """Returns the mean cross entropy of three digits, logits [..., 30], of whole seconds [...]; 0 of none."""
    digits = torch.stack([seconds.clamp(max=999) // place % 10 for place in (100, 10, 1)], dim=-1)
    losses = functional.cross_entropy(logits.reshape(-1, 10), digits.flatten(), reduction="sum")
    return losses / max(1, digits.numel())


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
        size = max(1, budget // (length * TOKENS + 600))
        for first in range(0, min(len(clips), 48), size):
            part = [
                clip if clip.is_image else retime(clip, USUAL_GAP_S) for clip in clips[first : first + size]
            ]
            asked_of = [ask_all(clip, rng) for clip in part]
            batch = make_batch(prompts, [(clip,) for clip in part], asked_of, rng, 0.0)
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


def start_from(model: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Loads an earlier checkpoint. Tokens that it has keep their embeddings, others get the mean of all."""
    saved = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    name = "model.language_model.embed_tokens.weight"
    rows, known = saved[name], Qwen2Tokenizer.from_pretrained(folder).get_vocab()
    table = rows.mean(0).repeat(model.config.text_config.vocab_size, 1)
    for token, index in tokenizer.get_vocab().items():
        if token in known:
            table[index] = rows[known[token]]
    model.load_state_dict(saved | {name: table}, strict=False)
    model.model.visual.requires_grad_(False)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    prompts = Prompts(tokenizer)
    model = Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))
    if options.start:
        start_from(model, tokenizer, options.start)
    if options.vision:
        load_vision(model, options.vision)
    pool = EncodedPool(options.clips, model.model.visual, options.cache)
    language = model.model.language_model
    probes = Probes([language.layers[number - 1] for number in _PROBED_LAYERS], language.config.hidden_size)
    optimizers = [*make_optimizers(model), torch.optim.AdamW(probes.parameters(), weight_decay=0.0)]
    training = Training({"model": model, "probes": probes}, optimizers, options.out)
    rng = random.Random(options.seed + training.step)
    while training.step < options.steps:
        share = training.step / options.steps
        batch = draw_batch(pool.training, prompts, rng, options.budget, longest_pairs(share))
        logits, targets, weights = answer_logits(model, batch)
        loss = answers_loss(logits, targets, weights) + _PROBES_WEIGHT * probes.loss(batch)
        training.update(loss, learning_rate(training.step, options.steps, options.lr))
        if training.step % 250 == 0 or training.step == options.steps:
            accuracy = validate(model, pool, prompts, options.budget)
            print(json.dumps({name: round(value, 3) for name, value in accuracy.items()}), flush=True)
            training.save()
            if options.checkpoint:
                save_checkpoint(model, options.checkpoint)


def main() -> None:
    parser = base_parser(__doc__, steps=2000, lr=2e-3)
    parser.add_argument("--vision", type=Path, help="tower that `training.vision` made")
    parser.add_argument(
        "--start", type=Path, help="checkpoint whose language model is taught on, and tower used"
    )
    parser.add_argument("--cache", type=Path, default=Path("runs/encoded"), help="folder for encoded clips")
    parser.add_argument("--checkpoint", type=Path, help="folder for a loadable checkpoint")
    parser.add_argument("--budget", type=int, default=9000, help="tokens per step")
    options = parser.parse_args()
    if not (options.vision or options.start):
        parser.error("--vision, --start or both are needed: nothing else says what the model sees")
    torch.set_num_threads(options.threads)
    train(options)


if __name__ == "__main__":
    main()
