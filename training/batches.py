"""Draws batches for the language model: one video and a dozen questions in one sequence, none seeing another.

    tokens     [system, vision start, visual tokens) [question 1 + answer) [question 2 + answer) ...
    segment                 0                                 1                     2
    position   0 ...                                 p ...                 p ...

A fifth of the sequences hold two videos, and questions about both.

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

from epd.shapes import SHAPES, Question, QuestionKind, make_questions
from epd.shapes.stories import make_stories
from training.checkpoint import SYSTEM_PROMPT
from training.encoded import EncodedClip, crop, retime
from training.rows import VISUAL, Row, ask_clips, stacked
from training.vision import COLUMNS, ROWS, TOKENS, reached

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
# Questions of each kind of more than one word, but one description and one in JSON.
_NUM_STORIES = 2
_TWO_CLIPS_SHARE = 0.2


class Prompts:
    """Token ids of the parts of a conversation."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.head = self.ids(
            f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        )
        self.between = self.ids("<|vision_end|><|vision_start|>")

    def ids(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]

    def question(self, question: Question) -> tuple[list[int], list[int]]:
        """Returns (what the model reads, what it must answer)."""
        earlier = "".join(
            f"{text}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\n"
            for text, answer in question.earlier
        )
        read = self.ids(f"<|vision_end|>{earlier}{question.text}<|im_end|>\n<|im_start|>assistant\n")
        return read, self.ids(f"{question.answer}<|im_end|>")


@dataclass(frozen=True, slots=True)
class Sightings:
    """States what B rows of V visual tokens show that one look cannot tell.

    appears: float32 [B, V, 6], 1 for a shape that this pair of frames is the first to show here.
    leaves: float32 [B, V / 15, 6], 1 for a shape that the pair of frames is the first not to show any more.
        The last token of a pair is to know it: a token sees those before it alone, and hardly its place.
    is_one: bool [B, V], True where a token shows one object.
    fallen: float32 [B, V], how much lower that object is than it was first, in shares of the frame's height.
    """

    appears: Tensor
    leaves: Tensor
    is_one: Tensor
    fallen: Tensor

    @classmethod
    def of(cls, clips: Sequence[EncodedClip]) -> Sightings:
        """Returns those of one row, B = 1, which shows these clips."""
        parts = [_sightings(clip) for clip in clips]
        return cls(*(torch.cat(columns)[None] for columns in zip(*parts, strict=True)))

    @classmethod
    def stacked(cls, rows: Sequence[Sightings]) -> Sightings:
        fields = [(row.appears, row.leaves, row.is_one, row.fallen) for row in rows]
        return cls(*(torch.cat(columns) for columns in zip(*fields, strict=True)))


def _sightings(clip: EncodedClip) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns appears, leaves, is_one and fallen of one clip: [P * 15, ...] each, leaves [P, 6]."""
    appears, leaves = torch.zeros(len(clip), TOKENS, len(SHAPES)), torch.zeros(len(clip), len(SHAPES))
    num_shown = torch.zeros(len(clip), TOKENS, dtype=torch.int64)
    fallen = torch.zeros(len(clip), TOKENS)
    times_s = [n * clip.gap_s for n in range(2 * len(clip))]
    for item in clip.scene.objects:
        seen = [n for n, time_s in enumerate(times_s) if item.start_s <= time_s < item.end_s]
        for pair in sorted({n // 2 for n in seen}):
            last = max(n for n in seen if n // 2 == pair)
            covered = reached(item, times_s[last])
            num_shown[pair, covered] += 1
            fallen[pair, covered] = item.position(times_s[last])[1] - item.position(times_s[seen[0]])[1]
            if pair == seen[0] // 2:
                appears[pair, covered, SHAPES.index(item.shape)] = 1
            if pair == seen[-1] // 2 < len(clip) - 1:
                leaves[pair + 1, SHAPES.index(item.shape)] = 1
    return appears.flatten(0, 1), leaves, (num_shown == 1).flatten(), fallen.flatten()


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of one video or two with their questions, S positions; visual tokens stand at the same ones.

    ids: int64 [B, S].
    embeddings: bfloat16 [B, V, hidden].
    instants: int64 [B, V], the second of its video that each visual token begins to show.
    sightings: what the visual tokens show that one look cannot tell.
    visual: int64 [V], the positions of visual tokens.
    positions: int64 [3, B, S].
    mask: bool [B, 1, S, S], True: may attend.
    targets: int64 [B, S], -100 where nothing is learned.
    weights: float32 [B, S], of each target: long answers do not drown short ones.
    """

    ids: Tensor
    embeddings: Tensor
    instants: Tensor
    sightings: Sightings
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
    prompts: Prompts, clips: Sequence[EncodedClip], questions: list[Question], after_last_instant: bool
) -> tuple[Row, Tensor]:
    """Returns one sequence and its positions [3, S]."""
    ids, last = list(prompts.head), len(prompts.head) - 1
    positions = [torch.arange(len(ids)).expand(3, -1)]
    largest = last
    for number, clip in enumerate(clips):
        if number:
            ids += prompts.between
            positions.append((torch.arange(len(prompts.between)) + last + 1).expand(3, -1))
            last += len(prompts.between)
        seen = visual_positions(clip, last + 1)
        ids += [VISUAL] * (len(clip) * TOKENS)
        positions.append(seen)
        largest = max(largest, int(seen.max()))
        last = int(seen.max()) if after_last_instant else last + max(ROWS, COLUMNS)
    row = Row(ids)
    for number, question in enumerate(questions, 1):
        read, answer = prompts.question(question)
        row.ask(number, read, answer)
        asked = torch.arange(len(read)) + last + 1
        answered = torch.arange(len(answer)) + max(largest, int(asked[-1])) + 1
        positions.append(torch.cat([asked, answered]).expand(3, -1))
    return row, torch.cat(positions, dim=1)


