"""Parts what a model thinks from its answer while both grow.

    <think> There are two. </think> It is the left one.
           [ thought       )        [ answer           )

A thought has begun where the prompt ends with its first mark, or the answer begins with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Thought:
    """The next piece of what a model thinks."""

    text: str


class ReasoningReader:
    """Reads one answer, piece by piece."""

    def __init__(self, marks: tuple[str, str], *, has_begun: bool) -> None:
        """Takes marks: before and after a thought; has_begun: whether the first one is in the prompt."""
        self._begin, self._end = marks
        self._held = ""
        self._state: Literal["start", "thought", "answer"] = "start"
        self._has_begun = has_begun

    def push(self, text: str) -> list[str | Thought]:
        """Takes the next text; returns what is certain by now."""
        self._held += text
        self._start()
        return [*self._thought(), *self._answer()]

    def finish(self) -> list[str | Thought]:
        """Returns the rest of an answer that has ended."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Thought(held) if self._state == "thought" or self._has_begun else held]

    def _start(self) -> None:
        """Leaves the start once it is certain whether the answer begins with a mark."""
        if self._state != "start":
            return
        said = self._held.lstrip()
        if said.startswith(self._begin):
            self._held, self._state = said.removeprefix(self._begin), "thought"
        elif not self._begin.startswith(said):
            self._state = "thought" if self._has_begun else "answer"

    def _answer(self) -> Iterator[str]:
        if self._state == "answer" and self._held:
            held, self._held = self._held, ""
            yield held

    def _thought(self) -> Iterator[Thought]:
        if self._state != "thought":
            return
        before, mark, rest = self._held.partition(self._end)
        if mark:
            self._held, self._state = rest, "answer"
        else:
            num_certain = len(before) - overlap(before, self._end)
            before, self._held = before[:num_certain], before[num_certain:]
        if before:
            yield Thought(before)


def overlap(text: str, mark: str) -> int:
    """Returns how many characters at the end of a text may begin a mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
