"""Traces as spreadsheets, pandas and other programs write them are read, or refused by the line.

Modules: `epd/workload/trace.py`.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from epd.errors import RequestError
from epd.workload.trace import TraceRow, open_trace

PLAIN = (
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    "2024-10-15 00:00:01.25,2,1743,112\n2024-10-15 00:00:03.75,0,40,5\n"
)
ROWS = [TraceRow(0.0, 2, 1743, 112), TraceRow(2.5, 0, 40, 5)]
TEXTS = [TraceRow(0.0, 0, 1743, 112), TraceRow(2.5, 0, 40, 5)]
MOONCAKE = (
    '{"timestamp": 1250, "input_length": 1743, "output_length": 112, "hash_ids": [1]}\n'
    '{"timestamp": 3750, "input_length": 40, "output_length": 5}\n'
)
HEAD = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"

READ: dict[str, bytes] = {
    "plain": PLAIN.encode(),
    "a mark of UTF-8": b"\xef\xbb\xbf" + PLAIN.encode(),
    "UTF-16": PLAIN.encode("utf-16"),
    "UTF-16, tabs: Excel's Unicode text": PLAIN.replace(",", "\t").replace("\n", "\r\n").encode("utf-16"),
    "semicolons": PLAIN.replace(",", ";").encode(),
    "CR LF": PLAIN.replace("\n", "\r\n").encode(),
    "CR": PLAIN.replace("\n", "\r").encode(),
    "pandas' counts": PLAIN.replace("1743", "1743.0").replace(",2,", ",2.0,").encode(),
    "pandas' index": ("," + PLAIN.replace("\n2024", "\n0,2024")).encode(),
    "quotes": b'"TIMESTAMP","NumImages","ContextTokens","GeneratedTokens"\n'
    b'"2024-10-15 00:00:01.25","2","1743","112"\n"2024-10-15 00:00:03.75","0","40","5"\n',
    "blank lines": ("\n \n" + PLAIN.replace("\n", "\n\n") + "\n,,,\n").encode(),
    "names with marks": (
        "Timestamp ,num_images,Context Tokens,generated-tokens\n" + PLAIN.removeprefix(HEAD)
    ).encode(),
    "no images said": PLAIN.replace(",0,", ",,").encode(),
    "out of order": "".join(PLAIN.splitlines(keepends=True)[place] for place in (0, 2, 1)).encode(),
    "seconds": (HEAD + "1.25,2,1743,112\n3.75,0,40,5").encode(),
    "times of a day": (HEAD + "10:00:01.250,2,1743,112\n10:00:03.750,0,40,5").encode(),
    "zones": (HEAD + "2024-10-15T02:00:01.250+02:00,2,1743,112\n2024-10-15T00:00:03.750Z,0,40,5").encode(),
    "columns in another order": (
        b"GeneratedTokens,x,ContextTokens,NumImages,TIMESTAMP\n112,a,1743,2,1.25\n5,b,40,0,3.75"
    ),
    "gzip of a mark": gzip.compress(b"\xef\xbb\xbf" + PLAIN.encode()),
}


@pytest.mark.parametrize("name", READ)
def test_a_table_is_read_as_programs_write_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "trace.csv").write_bytes(READ[name])
    assert open_trace(tmp_path / "trace.csv") == ROWS


@pytest.mark.parametrize("begin", ["", "\ufeff", "\n\n", "\ufeff \r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_json_lines_are_read_as_programs_write_them(tmp_path: Path, begin: str, encoding: str) -> None:
    text = (begin + MOONCAKE.replace("1743", "1743.0") + "\n").removeprefix(
        "\ufeff" if encoding == "utf-16" else ""
    )
    (tmp_path / "trace.jsonl").write_bytes(text.encode(encoding))
    assert open_trace(tmp_path / "trace.jsonl") == TEXTS


REFUSED: dict[str, tuple[str, str]] = {
    "NaN": (
        HEAD + "1,1,2,3\n2,1,nan,3",
        "line 3 of the trace: received 'nan'; allowed: a number that is finite",
    ),
    "NaN as a time": (HEAD + "NaN,1,2,3", "line 2 of the trace: received 'NaN'"),
    "inf": (HEAD + "\n\n1,1,2,inf", "line 4 of the trace: received 'inf'"),
    "an empty cell": (HEAD + "1,1,,3", "line 2 of the trace: received ''"),
    "decimal commas": (
        HEAD.replace(",", ";") + "1,25;2;1743;112",
        "received '1,25'; allowed: a number without commas",
    ),
    "grouped digits": (HEAD + '1,2,"1,743",112', "received '1,743'; allowed: a number without commas"),
    "spaces in numbers": (HEAD + "1,2,1\u202f743,112", "allowed: a number without commas, spaces"),
    "half a token": (HEAD + "1,2,1743.5,112", "received '1743.5'; allowed: a whole number"),
    "dates of other countries": (HEAD + "15/10/2024 00:01,2,3,4", "as 2024-10-15 00:00:01.25"),
    "more images than a request has": (HEAD + "1,1000000000,3,4", "allowed: 0 to 10000"),
    "more tokens than a model has": (HEAD + "1,1,1e300,4", "line 2 of the trace: received '1e300'"),
    "a NUL": (HEAD + "1,2,3\x00,4", "line 2 of the trace"),
    "a cell without end": (HEAD + '1,2,"' + "3" * 200_000, "of the trace: field larger than field limit"),
    "another table": ("a,b\n1,2", "the columns 'a, b'; it needs TIMESTAMP"),
    "an array": ('[{"timestamp": 1}]', "holds a JSON array"),
    "JSON's NaN": (MOONCAKE.replace("40", "NaN"), "line 2 of the trace: received nan"),
    "JSON's infinity": (MOONCAKE.replace("3750", "1e999"), "line 2 of the trace: received inf"),
    "null": ("\n" + MOONCAKE.replace("40", "null"), "line 3 of the trace: received None"),
    "400 digits": (MOONCAKE.replace("40", "9" * 400), "line 2 of the trace: received 99999"),
    "brackets": (MOONCAKE + '{"timestamp": ' + "[" * 60_000, "line 3 of the trace: it is nested too deeply"),
    "a list": (MOONCAKE + "[1]", "line 3 of the trace: it is no JSON object"),
    "a name that is not there": (
        MOONCAKE.replace("input_", "in_"),
        "line 1 of the trace: it has no 'input_length'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    text, words = REFUSED[name]
    (tmp_path / "trace").write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=r"^[^\n]*$") as caught:
        open_trace(tmp_path / "trace")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "data", [b"", b"\n\n", b"\xff\xfe", b"\x1f\x8bxx", b"\x1f\x8b\x08" + b"x" * 50, b"caf\xe9,b\n"]
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "trace").write_bytes(data)
    with pytest.raises(RequestError, match=r"^[^\n]*$"):
        open_trace(tmp_path / "trace")