def make_batch(
    prompts: Prompts,
    clips: Sequence[tuple[EncodedClip, ...]],
    questions: list[list[Question]],
    rng: random.Random,
    after_last_instant_share: float = _AFTER_LAST_INSTANT_SHARE,
) -> Batch:
    """Lays out rows whose first clips are equally long, and whose second ones are."""
    rows = [
        lay_out(prompts, shown, asked, after_last_instant=rng.random() < after_last_instant_share)
        for shown, asked in zip(clips, questions, strict=True)
    ]
    ids, segments, targets, weights = stacked([row for row, _ in rows], -1)
    length = ids.shape[1]
    positions = torch.stack([functional.pad(each, (0, length - each.shape[1])) for _, each in rows], dim=1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    visual = (ids[0] == VISUAL).nonzero().flatten()
    embeddings = torch.stack(
        [torch.cat([clip.embeddings.flatten(0, 1) for clip in shown]) for shown in clips]
    )
    instants = torch.stack([torch.cat([_instants(clip) for clip in shown]) for shown in clips])
    return Batch(
        ids=ids.clamp(min=0),
        embeddings=embeddings,
        instants=instants,
        sightings=Sightings.stacked([Sightings.of(shown) for shown in clips]),
        visual=visual,
        positions=positions,
        mask=(causal & same)[:, None],
        targets=targets,
        weights=weights,
        questions=questions,
        segments=segments,
    )


def _instants(clip: EncodedClip) -> Tensor:
    return (torch.arange(len(clip)) * 2 * clip.gap_s).long().repeat_interleave(TOKENS)


def ask(clip: EncodedClip, rng: random.Random, num_per_kind: int) -> list[Question]:
    questions = make_questions(clip.scene, rng, num_per_kind, time_margin_s=2 * clip.gap_s)
    return [q for q in questions if not clip.is_image or q.kind in _IMAGE_KINDS]


def ask_all(clip: EncodedClip, rng: random.Random) -> list[Question]:
    """Draws a question of every kind about one clip."""
    return ask(clip, rng, 1) + make_stories(clip.scene, rng, clip.gap_s, is_image=clip.is_image)


def ask_mix(clip: EncodedClip, rng: random.Random) -> list[Question]:
    """Draws questions for training, more of the kinds that are learned last."""
    asked = ask(clip, rng, max(_MIX.values()))
    short = [q for kind, count in _MIX.items() for q in [q for q in asked if q.kind is kind][:count]]
    return short + make_stories(clip.scene, rng, clip.gap_s, _NUM_STORIES, is_image=clip.is_image)


def draw_batch(
    pool: dict[int, list[EncodedClip]], prompts: Prompts, rng: random.Random, budget: int, longest: int
) -> Batch:
    """Draws clips of one length (0: images), as many as the token budget holds; half are cut shorter."""
    lengths = [length for length in pool if length <= longest]
    length = rng.choices(lengths, weights=[1.0 + (length in (8, 16, 32)) for length in lengths])[0]
    first = _ClipDraw(pool[length], length, rng)
    if length and rng.random() < _TWO_CLIPS_SHARE:
        other = rng.choice([one for one in lengths if 0 < one <= 32])
        second = _ClipDraw(pool[other], other, rng)
        size = max(1, budget // ((first.num_pairs + second.num_pairs) * TOKENS + 150))
        pairs = [(first.draw(), second.draw()) for _ in range(size)]
        return make_batch(prompts, pairs, [ask_clips(pair, rng) for pair in pairs], rng)
    clips = [first.draw() for _ in range(max(1, budget // (first.num_pairs * TOKENS + 800)))]
    return make_batch(prompts, [(clip,) for clip in clips], [ask_mix(clip, rng) for clip in clips], rng)


class _ClipDraw:
    """Draws clips of one length in frame pairs, of which half of the draws are cut shorter, all alike."""

    def __init__(self, clips: list[EncodedClip], length: int, rng: random.Random) -> None:
        self._clips, self._length, self._rng = clips, length, rng
        is_whole = length < 4 or rng.random() < 0.5
        self.num_pairs = length if is_whole else rng.randint(max(2, length // 4), length)

    def draw(self) -> EncodedClip:
        while True:
            first = self._rng.randint(0, self._length - self.num_pairs)
            clip = vary(self._rng.choice(self._clips), first, first + self.num_pairs, self._rng)
            if clip:
                return clip


def vary(clip: EncodedClip, first: int, stop: int, rng: random.Random) -> EncodedClip | None:
    """Returns part of a clip as a video, often at the usual pace; None where it would show nothing."""
    if clip.is_image:
        return clip
    cropped = crop(clip, first, stop)
    return retime(cropped, USUAL_GAP_S) if cropped and rng.random() < _USUAL_GAP_SHARE else cropped
