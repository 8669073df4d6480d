"""Draws batches for the language model: one video and a dozen questions in one sequence, none seeing another.

    tokens     [system, vision start, visual tokens) [question 1 + answer) [question 2 + answer) ...
    segment                 0                                 1                     2
    position   0 ...                                 p ...                 p ...

Engines disagree on the position of the text after a video (docs/decisions/0009): transformers from 5.3
continues after its height or width (and, once the answer begins, after the largest position so far),
Qwen2.5-VL's authors and vLLM after its last instant. Both occur here, the first more often: config.json names
it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Tokenizer

from epd.shapes import Question, QuestionKind, make_questions
from training.checkpoint import SYSTEM_PROMPT
from training.encoded import EncodedClip, crop, retime
from training.vision import COLUMNS, ROWS, TOKENS

NO_TARGET = -100
# How far apart frames lie unless a user says otherwise, and the share of clips that are shown so.
USUAL_GAP_S = 1.0
_USUAL_GAP_SHARE = 0.6
# Share of videos whose text continues after the last instant.
_AFTER_LAST_INSTANT_SHARE = 0.15
_IMAGE_KINDS = (QuestionKind.COLOUR, QuestionKind.PRESENCE, QuestionKind.COUNT)
# Questions of each kind put to a clip in training.
_MIX = {
    QuestionKind.COLOUR: 1,
    QuestionKind.ORDER: 1,
    QuestionKind.COUNT: 1,
    QuestionKind.PRESENCE: 2,
    QuestionKind.AFTER: 2,
    QuestionKind.TIME: 6,
}


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
        """Returns (what the model reads, what it must answer)."""
        read = self.ids(f"<|vision_end|>{question.text}<|im_end|>\n<|im_start|>assistant\n")
        return read, self.ids(f"{question.answer}<|im_end|>")


@dataclass(frozen=True, slots=True)
class Batch:
    """B videos of equal length with their questions, S positions.

    ids: int64 [B, S].
    visual: bool [S].
    positions: int64 [3, B, S].
    mask: bool [B, 1, S, S], True: may attend.
    targets: int64 [B, S], -100 where nothing is learned.
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
    """Returns M-RoPE rows (time, height, width) of the visual tokens: int64 [3, P * 15]."""
    step = 1.0 if clip.is_image else 2 * clip.gap_s * 2
    instants = (torch.arange(len(clip)) * step).long()
    grid = torch.meshgrid(instants, torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    return torch.stack(grid).reshape(3, -1) + start


def lay_out(
    prompts: Prompts, clip: EncodedClip, questions: list[Question], after_last_instant: bool
) -> tuple[list[int], Tensor, list[int], list[int]]:
    """Returns one sequence: ids, positions [3, S], segments and targets."""
    start = len(prompts.head)
    seen = visual_positions(clip, start)
    following = int(seen.max()) + 1 if after_last_instant else start + max(ROWS, COLUMNS)
    ids = prompts.head + [0] * (len(clip) * TOKENS)
    segments, targets = [0] * len(ids), [NO_TARGET] * len(ids)
    positions = [torch.arange(start).expand(3, -1), seen]
    for number, question in enumerate(questions, 1):
        read, answer = prompts.question(question)
        ids += read + answer
        segments += [number] * (len(read) + len(answer))
        targets += [NO_TARGET] * (len(read) - 1) + answer + [NO_TARGET]
        asked = torch.arange(len(read)) + following
        answered = torch.arange(len(answer)) + max(int(seen.max()), int(asked[-1])) + 1
        positions.append(torch.cat([asked, answered]).expand(3, -1))
    return ids, torch.cat(positions, dim=1), segments, targets


def make_batch(
    prompts: Prompts,
    clips: list[EncodedClip],
    questions: list[list[Question]],
    rng: random.Random,
    after_last_instant_share: float = _AFTER_LAST_INSTANT_SHARE,
) -> Batch:
    rows = [
        lay_out(prompts, clip, asked, after_last_instant=rng.random() < after_last_instant_share)
        for clip, asked in zip(clips, questions, strict=True)
    ]
    length = max(len(row[0]) for row in rows)

    def padded(values: list[int], fill: int) -> Tensor:
        return torch.tensor(values + [fill] * (length - len(values)))

    ids = torch.stack([padded(row[0], 0) for row in rows])
    positions = torch.stack([functional.pad(row[1], (0, length - row[1].shape[1])) for row in rows], dim=1)
    segments = torch.stack([padded(row[2], -1) for row in rows])
    targets = torch.stack([padded(row[3], NO_TARGET) for row in rows])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    start = len(prompts.head)
    visual = slice(start, start + len(clips[0]) * TOKENS)
    embeddings = torch.stack([clip.embeddings.reshape(-1, clip.embeddings.shape[-1]) for clip in clips])
    return Batch(ids, embeddings, visual, positions, (causal & same)[:, None], targets, questions, segments)


def ask(clip: EncodedClip, rng: random.Random, num_per_kind: int) -> list[Question]:
    questions = make_questions(clip.scene, rng, num_per_kind, time_margin_s=2 * clip.gap_s)
    return [q for q in questions if not clip.is_image or q.kind in _IMAGE_KINDS]


def ask_mix(clip: EncodedClip, rng: random.Random) -> list[Question]:
    """Draws questions for training, more of the kinds that are learned last."""
    asked = ask(clip, rng, max(_MIX.values()))
    return [q for kind, count in _MIX.items() for q in [q for q in asked if q.kind is kind][:count]]


def draw_batch(
    pool: dict[int, list[EncodedClip]], prompts: Prompts, rng: random.Random, budget: int, longest: int
) -> Batch:
    """Draws clips of one length (0: images), as many as the token budget holds; half are cut shorter."""
    lengths = [length for length in pool if length <= longest]
    length = rng.choices(lengths, weights=[1.0 + (length in (8, 16, 32)) for length in lengths])[0]
    kept = length if length < 4 or rng.random() < 0.5 else rng.randint(max(2, length // 4), length)
    size = max(1, budget // (kept * TOKENS + 280))
    clips: list[EncodedClip] = []
    while len(clips) < size:
        first = rng.randint(0, length - kept)
        clip = vary(rng.choice(pool[length]), first, first + kept, rng)
        clips += [clip] if clip else []
    return make_batch(prompts, clips, [ask_mix(clip, rng) for clip in clips], rng)


def vary(clip: EncodedClip, first: int, stop: int, rng: random.Random) -> EncodedClip | None:
    """Returns part of a clip as a video, often at the usual pace; None where it would show nothing."""
    if clip.is_image:
        return clip
    cropped = crop(clip, first, stop)
    return retime(cropped, USUAL_GAP_S) if cropped and rng.random() < _USUAL_GAP_SHARE else cropped
