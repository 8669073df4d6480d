"""What a model thinks and calls is found in any cut of its answer, as parsers of vLLM's names find it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.answer_parsers import REASONING_PARSERS, AnswerParsing, check_parser, tool_call_parser_of
from epd.errors import RequestError
from epd.serve_app.http.answers.answer_reader import AnswerReader, Piece, delta_of, reader_of, reply_of
from epd.serve_app.http.answers.reasoning import Thought
from epd.serve_app.http.answers.tool_calls import CallPiece

Found = tuple[str, str, list[tuple[str, Any]]]
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "at": {"type": "array", "items": {"type": "number"}},
            "exact": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "any": {"type": ["string", "number"]},
            "place": {"$ref": "#/$defs/Place"},
            "places": {"allOf": [{"$ref": "#/$defs/Places"}], "description": "Some."},
            "level": {"enum": [1, 2]},
            "mode": {"enum": ["a", 2]},
            "one": {"const": 1},
            "lost": {"$ref": "#/$defs/Lost"},
            "foreign": {"$ref": "https://example.com/schema"},
            "odd": {"type": 5, "anyOf": 5, "enum": 5, "$ref": 5},
        },
        "$defs": {
            "Place": {"type": "object", "properties": {"in": {"$ref": "#/$defs/Place"}}},
            "Places": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"$ref": "#/$defs/Places"}]},
        },
    }
}


def found_in(reader: AnswerReader, texts: list[str]) -> Found:
    """Thoughts, content, and name and arguments of each call."""
    pieces: list[Piece] = [piece for text in texts for piece in reader.push(text)] + reader.finish()
    thoughts, content, calls = "", "", list[list[str]]()
    for piece in pieces:
        if isinstance(piece, Thought):
            thoughts += piece.text
        elif isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            calls.append([piece.name, piece.arguments])
        else:
            calls[piece.index][1] += piece.arguments
    assert reader.num_calls == len(calls)
    return thoughts, content, [(name, json.loads(arguments)) for name, arguments in calls]


def read(text: str, *, thinks: bool = False, **parsing: Any) -> Found:
    """What is found in a text, however it is cut into two, or into single characters."""
    made = AnswerParsing(schemas=SCHEMAS, **parsing)
    whole = found_in(reader_of(made, thinks=thinks), [text])
    assert found_in(reader_of(made, thinks=thinks), list(text)) == whole
    for cut in range(len(text)):
        assert found_in(reader_of(made, thinks=thinks), [text[:cut], text[cut:]]) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "thinks", "thought", "content"),
    [
        ("<think>\nTwo.\n</think>\n\nleft", False, "\nTwo.\n", "\n\nleft"),
        ("Two.\n</think>\n\nleft", True, "Two.\n", "\n\nleft"),
        ("<think>Two.</think>left", True, "Two.", "left"),
        ("left", False, "", "left"),
        ("it is < 3 </think> done", False, "", "it is < 3 </think> done"),
        ("Two, a < b </thin", True, "Two, a < b </thin", ""),
        ("<think>cut", False, "cut", ""),
        ("<thi", False, "", "<thi"),
        ("<thi", True, "<thi", ""),
        ("a</think></think>", True, "a", "</think>"),
        ("", True, "", ""),
    ],
)
@pytest.mark.parametrize("parser", ["qwen3", "glm45"])
def test_a_thought_ends_where_its_mark_says(
    parser: str, text: str, thinks: bool, thought: str, content: str
) -> None:
    assert read(text, thinks=thinks, reasoning=parser) == (thought, content, [])


def test_other_marks_and_models_that_always_think() -> None:
    assert read("[THINK]a[/THINK]b", reasoning="mistral") == ("a", "b", [])
    assert read("a</think>b", reasoning="deepseek_r1") == ("a", "b", [])


CODER = """<tool_call>
<function=weather>
<parameter=city>
New
York </b>
</parameter>
<parameter=days>
3
</parameter>
<parameter=at>
[1, 2.5]
</parameter>
<parameter=exact>
True
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>New York</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>unit</arg_key>
<arg_value>7</arg_value>
</tool_call>"""
CALLED = {"city": "New\nYork </b>", "days": 3, "at": [1, 2.5], "exact": True}


@pytest.mark.parametrize(
    ("parser", "text", "found"),
    [
        ("qwen3_coder", f"Look.\n{CODER}\n{CODER}", ("", "Look.\n", [("weather", CALLED)] * 2)),
        ("qwen3_xml", CODER, ("", "", [("weather", CALLED)])),
        (
            "qwen3_coder",
            "<tool_call><function=other><parameter=a>1</parameter></function></tool_call>",
            ("", "", [("other", {"a": "1"})]),
        ),
        ("qwen3_coder", "<tool_call>no</tool_call>", ("", "<tool_call>no</tool_call>", [])),
        ("qwen3_coder", "<tool_call>\n<function=wea", ("", "<tool_call>\n<function=wea", [])),
        ("glm45", GLM, ("", "", [("weather", {"city": "New York", "days": 3, "unit": "7"})])),
        (
            "glm47",
            "<tool_call>weather<arg_key>days</arg_key><arg_value>no</arg_value></tool_call>",
            ("", "", [("weather", {"days": "no"})]),
        ),
        ("glm45", "<tool_call>time\n</tool_call>", ("", "", [("time", {})])),
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>',
            ("", "", [("weather", {"days": 3})]),
        ),
    ],
)
def test_calls_are_read_as_their_families_write_them(parser: str, text: str, found: Found) -> None:
    assert read(text, calls=parser) == found
    assert read(f"<think>x {text}</think>{text}", calls=parser, reasoning="qwen3") == (
        f"x {text}",
        *found[1:],
    )


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "3", "3"), ("city", "null", "null"), ("days", "3", 3), ("days", "x", "x"),
        ("at", "[1]", [1]),
        ("exact", "false", False), ("exact", "False", False), ("unit", "3", "3"), ("limit", "null", None),
        ("limit", "None", None), ("limit", "4", 4), ("any", "4", 4), ("any", "[4]", "[4]"), ("any", "x", "x"),
        ("days", "1e999", "1e999"), ("at", "[" * 5000, "[" * 5000),
        ("place", '{"in": {}}', {"in": {}}), ("places", '["a"]', ["a"]), ("places", "x", "x"),
        ("level", "1", 1), ("mode", "a", "a"), ("mode", "2", 2), ("one", "1", 1),
        ("lost", "1", "1"), ("foreign", "1", "1"), ("odd", "1", "1"),
        ("place", r'{"in": "\ud800"}', r'{"in": "\ud800"}'),
    ],
)  # fmt: skip
def test_the_schema_says_what_an_argument_is(name: str, text: str, value: object) -> None:
    call = f"<tool_call><function=weather><parameter={name}>{text}</parameter></function></tool_call>"
    reader = reader_of(AnswerParsing(calls="qwen3_coder", schemas=SCHEMAS), thinks=False)
    assert found_in(reader, [call])[2] == [("weather", {name: value})]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "a", "\n"])),
    st.data(),
)
def test_whatever_is_written_no_text_is_lost_or_doubled(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parsing = AnswerParsing(reasoning="qwen3")
    assert found_in(reader_of(parsing, thinks=True), pieces) == found_in(
        reader_of(parsing, thinks=True), [text]
    )


def test_thoughts_have_the_fields_of_vllm() -> None:
    reader = reader_of(AnswerParsing(reasoning="qwen3"), thinks=True)
    message = reply_of(reader, "two</think>left", "r", 0).model_dump()
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("two", "two", "left")
    delta = delta_of(Thought("two"), "r", 0).model_dump(exclude_unset=True)
    assert delta == {"reasoning": "two", "reasoning_content": "two"}
    assert delta_of(CallPiece(0, None, "{}"), "r", 0).tool_calls is not None


def test_an_answer_without_a_thought_has_no_field_of_it() -> None:
    message = reply_of(reader_of(AnswerParsing(calls="hermes"), thinks=False), "left", "r", 0).model_dump()
    assert "reasoning" not in message
    assert "reasoning_content" not in message


def test_a_template_shows_how_calls_are_written() -> None:
    assert tool_call_parser_of("... <function=example>\n<parameter=a>") == "qwen3_coder"
    assert tool_call_parser_of("{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>") == "glm45"
    assert tool_call_parser_of('<tool_call>\n{"name": ') == tool_call_parser_of("") == "hermes"


@pytest.mark.parametrize("option", ["reasoning_parser", "tool_call_parser"])
def test_an_unknown_parser_is_refused_with_the_list(option: str) -> None:
    with pytest.raises(RequestError, match=f"received the {option} 'gpt'; allowed: .*, .*; use one of these"):
        check_parser(option, "gpt")
    assert {"qwen3", "glm45", "deepseek_r1"} <= REASONING_PARSERS.keys()
