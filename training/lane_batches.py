"""Lays out batches for a model that reads timestamps: a video and its questions, none seeing another.

tokens     [system <0.5 seconds> visual tokens <2.5 seconds> ...) [question 1 + answer) [question 2 ...
segment                             0                                      1                  2
position   as many as tokens: the three lanes of two frames lie side by side
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from epd.reduction import plan_windows
from epd.shapes import Question
from training.checkpoint import SYSTEM_PROMPT
from training.lane_decoder import PADDING
from training.lane_mentions import Mentions, mentions_of
from training.lane_scenes import Events, Shown, draw_shown, questions_about
from training.lanes import SCALE, TOKENS
from training.rows import VISUAL, Row, ask_clips, stacked
from training.stories import timestamps_s

_TWO_CLIPS_SHARE = 0.15
# How often videos are so many frame pairs long, against each other.
_LENGTHS = {2: 1, 4: 3, 8: 3, 12: 1, 16: 3, 24: 3, 32: 3, 64: 3, 128: 6, 256: 6}
_END = "<|im_end|>\n<|im_start|>"
# Shares of its tokens that a thinned video keeps: at least one of every two frames.
_THINNED_SHARES = (1 / TOKENS, 0.5, 2 / TOKENS)

Embed = Callable[[Shown], Tensor]
Keep = Callable[[Tensor], Tensor]  # embeddings [P, 3, C] -> which of them the model is to see, bool [P, 3]


class Prompts:
    """Token ids of the parts of a conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self.head = self.ids(f"<|im_start|>system\n{SYSTEM_PROMPT}{_END}user\n")
        self.begin, self.end = self.ids("<|vision_start|>"), self.ids("<|vision_end|>")

    def ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self.tokenizer(text)["input_ids"]
        return self._known[text]

    def media(self, shown: Shown) -> list[int]:
        """Returns what stands for a video or an image, VISUAL for each visual token."""
        pair = [*self.begin, *[VISUAL] * TOKENS, *self.end]
        if shown.is_image:
            return pair
        stamps = timestamps_s(shown.times_s)
        pairs = [token for stamp in stamps for token in [*self.ids(f"<{stamp:.1f} seconds>"), *pair]]
        return [*self.begin, *pairs, *self.end]

    def question(self, question: Question) -> tuple[list[int], list[int]]:
        """Returns (what the model reads, what it must answer)."""
        read = [
            token
            for text, answer in question.earlier
            for part in (text, f"{_END}assistant\n", answer, f"{_END}user\n")
            for token in self.ids(part)
        ]
        read += [*self.ids(question.text), *self.ids(f"{_END}assistant\n")]
        return read, self.tokenizer(f"{question.answer}<|im_end|>")["input_ids"]


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of a video or two with their questions, S positions.

    ids: int64 [B, S]; visual: bool [B, S], the V visual tokens; embeddings: float32 [V, C], row by row.
    positions: int64 [3, B, S].
    targets: int64 [B, S], NO_TARGET where nothing is learned; weights: float32 [B, S], of each.
    segments: int64 [B, S], the question that a token belongs to, from 1; PADDING: no token.
    events: what the visual tokens show that one look cannot tell.
    mentions: what is true of the shapes that questions and answers name, at their names.
    subjects: the same where answers go on about a shape.
    """

    ids: Tensor
    visual: Tensor
    embeddings: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    segments: Tensor
    events: Events
    mentions: Mentions
    subjects: Mentions
    questions: list[list[Question]]

    def to(self, device: torch.device) -> Batch:
        records = {"events": self.events, "mentions": self.mentions, "subjects": self.subjects}
        moved = {name: replace(each, **_tensors(each, device)) for name, each in records.items()}
        return replace(self, **moved, **_tensors(self, device))

    @property
    def is_token(self) -> Tensor:
        return self.segments != PADDING


def _tensors(record: Batch | Events | Mentions, device: torch.device) -> dict[str, Any]:
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}


def lay_out(prompts: Prompts, shown: Sequence[Shown], questions: list[Question]) -> Row:
    """Returns one sequence."""
    row = Row([*prompts.head, *(token for each in shown for token in prompts.media(each))])
    for number, question in enumerate(questions, 1):
        row.ask(number, *prompts.question(question))
    return row


def positions_of(ids: Tensor, segments: Tensor) -> Tensor:
    """Returns M-RoPE rows of ids [B, S], in which VISUAL is a lane of two frames: int64 [3, B, S].

    All questions begin where the video ends. Time and height of a lane are those of the first lane.
    """
    count = torch.arange(ids.shape[1]).expand_as(ids)
    prefix = (segments == 0).sum(1, keepdim=True)
    begins = torch.zeros_like(count)
    changed = torch.cat(
        [torch.zeros_like(segments[:, :1]), segments[:, 1:] != segments[:, :-1]], dim=1
    ).bool()
    begins = torch.where(changed, count, begins).cummax(1).values
    text = torch.where(segments == 0, count, count - begins + prefix)
    is_visual = ids == VISUAL
    lane = torch.where(is_visual, (is_visual.cumsum(1) - 1) % TOKENS, 0)
    return torch.stack([text - lane, text - lane, text])


def keep_all(embeddings: Tensor) -> Tensor:
    return torch.ones(embeddings.shape[:2], dtype=torch.bool)


class Thinned:
    """Keeps as many tokens of every two frames as reduction does: the changed, the unlike others, or any."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, embeddings: Tensor) -> Tensor:
        num_pairs = len(embeddings)
        units = [(pair, pair + 1) for pair in range(num_pairs)]
        windows = plan_windows(units, TOKENS, self._rng.choice(_THINNED_SHARES))
        counts = torch.tensor([window.num_kept for window in windows])
        changed = functional.pad((embeddings[1:] - embeddings[:-1]).norm(dim=-1), (0, 0, 1, 0))
        unlike = (embeddings - embeddings.flatten(0, 1).median(0).values).norm(dim=-1)
        score = self._rng.choice((changed, unlike, torch.zeros(num_pairs, TOKENS)))
        score = score + SCALE * torch.rand(num_pairs, TOKENS) / 2
        return score.argsort(-1, descending=True).argsort(-1) < counts[:, None]


