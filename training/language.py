"""Second step: teaches the language model to answer from what the (now frozen) vision tower sees.

    python -m training.language --clips runs/clips --vision runs/vision.pt --out runs/language.pt --steps 8000

A video's embeddings never change once the tower is frozen, so each clip is encoded once and kept. One
sequence holds one video and a dozen questions; a mask lets every question see the video and itself only, with
the positions it would have alone:

    tokens     [system, vision start, visual tokens) [question 1 + answer) [question 2 + answer) ...
    segment                 0                                 1                     2
    position   0 ...                                 p ...                 p ...

Engines disagree on the position of the text after a video: transformers 5 goes on after its height or width
(and, once the answer begins, after the largest position so far), others after its last instant. Both occur
here, so that answers do not depend on the engine. Resumes from --out when it exists.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from epd.shapes import Question, QuestionKind, Scene, make_questions
from training.checkpoint import SYSTEM_PROMPT, build_config, build_tokenizer, save_checkpoint
from training.clips import Clip, read_shard
from training.vision import COLUMNS, ROWS, TOKENS, encode, learning_rate, patchify

_IMAGE_KINDS = (QuestionKind.COLOUR, QuestionKind.PRESENCE, QuestionKind.COUNT)
_NO_TARGET = -100
# Questions of each kind put to a clip in training.
_MIX = {
    QuestionKind.COLOUR: 1,
    QuestionKind.ORDER: 1,
    QuestionKind.COUNT: 1,
    QuestionKind.PRESENCE: 2,
    QuestionKind.AFTER: 2,
    QuestionKind.TIME: 4,
}
# (until this share of the training, at most so many frame pairs)
_CURRICULUM = ((0.2, 8), (0.5, 32), (0.65, 64), (2.0, 256))
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
    """The clip of frame pairs [first, stop) as a video of its own; None where it would show nothing."""
    start_s, end_s = first * 2 * clip.gap_s, stop * 2 * clip.gap_s
    frame_times = start_s + clip.gap_s * np.arange(2 * (stop - first))
    objects = tuple(
        dataclasses.replace(
            item, start_s=max(0.0, item.start_s - start_s), end_s=min(item.end_s, end_s) - start_s
        )
        for item in clip.scene.objects
        if ((frame_times >= item.start_s) & (frame_times < item.end_s)).any()
    )
    scene = Scene(clip.scene.seed, end_s - start_s, objects)
    return EncodedClip(scene, clip.gap_s, clip.embeddings[first:stop]) if objects else None


@torch.inference_mode()
def encode_shard(visual: nn.Module, clips: list[Clip], rng: random.Random) -> list[EncodedClip]:
    """Every clip, and one of its frames as an image."""
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
    """Encoded clips by number of frame pairs; what was encoded once is kept in files."""

    def __init__(self, folder: Path, visual: nn.Module, cache: Path) -> None:
        self._folder, self._visual, self._cache = folder, visual, cache
        self._read: set[str] = set()
        self.training: dict[int, list[EncodedClip]] = defaultdict(list)
        self.validation: dict[int, list[EncodedClip]] = defaultdict(list)
        cache.mkdir(parents=True, exist_ok=True)

    def refresh(self) -> None:
        """Reads all shards that have not been read; a few are kept for validation."""
        for spec in sorted(self._folder.glob("*.json")):
            if spec.stem in self._read:
                continue
            self._read.add(spec.stem)
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


class Prompts:
    """Token ids of the parts of a conversation."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.head = self.ids(
            f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        )

    def ids(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]

    def question(self, question: Question) -> tuple[list[int], list[int]]:
        """(what the model reads, what it must answer)."""
        read = self.ids(f"<|vision_end|>{question.text}<|im_end|>\n<|im_start|>assistant\n")
        return read, self.ids(f"{question.answer}<|im_end|>")


@dataclass(frozen=True, slots=True)
class Batch:
    """B videos of equal length with their questions, S positions.

    ids int64 [B, S], visual bool [S], positions int64 [3, B, S], mask bool [B, 1, S, S] (True: may attend),
    targets int64 [B, S] (-100 where nothing is learned), kinds: the question kind behind each target row.
    """

    ids: Tensor
    embeddings: Tensor
    visual: slice
    positions: Tensor
    mask: Tensor
    targets: Tensor
    questions: list[list[Question]]
    segments: Tensor


