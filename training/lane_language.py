"""Teaches a language model that reads timestamps what happens, on scenes that are never drawn.

    python -m training.lane_language --out runs/language.pt
    python -m training.lane_language --out runs/language.pt --vision runs/vision.pt --clips runs/lanes \\
        --checkpoint runs/shapes-vl-2
    python -m training.lane_language --out runs/more.pt --model shapes-vl-2 --clips runs/lanes \\
        --checkpoint runs/more
    torchrun --nproc-per-node 2 -m training.lane_language ...      two processes, one core each

The tower may be taught meanwhile and be given later: with it and clips, embeddings are off by what it is.
With --model a checkpoint is taught further, with its own tower.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

from training.lane_batches import Batch, Embed, Keep, Prompts, Thinned, draw_batch, keep_all, make_batch
from training.lane_decoder import decode
from training.lane_probes import NAME_LAYERS, SUBJECT_LAYERS, EventProbes, MentionProbes
from training.lane_scenes import Imagined, draw_shown, questions_about
from training.lane_vision import errors_of
from training.lanes import HIDDEN_SIZE, SCALE
from training.loop import Progress, Training, base_parser, joined_processes, rank
from training.qwen3_checkpoint import build_model, build_tokenizer, load_model, number_ids, save_checkpoint
from training.rows import NO_TARGET, Tally, answers_loss
from training.vision import load_vision, read_clips

# Losses of what is read along count so much.
_EVENTS_WEIGHT, _NAMES_WEIGHT, _SUBJECTS_WEIGHT = 0.2, 0.15, 0.15
# Rates, in shares of the matrices': embeddings, gains of queries and keys, linear layers that read along.
_EMBEDDING_RATE, _GAINS_RATE, _PROBES_RATE = 0.25, 4.0, 4.0
_REPORT_STEPS = 25
# (until this share of the training, at most this number of frame pairs)
_CURRICULUM = ((0.2, 8), (0.45, 16), (0.6, 32), (0.75, 64), (0.85, 128), (2.0, 256))
# Videos of so many frame pairs, so many of them.
VALIDATED = ((4, 24), (16, 24), (32, 8), (64, 6), (128, 3), (256, 2))


def answer_logits(model: Qwen3VLForConditionalGeneration, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Returns logits [T, V] where an answer token is predicted, row by row, and the states of all layers."""
    table = model.get_input_embeddings().weight
    inputs = table[batch.ids].masked_scatter(batch.visual[..., None], batch.embeddings)
    states = decode(model.model.language_model, inputs, batch.positions, batch.segments)
    wanted = states[-1][(batch.targets != NO_TARGET)[batch.is_token]]
    return functional.linear(wanted.bfloat16(), table.bfloat16()).float(), states


@torch.inference_mode()
def validate(
    model: Qwen3VLForConditionalGeneration,
    prompts: Prompts,
    longest: int,
    embed: Embed,
    keep: Keep = keep_all,
) -> dict[str, float]:
    """Returns the share of answers whose every token is right after right ones, by length and by kind."""
    tally = Tally()
    for length, count in VALIDATED:
        rng = random.Random(10**6 + length)
        for _ in range(count if length <= longest else 0):
            clip = draw_shown(rng, length)
            batch = make_batch(prompts, [(clip,)], [questions_about(clip, rng, 2, 2)], embed, keep)
            batch = batch.to(model.device)
            logits, _ = answer_logits(model, batch)
            right = logits.argmax(-1) == batch.targets[batch.targets != NO_TARGET]
            tally.add(batch, right, f"{2 * length}f")
    return tally.shares()


