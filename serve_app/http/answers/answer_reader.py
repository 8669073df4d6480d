"""Reads the text of one answer: what the model thinks, its content, and its calls of functions.

Reports them in the JSON of OpenAI and vLLM, whole and as pieces in a stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from epd.answer_parsers import ALWAYS_THINKING, REASONING_PARSERS, AnswerParsing
from epd.serve_app.http.answers.reasoning import ReasoningReader, Thought
from epd.serve_app.http.answers.tool_calls import CallPiece, ToolCallReader, call_reader
from epd.serve_app.http.protocol import (
    CallDelta,
    CallReport,
    Delta,
    FunctionDelta,
    FunctionReport,
    ReplyMessage,
)

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


_ID_BYTES = 12


def call_id(request_id: str, choice: int, index: int) -> str:
    """Returns the id of a call: the same whenever the request is answered again."""
    name = f"{request_id}/{choice}/{index}"
    return f"call_{hashlib.blake2b(name.encode(), digest_size=_ID_BYTES).hexdigest()}"


def reply_of(reader: AnswerReader, text: str, request_id: str, choice: int) -> ReplyMessage:
    """Returns the message of a whole answer. reader: a new one."""
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[CallReport] = []
    for piece in (*reader.push(text), *reader.finish()):
        if isinstance(piece, str):
            content.append(piece)
        elif isinstance(piece, Thought):
            thoughts.append(piece.text)
        elif piece.name is not None:
            function = FunctionReport(name=piece.name, arguments=piece.arguments)
            calls.append(CallReport(id=call_id(request_id, choice, piece.index), function=function))
        else:
            calls[piece.index].function.arguments += piece.arguments
    said = "".join(content) or (None if calls else "")
    thought = "".join(thoughts) or None
    return ReplyMessage(content=said, tool_calls=calls or None, reasoning=thought, reasoning_content=thought)


def delta_of(piece: Piece, request_id: str, choice: int) -> Delta:
    """Returns the delta of a piece of an answer."""
    if isinstance(piece, str):
        return Delta(content=piece)
    if isinstance(piece, Thought):
        return Delta(reasoning=piece.text, reasoning_content=piece.text)
    return Delta(tool_calls=[_call_delta(piece, request_id, choice)])


def _call_delta(piece: CallPiece, request_id: str, choice: int) -> CallDelta:
    if piece.name is None:
        return CallDelta(index=piece.index, function=FunctionDelta(arguments=piece.arguments))
    function = FunctionDelta(name=piece.name, arguments=piece.arguments)
    number = call_id(request_id, choice, piece.index)
    return CallDelta(index=piece.index, id=number, type="function", function=function)