def visual_positions(clip: EncodedClip, start: int) -> Tensor:
    """M-RoPE rows (time, height, width) of the visual tokens: int64 [3, P * 15]."""
    step = 1.0 if clip.is_image else 2 * clip.gap_s * 2
    instants = (torch.arange(len(clip)) * step).long()
    grid = torch.meshgrid(instants, torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    return torch.stack(grid).reshape(3, -1) + start


def lay_out(
    prompts: Prompts, clip: EncodedClip, questions: list[Question], after_last_instant: bool
) -> tuple[list[int], Tensor, list[int], list[int]]:
    """One sequence: ids, positions [3, S], segments and targets."""
    start = len(prompts.head)
    seen = visual_positions(clip, start)
    following = int(seen.max()) + 1 if after_last_instant else start + max(ROWS, COLUMNS)
    ids = prompts.head + [0] * (len(clip) * TOKENS)
    segments, targets = [0] * len(ids), [_NO_TARGET] * len(ids)
    positions = [torch.arange(start).expand(3, -1), seen]
    for number, question in enumerate(questions, 1):
        read, answer = prompts.question(question)
        ids += read + answer
        segments += [number] * (len(read) + len(answer))
        targets += [_NO_TARGET] * (len(read) - 1) + answer + [_NO_TARGET]
        asked = torch.arange(len(read)) + following
        answered = torch.arange(len(answer)) + max(int(seen.max()), int(asked[-1])) + 1
        positions.append(torch.cat([asked, answered]).expand(3, -1))
    return ids, torch.cat(positions, dim=1), segments, targets


def make_batch(
    prompts: Prompts, clips: list[EncodedClip], questions: list[list[Question]], rng: random.Random
) -> Batch:
    rows = [
        lay_out(prompts, clip, asked, after_last_instant=rng.random() < 0.4)
        for clip, asked in zip(clips, questions, strict=True)
    ]
    length = max(len(row[0]) for row in rows)

    def padded(values: list[int], fill: int) -> Tensor:
        return torch.tensor(values + [fill] * (length - len(values)))

    ids = torch.stack([padded(row[0], 0) for row in rows])
    positions = torch.stack([functional.pad(row[1], (0, length - row[1].shape[1])) for row in rows], dim=1)
    segments = torch.stack([padded(row[2], -1) for row in rows])
    targets = torch.stack([padded(row[3], _NO_TARGET) for row in rows])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    start = len(prompts.head)
    visual = slice(start, start + len(clips[0]) * TOKENS)
    embeddings = torch.stack([clip.embeddings.reshape(-1, clip.embeddings.shape[-1]) for clip in clips])
    return Batch(ids, embeddings, visual, positions, (causal & same)[:, None], targets, questions, segments)


def answer_logits(model: Qwen2_5_VLForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and targets [T] at the positions where an answer token is predicted, row by row."""
    with torch.autocast("cpu", torch.bfloat16):
        embedded = model.get_input_embeddings()(batch.ids)
        visual = batch.embeddings.to(embedded.dtype)
        inputs = torch.cat(
            [embedded[:, : batch.visual.start], visual, embedded[:, batch.visual.stop :]], dim=1
        )
        hidden = model.model.language_model(
            inputs_embeds=inputs, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
        wanted = batch.targets != _NO_TARGET
        return model.lm_head(hidden[wanted]).float(), batch.targets[wanted]


def ask(clip: EncodedClip, rng: random.Random, num_per_kind: int) -> list[Question]:
    questions = make_questions(clip.scene, rng, num_per_kind, time_margin_s=2 * clip.gap_s)
    return [q for q in questions if not clip.is_image or q.kind in _IMAGE_KINDS]


def ask_mix(clip: EncodedClip, rng: random.Random) -> list[Question]:
    """Questions for training: more of the kinds that are learned last."""
    asked = ask(clip, rng, max(_MIX.values()))
    return [q for kind, count in _MIX.items() for q in [q for q in asked if q.kind is kind][:count]]


def draw_batch(
    pool: dict[int, list[EncodedClip]], prompts: Prompts, rng: random.Random, budget: int, longest: int
) -> Batch:
    """Clips of one length (0: images), as many as the token budget holds; half of the time cut shorter."""
    lengths = [length for length in pool if length <= longest]
    length = rng.choices(lengths, weights=[1.0 + (length in (8, 16, 32)) for length in lengths])[0]
    kept = length if length < 4 or rng.random() < 0.5 else rng.randint(max(2, length // 4), length)
    size = max(1, budget // (kept * TOKENS + 280))
    clips: list[EncodedClip] = []
    while len(clips) < size:
        clip = rng.choice(pool[length])
        if kept < length:
            first = rng.randint(0, length - kept)
            cropped = crop(clip, first, first + kept)
            clips += [cropped] if cropped else []
        else:
            clips.append(clip)
    return make_batch(prompts, clips, [ask_mix(clip, rng) for clip in clips], rng)


def right_by_kind(batch: Batch, right: Tensor) -> Iterator[tuple[QuestionKind, bool]]:
    """Whether every token of each answer was right; `right` bool [T] as answer_logits orders them."""
    rows, columns = (batch.targets != _NO_TARGET).nonzero(as_tuple=True)
    segments = batch.segments[rows, columns]
    verdicts: dict[tuple[int, int], bool] = {}
    for row, segment, good in zip(rows.tolist(), segments.tolist(), right.tolist(), strict=True):
        verdicts[row, segment] = verdicts.get((row, segment), True) and good
    for (row, segment), good in verdicts.items():
        yield batch.questions[row][segment - 1].kind, good


@torch.inference_mode()
def validate(model: nn.Module, pool: EncodedPool, prompts: Prompts, budget: int) -> dict[str, float]:
    """Accuracy by length and by kind on clips never trained on."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    rng = random.Random(1)
    for length, clips in sorted(pool.validation.items()):
        size = max(1, budget // (length * TOKENS + 280))
        for first in range(0, min(len(clips), 48), size):
            part = clips[first : first + size]
            batch = make_batch(prompts, part, [ask(clip, rng, 1) for clip in part], rng)
            logits, targets = answer_logits(model, batch)
            for kind, good in right_by_kind(batch, logits.argmax(-1) == targets):
                for name in (f"{2 * length}f" if length else "image", str(kind), "all"):
                    right[name] += good
                    asked[name] += 1
    return {name: right[name] / asked[name] for name in asked}


def make_optimizers(model: Qwen2_5_VLForConditionalGeneration) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, biases and norms; rates of one scale."""
    language = model.model.language_model
    matrices = [parameter for parameter in language.layers.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in language.parameters() if parameter.ndim == 1]
    return [
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([language.embed_tokens.weight, *rest], weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def longest_pairs(share: float) -> int:
    """The longest video trained on, in frame pairs, when `share` of the training is over."""
    return next(longest for until, longest in _CURRICULUM if share < until)


def load_vision(model: Qwen2_5_VLForConditionalGeneration, path: Path) -> None:
    model.model.visual.load_state_dict(torch.load(path)["visual"])
    model.model.visual.requires_grad_(False)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    tokenizer = build_tokenizer()
    prompts = Prompts(tokenizer)
    model = Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))
    load_vision(model, options.vision)
    pool = EncodedPool(options.clips, model.model.visual, options.cache)
    pool.refresh()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = make_optimizers(model)
    start = 0
    if options.out.exists():
        saved = torch.load(options.out)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        start = saved["step"]
    began = time.monotonic()
    losses: list[float] = []
    for step in range(start, options.steps):
        batch = draw_batch(pool.training, prompts, rng, options.budget, longest_pairs(step / options.steps))
        logits, targets = answer_logits(model, batch)
        loss = functional.cross_entropy(logits, targets)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, options.steps, options.lr)
            optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            speed = (step + 1 - start) / (time.monotonic() - began)
            print(f"step {step + 1} loss {np.mean(losses[-50:]):.4f} {speed:.2f} steps/s", flush=True)
        if step % 250 == 249 or step == options.steps - 1:
            accuracy = validate(model, pool, prompts, options.budget)
            print(json.dumps({name: round(value, 3) for name, value in accuracy.items()}), flush=True)
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"model": model.state_dict(), "optimizers": states, "step": step + 1}
            temporary = options.out.with_suffix(".part")
            torch.save(state, temporary)
            temporary.rename(options.out)
            if options.checkpoint:
                save_checkpoint(model, options.checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--vision", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/encoded"), help="encoded clips are kept here"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="folder to write a loadable checkpoint to as it improves"
    )
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--budget", type=int, default=9000, help="tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options)


if __name__ == "__main__":
    main()