def make_optimizers(model: Qwen3VLForConditionalGeneration, probes: nn.Module) -> list[torch.optim.Optimizer]:
    """Returns Muon for the matrices and AdamW for the rest.

    Gains of queries and keys have a higher rate: they bound how sharp a look can be.
    """
    language = model.model.language_model
    matrices = [parameter for parameter in language.layers.parameters() if parameter.ndim == 2]
    sharp, rest = [], []
    for name, parameter in language.named_parameters():
        if parameter.ndim == 1:
            (sharp if name.endswith(("q_norm.weight", "k_norm.weight")) else rest).append(parameter)
    groups = [
        {"params": [language.embed_tokens.weight], "rate": SCALE * _EMBEDDING_RATE},
        {"params": sharp, "rate": _GAINS_RATE},
        {"params": rest},
        {"params": list(probes.parameters()), "rate": _PROBES_RATE},
    ]
    return [
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


class _Language:
    """Holds what is taught, and what reads along."""

    def __init__(self, options: argparse.Namespace) -> None:
        tokenizer = build_tokenizer()
        self.prompts = Prompts(tokenizer)
        self.numbers = number_ids(tokenizer)
        self.model = load_model(options.model) if options.model else build_model(tokenizer)
        self.embed = Imagined()
        if options.vision:
            load_vision(self.model, options.vision)
        if options.clips and (options.vision or options.model):
            self.embed = Imagined(errors_of(self.model.model.visual, read_clips(options.clips)))
        visual = self.model.model.visual.requires_grad_(False)
        tower = {name: tensor.clone() for name, tensor in visual.state_dict().items()}
        self.model.to(options.device)
        self.events = EventProbes(HIDDEN_SIZE).to(options.device)
        self.names = MentionProbes(HIDDEN_SIZE, NAME_LAYERS).to(options.device)
        self.subjects = MentionProbes(HIDDEN_SIZE, SUBJECT_LAYERS).to(options.device)
        probes = {"events": self.events, "names": self.names, "subjects": self.subjects}
        reading = nn.ModuleDict(probes)
        if options.model:
            _begin_at_zero(reading)
        modules = {"model": self.model} | probes
        optimizers = make_optimizers(self.model, reading)
        self.training = Training(modules, optimizers, options.out)
        if options.vision:
            visual.load_state_dict(tower)  # the saved one may be older

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns what is to become small, and its parts: of answers, of events, of names and after them."""
        logits, states = answer_logits(self.model, batch)
        is_target = batch.targets != NO_TARGET
        answers = answers_loss(logits, batch.targets[is_target], batch.weights[is_target])
        table = self.model.get_input_embeddings().weight / SCALE
        events = self.events.losses(batch, states, table[self.numbers])
        names = self.names.losses(batch.mentions, states, table)
        subjects = self.subjects.losses(batch.subjects, states, table)
        total = answers + _EVENTS_WEIGHT * _sum(events)
        total = total + _NAMES_WEIGHT * _sum(names) + _SUBJECTS_WEIGHT * _sum(subjects)
        later = {f"{name} later": loss for name, loss in subjects.items()}
        return total, {"answers": answers} | events | names | later


def _begin_at_zero(probes: nn.Module) -> None:
    """Lets linear layers leave alone what a taught model has, until they have learned to read it."""
    for parameter in probes.parameters():
        nn.init.zeros_(parameter)


def _sum(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    language = _Language(options)
    training = language.training
    seed = options.seed + training.step + 10**6 * rank()
    rng = random.Random(seed)
    torch.manual_seed(seed)
    progress = Progress(options.steps, training.step, options.until, options.begun)
    sums = Counter[str]()
    while not progress.is_over(training.step):
        share = progress.share(training.step)
        longest = longest_pairs(share)
        batch = draw_batch(language.prompts, rng, options.budget, longest, language.embed, options.thinned)
        total, losses = language.losses(batch.to(options.device))
        sums.update({name: loss.item() for name, loss in losses.items()})
        training.update(total, options.lr * progress.warmed(training.step) * rate(share))
        if training.step % _REPORT_STEPS == 0 and rank() == 0:
            means = {name: round(each / _REPORT_STEPS, 3) for name, each in sums.items()}
            print(json.dumps({"share": round(share, 3)} | means), flush=True)
            sums.clear()
        training.save_now_and_then(is_over=progress.is_over(training.step))
        is_due = progress.is_over(training.step) or training.step % options.validate == 0
        if is_due and rank() == 0:
            _report(language, max(16, longest), options)


def _report(language: _Language, longest: int, options: argparse.Namespace) -> None:
    for keep in (keep_all, Thinned(random.Random(0))) if options.thinned else (keep_all,):
        accuracy = validate(language.model, language.prompts, longest, language.embed, keep)
        rounded = {name: round(value, 3) for name, value in accuracy.items()}
        print(json.dumps({"thinned": keep is not keep_all} | rounded), flush=True)
    if options.checkpoint:
        save_checkpoint(language.model, options.checkpoint)


def longest_pairs(share: float) -> int:
    """Returns the longest video trained on, in frame pairs, when `share` of the training is over."""
    return next(longest for until, longest in _CURRICULUM if share < until)


def rate(share: float) -> float:
    """Returns the rate in shares of its peak: level at first, then down to almost nothing."""
    return 0.02 + 0.98 * min(1.0, (1 - share) / 0.7)


def main() -> None:
    parser = base_parser(__doc__, steps=4000, lr=2e-3, needs_clips=False)
    parser.add_argument("--device", default="cpu", help="where the language model is taught, like cuda")
    parser.add_argument("--budget", type=int, default=6000, help="tokens per step")
    parser.add_argument("--validate", type=int, default=250, help="steps between validations")
    parser.add_argument("--checkpoint", type=Path, help="folder for a loadable checkpoint")
    parser.add_argument("--vision", type=Path, help="tower that `training.lane_vision` made")
    parser.add_argument("--model", help="checkpoint to teach further: a name or a folder")
    parser.add_argument(
        "--thinned", type=float, default=0.0, help="share of batches whose videos keep only some tokens"
    )
    parser.add_argument("--until", help="wall-clock time like 19:25 to end at, whatever the steps")
    parser.add_argument("--begun", type=float, default=0.0, help="with --until, the share that is over now")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with joined_processes():
        train(options)


if __name__ == "__main__":
    main()
