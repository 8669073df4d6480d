"""Reads the text of one answer: what the model thinks, its content, and its calls of functions."""

from __future__ import annotations

from collections.abc import Iterable

from epd.answer_parsers import ALWAYS_THINKING, REASONING_PARSERS, AnswerParsing
from epd.serve_app.http.answers.reasoning import ReasoningReader, Thought
from epd.serve_app.http.answers.tool_calls import CallPiece, ToolCallReader
from epd.serve_app.http.answers.written_calls import call_reader

Piece = str | CallPiece | Thought


class AnswerReader:
    """Reads one answer, piece by piece."""

    def __init__(self, reasoning: ReasoningReader | None, calls: ToolCallReader | None) -> None:
        """Takes reasoning, calls: what finds these; None to find none."""
        self._reasoning, self._calls = reasoning, calls

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls if self._calls else 0

    def push(self, text: str) -> list[Piece]:
        """Takes the next text; returns what is certain by now."""
        return self._read([text] if self._reasoning is None else self._reasoning.push(text))

    def finish(self) -> list[Piece]:
        """Returns the rest of an answer that has ended."""
        pieces = self._read(self._reasoning.finish() if self._reasoning else [])
        return pieces + (self._calls.finish() if self._calls else [])

    def _read(self, parts: Iterable[str | Thought]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, Thought) or self._calls is None:
                pieces += [part] if part else []
            else:
                pieces += self._calls.push(part)
        return pieces


def reader_of(parsing: AnswerParsing, *, thinks: bool) -> AnswerReader:
    """Returns a reader of one answer. thinks: whether its prompt ends within a thought."""
    reasoning = calls = None
    if parsing.reasoning is not None:
        has_begun = thinks or parsing.reasoning in ALWAYS_THINKING
        reasoning = ReasoningReader(REASONING_PARSERS[parsing.reasoning], has_begun=has_begun)
    if parsing.calls is not None:
        calls = ToolCallReader(call_reader(parsing.calls, parsing.schemas))
    return AnswerReader(reasoning, calls)
