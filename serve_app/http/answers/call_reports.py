"""Reports thoughts and calls of functions in the JSON of OpenAI and vLLM, whole and as pieces in a stream."""

from __future__ import annotations

import hashlib

from epd.serve_app.http.answers.answer_reader import AnswerReader, Piece
from epd.serve_app.http.answers.reasoning import Thought
from epd.serve_app.http.answers.tool_calls import CallPiece
from epd.serve_app.http.protocol import (
    CallDelta,
    CallReport,
    Delta,
    FunctionDelta,
    FunctionReport,
    ReplyMessage,
)

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
