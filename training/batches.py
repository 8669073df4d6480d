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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Tokenizer

from epd.shapes import Question, QuestionKind, make_questions
from training.checkpoint import SYSTEM_PROMPT
from training.encoded import EncodedClip, crop, retime
from training.rows import VISUAL, Row, stacked
from training.vision import COLUMNS, ROWS, TOKENS

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
    QuestionKind.TIME: 5,
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
    """B rows of a video and its questions, S positions; visual tokens stand at the same ones.

    ids: int64 [B, S].
    embeddings: bfloat16 [B, V, hidden].
    visual: int64 [V], the positions of visual tokens.
    positions: int64 [3, B, S].
    mask: bool [B, 1, S, S], True: may attend.
    targets: int64 [B, S], -100 where nothing is learned.
    weights: float32 [B, S], of each target.
    """

    ids: Tensor
    embeddings: Tensor
    visual: Tensor
    positions: Tensor
    mask: Tensor
    targets: Tensor
    weights: Tensor
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
) -> tuple[Row, Tensor]:
    """Returns one sequence and its positions [3, S]."""
    start = len(prompts.head)
    seen = visual_positions(clip, start)
    largest = int(seen.max())
    following = largest + 1 if after_last_instant else start + max(ROWS, COLUMNS)
    row = Row([*prompts.head, *[VISUAL] * (len(clip) * TOKENS)])
    positions = [torch.arange(start).expand(3, -1), seen]
    for number, question in enumerate(questions, 1):
        read, answer = prompts.question(question)
        row.ask(number, read, answer)
        asked = torch.arange(len(read)) + following
        answered = torch.arange(len(answer)) + max(largest, int(asked[-1])) + 1
        positions.append(torch.cat([asked, answered]).expand(3, -1))
    return row, torch.cat(positions, dim=1)


def make_batch(
    prompts: Prompts,
    clips: Sequence[EncodedClip],
    questions: list[list[Question]],
    rng: random.Random,
    after_last_instant_share: float = _AFTER_LAST_INSTANT_SHARE,
) -> Batch:
    """Lays out clips that are equally long."""
    rows = [
        lay_out(prompts, clip, asked, after_last_instant=rng.random() < after_last_instant_share)
        for clip, asked in zip(clips, questions, strict=True)
    ]
    ids, segments, targets, weights = stacked([row for row, _ in rows], -1)
    length = ids.shape[1]
    positions = torch.stack([functional.pad(each, (0, length - each.shape[1])) for _, each in rows], dim=1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    return Batch(
        ids=ids.clamp(min=0),
        embeddings=torch.stack([clip.embeddings.flatten(0, 1) for clip in clips]),
        visual=(ids[0] == VISUAL).nonzero().flatten(),
        positions=positions,
        mask=(causal & same)[:, None],
        targets=targets,
        weights=weights,
        questions=questions,
        segments=segments,
    )


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
    num_pairs = length if length < 4 or rng.random() < 0.5 else rng.randint(max(2, length // 4), length)
    size = max(1, budget // (num_pairs * TOKENS + 280))
    clips: list[EncodedClip] = []
    while len(clips) < size:
        first = rng.randint(0, length - num_pairs)
        clip = vary(rng.choice(pool[length]), first, first + num_pairs, rng)
        clips += [clip] if clip else []
    return make_batch(prompts, clips, [ask_mix(clip, rng) for clip in clips], rng)


def vary(clip: EncodedClip, first: int, stop: int, rng: random.Random) -> EncodedClip | None:
    """Returns part of a clip as a video, often at the usual pace; None where it would show nothing."""
    if clip.is_image:
        return clip
    cropped = crop(clip, first, stop)
    return retime(cropped, USUAL_GAP_S) if cropped and rng.random() < _USUAL_GAP_SHARE else cropped
