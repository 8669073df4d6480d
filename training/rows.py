"""Lays out the rows of a batch, a video and its questions, and judges their answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from epd.shapes import Question, QuestionKind, Scene
from training.clip_questions import ask_which_clip

NO_TARGET = -100
VISUAL = -1  # stands for the id of a visual token
_NUM_CLIP_QUESTIONS = 8


class Row:
    """Is one sequence: ids, the question that each belongs to, from 1, targets, and their weights."""

    def __init__(self, ids: list[int]) -> None:
        """Begins with what all questions see. ids: of it, none of which is a target."""
        self.ids = ids
        self.segments = [0] * len(ids)
        self.targets = [NO_TARGET] * len(ids)
        self.weights = [0.0] * len(ids)

    def ask(self, number: int, read: list[int], answer: list[int]) -> None:
        """Adds a question and its answer; long answers do not drown short ones."""
        self.ids += read + answer
        self.segments += [number] * (len(read) + len(answer))
        self.targets += [NO_TARGET] * (len(read) - 1) + answer + [NO_TARGET]
        self.weights += [0.0] * (len(read) - 1) + [len(answer) ** -0.5] * len(answer) + [0.0]


def stacked(rows: Sequence[Row], padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ids, segments, targets and weights [B, S] of rows. padding: the segment of no token."""
    length = max(len(row.ids) for row in rows)

    def padded(values: list[Any], fill: float) -> Tensor:
        return torch.tensor(values + [fill] * (length - len(values)))

    return (
        torch.stack([padded(row.ids, 0) for row in rows]),
        torch.stack([padded(row.segments, padding) for row in rows]),
        torch.stack([padded(row.targets, NO_TARGET) for row in rows]),
        torch.stack([padded(row.weights, 0.0) for row in rows]),
    )


class AskedBatch(Protocol):
    """Has targets and segments, [B, S], and the questions of each row."""

    @property
    def targets(self) -> Tensor: ...

    @property
    def segments(self) -> Tensor: ...

    @property
    def questions(self) -> list[list[Question]]: ...


def right_by_kind(batch: AskedBatch, right: Tensor) -> Iterator[tuple[QuestionKind, bool]]:
    """Yields whether every token of each answer was right; `right` bool [T], of targets row by row."""
    rows, columns = (batch.targets != NO_TARGET).nonzero(as_tuple=True)
    segments = batch.segments[rows, columns]
    verdicts: dict[tuple[int, int], bool] = {}
    for row, segment, good in zip(rows.tolist(), segments.tolist(), right.tolist(), strict=True):
        verdicts[row, segment] = verdicts.get((row, segment), True) and good
    for (row, segment), good in verdicts.items():
        yield batch.questions[row][segment - 1].kind, good


class Tally:
    """Counts right answers by name: of a length, of a kind, of both, and of all."""

    def __init__(self) -> None:
        self._right: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    def add(self, batch: AskedBatch, right: Tensor, length: str) -> None:
        """right: bool [T], of targets row by row. length: what the batch's videos are called."""
        for kind, good in right_by_kind(batch, right):
            for name in (length, str(kind), f"{kind} {length}", "all"):
                self._right[name] += good
                self._asked[name] += 1

    def shares(self) -> dict[str, float]:
        return {name: self._right[name] / asked for name, asked in self._asked.items()}


def answers_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean of the cross entropy of targets [T] under logits [T, V]."""
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


class WithScene(Protocol):
    """Shows a scene."""

    @property
    def scene(self) -> Scene: ...


def ask_clips(clips: tuple[WithScene, WithScene], rng: random.Random) -> list[Question]:
    """Draws questions about two videos."""
    first, second = (clip.scene for clip in clips)
    return [ask_which_clip(first, second, rng) for _ in range(_NUM_CLIP_QUESTIONS)]
