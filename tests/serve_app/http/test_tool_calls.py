"""Calls of functions are found in any cut of an answer's text, and what is no call stays content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.serve_app.http.answers.tool_calls import CallPiece, Piece, ToolCallReader


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call."""
    reader = ToolCallReader()
    found: list[Piece] = [piece for text in pieces for piece in reader.push(text)] + reader.finish()
    content, calls = "", []
    for piece in found:
        if isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return content, calls


def written(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


ODD = {"a": "}</tool_call>\\", "b": [{"c": '"{['}], "ü": None}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello", "hello", []),
        ("a < b <tool", "a < b <tool", []),
        ("  ", "  ", []),
        (written("f", {}), "", [("f", "{}")]),
        ("Let me look.\n" + written("f", ODD), "Let me look.\n", [("f", json.dumps(ODD))]),
        (
            written("f", {"x": 1}) + "\n" + written("g", {}) + "\n",
            "",
            [("f", '{"x": 1}'), ("g", "{}")],
        ),
        (written("f", {}) + " done", " done", [("f", "{}")]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "parameters": {"x": [1]}}</tool_call>', "", [("f", '{"x": [1]}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("<tool_call>no</tool_call>!", "<tool_call>no</tool_call>!", []),
        ("<tool_call>[" + "[" * 5000 + "</tool_call>", "<tool_call>[" + "[" * 5000 + "</tool_call>", []),
        ('<tool_call>\n{"name": "f', '<tool_call>\n{"name": "f', []),
        ('<tool_call>\n{"name": "f", "arguments": {"x', "", [("f", '{"x')]),
        (r'<tool_call>{"name": "\u0066", "arguments": {"x": 1}}</tool_call>', "", [("f", '{"x": 1}')]),
        *(
            (f"<tool_call>{body}</tool_call>", f"<tool_call>{body}</tool_call>", [])
            for body in (
                r'{"name": "f\q", "arguments": {}}',
                '{"name": "f\n", "arguments": {}}',
                r'{"name": "\ud800", "arguments": {}}',
                r'{"arguments": "\ud800", "name": "f"}',
            )
        ),
        *(
            (f'<tool_call>{{"name": "f", "arguments": {none}}}</tool_call>', "", [("f", "{}")])
            for none in ("null", '""')
        ),
    ],
    ids=range(21),
)
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_calls_and_content(text: str, content: str, calls: list[tuple[str, str]], size: int) -> None:
    assert read([text[i : i + size] for i in range(0, len(text), size)]) == (content, calls)


@given(st.lists(st.text(alphabet='<tol_ca>/{}"\\ \nname:,x[]0', max_size=30), max_size=8))
def test_how_a_text_is_cut_makes_no_difference(pieces: list[str]) -> None:
    pieces = ["<tool_call>", *pieces, '{"name": "f", "arguments": {', *pieces, "}}</tool_call>"]
    assert read(pieces) == read(["".join(pieces)]) == read(list("".join(pieces)))


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = ToolCallReader()
    assert reader.push('<tool_call>{"name": "f", "arguments": {"x') == [
        CallPiece(0, "f", ""),
        CallPiece(0, None, '{"x'),
    ]
    assert reader.push('": 1') == [CallPiece(0, None, '": 1')]
    assert reader.push("}}") == [CallPiece(0, None, "}")]
