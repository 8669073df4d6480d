"""Defines a question with a known answer: how it is put to a model, and how the answer is judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from epd.shapes import Scene

LETTERS = "ABCDEFGHIJ"
# Groups of durations that have names, the shortest first; others are seconds.
DURATION_NAMES = ("short", "medium", "long")
# "B", "(B)", "B." or "B) two", but not "A cat".
_LEADING_LETTER = re.compile(r"\(?([A-J])(?:[).:,]|\s*$)")
_NAMED_LETTER = re.compile(r"\b(?:answer|option|choice)\b(?:\s+is)?\s*:?\s*\(?([A-J])\b", re.IGNORECASE)
_LONE_LETTER = re.compile(r"(?<![\w'])([A-J])(?![\w'])")


@dataclass(frozen=True, slots=True)
class FactCounts:
    """Counts the facts of descriptions."""

    found: int = 0
    missed: int = 0
    invented: int = 0

    def __add__(self, other: FactCounts) -> FactCounts:
        return FactCounts(
            self.found + other.found, self.missed + other.missed, self.invented + other.invented
        )

    @property
    def is_all(self) -> bool:
        """Returns True if nothing was missed or invented."""
        return not self.missed and not self.invented

    @property
    def f1(self) -> float:
        """Returns the harmonic mean of the shares of claims that are true and of facts that are claimed."""
        return 2 * self.found / max(1, 2 * self.found + self.missed + self.invented)


@dataclass(frozen=True, slots=True)
class EvalItem:
    """Holds one question about one video.

    item_id: unique in its data set.
    kind: accuracy is also reported by it; empty if the data set has none.
    options: of a multiple-choice question, without their letters.
    answer: the right option's letter, or, without options, the right words.
    duration_group: how long the video is, roughly, in the data set's words; accuracy is reported by it too.
    earlier: questions and answers that go before it.
    judge: says whether an answer without options is right; by default, if its words are.
    count_facts: of an answer that is to be a description, which is right with all of them and no other.
    """

    item_id: str
    question: str
    answer: str
    options: tuple[str, ...] = ()
    kind: str = ""
    duration_group: str = ""
    earlier: tuple[tuple[str, str], ...] = ()
    judge: Callable[[str], bool] | None = field(default=None, compare=False)
    count_facts: Callable[[str], FactCounts] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.options and self.answer not in tuple(LETTERS[: len(self.options)]):
            raise ValueError(f"the answer must be a letter of {len(self.options)} options, got {self}")

    @property
    def prompt(self) -> str:
        """Returns the model's text: the question, or, with options, the prompt of Video-MME's protocol."""
        if not self.options:
            return self.question
        letters = LETTERS[: len(self.options)]
        allowed = f"{', '.join(letters[:-1])}, or {letters[-1]}" if len(letters) > 2 else " or ".join(letters)
        lines = [f"{letter}. {option}" for letter, option in zip(letters, self.options, strict=True)]
        return "\n".join(
            [
                "Select the best answer to the following multiple-choice question based on the video. "
                f"Respond with only the letter ({allowed}) of the correct option.",
                self.question,
                *lines,
                "The best answer is:",
            ]
        )

    def is_answered_by(self, text: str) -> bool:
        """Returns whether a model's answer is right; case, outer space and a final full stop do not count."""
        if self.options:
            return chosen_letter(text, self.options) == self.answer
        if self.count_facts is not None:
            return self.count_facts(text).is_all
        return _plain(text) == _plain(self.answer) if self.judge is None else self.judge(text)


def chosen_letter(text: str, options: tuple[str, ...]) -> str | None:
    """Returns the option that an answer means, None if that is unclear.

    A letter at the start counts first, then one that is called the answer, then the words of exactly one
    option, and last a lone capital letter.
    """
    letters = LETTERS[: len(options)]
    text = text.strip()
    for match in (_LEADING_LETTER.match(text), _NAMED_LETTER.search(text)):
        if match and match[1].upper() in letters:
            return match[1].upper()
    same = [letter for letter, option in zip(letters, options, strict=True) if _plain(option) == _plain(text)]
    if len(same) == 1:
        return same[0]
    alone = {letter for letter in _LONE_LETTER.findall(text) if letter in letters}
    return alone.pop() if len(alone) == 1 else None


def _plain(text: str) -> str:
    return text.strip().rstrip(".").strip().lower()


@dataclass(frozen=True, slots=True)
class EvalVideo:
    """Holds one video and all questions about it.

    source: a path or an address, or the scene to draw.
    name: unique in its data set.
    """

    name: str
    source: str | Scene
    items: tuple[EvalItem, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError(f"video {self.name!r} has no questions")


@dataclass(frozen=True, slots=True)
class EvalCase:
    """Pairs a video with the number of frames through which it is seen."""

    video: EvalVideo
    num_frames: int


@dataclass(frozen=True, slots=True, order=True)
class EvalSetting:
    """Sets how visual tokens are reduced: by a method, to a share of them. All tokens: FULL."""

    method: str
    retention: float


FULL = EvalSetting("full", 1.0)