def make_batch(
    prompts: Prompts,
    shown: Sequence[tuple[Shown, ...]],
    questions: list[list[Question]],
    embed: Embed,
    keep: Keep = keep_all,
) -> Batch:
    """Lays out rows of a video or two. A token that is not kept takes its place, and the model sees none."""
    rows = [lay_out(prompts, clips, asked) for clips, asked in zip(shown, questions, strict=True)]
    ids, segments, targets, weights = stacked(rows, PADDING)
    positions = positions_of(ids, segments)
    clips = [each for row in shown for each in row]
    embeddings = [embed(each) for each in clips]
    kept = torch.cat([keep(each).flatten() for each in embeddings])
    is_visual = ids == VISUAL
    visual = is_visual.masked_scatter(is_visual, kept)
    segments = segments.masked_fill(is_visual & ~visual, PADDING)
    mentions, subjects = mentions_of(prompts.tokenizer, ids, segments, targets, PADDING, shown)
    return Batch(
        ids=ids.clamp(min=0),
        visual=visual,
        embeddings=torch.cat(embeddings).flatten(0, 1)[kept],
        positions=positions,
        targets=targets,
        weights=weights,
        segments=segments,
        events=Events.of(clips).kept(kept),
        mentions=mentions,
        subjects=subjects,
        questions=questions,
    )


def draw_batch(
    prompts: Prompts, rng: random.Random, budget: int, longest: int, embed: Embed, thinned: float = 0.0
) -> Batch:
    """Draws videos of about one length, or images, as many as the token budget holds.

    thinned: the share of batches whose videos keep only some of their tokens
    """
    lengths = [length for length in _LENGTHS if length <= longest]
    length = rng.choices(lengths, weights=[_LENGTHS[each] for each in lengths])[0]
    kind = rng.random()
    if kind < 0.04:
        images = [draw_shown(rng, 0) for _ in range(budget // 100)]
        return make_batch(
            prompts,
            [(each,) for each in images],
            [questions_about(each, rng, 1, 1) for each in images],
            embed,
        )
    keep = Thinned(rng) if rng.random() < thinned else keep_all
    if kind < 0.04 + _TWO_CLIPS_SHARE:
        other = rng.choice([one for one in lengths if one <= 16])
        size = max(1, budget // ((min(length, 64) + other) * 8 + 250))
        pairs = [(draw_shown(rng, min(length, 64)), draw_shown(rng, other)) for _ in range(size)]
        return make_batch(prompts, pairs, [ask_clips(pair, rng) for pair in pairs], embed, keep)
    clips = [draw_shown(rng, length) for _ in range(max(1, budget // (length * 8 + 800)))]
    questions = [questions_about(clip, rng, 3, 2) for clip in clips]
    return make_batch(prompts, [(clip,) for clip in clips], questions, embed, keep)
