"""Lines that are no requests, of every kind that files of others had, and drawn ones."""

from __future__ import annotations

import json

from hypothesis import strategies as st

# The fields of a line in either form but its id, for lines that are wrong in one thing.
SHORT = b'"images": ["i.png"], "question": "What?"'
_OPENAI = (
    b'"method": "POST", "url": "/v1/chat/completions", '
    b'"body": {"messages": [{"role": "user", "content": "%b"}]}'
)  # fmt: skip


def bad_lines(question: bytes = b"What?", *, is_openai: bool = False) -> dict[str, tuple[bytes, str, object]]:
    """Returns by name: the line, words of its error, and its id, None where that cannot be read."""
    name = b"custom_id" if is_openai else b"id"

    def line(line_id: bytes, text: bytes = question, more: bytes = b"") -> bytes:
        rest = _OPENAI % text if is_openai else SHORT.replace(b"What?", text)
        return b'{"%b": %b, %b%b}' % (name, line_id, rest, more)

    return {
        "60,000 brackets": (
            line(b'"deep"', more=b', "x": ' + b"[" * 60_000 + b"]" * 60_000),
            "nested too deeply",
            "deep",
        ),
        "500 objects": (
            line(b'"deeper"', more=b', "x": ' + b'{"a":' * 500 + b"1" + b"}" * 500),
            "nested too deeply",
            "deeper",
        ),
        "half an emoji in the id": (line(b'"\\ud83d"'), "\\ud83d is half of a character", None),
        "half an emoji in the question": (line(b'"emoji"', b"\\uDE00?"), "\\ude00 is half", "emoji"),
        "UTF-8 of half an emoji": (line(b'"cesu"', b"\xed\xa0\xbd"), "can't decode byte 0xed", "cesu"),
        "Latin-1": (line(b'"latin"', b"caf\xe9"), "can't decode byte 0xe9", "latin"),
        "UTF-16": (b"\xff\xfe" + line(b'"wide"').decode().encode("utf-16-le"), "can't decode", None),
        "NaN": (line(b'"nan"', more=b', "fps": NaN'), "NaN is no number", "nan"),
        "Infinity": (line(b'"inf"', more=b', "fps": -Infinity'), "-Infinity is no number", "inf"),
        "1e999": (line(b'"huge"', more=b', "fps": 1e999'), "1e999 is too large", "huge"),
        "5,000 digits": (line(b'"digits"', more=b', "num_frames": ' + b"9" * 5000), "not JSON", "digits"),
        "a field twice": (
            line(b'"twice"', more=b', "fps": 1, "fps": 2'),
            "the field 'fps' comes twice",
            "twice",
        ),
        "a NUL": (line(b'"nul"', b"a\x00b"), "Invalid control character", "nul"),
        "a trailing comma": (line(b'"comma"', more=b","), "not JSON", "comma"),
        "a comma behind it": (line(b'"list"') + b",", "Extra data", "list"),
        "a list": (b"[1, 2]", "this line is a JSON list", None),
        "a number": (b"17", "this line is a JSON int", None),
        "a text": (b'"what?"', "this line is a JSON str", None),
        "nothing but a bracket": (b"[", "not JSON", None),
        "half a line": (line(b'"half"')[:-9], "not JSON", "half"),
        "an id of another line": (line(b'"good 0"'), 'it has the id "good 0" of line 1', None),
        "another line's, and no JSON": (line(b'"good 1"')[:-9], "not JSON", None),
    }


_TEXT = st.text(st.characters(), max_size=8)  # halves of surrogate pairs too
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_RECORD = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("id", "custom_id", "question", "images", "body", "url", "fps", "method"), _VALUE),
)


@st.composite
def _bent(draw: st.DrawFn) -> bytes:
    """Draws a good line with some of its bytes replaced."""
    number = draw(st.integers(0, 1 << 40))
    line = (
        draw(st.sampled_from((b'{"id": "drawn %d", ' % number, b'{"custom_id": "drawn %d", ' % number)))
        + SHORT
        + b"}"
    )
    start = draw(st.integers(0, len(line)))
    stop = draw(st.integers(start, min(len(line), start + 12)))
    return line[:start] + draw(st.binary(max_size=6)) + line[stop:]


DRAWN_LINES = st.lists(
    st.one_of(
        st.binary(max_size=60),
        _bent(),
        _RECORD.map(lambda record: json.dumps(record).encode()),
        st.sampled_from([each for each, *_ in bad_lines().values()]),
    ).map(lambda line: line.replace(b"\n", b" ")),
    min_size=40,
    max_size=60,
)
